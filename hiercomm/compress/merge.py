"""Checkpoints of all ranks made one, for a world of any size: what is left out of each bucket, summed. Pure.

What was left out of an element and has yet to arrive is the sum of its residuals on all ranks, in units of what the
exchange gives (the mean, or the sum, over the ranks), whatever their number. N nodes have N sites for each element, so
each begins with an Nth of it. It is kept like the state of one site that has compressed the whole bucket: at place 0,
or, for PowerSGD, at each matrix's place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hiercomm.compress.feedback import RESIDUAL
from hiercomm.errors import ConfigError
from hiercomm.topology import ranges

# What a coding keeps at a site beside what a user's compressor does: residuals of elements from the place on, or of a
# whole matrix and its basis; "" for nothing.
ELEMENTS, MATRICES = "elements", "matrices"
_States = Mapping[int, Mapping[str, Tensor]]


def merge(saved: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """One for all of what every rank's compressors remembered, in any order.

    `codings` has for each part and bucket the `number` of exchanges and what is `inherited`; `dropped` names what a
    user's compressor kept besides, which means nothing in other pieces. Raises ConfigError unless each rank of one job
    is there once, as of one step.
    """
    by_rank = _by_rank(saved)
    first = by_rank[0]
    codings = [
        {
            bucket: _merged({rank: by_rank[rank]["codings"][part][bucket] for rank in by_rank}, first["nodes"], *facts)
            for bucket, (_, *facts) in identity.items()
        }
        for part, identity in enumerate(first["parts"])
    ]
    dropped = {name for entry in by_rank.values() for name in _names_of_others(entry)}
    return {"parts": first["parts"], "codings": codings, "dropped": sorted(dropped)}


def _by_rank(saved: Iterable[Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
    """All ranks of one job, in order."""
    found: dict[int, Mapping[str, Any]] = {}
    for entry in saved:
        if "rank" not in entry:
            raise ConfigError("one of the states is a merged one: it can be loaded as it is")
        if entry["rank"] in found:
            raise ConfigError(f"two of the states are of rank {entry['rank']}: one of each rank is needed")
        found[entry["rank"]] = entry
    low = min(found)
    for rank, entry in found.items():
        for facts, complaint in (
            (_nodes, "are of different jobs: the ranks of their nodes are {} and {}"),
            (lambda e: e["parts"], "differ in compression, model or bucket size"),
            (_number, "were not saved at the same step: after {} and {} exchanges"),
        ):
            mine, others = facts(entry), facts(found[low])
            if mine != others:
                raise ConfigError(f"the states of ranks {low} and {rank} " + complaint.format(others, mine))
    missing = sorted({rank for node in found[low]["nodes"] for rank in node} - found.keys())
    if missing:
        raise ConfigError(f"the state of rank {ranges(missing)} is missing: one of each rank is needed")
    return dict(sorted(found.items()))


def _nodes(entry: Mapping[str, Any]) -> str:
    return " | ".join(ranges(node) for node in entry["nodes"])


def _number(entry: Mapping[str, Any]) -> int:
    """Each step has an exchange of each bucket."""
    return max((coding["number"] for part in entry["codings"] for coding in part.values()), default=0)


def _names_of_others(entry: Mapping[str, Any]) -> Iterator[str]:
    """What users' compressors keep."""
    for identity, part in zip(entry["parts"], entry["codings"], strict=True):
        for bucket, (_, keeps, _) in identity.items():
            for state in part[bucket]["sites"].values() if keeps != MATRICES else ():
                yield from (name for name in state if keeps != ELEMENTS or name != RESIDUAL)


def _merged(
    each: Mapping[int, Mapping[str, Any]], nodes: Sequence[Sequence[int]], keeps: str, size: tuple[int, torch.dtype]
) -> dict[str, Any]:
    """All ranks' states of one bucket as one."""
    inherited = _inherited(each)
    if inherited is None:
        sites = {rank: coding["sites"] for rank, coding in each.items()}
        if keeps == ELEMENTS:
            inherited = {0: {RESIDUAL: _sum(sites, size[0])}}
        else:
            inherited = _matrices(sites, nodes) if keeps == MATRICES else {}
    return {"number": each[0]["number"], "sites": {}, "inherited": inherited}


def _inherited(each: Mapping[int, Mapping[str, Any]]) -> Any:
    """What all ranks still have of a merged checkpoint, where there was no exchange since; else None."""
    found = [coding["inherited"] for coding in each.values() if "inherited" in coding]
    if found and len(found) < len(each):
        raise ConfigError("some of the states go back to a merged one, and some do not: every rank must load the same")
    return found[0] if found else None


def _sum(sites: Mapping[int, _States], numel: int) -> Tensor:
    """Every rank has residuals of its own pieces, which begin with the element that is their place."""
    total = torch.zeros(numel, dtype=torch.float64)
    for rank, places in sites.items():
        for place, state in places.items():
            residual = state.get(RESIDUAL, total[:0])
            if residual.dim() != 1 or place + residual.numel() > numel:
                raise ConfigError(f"what rank {rank} has left out does not fit into its bucket: the state is damaged")
            total[place : place + residual.numel()] += residual.cpu()
    return total.float()


def _matrices(sites: Mapping[int, _States], nodes: Sequence[Sequence[int]]) -> dict[int, dict[str, Tensor]]:
    """Ranks of a node hold the same, or nothing but for the first. Summed in order: every rank must get the same bits,
    or replicas would differ.
    """
    found: dict[int, dict[str, Tensor]] = {}
    for node in nodes:
        for place, state in sites[node[0]].items():
            if RESIDUAL in state:  # not where the last sum had NaN
                held = found.setdefault(place, {**state, RESIDUAL: torch.zeros_like(state[RESIDUAL]).double().cpu()})
                held[RESIDUAL] += state[RESIDUAL].cpu()
    return {
        place: {name: t.to("cpu", torch.float32) for name, t in tensors.items()} for place, tensors in found.items()
    }
