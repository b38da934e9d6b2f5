"""The seam between algorithms and transports: Work, Communicator, ReducingCommunicator, Mailbox.

Every call is non-blocking, works on the caller's tensors and takes a tag. Buffers are contiguous
tensors of any dtype: a Communicator moves bytes and never adds. Messages between two ranks with one
tag arrive in the order in which they were sent. Knows nothing of MPI, torch.distributed or modes.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import final

import torch
from torch import Tensor

from hiercomm.errors import CommTimeout

# A long wait must not burn a core and a short one must not sleep: yield for a moment, then sleep longer and longer.
_YIELD_S = 200e-6
_SLEEP_S = (50e-6, 1e-3)


def wait_until(done: Callable[[], bool], timeout_s: float | None, what: str) -> None:
    """Poll `done` until it holds: yielding for 0.2 ms, then with growing sleeps (50 us to 1 ms).

    Raises CommTimeout, naming `what`, after `timeout_s` seconds; None waits for ever.
    """
    begin = time.perf_counter()
    sleep_s = _SLEEP_S[0]
    while not done():
        waited_s = time.perf_counter() - begin
        if waited_s < _YIELD_S:
            os.sched_yield()
            continue
        if timeout_s is not None and waited_s > timeout_s:
            raise CommTimeout(f"{what} did not complete within {timeout_s:g} s")
        time.sleep(sleep_s)
        sleep_s = min(sleep_s * 1.2, _SLEEP_S[1])


class Work(ABC):
    """An operation under way. Not thread-safe: one thread polls or waits."""

    @abstractmethod
    def is_completed(self) -> bool:
        """Whether the operation has ended; makes progress where polling does. Raises what it raised."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until completed. Raises what the operation raised, or CommTimeout."""
        wait_until(self.is_completed, timeout_s, str(self))

    def __str__(self) -> str:
        return type(self).__name__


@final
class Done(Work):
    """A Work with nothing left to do."""

    def is_completed(self) -> bool:
        return True


@final
class AllOf(Work):
    """Completed when all its parts are."""

    def __init__(self, parts: Iterable[Work]) -> None:
        self._parts = list(parts)

    def is_completed(self) -> bool:
        self._parts = [part for part in self._parts if not part.is_completed()]
        return not self._parts

    def __str__(self) -> str:
        return f"{len(self._parts)} operations, first {self._parts[0]}" if self._parts else "nothing"


class Communicator(ABC):
    """A fixed group of ranks that send each other bytes."""

    rank: int
    size: int

    @abstractmethod
    def send(self, buf: Tensor, dest: int, *, tag: int) -> Work:
        """Send a contiguous tensor; the buffer must not change until the Work is completed."""

    @abstractmethod
    def recv(self, buf: Tensor, source: int, *, tag: int) -> Work:
        """Receive into a contiguous tensor of the sender's number of bytes."""

    def all_to_all(self, out: Sequence[Tensor], buf: Sequence[Tensor], *, tag: int) -> Work:
        """`buf[q]` goes to rank q, `out[q]` comes from rank q. The own piece is left alone."""
        peers = [q for q in range(self.size) if q != self.rank]
        # Receives first, so that no payload meets a rank that has nowhere to put it.
        parts = [self.recv(out[q], q, tag=tag) for q in peers if out[q].numel()]
        # Staggered destinations: at no time do all ranks send to the same one.
        order = sorted(peers, key=lambda q: (q - self.rank) % self.size)
        parts += [self.send(buf[q], q, tag=tag) for q in order if buf[q].numel()]
        return AllOf(parts)

    def all_gather(self, out: Sequence[Tensor], buf: Tensor, *, tag: int) -> Work:
        """Every rank's `buf` ends in `out[rank]` of all others; `out[self.rank]` is left alone."""
        return self.all_to_all(out, [buf] * self.size, tag=tag)


class LocalBuffer:
    """A flat tensor on which the local level works; what else a transport needs, its own kind adds."""

    def __init__(self, data: Tensor) -> None:
        self.data = data


class ReducingCommunicator(ABC):
    """The local level: a group of ranks inside one node that also adds, in buffers it has allocated.

    Calls are made by one thread, in the same order on every rank of the group. `divisor` divides the
    result, in the precision in which it was added.
    """

    rank: int
    size: int
    # Whether an operation moves only while somebody polls its Work.
    needs_polling: bool

    @abstractmethod
    def allocate(self, specs: Sequence[tuple[int, torch.dtype]], device: torch.device) -> list[LocalBuffer]:
        """Zeroed flat buffers of (numel, dtype). Collective; on failure CommError on every rank of the group."""

    @abstractmethod
    def reduce_scatter(
        self, buffer: LocalBuffer, op: str, divisor: int = 1, cuts: Sequence[slice] = (slice(None),)
    ) -> list[Work]:
        """Afterwards the own shard, `pieces(buffer.data, size)[rank]`, holds the reduction over the group.

        A Work for each of `cuts`, which together are the whole shard: each part may be had before the others.
        """

    @abstractmethod
    def all_gather(self, buffer: LocalBuffer) -> Work:
        """Afterwards every rank's shard is in every rank's buffer. Follows `reduce_scatter`, or stands alone."""

    @abstractmethod
    def spread(self, buffer: LocalBuffer, cut: slice) -> None:
        """This part of the own shard is final: what `all_gather` has to do with it may be done now, on any thread."""

    @abstractmethod
    def all_reduce(self, buffer: LocalBuffer, op: str, divisor: int = 1) -> Work:
        """Afterwards the buffer holds the reduction over the group, the same bits on every rank."""

    @abstractmethod
    def broadcast(self, buffer: LocalBuffer, root: int) -> Work:
        """Afterwards the buffer holds the root's values."""


class Mailbox(ABC):
    """Small messages of any length between all ranks: the control plane."""

    @abstractmethod
    def post(self, dest: int, message: bytes) -> None:
        """Send a message; messages from one rank to another arrive in order."""

    @abstractmethod
    def poll(self) -> list[tuple[int, bytes]]:
        """(source, message) of all that has arrived since the last call."""

    @abstractmethod
    def close(self) -> None:
        """Release what the mailbox holds; no call may follow."""


# Shards begin at multiples of this many elements, so that slices stay aligned for vector units.
_ALIGN = 16


def bounds(numel: int, parts: int, index: int) -> tuple[int, int]:
    """[begin, end) of part `index` when `numel` elements are cut into aligned, nearly equal parts."""
    step = -(-numel // parts)
    step = -(-step // _ALIGN) * _ALIGN
    return min(numel, index * step), min(numel, (index + 1) * step)


def pieces(flat: Tensor, parts: int) -> list[Tensor]:
    """A flat tensor as `parts` views, cut at `bounds`."""
    return [flat[slice(*bounds(flat.numel(), parts, i))] for i in range(parts)]


def as_bytes(buf: Tensor) -> Tensor:
    """A flat uint8 view of a contiguous CPU tensor. Raises ValueError for any other."""
    if buf.device.type != "cpu" or not buf.is_contiguous():
        raise ValueError(f"a contiguous CPU tensor is needed, not {buf.device}, strides {buf.stride()}")
    return buf.detach().reshape(-1).view(torch.uint8)
