"""Which GPU a rank uses, and whether several ranks would share one. Knows nothing of MPI or of how to ask other ranks.

The decisions are pure: counts and identities are arguments. Nothing here touches CUDA before the user does, as that
would fix which GPUs are visible.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hiercomm.config import process_environment
from hiercomm.topology import Topology, ranges

Gather = Callable[[object, str], list[Any]]  # every rank's object, by rank


@dataclass(frozen=True)
class Visible:
    """The GPUs that one process sees: how many, and the CUDA_VISIBLE_DEVICES that selected them, None where unset."""

    count: int
    selected: str | None


def choose(local_rank: int, count: int) -> torch.device:
    """The device of a rank that sees `count` GPUs. With --gpus-per-task=1 each sees one, whatever its local rank."""
    return torch.device("cuda", local_rank % count) if count else torch.device("cpu")


def crowding(topology: Topology, visible: Sequence[Visible]) -> str | None:
    """A warning where a node has more ranks than GPUs; None where all is well or cannot be known.

    `visible` is indexed by world rank. Launchers may give each rank GPUs of its own, by another selection or, with
    cgroups, as number 0 of every rank: `sharing` tells those from ranks that share when the optimizer is wrapped.
    """
    for name, ranks in zip(topology.names, topology.nodes, strict=True):
        seen = {visible[rank] for rank in ranks}
        first = visible[ranks[0]]
        of_its_own = len(seen) > 1 or (first.count == 1 and first.selected is not None)
        if not of_its_own and 0 < first.count < len(ranks):
            gpus = "1 visible GPU" if first.count == 1 else f"{first.count} visible GPUs"
            return (
                f"node {name} has {len(ranks)} ranks but {gpus}, which its ranks will share: "
                f"start {first.count} a node (hiercommrun --ranks-per-node, sbatch --ntasks-per-node)"
            )
    return None


def sharing(identities: Sequence[str]) -> str | None:
    """A warning where ranks use one GPU; None where each has its own. `identities` are UUIDs, by world rank."""
    users: dict[str, list[int]] = {}
    for rank, identity in enumerate(identities):
        users.setdefault(identity, []).append(rank)
    shared = [(identity, ranks) for identity, ranks in users.items() if len(ranks) > 1]
    if not shared:
        return None
    identity, ranks = shared[0]
    others = f", and so it is with {len(shared) - 1} more" if len(shared) > 1 else ""
    return (
        f"ranks {ranges(ranks)} are on one GPU ({identity}){others}: "
        "call torch.cuda.set_device(hvd.device()) before the model is made, and start one rank a GPU"
    )


def visible() -> Visible:
    """What this process sees now."""
    return Visible(torch.cuda.device_count(), process_environment().get("CUDA_VISIBLE_DEVICES"))


def warn_of_crowding(topology: Topology, gather: Gather) -> None:
    """Rank 0 says once what `crowding` finds. Collective."""
    if topology.size > 1:
        _say(topology.rank, crowding(topology, gather(visible(), "hiercomm.visible")))


def warn_of_sharing(device: torch.device, rank: int, gather: Gather) -> None:
    """Rank 0 says once what `sharing` finds; `device` is this rank's GPU. Collective."""
    _say(rank, sharing(gather(str(torch.cuda.get_device_properties(device).uuid), "hiercomm.gpu")))


@functools.cache
def _say(rank: int, sentence: str | None) -> None:
    if rank == 0 and sentence is not None:
        print(f"hiercomm: {sentence}", file=sys.stderr, flush=True)
