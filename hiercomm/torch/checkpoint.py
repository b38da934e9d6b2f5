"""What compressors remember, in checkpoints: each rank's own, or all ranks' merged into one for other worlds."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from hiercomm.compress.merge import merge
from hiercomm.errors import ConfigError
from hiercomm.exchange import Coding

_WORDS = {"rank": "rank", "nodes": "number or placement of ranks", "parts": "compression, model or bucket size"}


def merge_optimizer_states(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The `optimizer.state_dict()`s that all ranks of a job have saved, in any order, as one that every rank of any
    other job loads: on other nodes, or more or fewer of them.

    What compression has left out is summed, and shared by the nodes of the new job; all else is rank 0's. A pure
    function on the CPU: `init()` is not needed. Raises ConfigError naming the rank of which there is no state, or
    two, or one that does not fit the others.
    """
    if isinstance(states, Mapping):
        raise ConfigError("merge_optimizer_states takes the states of all ranks: this is one")
    saved: list[Mapping[str, Any]] = []
    without: list[int] = []
    lowest, rest = -1, dict[str, Any]()
    for index, state in enumerate(states):
        if not (isinstance(state, Mapping) and "param_groups" in state):
            raise ConfigError(f"state {index} of merge_optimizer_states is not what optimizer.state_dict() gives")
        own = state.get("hiercomm")
        saved += [] if own is None else [own]
        without += [index] if own is None else []
        rank = index if own is None else own.get("rank", index)
        if not rest or rank < lowest:
            lowest, rest = rank, {key: value for key, value in state.items() if key != "hiercomm"}
    if not rest:
        raise ConfigError("merge_optimizer_states was given no states: it takes those of all ranks")
    if not saved:  # nothing was compressed
        return rest
    if without:
        raise ConfigError(
            f"state {without[0]} of merge_optimizer_states has nothing of compressors, as others do: it takes what "
            "optimizer.state_dict() gave on each rank of one job"
        )
    return {**rest, "hiercomm": merge(saved)}


def load(
    own: Mapping[str, Any], saved: Mapping[str, Any], parts: Sequence[tuple[dict[int, Coding], torch.device]]
) -> None:  # fmt: skip
    """Take up what is saved where it is this rank's own, or merged; else begin with nothing remembered, with a word.

    `own` and `saved` tell whose it is by `rank`, `nodes` and `parts`.
    """
    differs = {key for key in own if saved.get(key) != own[key]}
    # Merged, and not used since: then it is the whole job's, whoever has saved it.
    whole = all("inherited" in coding for part in saved.get("codings", ()) for coding in part.values())
    dropped = "parts" in differs or ("nodes" in differs and not whole)
    # One rank for all, which must not be the one that has saved it where nothing else differs.
    speaker = 1 if differs == {"rank"} and saved.get("rank") == 0 else 0
    if saved and own["rank"] == speaker:
        _say_what_is_dropped(own, saved, differs if dropped or not whole else set())
    for index, (codings, device) in enumerate(parts):
        for bucket, coding in codings.items():
            if dropped:
                coding.sites.forget()
                continue
            found = saved["codings"][index][bucket]
            # The count of exchanges is the same on all ranks; what is left out is not.
            coding.sites.load_state_dict({**found, "sites": {}} if differs else found, device)


def _say_what_is_dropped(own: Mapping[str, Any], saved: Mapping[str, Any], differs: set[str]) -> None:
    if "rank" not in saved:
        differs = differs & {"parts"}
    if differs and len(own["nodes"]) == 1:
        _say("what compressors remembered is dropped: on one node nothing is compressed")
    elif differs:
        what = " and ".join(_WORDS[key] for key in sorted(differs))
        _say(
            f"what compressors remembered was saved with another {what}, and is dropped: to resume exactly, save and "
            "load the optimizer's state on every rank; in another world load hvd.merge_optimizer_states() of them all"
        )
    if saved.get("dropped"):
        names = ", ".join(map(repr, saved["dropped"]))
        _say(f"{names}, which compressors kept beside what they left out, cannot be merged, and begins anew")


def _say(text: str) -> None:
    print(f"hiercomm: {text}", file=sys.stderr)
