"""Operations on the user's own tensors: allreduce, allgather, broadcast, barrier, matched by name.

Exact, whatever compression the optimizers use. Reductions and broadcasts are hierarchical; an allgather sends
every rank's block to every other. Works on host memory; tensors on a GPU are copied. One `EagerOperation` is one
call on one rank; its tasks run on the progress thread.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from hiercomm import allreduce
from hiercomm.comm.base import Communicator, Work, pieces
from hiercomm.errors import HierCommError
from hiercomm.negotiate import Request, Response
from hiercomm.progress import Pending, Task
from hiercomm.topology import Topology

# Tags of operations under way must differ; MPI guarantees tags up to 32767.
_TAGS = 4096
_TAGS_PER_OPERATION = allreduce.LANES + 1

Spawn = Callable[[int, Task, Pending], None]


@dataclass(frozen=True)
class Communicators:
    """The groups over which operations run: all ranks, this node, and this local rank over the nodes."""

    topology: Topology
    world: Communicator
    local: Communicator
    cross: Communicator | None


@final
class EagerOperation:
    """One call on one rank. `data` is contiguous and on the CPU; the result may be `data` itself."""

    def __init__(self, request: Request, data: Tensor, divisor: int, comms: Communicators, spawn: Spawn) -> None:
        self.request = request
        self.pending = Pending(str(request))
        self._data = data
        self._divisor = divisor
        self._comms = comms
        self._spawn = spawn

    def run(self, response: Response) -> None:
        """Every rank is ready: hand the task to the progress thread."""
        # Operations that share a tag run one after the other.
        slot = response.sequence % _TAGS
        self._spawn(slot, self.task(slot * _TAGS_PER_OPERATION, response.rows), self.pending)

    def fail(self, error: HierCommError) -> None:
        """It will never run."""
        self.pending.finish(error=error)

    def task(self, tag: int, rows: tuple[int, ...]) -> Task:
        """The generator that carries the operation out; its value is the result."""
        if self.request.kind == "allreduce":
            return self._all_reduce(tag)
        if self.request.kind == "allgather":
            return self._all_gather(tag, rows)
        if self.request.kind == "broadcast":
            return self._broadcast(tag)
        return self._barrier()

    def _all_reduce(self, tag: int) -> Generator[Work, None, Tensor]:
        flat, op, comms = self._data.reshape(-1), self.request.op, self._comms
        if self.request.prescale != 1.0:
            flat = _scaled(flat, self.request.prescale)
        if comms.topology.is_homogeneous:
            yield from _sharded(comms, flat, op, self._divisor, tag)
        else:
            yield from _through_leaders(comms, flat, op, self._divisor, tag)
        if self.request.postscale != 1.0:
            flat = _scaled(flat, self.request.postscale)
        return flat.reshape(self._data.shape)

    def _all_gather(self, tag: int, rows: tuple[int, ...]) -> Generator[Work, None, Tensor]:
        tail = self._data.shape[1:] if self._data.dim() else ()
        out = torch.empty((sum(rows), *tail), dtype=self._data.dtype)
        blocks = list(out.split(list(rows)))
        world = self._comms.world
        blocks[world.rank].copy_(self._data.reshape(blocks[world.rank].shape))
        yield world.all_gather(blocks, blocks[world.rank], tag=tag)
        return out

    def _broadcast(self, tag: int) -> Generator[Work, None, Tensor]:
        topology, world, root = self._comms.topology, self._comms.world, self.request.root
        home = next(i for i, ranks in enumerate(topology.nodes) if root in ranks)
        # To one rank of each node first, then inside the nodes: every link is crossed once.
        leaders = [root] + [ranks[0] for i, ranks in enumerate(topology.nodes) if i != home]
        leader = root if topology.node == home else topology.local_ranks[0]
        if topology.rank in leaders:
            yield from allreduce.tree_broadcast(world, leaders, self._data, tag)
        members = [leader] + [r for r in topology.local_ranks if r != leader]
        yield from allreduce.tree_broadcast(world, members, self._data, tag + 1)
        return self._data

    def _barrier(self) -> Generator[Work, None, Tensor]:
        return self._data  # that every rank was ready is all there is to it
        yield


def _scaled(flat: Tensor, factor: float) -> Tensor:
    """In double precision for integers, then truncated, as Horovod does."""
    if flat.dtype.is_floating_point or flat.dtype.is_complex:
        return flat.mul_(factor)
    return flat.copy_(flat.double().mul_(factor))


def _sharded(comms: Communicators, flat: Tensor, op: str, divisor: int, tag: int) -> Task:
    local_first = comms.topology.local_size > 1
    yield from allreduce.reduce_scatter(comms.local, flat, op, divisor if local_first else 1, tag)
    if comms.cross is not None:
        shard = pieces(flat, comms.local.size)[comms.local.rank]
        yield from allreduce.two_phase(comms.cross, shard, op, 1 if local_first else divisor, tag)
    yield from allreduce.all_gather_pieces(comms.local, flat, tag + 1)


def _through_leaders(comms: Communicators, flat: Tensor, op: str, divisor: int, tag: int) -> Task:
    yield from allreduce.two_phase(comms.local, flat, op, divisor, tag)
    if comms.cross is not None and comms.topology.local_rank == 0:
        yield from allreduce.two_phase(comms.cross, flat, op, 1, tag)
    yield from allreduce.tree_broadcast(comms.local, range(comms.local.size), flat, tag + allreduce.LANES)
