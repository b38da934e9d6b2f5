"""What the ranks do together in an examination: messages with rank 0, a link, a sum at one level, the whole.

Before the whole, nothing here is collective over the job, so a link that is cut stops only those at its ends, and
each wait has a limit. Knows nothing of MPI itself.
"""

from __future__ import annotations

import os
import pickle
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

import hiercomm.torch as hvd
from hiercomm import reduction, runtime
from hiercomm.allreduce import two_phase
from hiercomm.cli.facts import may_read_memory
from hiercomm.comm.base import Communicator, Mailbox, ReducingCommunicator, Work
from hiercomm.comm.shm import SharedMemory
from hiercomm.comm.torchdist import TorchDistributed
from hiercomm.config import Config
from hiercomm.connect import throttle
from hiercomm.errors import CommError, CommTimeout
from hiercomm.topology import Topology

CONTACT_S = 8.0  # the first message over a link
LINK_S = 12.0  # all else on a link
EXCHANGE_S = 20.0
_ROUND_TRIPS = 20
_SIZES = (1 << 20, 8 << 20)
_REPEAT = 2
_PATIENCE_S = 1.0  # a message that took more is not repeated
_QUICK_S = 0.15  # a message that took less is followed by the next size
_YIELD_S = 5e-3
FIRST_TAG = 16
_TRANSPORTS = {"shm": "shared memory", "gloo": "Gloo", "nccl": "NCCL"}

# Buffers of messages that never arrived: MPI may still write to them.
_lost: list[Any] = []


@final
class Post:
    """Objects between any two ranks, over a Mailbox, each under a word; waits have a limit."""

    def __init__(self, mailbox: Mailbox, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._mailbox = mailbox
        self._arrived: dict[tuple[int, str], deque[Any]] = {}

    def send(self, dest: int, word: str, content: Any) -> None:
        """Hand over an object. Raises CommError."""
        if dest == self.rank:
            self._arrived.setdefault((dest, word), deque()).append(content)
        else:
            self._mailbox.post(dest, pickle.dumps((word, content)))

    def take(self, source: int, word: str) -> deque[Any]:
        """All that has come from a rank under a word; the caller removes what it uses. Raises CommError."""
        for sender, message in self._mailbox.poll():
            found, content = pickle.loads(message)
            self._arrived.setdefault((sender, found), deque()).append(content)
        return self._arrived.setdefault((source, word), deque())

    def receive(self, source: int, word: str, timeout_s: float) -> Any:
        """The next object from a rank under a word. Raises CommTimeout, CommError."""
        deadline = time.monotonic() + timeout_s
        while not (queue := self.take(source, word)):
            if time.monotonic() > deadline:
                raise CommTimeout(f"no message from rank {source} within {timeout_s:g} s")
            time.sleep(1e-3)
        return queue.popleft()

    def gather(self, ranks: Sequence[int], word: str, timeout_s: float) -> dict[int, Any]:
        """One object from each of `ranks`, as far as they come in time."""
        deadline = time.monotonic() + timeout_s
        found: dict[int, Any] = {}
        while len(found) < len(ranks) and time.monotonic() < deadline:
            for rank in ranks:
                if rank not in found and (queue := self.take(rank, word)):
                    found[rank] = queue.popleft()
            time.sleep(1e-3)
        return found


@final
class _Group(Communicator):
    """Some ranks of a Communicator, numbered from 0; made without a message."""

    def __init__(self, inner: Communicator, ranks: Sequence[int]) -> None:
        self._inner = inner
        self._ranks = ranks
        self.rank = ranks.index(inner.rank)
        self.size = len(ranks)

    def send(self, buf: Tensor, dest: int, *, tag: int) -> Work:
        return self._inner.send(buf, self._ranks[dest], tag=tag)

    def recv(self, buf: Tensor, source: int, *, tag: int) -> Work:
        return self._inner.recv(buf, self._ranks[source], tag=tag)


@dataclass
class LinkResult:
    """What one end of a link saw: bit/s to the other end and back."""

    error: str | None = None
    latency_s: float | None = None
    bps_to: float | None = None
    bps_from: float | None = None


@dataclass
class SumResult:
    """What one rank saw of a sum."""

    transport: str
    error: str | None = None
    fallback: str | None = None
    seconds: float | None = None
    unreadable: bool = False
    nodes: tuple[tuple[int, ...], ...] | None = None  # as MPI finds them


@final
class Rank:
    """This rank's part in the exercises. `run` is called with the same words on the ranks that take part."""

    def __init__(self, post: Post, comm: Communicator, topology: Topology, config: Config) -> None:
        self._post = post
        self._topology = topology
        self._config = config
        far = [rank for rank in range(topology.size) if rank not in topology.local_ranks]
        # As training sees the links: slowed down where the options say so.
        self._alone = throttle(config, 1)(comm, far)
        self._shared = throttle(config, topology.local_size if topology.is_homogeneous else 1)(comm, far)

    def run(self, what: str, *arguments: Any) -> Any:
        """Carry out one exercise. Returns a result in which any error is a sentence."""
        exercises: dict[str, Callable[..., Any]] = {
            "link": self.link, "local": self.local, "cross": self.cross, "whole": self.whole,
        }  # fmt: skip
        return exercises[what](*arguments)

    # ---- one link ----------------------------------------------------------------------------------------

    def link(self, peer: int, tag: int) -> LinkResult:
        """Latency and bandwidth to a rank of another node, which does the same; the lower rank measures."""
        result = LinkResult()
        end = _End(self._alone, peer, tag)
        try:
            end.turn(CONTACT_S, "the first message did not arrive")
            begin = time.monotonic()
            trips = [end.turn(LINK_S, "small messages do not arrive any more") for _ in range(_ROUND_TRIPS)]
            result.latency_s = min(trips) / 2
            for nbytes in _SIZES:
                data = torch.ones(nbytes, dtype=torch.uint8)  # written to: its pages are there
                times = [end.best_transfer(forth, data, begin + LINK_S) for forth in (True, False)]
                result.bps_to, result.bps_from = (8 * nbytes / max(t - result.latency_s, 1e-9) for t in times)
                if not end.agree(max(times) < _QUICK_S):
                    break
        except CommError as error:
            result.error = str(error)
            _lost.append(end)
        return result

    # ---- sums --------------------------------------------------------------------------------------------

    def local(self, nbytes: int, neighbours: Sequence[int]) -> SumResult:
        """A sum over the ranks of this node, by the transport that training would use. `neighbours`: ids of their
        processes.
        """
        t, wanted = self._topology, self._config.local
        device = _device(wanted, t)
        kind = wanted if wanted != "auto" else "nccl" if device.type == "cuda" else "shm"
        result = SumResult(_TRANSPORTS[kind])
        result.unreadable = not all(may_read_memory(pid) for pid in neighbours)
        try:
            try:
                level = self._level(kind)
                buffer = level.allocate([(nbytes // 4, torch.float32)], device)[0]
            except CommError as error:
                if wanted != "auto" or kind != "shm":
                    raise
                result.fallback, result.transport = str(error), _TRANSPORTS["gloo"]
                level = self._level("gloo")
                buffer = level.allocate([(nbytes // 4, torch.float32)], device)[0]
            for _ in range(3):
                buffer.data.fill_(t.local_rank + 1)
                begin = time.monotonic()
                level.all_reduce(buffer, reduction.SUM).wait(EXCHANGE_S)
                result.seconds = min(time.monotonic() - begin, result.seconds or EXCHANGE_S)
                _require_sum(buffer.data, t.local_size)
                self._exchange("done")
        except CommError as error:
            result.error = str(error)
        return result

    def _exchange(self, item: Any) -> Sequence[Any]:
        """Every local rank's object on every local rank, by way of the first one."""
        ranks = self._topology.local_ranks
        self._post.send(ranks[0], "local", item)
        if self._post.rank == ranks[0]:
            found = self._post.gather(ranks, "local", EXCHANGE_S)
            if len(found) < len(ranks):
                raise CommTimeout(f"local ranks {[ranks.index(r) for r in ranks if r not in found]} do not answer")
            for rank in ranks:
                self._post.send(rank, "all local", [found[r] for r in ranks])
        return list(self._post.receive(ranks[0], "all local", EXCHANGE_S + 1.0))

    def _level(self, kind: str) -> ReducingCommunicator:
        t = self._topology
        if kind == "shm":
            return SharedMemory(t.local_rank, t.local_size, self._exchange)
        return TorchDistributed(kind, t.local_rank, t.local_size, self._exchange, EXCHANGE_S)

    def cross(self, nbytes: int, tag: int) -> SumResult:
        """A sum over the ranks with this local rank, one on each node; over the first ones where nodes are unequal."""
        result = SumResult("MPI")
        group = _Group(self._shared, self._topology.cross_ranks)
        flat = torch.full((nbytes // 4,), float(group.rank + 1))
        begin = time.monotonic()
        deadline = begin + EXCHANGE_S
        try:
            for work in two_phase(group, flat, reduction.SUM, 1, tag):
                _await(work, deadline, f"a sum over {group.size} nodes did not end")
            result.seconds = time.monotonic() - begin
            _require_sum(flat, group.size)
        except CommError as error:
            result.error = str(error)
            _lost.append((group, flat))
        return result

    def whole(self, nbytes: int) -> SumResult:
        """One step of a wrapped optimizer: everything that training uses, over all ranks. Collective."""
        result = SumResult("all levels")
        try:
            hvd.init(placement=False, report=False, stall_warn=0.0, stall_abort=EXCHANGE_S)
            t = runtime.current().topology
            result.nodes = t.nodes
            parameter = torch.nn.Parameter(torch.zeros(nbytes // 4, device=_device(self._config.local, t)))
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), op=hvd.Sum)
            begin = time.monotonic()
            (parameter * (t.rank + 1)).sum().backward()
            optimizer.step()
            result.seconds = time.monotonic() - begin
            _require_sum(-parameter.detach().cpu(), t.size)
            hvd.shutdown()
        except Exception as error:  # whatever it is, it is what training would die of
            result.error = f"{type(error).__name__}: {error}"
        return result


@final
class _End:
    """One end of a link: both ends make the same calls."""

    def __init__(self, comm: Communicator, peer: int, tag: int) -> None:
        self._comm = comm
        self._peer = peer
        self._tag = tag
        self._leads = comm.rank < peer
        self._small = torch.zeros(1)
        self._works: list[Work] = []

    def turn(self, limit_s: float, otherwise: str) -> float:
        """A small message to the other end and back. Returns the seconds it took."""
        begin = time.monotonic()
        self._pass(self._leads, self._small, begin + limit_s, otherwise)
        self._pass(not self._leads, self._small, begin + limit_s, otherwise)
        return time.monotonic() - begin

    def best_transfer(self, forth: bool, data: Tensor, deadline: float) -> float:
        """Bytes one way, once to use up what a shaped link lets through at once, then for their time in seconds."""
        first = self._transfer(forth, data, deadline)
        if not self.agree(first < _PATIENCE_S):
            return first
        return min(self._transfer(forth, data, deadline) for _ in range(_REPEAT))

    def _transfer(self, forth: bool, data: Tensor, deadline: float) -> float:
        """Bytes from the leading end to the other, or back; the answer is a small message."""
        begin = time.monotonic()
        small = f"small messages pass, {data.numel() >> 20} MB did not (large packets may get lost: check the MTU)"
        if forth:
            self._pass(self._leads, data, deadline, small)
            self._pass(not self._leads, self._small, deadline, small)
        else:
            self._pass(self._leads, self._small, deadline, small)
            self._pass(not self._leads, data, deadline, small)
        return time.monotonic() - begin

    def agree(self, value: bool) -> bool:
        """What the leading end says, at both ends."""
        if self._leads:
            self._small.fill_(float(value))
        self._pass(self._leads, self._small, time.monotonic() + LINK_S, "small messages do not arrive any more")
        return bool(self._small.item())

    def _pass(self, sends: bool, buf: Tensor, deadline: float, otherwise: str) -> None:
        move = self._comm.send if sends else self._comm.recv
        work = move(buf, self._peer, tag=self._tag)
        self._works = [work]
        _await(work, deadline, otherwise)


def _await(work: Work, deadline: float, otherwise: str) -> None:
    """Yields at first, for the sake of the figures; then sleeps, for that of the other ranks on this host."""
    begin = time.monotonic()
    while not work.is_completed():
        now = time.monotonic()
        if now > deadline:
            raise CommTimeout(f"{otherwise} within {deadline - begin:.0f} s")
        if now - begin < _YIELD_S:
            os.sched_yield()
        else:
            time.sleep(1e-4)


def _require_sum(flat: Tensor, size: int) -> None:
    right = size * (size + 1) / 2
    wrong = flat[flat != right]
    if wrong.numel():
        raise CommError(f"wrong sum: {wrong[0].item():g} instead of {right:g}")


def _device(wanted: str, topology: Topology) -> torch.device:
    """A GPU of this rank's own, where the user wants NCCL or every local rank has one; else the CPU."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus and (wanted == "nccl" or (wanted == "auto" and gpus >= topology.local_size)):
        return torch.device("cuda", topology.local_rank % gpus)
    return torch.device("cpu")
