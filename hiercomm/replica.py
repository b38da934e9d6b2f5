"""A node's replica of the parameters: in step on the ranks of the node, joined to the other nodes by rounds.

Every rank of a node carries its shard of the parameters to the other nodes (nodes of unequal size: the first rank all
of them); after a merge the ranks give each other their shards, so that the node's replicas stay equal. Knows parameters
as tensors that somebody moves: nothing of gradients, optimizers or MPI.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from hiercomm import reduction
from hiercomm.bucket import Bucket
from hiercomm.comm.base import AllOf, LocalBuffer, ReducingCommunicator, Work, pieces
from hiercomm.compress import PerLayer
from hiercomm.rounds import Lag, Rounds
from hiercomm.topology import Topology


@final
@dataclass(frozen=True)
class Crossing:
    """How progress goes to the other nodes: through what (None: as it is), and which rounds wait for whom."""

    compression: PerLayer | None = None
    lag: Lag = field(default_factory=Lag)


class Waits(ABC):
    """Blocks until a Work completes; `what` names it for people."""

    @abstractmethod
    def local(self, work: Work, what: str) -> None:
        """It needs the other ranks of the node to do the same."""

    @abstractmethod
    def rounds(self, work: Work, what: str) -> None:
        """It needs messages, and no other rank's program to go on."""

    @abstractmethod
    def flush(self, work: Work, what: str) -> None:
        """It needs all ranks to do the same."""


def shard(topology: Topology, flat: Tensor) -> Tensor:
    """The part of a bucket that this rank carries between the nodes."""
    if topology.is_homogeneous:
        return pieces(flat, topology.local_size)[topology.local_rank]
    return flat if topology.local_rank == 0 else flat[:0]


@final
class Replica:
    """The parameters of one node. Called by the training thread, alike on all ranks of the node.

    `buckets` hold the values of `parameters` (of one bucket after the other) while they travel, in buffers that `level`
    has allocated, `news` is one uint8 more; `level` is None where the node has one rank, `rounds` where this rank does
    not cross. `agree(digest)` raises on all ranks unless all have the same.
    """

    def __init__(
        self,
        topology: Topology,
        parameters: Sequence[Tensor],
        buckets: Sequence[Bucket],
        news: LocalBuffer,
        level: ReducingCommunicator | None,
        rounds: Rounds | None,
        waits: Waits,
        agree: Callable[[int], None],
    ) -> None:
        self._topology = topology
        self._buckets = list(buckets)
        self._pairs = ([view for bucket in buckets for view in bucket.views], [p.detach() for p in parameters])
        self._news = news
        self._level = level
        self._rounds = rounds
        self._waits = waits
        self._agree = agree
        self._own = [shard(topology, bucket.buffer.data) for bucket in buckets]
        wide = [torch.float64 if each.dtype == torch.float64 else torch.float32 for each in self._own]
        # What the own shard was when it was last exported or merged.
        self._base = [torch.zeros_like(each, dtype=dtype) for each, dtype in zip(self._own, wide, strict=True)]
        self._flush: Work | None = None
        self._merged = 0  # rounds
        self.steps = 0  # that this node has taken
        self._exported = 0  # of these
        self.has_begun = False

    def begin(self) -> None:
        """The parameters are as they should be at the beginning: the same everywhere. Collective over all ranks."""
        self._gather()
        digest = 0
        for bucket in self._buckets:
            digest = zlib.crc32(bucket.buffer.data.cpu().view(torch.uint8).numpy().data, digest)
        self._agree(digest)
        self._rebase()
        if self._rounds is not None:
            self._rounds.begin(self._base)
        self.has_begun = True

    def exchange(self, max_age: int, period: int) -> None:
        """Export what was done since the last time, wait for rounds as far as `max_age` demands, merge what has come.

        `period` steps will be taken before the next call. What was exported is in the anchor before this node has made
        more than `max_age` steps more.
        """
        if self._rounds is not None:
            # What is left here is handed over with the next export: while a round is under way it would only wait.
            age = max(self._rounds.age(self.steps), self.steps - self._exported - period)
            assert age <= max_age, f"progress has waited for {age} steps, {max_age} are allowed"
            younger = max(0, 0 if self._rounds.is_synchronous else max_age - period + 1)
            if self._rounds.is_idle or self.steps - self._exported - period >= younger:
                self._export()
            work = self._rounds.until_younger(younger, self.steps)
            if not work.is_completed():
                self._waits.rounds(work, f"{work}, before step {self.steps + 1}")
        if self._have_news():
            if self._exported < self.steps:
                self._export()
            self._merge()

    def start_flush(self, *, leave: bool = False) -> None:
        """Begin; the parameters must not change until `finish_flush`. `leave`: there will be no more rounds."""
        if self.has_begun:
            self._export()
            self._flush = AllOf([self._rounds.flush(leave=leave)] if self._rounds is not None else [])

    def finish_flush(self) -> None:
        """Everything that any node has done goes into the parameters, which afterwards are equal to the bit everywhere.
        Collective over all ranks; nothing to do before the first step.
        """
        if self._flush is not None:
            work, self._flush = self._flush, None
            self._waits.flush(work, "flush()")
            self._merge()

    def retire(self) -> None:
        """The parameters belong to somebody else now: they are left alone, whatever other nodes still do."""
        self._pairs = ([], [])

    def _gather(self) -> None:
        """The parameters' values, into the buckets."""
        with torch.no_grad():
            if self._pairs[0]:
                torch._foreach_copy_(*self._pairs)

    def _export(self) -> None:
        """Hand over by how much the own shards have moved."""
        if self._rounds is not None:
            self._gather()
            for own, base in zip(self._own, self._base, strict=True):
                torch.sub(own, base, out=base)
            self._rounds.export(self._base, self.steps)
            self._exported = self.steps
            self._rebase()

    def _rebase(self) -> None:
        for own, base in zip(self._own, self._base, strict=True):
            base.copy_(own)

    def _have_news(self) -> bool:
        """Whether some rank of the node has rounds that are not in the parameters: then all ranks merge."""
        own = self._rounds is not None and self._rounds.number > self._merged
        if self._level is None:
            return own
        self._news.data.fill_(int(own))
        self._waits.local(self._level.all_reduce(self._news, reduction.MAX), "the agreement on what to merge")
        return bool(self._news.data.item())

    def _merge(self) -> None:
        if self._rounds is not None:
            self._merged = self._rounds.merge(self._base)
            for own, base in zip(self._own, self._base, strict=True):
                own.copy_(base)
            self._rebase()  # as rounded: the anchor keeps what halves cannot hold
        if self._level is not None:
            self._waits.local(AllOf([self._distribute(self._level, b.buffer) for b in self._buckets]), "a merge")
        with torch.no_grad():
            if self._pairs[0]:
                torch._foreach_copy_(self._pairs[1], self._pairs[0])

    def _distribute(self, level: ReducingCommunicator, buffer: LocalBuffer) -> Work:
        return level.all_gather(buffer) if self._topology.is_homogeneous else level.broadcast(buffer, root=0)


def flush_all(replicas: Sequence[Replica], *, leave: bool = False) -> None:
    """Flush, all alike on all ranks. `leave`: there will be no more rounds."""
    for replica in replicas:  # all first: a node that still trains may wait for this one in any of them
        replica.start_flush(leave=leave)
    for replica in replicas:
        replica.finish_flush()
