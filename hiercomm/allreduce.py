"""The hierarchical all-reduce: inside the nodes, between the nodes, inside the nodes again.

With L ranks on each of N nodes a buffer of n elements costs every rank
    local  reduce-scatter    n (L-1)/L elements   each local rank holds a shard, summed over its node
    cross  all-to-all        n/L (N-1)/N          pieces of the shard go to the nodes that own them
           add in node order                      so every replica gets the same bits
           all-gather        n/L (N-1)/N          the owners' sums go to every node
    local  all-gather        n (L-1)/L
so every local rank's link to the network carries its share. Nodes of unequal size send through their
first rank instead. Works on the seam of `comm/base.py`: no MPI and no NCCL in sight.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from hiercomm import reduction
from hiercomm.comm.base import Communicator, Done, LocalBuffer, ReducingCommunicator, Work, pieces
from hiercomm.comm.staging import from_host, to_host, written
from hiercomm.progress import Pending, Progress, Task
from hiercomm.timing import Timing
from hiercomm.topology import Topology


def reduce_scatter(comm: Communicator, flat: Tensor, op: str, divisor: int, tag: int) -> Task:
    """Task: afterwards `pieces(flat, comm.size)[comm.rank]` holds the reduction, added in rank order."""
    if comm.size == 1:
        if divisor != 1:
            reduction.combine([flat], [flat], op, divisor)
        return
    parts = pieces(flat, comm.size)
    own = parts[comm.rank]
    received = [own if q == comm.rank else torch.empty_like(own) for q in range(comm.size)]
    yield comm.all_to_all(received, parts, tag=tag)
    reduction.combine(received, [own], op, divisor)


def all_gather_pieces(comm: Communicator, flat: Tensor, tag: int) -> Task:
    """Task: every rank's own piece of `flat` goes to all others."""
    parts = pieces(flat, comm.size)
    yield comm.all_gather(parts, parts[comm.rank], tag=tag)


def two_phase(comm: Communicator, flat: Tensor, op: str, divisor: int, tag: int) -> Task:
    """Task: all-reduce of a flat CPU tensor, the same bits on every rank. Uses `tag` and `tag + 1`.

    Scratch: comm.size - 1 pieces, so less than one more `flat`.
    """
    yield from reduce_scatter(comm, flat, op, divisor, tag)
    yield from all_gather_pieces(comm, flat, tag + 1)


def tree_broadcast(comm: Communicator, ranks: Sequence[int], buf: Tensor, tag: int) -> Task:
    """Task: `ranks[0]` sends `buf` to the other `ranks` along a binomial tree; the caller is one of them."""
    index = ranks.index(comm.rank)
    low = index & -index if index else 1 << len(ranks).bit_length()
    if index and buf.numel():
        yield comm.recv(buf, ranks[index - low], tag=tag)
    children = []
    step = low >> 1
    while step:
        if index + step < len(ranks):
            children.append(index + step)
        step >>= 1
    # The largest subtree first: it has the longest way to go.
    for child in children if buf.numel() else ():
        yield comm.send(buf, ranks[child], tag=tag)


@dataclass
class Exchange:
    """One buffer under way: wait for `cross` and `local`, then for `HierarchicalAllReduce.distribute`."""

    buffer: LocalBuffer
    local: Work
    cross: Pending | None
    what: str


@final
class HierarchicalAllReduce:
    """All-reduce of buffers that `local` has allocated. `start` and `distribute` are called by the training
    thread, in the same order on every rank.

    `local` is None where this node has one rank, `cross` where there is one node or this rank does not
    cross (nodes of unequal size, not the first rank).
    """

    def __init__(
        self,
        topology: Topology,
        local: ReducingCommunicator | None,
        cross: Communicator | None,
        progress: Progress,
        timing: Timing,
    ) -> None:
        self._topology = topology
        self._local = local
        self._cross = cross
        self._progress = progress
        self._timing = timing
        # The first level that adds divides, in the precision in which it adds: a mean of fp16 numbers
        # then never passes through their sum. All ranks must divide at the same level.
        self._local_divides = not topology.is_homogeneous or topology.local_size > 1

    def start(self, buffer: LocalBuffer, op: str, divisor: int, tag: int, what: str) -> Exchange:
        """Begin; returns at once. `tag` and `tag + 1` belong to this buffer. `what` names it in errors."""
        local: Work
        local_divisor, cross_divisor = (divisor, 1) if self._local_divides else (1, divisor)
        several = len(self._topology.nodes) > 1
        if self._local is None:
            if local_divisor != 1:
                reduction.combine([buffer.data], [buffer.data], op, local_divisor)
            local = written(buffer.data)
        elif several and self._topology.is_homogeneous:
            local = self._local.reduce_scatter(buffer, op, local_divisor)
        else:
            local = self._local.all_reduce(buffer, op, local_divisor)
        crosses = several and self._cross is not None
        cross = None
        if crosses or (self._local is not None and self._local.needs_polling):
            task = self._task(local, buffer, op, cross_divisor, tag, crosses)
            cross = self._progress.submit(("exchange", tag), task, Pending(what))
        return Exchange(buffer, local, cross, what)

    def _task(
        self, local: Work, buffer: LocalBuffer, op: str, divisor: int, tag: int, crosses: bool
    ) -> Generator[Work, None, None]:
        with self._timing.span("local"):
            yield local
        if not crosses:
            return
        assert self._cross is not None
        with self._timing.span("cross"):
            shard = self._shard(buffer)
            host = yield from to_host(shard)
            yield from two_phase(self._cross, host, op, divisor, tag)
            yield from from_host(host, shard)

    def _shard(self, buffer: LocalBuffer) -> Tensor:
        """What this rank carries between the nodes."""
        if self._topology.is_homogeneous:
            return pieces(buffer.data, self._topology.local_size)[self._topology.local_rank]
        return buffer.data

    def distribute(self, exchange: Exchange) -> Work:
        """The last level of an exchange whose `local` and `cross` have completed; in order."""
        if self._local is None or len(self._topology.nodes) == 1:
            return Done()
        if self._topology.is_homogeneous:
            return self._local.all_gather(exchange.buffer)
        return self._local.broadcast(exchange.buffer, root=0)
