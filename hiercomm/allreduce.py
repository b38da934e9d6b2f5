"""The hierarchical all-reduce: inside the nodes, between the nodes, inside the nodes again.

With L ranks on each of N nodes a buffer of n elements costs every rank
    local  reduce-scatter    n (L-1)/L elements   each local rank holds a shard, summed over its node
    cross  all-to-all        n/L (N-1)/N          pieces of the shard go to the nodes that own them
           add in node order                      so every replica gets the same bits
           all-gather        n/L (N-1)/N          the owners' sums go to every node
    local  all-gather        n (L-1)/L
so every local rank's link to the network carries its share. Nodes of unequal size send through their
first rank instead. The cross level goes in chunks, which overlap. Works on the seam of `comm/base.py`: no
MPI and no NCCL in sight.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from hiercomm import reduction
from hiercomm.comm.base import AllOf, Communicator, Done, LocalBuffer, ReducingCommunicator, Work, pieces
from hiercomm.comm.staging import from_host, to_host, written
from hiercomm.exchange import Chunk, Coding, all_to_all, cuts
from hiercomm.progress import Pending, Progress, Task, Together
from hiercomm.timing import Timing
from hiercomm.topology import Topology

# A large buffer goes in chunks, so that one chunk is added while others travel; chunks go in a few lanes, each lane one
# after the other. A piece should be on the link for some milliseconds (probe.py chooses). The kernel sends 64 KB at
# once and holds back a small rest of them: messages of 64, 65 or 128 KB take up to four times as long, hence the gaps.
PIECE_BYTES = tuple(kb << 10 for kb in (32, 48, 96, 160, 224, 480, 992))
_USUAL_PIECE_BYTES = 96 << 10
LANES = 3
# Small buffers have a lane of their own: the last of a step would queue up behind all others, and add its latency.
TAGS = LANES + 1
_SMALL_BYTES = 16 << 10


def chunk_cuts(comm: Communicator, flat: Tensor, piece_bytes: int) -> list[slice]:
    """Parts of `flat` that are reduced one by one, in pieces of exactly `piece_bytes` but in the last."""
    return cuts(flat.numel(), max(1, comm.size * piece_bytes // flat.itemsize))


def reduce_scatter(comm: Communicator, flat: Tensor, op: str, divisor: int, tag: int) -> Task:
    """Task: afterwards `pieces(flat, comm.size)[comm.rank]` holds the reduction, added in rank order."""
    if comm.size == 1:
        if divisor != 1:
            reduction.combine([flat], [flat], op, divisor)
        return
    parts = pieces(flat, comm.size)
    own = parts[comm.rank]
    received = [own if q == comm.rank else torch.empty_like(own) for q in range(comm.size)]
    yield from all_to_all(comm, received, parts, tag)
    reduction.combine(received, [own], op, divisor)


def all_gather_pieces(comm: Communicator, flat: Tensor, tag: int) -> Task:
    """Task: every rank's own piece of `flat` goes to all others."""
    parts = pieces(flat, comm.size)
    yield from all_to_all(comm, parts, [parts[comm.rank]] * comm.size, tag)


def reduce_chunk(comm: Communicator, flat: Tensor, op: str, divisor: int, tag: int) -> Task:
    """Task: all-reduce of one chunk on the CPU, the same bits on every rank.

    Scratch: comm.size - 1 pieces. Both phases use one tag: between two ranks all messages keep their order.
    """
    yield from reduce_scatter(comm, flat, op, divisor, tag)
    yield from all_gather_pieces(comm, flat, tag)


def two_phase(
    comm: Communicator, flat: Tensor, op: str, divisor: int, tag: int, piece_bytes: int = _USUAL_PIECE_BYTES
) -> Task:
    """Task: all-reduce of a flat CPU tensor, the same bits on every rank. Uses LANES tags from `tag` on."""
    parts = [flat[cut] for cut in chunk_cuts(comm, flat, piece_bytes)]

    def lane(index: int) -> Task:
        for part in parts[index::LANES]:
            yield from reduce_chunk(comm, part, op, divisor, tag + index)

    yield Together([lane(index) for index in range(min(LANES, len(parts)))])


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
    shared: bool = False  # whether each local rank holds a shard of the result


@final
class _Countdown(Work):
    """Completed when as many tasks have ended as were `counted`. Looked at at every turn: it must not look at each."""

    def __init__(self) -> None:
        self._begun, self._ended = 0, 0  # by the training and the progress thread, each its own
        self._error: BaseException | None = None

    def counted(self, task: Task) -> Task:
        """The task, to be waited for."""
        self._begun += 1
        return self._run(task)

    def _run(self, task: Task) -> Task:
        try:
            yield from task
        except BaseException as error:
            self._error = error
            raise
        self._ended += 1

    def is_completed(self) -> bool:
        if self._error is not None:
            raise self._error
        return self._ended == self._begun

    def __str__(self) -> str:
        return f"{self._begun - self._ended} parts"


def _wait(work: Work) -> Task:
    yield work


def _whole_chunk(comm: Communicator, chunk: Tensor, op: str, divisor: int, tag: int) -> Task:
    host = yield from to_host(chunk)
    yield from reduce_chunk(comm, host, op, divisor, tag)
    yield from from_host(host, chunk)


@final
class HierarchicalAllReduce:
    """All-reduce of buffers that `local` has allocated. `start` and `distribute` are called by the training
    thread, in the same order on every rank. TAGS tags from `tag` on belong to it. Pieces of `piece_bytes` go over the
    links between the nodes.

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
        tag: int,
        piece_bytes: int,
    ) -> None:
        self._tag = tag
        self._piece_bytes = piece_bytes
        self._turn = itertools.count()
        self._tasks = itertools.count()
        self._topology = topology
        self._local = local
        self._cross = cross
        self._progress = progress
        self._timing = timing
        # The first level that adds divides, in the precision in which it adds: a mean of fp16 numbers
        # then never passes through their sum. All ranks must divide at the same level.
        self._local_divides = not topology.is_homogeneous or topology.local_size > 1

    def start(
        self, buffer: LocalBuffer, op: str, divisor: int, what: str, coding: Coding | None = None
    ) -> Exchange:  # fmt: skip
        """Begin; returns at once. `what` names it in errors; `coding` makes it fewer bytes between the nodes."""
        local_divisor, cross_divisor = (divisor, 1) if self._local_divides else (1, divisor)
        several = len(self._topology.nodes) > 1
        shared = several and self._topology.is_homogeneous and not (coding is not None and coding.takes_whole)
        crosses = several and self._cross is not None
        chunks = list(self._chunks_of(buffer, op, cross_divisor, coding)) if crosses else []
        if coding is not None:
            coding.sites.begin()  # also on ranks that do not cross
        ranges = [chunk.cut for chunk in chunks] if shared else [slice(None)]
        ready = self._start_local(buffer, op, local_divisor, ranges, shared=shared)
        parts = _Countdown()
        polled = self._local is not None and (crosses or self._local.needs_polling)
        if polled:
            self._beside(parts.counted(self._timed(ready[0])), what)
        for chunk, local in zip(chunks, itertools.cycle(ready), strict=False):
            # Behind those of earlier buffers, in lanes that turn by turn take one each.
            lane = LANES if buffer.data.nbytes <= _SMALL_BYTES else next(self._turn) % LANES
            task = parts.counted(self._crossing(buffer, local, chunk, self._tag + lane, shared=shared))
            self._progress.submit(("lane", self._tag, lane), task, Pending(what))
        cross = self._beside(_wait(parts), what) if polled or crosses else None
        return Exchange(buffer, AllOf(ready), cross, what, shared)

    def _start_local(
        self, buffer: LocalBuffer, op: str, divisor: int, ranges: list[slice], *, shared: bool
    ) -> list[Work]:  # fmt: skip
        """The first level: a Work for each of `ranges` of this rank's shard where it is shared, else one."""
        if self._local is None:
            if divisor != 1:
                reduction.combine([buffer.data], [buffer.data], op, divisor)
            return [written(buffer.data)]
        if shared:
            return self._local.reduce_scatter(buffer, op, divisor, ranges)
        return [self._local.all_reduce(buffer, op, divisor)]

    def _chunks_of(self, buffer: LocalBuffer, op: str, divisor: int, coding: Coding | None) -> Iterator[Chunk]:
        """This rank's shard, a chunk at a time."""
        assert self._cross is not None
        shard, cross = self._shard(buffer), self._cross
        if coding is None:
            for cut in chunk_cuts(cross, shard, self._piece_bytes):
                yield Chunk(cut, functools.partial(_whole_chunk, cross, shard[cut], op, divisor))
            return
        part = buffer.data if coding.takes_whole else shard
        yield from coding.chunks(cross, part, int(part.storage_offset() - buffer.data.storage_offset()), divisor)

    def _crossing(self, buffer: LocalBuffer, local: Work, chunk: Chunk, tag: int, *, shared: bool) -> Task:
        yield local
        with self._timing.span("cross"):
            yield from chunk.task(tag)
            if shared and self._local is not None:
                self._local.spread(buffer, chunk.cut)

    def _beside(self, task: Task, what: str) -> Pending:
        """A task that waits for no other."""
        return self._progress.submit(("beside", self._tag, next(self._tasks)), task, Pending(what))

    def _timed(self, local: Work) -> Task:
        with self._timing.span("local"):
            yield local

    def _shard(self, buffer: LocalBuffer) -> Tensor:
        """What this rank carries between the nodes."""
        if self._topology.is_homogeneous:
            return pieces(buffer.data, self._topology.local_size)[self._topology.local_rank]
        return buffer.data

    def distribute(self, exchange: Exchange) -> Work:
        """The last level of an exchange whose `local` and `cross` have completed; in order."""
        if self._local is None or len(self._topology.nodes) == 1:
            return Done()
        if exchange.shared:
            return self._local.all_gather(exchange.buffer)
        if self._topology.is_homogeneous:
            return Done()
        return self._local.broadcast(exchange.buffer, root=0)
