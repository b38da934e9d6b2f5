"""Engine R: rounds in which nodes add up what each has done since the last, beside the steps of all.

State of a rank, on its shard of the parameters (nodes n, this one m; weights w sum to 1):
    A          anchor: the sum of all that was agreed, the same bits on every node after every round
    exported   what this node has done and handed over, and no round has taken yet
    flying     what the round under way has taken
    e          residual of error feedback, weighted; never in the parameters
and always x = A + flying + exported + (steps not handed over yet), as the caller keeps it. A round is
    take       flying = exported;  exported = 0;  q = C(w flying + e);  e = w flying + e - decoded(q)
    exchange   q to all nodes, or in two phases where there are many
    commit     A += decoded(q_n), n in node order;  flying = 0
so A + sum_n (w_n (flying + exported)_n + e_n) grows by the weighted updates alone: nothing is lost, and steps that are
made while a round is under way survive it (Bagua's asynchronous model average, Gan et al., 2021; the residual apart
from the parameters as in local EF-sign SGD, Lin et al., 2020).

A round begins when any node has something to add. The others' progress threads take part at once with what their
nodes have exported, be it nothing: a node that computes holds nobody up, unless `Lag` says for how many rounds. All are
told of a round by its headers, which come from every node in every round, so rounds are counted alike everywhere.
Works on the seam of `comm/base.py`; knows nothing of MPI, autograd or optimizers.
"""

from __future__ import annotations

import functools
import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from hiercomm import reduction
from hiercomm.allreduce import LANES, reduce_chunk, two_phase
from hiercomm.coded import all_to_all_payloads, coded_chunk
from hiercomm.comm.base import AllOf, Communicator, Done, Work
from hiercomm.comm.staging import from_host, on_stream, to_host, written
from hiercomm.errors import CommError
from hiercomm.progress import Pending, Progress, Task, Together
from hiercomm.shard import Shard, gathers
from hiercomm.timing import Timing

# So often the nodes compare their anchors, in rounds.
CHECK_ROUNDS = 64

_MAGIC = b"HCR1"
_FORMAT = "<4sBxxxQQI"  # magic, flags, round, steps of the node in the anchor afterwards, digest of the anchor before
_HEAD_BYTES = struct.calcsize(_FORMAT)
_ADDS, _FLUSHES, _LEAVES, _COMPARES = 1, 2, 4, 8


@final
@dataclass(frozen=True)
class Lag:
    """In how many rounds in a row a node may have nothing to add because it still computes; None: in any number.

    A node that computes nothing, because its program waits for other ranks, may miss any number. In the first
    `synchronous` rounds every node adds something to each, without exception.
    """

    rounds: int | None = None
    synchronous: int = 0

    def allows(self, number: int, absent: int, *, idle: bool) -> bool:
        """Whether a node that had nothing to add in the last `absent` rounds may have nothing in round `number`; `idle`
        where it computes nothing.
        """
        if number < self.synchronous:
            return False
        return self.rounds is None or absent < self.rounds or idle


@final
@dataclass(frozen=True)
class Head:
    """What a node says of its part in a round. `digest` is of its anchor before, in rounds that compare."""

    number: int
    steps: int
    adds: bool = False
    flushes: bool = False
    leaves: bool = False
    digest: int | None = None

    def encoded(self) -> Tensor:
        """As bytes, uint8."""
        flags = self.adds * _ADDS | self.flushes * _FLUSHES | self.leaves * _LEAVES
        flags |= _COMPARES if self.digest is not None else 0
        data = struct.pack(_FORMAT, _MAGIC, flags, self.number, self.steps, self.digest or 0)
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)

    @staticmethod
    def decoded(data: Tensor, source: int) -> Head:
        """What `encoded` was made of. Raises CommError where these bytes are no header."""
        magic, flags, number, steps, digest = struct.unpack(_FORMAT, data.numpy().tobytes())
        if magic != _MAGIC:
            raise CommError(f"what rank {source} of the group sent is no header of a round: it begins with {magic!r}")
        compares = digest if flags & _COMPARES else None
        return Head(number, steps, bool(flags & _ADDS), bool(flags & _FLUSHES), bool(flags & _LEAVES), compares)


def compare(heads: Mapping[int, Head]) -> None:
    """Raise CommError unless the headers of a round, by node, are of one round and of equal anchors."""
    first = heads[0]
    for node, head in heads.items():
        if head.number != first.number:
            raise CommError(f"node {node} is in round {head.number}, node 0 in round {first.number}")
        if head.digest != first.digest:
            raise CommError(
                f"the anchors of nodes 0 and {node} differ after round {first.number - 1}: their processors or "
                "libraries calculate differently, or memory was overwritten"
            )


@final
class _When(Work):
    """Completed when `condition` holds."""

    def __init__(self, condition: Callable[[], bool], what: str) -> None:
        self._condition = condition
        self._what = what

    def is_completed(self) -> bool:
        return self._condition()

    def __str__(self) -> str:
        return self._what


@final
class Rounds:
    """The rounds of one rank with its peers in `comm`, which has a rank on every node, in node order.

    LANES + 1 tags of `comm` from `tag` on belong to it. All methods are the training thread's; tensors are lists, one
    for each of `shards`, on their device. `weight` is this node's share of all updates; `idle` tells whether the node's
    program waits for other ranks.
    """

    def __init__(
        self,
        comm: Communicator,
        shards: Sequence[Shard],
        weight: float,
        lag: Lag,
        idle: Callable[[], bool],
        progress: Progress,
        timing: Timing,
        tag: int,
        piece_bytes: int,
    ) -> None:
        self._comm = comm
        self._shards = list(shards)
        self._weight = weight
        self._lag = lag
        self._idle = idle
        self._progress = progress
        self._timing = timing
        self._tag = tag
        self._piece_bytes = piece_bytes
        self._lock = threading.Lock()  # for what follows, and the shards' tensors but `next`
        self.number = 0  # of the round that comes next or is under way
        self.steps = [0] * comm.size  # of each node, that are in the anchor
        self._exported: tuple[int, int] | None = None  # the first and the last step at which `exported` grew
        self._flying: tuple[int, int] | None = None
        self._absent = 0
        self._flushes = self._leaves = self._announced = False
        self._uses: list[Work] = [Done()]  # what the training thread has queued on a GPU
        self._pending = Pending("the rounds between the nodes")

    # ---- the training thread ----------------------------------------------------------------------

    def begin(self, values: Sequence[Tensor]) -> None:
        """The first anchor, the same on every node."""
        for shard, value in zip(self._shards, values, strict=True):
            shard.anchor.copy_(value)
        self._uses = [written(shard.anchor) for shard in self._shards]
        self._progress.submit(("rounds", self._tag), self._run(), self._pending)

    def export(self, progress: Sequence[Tensor], step: int) -> None:
        """This node's ranks have moved the parameters by `progress` up to and in `step`. Raises what a round raised."""
        self._pending.is_completed()
        with self._lock:
            for shard, each in zip(self._shards, progress, strict=True):
                if self._exported is None:
                    shard.exported.copy_(each)
                else:
                    shard.exported.add_(each)
            self._exported = (step if self._exported is None else self._exported[0], step)
            self._uses = [written(shard.exported) for shard in self._shards]
        self._progress.wake()

    def merge(self, out: Sequence[Tensor]) -> int:
        """Write anchor + flying + exported. Returns how many rounds are in it."""
        with self._lock:
            for shard, each in zip(self._shards, out, strict=True):
                each.copy_(shard.anchor)
                if self._flying is not None:
                    each.add_(shard.flying)
                if self._exported is not None:
                    each.add_(shard.exported)
            self._uses += [written(each) for each in out]
            return self.number

    @property
    def is_synchronous(self) -> bool:
        """Whether the round that comes next is one of the synchronous ones at the beginning."""
        return self.number < self._lag.synchronous

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits: what is exported now is taken at once."""
        return not self._waits()

    def age(self, step: int) -> int:
        """Steps of this node up to `step` since it exported what has waited longest; 0 where nothing waits."""
        with self._lock:
            waiting = self._flying or self._exported
        return 0 if waiting is None else step - waiting[0]

    def until_younger(self, age: int, step: int) -> Work:
        """Completes when nothing waits, or all that does is younger than `age` steps at `step`. Raises what a round
        raised.
        """
        return self._until(lambda: not self._waits() or self.age(step) < age)

    def flush(self, *, leave: bool = False) -> Work:
        """Nothing is exported until the result completes, on every node: then the anchor holds everything, residuals
        included, and nothing waits. `leave`: there will be no more rounds; all nodes say so.
        """
        with self._lock:
            self._flushes, self._leaves, self._announced = True, leave, False
        self._progress.wake()
        return self._until(lambda: not self._flushes)

    def digest(self) -> int:
        """Of the anchor: equal on all nodes after the same round."""
        with self._lock:
            return self._digest()

    def _until(self, condition: Callable[[], bool]) -> Work:
        return _When(lambda: self._pending.is_completed() or condition(), f"round {self.number}")

    def _waits(self) -> bool:
        with self._lock:
            return self._exported is not None or self._flying is not None

    # ---- the progress thread ----------------------------------------------------------------------

    def _run(self) -> Task:
        while (yield from self._round()):
            pass

    def _round(self) -> Task:
        """Task: one round. Returns whether there will be another."""
        comm, tag = self._comm, self._tag + LANES
        peers = [q for q in range(comm.size) if q != comm.rank]
        data = {q: torch.empty(_HEAD_BYTES, dtype=torch.uint8) for q in peers}
        arriving = [comm.recv(data[q], q, tag=tag) for q in peers]
        yield _When(lambda: self._is_due(arriving), f"round {self.number} to begin")
        own, uses = self._take()
        yield AllOf(uses)
        with self._timing.span("cross"):
            yield AllOf([*arriving, *(comm.send(own.encoded(), q, tag=tag) for q in peers)])
            heads = {q: own if q == comm.rank else Head.decoded(data[q], q) for q in range(comm.size)}
            compare(heads)
            adding = [q for q, head in heads.items() if head.adds]
            flushes = all(head.flushes for head in heads.values())
            if flushes:
                yield from self._exchange_all(adds=own.adds)
            elif adding:
                yield from self._exchange(adding)
        return self._commit(heads, moves=flushes or bool(adding))

    def _is_due(self, arriving: Sequence[Work]) -> bool:
        """Whether this node takes part now: it has something to say, or others have and it may come without."""
        others = sum(work.is_completed() for work in arriving) > 0  # all are asked: asking moves them
        with self._lock:
            if self._exported is not None or (self._flushes and not self._announced):
                return True
            return others and (self._flushes or self._lag.allows(self.number, self._absent, idle=self._idle()))

    def _take(self) -> tuple[Head, list[Work]]:
        with self._lock:
            adds = self._exported is not None
            if adds:
                for shard in self._shards:
                    shard.flying, shard.exported = shard.exported, shard.flying
            self._flying, self._exported = self._exported, None
            self._absent = 0 if adds or self._flushes else self._absent + 1
            self._announced = self._flushes
            compares = self.number > 0 and self.number % CHECK_ROUNDS == 0
            steps = self._flying[1] if self._flying is not None else self.steps[self._comm.rank]
            uses, self._uses = self._uses, [Done()]
            digest = self._digest() if compares else None
            return Head(self.number, steps, adds, self._flushes, self._leaves, digest), uses

    def _digest(self) -> int:
        found = 0
        for shard in self._shards:
            found = zlib.crc32(shard.anchor.cpu().numpy().data, found)
        return found

    def _commit(self, heads: Mapping[int, Head], *, moves: bool) -> bool:
        flushed = all(head.flushes for head in heads.values())
        left = all(head.leaves for head in heads.values())
        with self._lock:
            for shard in self._shards if moves else ():
                shard.anchor, shard.next = shard.next, shard.anchor
            self._flying = None
            self.steps = [heads[q].steps for q in range(self._comm.size)]
            self.number += 1
            if flushed and (left or not self._leaves):  # who leaves waits until all do
                self._flushes = False
        return not left

    def _exchange(self, adding: Sequence[int]) -> Task:
        """Task: `next` becomes the anchor and what the nodes `adding` have sent, added in their order."""
        chunks = list(self._chunks(self._gather if gathers(self._comm.size) else self._reduce, adding))

        def lane(index: int) -> Task:
            for chunk in chunks[index::LANES]:
                yield from chunk(self._tag + index)

        for shard in self._shards:
            if shard.coding is not None:
                shard.coding.sites.begin()
        yield Together([lane(index) for index in range(min(LANES, len(chunks)))])

    def _chunks(self, task: Callable[..., Task], adding: Sequence[int]) -> Iterator[Callable[[int], Task]]:
        for shard in self._shards:
            for cut in shard.chunks(self._comm.size, self._piece_bytes):
                yield functools.partial(task, shard, cut, adding)

    def _gather(self, shard: Shard, cut: slice, adding: Sequence[int], tag: int) -> Task:
        comm, sizes = self._comm, [0] * self._comm.size
        for q in adding:
            sizes[q] = shard.nbytes(cut)
        with on_stream(shard.next):
            own = shard.encode(cut, self._weight) if comm.rank in adding else _nothing(shard.next)
        payloads = yield from all_to_all_payloads(comm, [own] * comm.size, sizes, tag)
        payloads[comm.rank] = own
        with on_stream(shard.next):
            shard.next[cut].copy_(shard.anchor[cut])
            for q in adding:
                shard.add(payloads[q], cut, q)
            done = written(shard.next)
        yield done

    def _reduce(self, shard: Shard, cut: slice, adding: Sequence[int], tag: int) -> Task:
        """In two phases; who has nothing to add sends zeros and what its compressor has kept."""
        with on_stream(shard.next):
            flies = self._comm.rank in adding
            values = shard.flying[cut] * self._weight if flies else torch.zeros_like(shard.flying[cut])
        if shard.coding is not None:
            yield from coded_chunk(self._comm, values, shard.begin + cut.start, 1, shard.coding, tag)
        else:
            host = yield from to_host(values)
            yield from reduce_chunk(self._comm, host, reduction.SUM, 1, tag)
            yield from from_host(host, values)
        yield self._added(shard, cut, values)

    def _added(self, shard: Shard, cut: slice, values: Tensor) -> Work:
        with on_stream(shard.next):
            torch.add(shard.anchor[cut], values, out=shard.next[cut])
            return written(shard.next)

    def _exchange_all(self, *, adds: bool) -> Task:
        """Task: as `_exchange`, with all that any node has left, uncompressed."""
        for shard in self._shards:
            with on_stream(shard.next):
                values = shard.remainder(self._weight, flies=adds)
            host = yield from to_host(values)
            yield from two_phase(self._comm, host, reduction.SUM, 1, self._tag, self._piece_bytes)
            yield from from_host(host, values)
            yield self._added(shard, slice(0, shard.numel), values)


def _nothing(like: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=like.device)
