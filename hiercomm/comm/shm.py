"""The local level on CPU: a group of processes on one host that reduce in shared memory.

Buffers from `allocate` are slots of one window that every process of the group has mapped: each rank
reduces its own shard straight out of all slots, so nothing is copied before or after. Flags in the
window say who has come how far; no MPI, no socket, no lock. Knows nothing of other nodes.

An operation on a buffer has a number; a rank writes it to `arrived` when its data may be read by the
others and to `left` when it has written all that the others wait for. Both only grow.
"""

from __future__ import annotations

import functools
import mmap
import os
import platform
import secrets
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from hiercomm import reduction
from hiercomm.comm.base import Done, LocalBuffer, ReducingCommunicator, Work, bounds
from hiercomm.errors import CommError

_SHM = Path("/dev/shm")
_PAGE = mmap.PAGESIZE
_LINE = 64  # bytes: every flag has a cache line of its own
_STRIDE = _LINE // 8  # flags from one line to the next
_REORDERS = platform.machine() not in ("x86_64", "AMD64", "i686")
_fence_lock = threading.Lock()

# Set-up only: every rank of the group hands in an object and gets all of them, in rank order.
Exchange = Callable[[Any], Sequence[Any]]


def _fence() -> None:
    # A release followed by an acquire: on processors that reorder stores (Arm) nothing written before
    # can become visible after a flag that is written behind it. x86 keeps stores in order.
    if _REORDERS:
        with _fence_lock:
            pass
        with _fence_lock:
            pass


@final
class _Window(LocalBuffer):
    """One buffer: the slots and flags of every rank of the group."""

    def __init__(self, rank: int, slots: list[Tensor], flags: memoryview) -> None:
        super().__init__(slots[rank])
        self.slots = slots
        own = slice(*bounds(slots[0].numel(), len(slots), rank))
        self.shards = [slot[own] for slot in slots]  # this rank's shard of every slot
        self.step = 0
        self.scattered = False  # whether an all-gather follows a reduce-scatter
        self.spread = 0  # elements of the own shard that the others have already
        self._rank = rank
        self._flags = flags  # int64; two lines a rank: operations arrived at, operations left

    def arrive(self) -> int:
        """Begin the next operation: the others may read and write this rank's slot. Returns its number."""
        self.step += 1
        _fence()
        self._flags[2 * self._rank * _STRIDE] = self.step
        return self.step

    def leave(self, step: int) -> None:
        """This rank has written all that the others wait for in operation `step`."""
        _fence()
        self._flags[(2 * self._rank + 1) * _STRIDE] = step

    def arrived(self, ranks: Sequence[int], step: int) -> bool:
        """Whether all of `ranks` have begun operation `step`."""
        return self._reached(ranks, 0, step)

    def have_left(self, ranks: Sequence[int], step: int) -> bool:
        """Whether all of `ranks` have left operation `step`."""
        return self._reached(ranks, _STRIDE, step)

    def _reached(self, ranks: Sequence[int], line: int, step: int) -> bool:
        flags = self._flags
        for q in ranks:
            if flags[2 * q * _STRIDE + line] < step:
                return False
        _fence()  # nor may data be read before the flag was
        return True


@final
class _Operation(Work):
    """Wait for arrivals, act, say so, wait for the others to have acted."""

    def __init__(self, window: _Window, act: Callable[[], None], *, after: Sequence[int], until: Sequence[int]) -> None:
        self._window = window
        self._act: Callable[[], None] | None = act
        self._after = after
        self._until = until
        self._step = window.arrive()

    def is_completed(self) -> bool:
        if self._act is not None:
            if not self._window.arrived(self._after, self._step):
                return False
            self._act()
            self._act = None
            self._window.leave(self._step)
        return self._window.have_left(self._until, self._step)

    def __str__(self) -> str:
        phase = self._window.arrived if self._act is not None else self._window.have_left
        waited = self._after if self._act is not None else self._until
        late = [q for q in waited if not phase([q], self._step)]
        return f"shared-memory operation {self._step}, waiting for local ranks {late}"


@final
class _Part(Work):
    """Wait for arrivals, act; nobody else need know."""

    def __init__(self, window: _Window, act: Callable[[], None], step: int, after: Sequence[int]) -> None:
        self._window = window
        self._act: Callable[[], None] | None = act
        self._step = step
        self._after = after

    def is_completed(self) -> bool:
        if self._act is not None and self._window.arrived(self._after, self._step):
            self._act()
            self._act = None
        return self._act is None

    def __str__(self) -> str:
        late = [q for q in self._after if not self._window.arrived([q], self._step)]
        return f"shared-memory operation {self._step}, waiting for local ranks {late}"


@final
class SharedMemory(ReducingCommunicator):
    """ReducingCommunicator over /dev/shm. `exchange` is called by `allocate` only."""

    needs_polling = True

    def __init__(self, rank: int, size: int, exchange: Exchange) -> None:
        self.rank = rank
        self.size = size
        self._exchange = exchange
        self._all = range(size)

    def allocate(self, specs: Sequence[tuple[int, torch.dtype]], device: torch.device) -> list[LocalBuffer]:
        if device.type != "cpu":
            raise CommError(f"shared memory holds CPU tensors, not tensors on {device}")
        flag_bytes = _pages(2 * self.size * _LINE)
        sizes = [_pages(numel * dtype.itemsize) for numel, dtype in specs]
        memory = memoryview(self._map(sum(flag_bytes + self.size * nbytes for nbytes in sizes)))
        windows: list[LocalBuffer] = []
        offset = 0
        for (numel, dtype), nbytes in zip(specs, sizes, strict=True):
            flags = memory[offset : offset + flag_bytes].cast("q")
            offset += flag_bytes
            slots = [_tensor(memory, offset + q * nbytes, numel, dtype) for q in self._all]
            offset += self.size * nbytes
            windows.append(_Window(self.rank, slots, flags))
        return windows

    def _map(self, nbytes: int) -> mmap.mmap:
        """The same new, zeroed memory on every rank of the group; it goes with its last user."""
        path = str(_SHM / f"hiercomm-{os.getpid()}-{secrets.token_hex(8)}")
        memory: mmap.mmap | None = None
        error: str | None = None
        if self.rank == 0:
            memory, error = _open(path, nbytes, create=True)
            error = error and f"{nbytes} bytes of shared memory in {_SHM}: {error}"
        try:
            root_path, root_error = self._exchange((path, error))[0]
            if self.rank != 0 and root_error is None:
                memory, error = _open(root_path, nbytes, create=False)
                error = error and f"local rank {self.rank} cannot open the shared memory of local rank 0: {error}"
            errors = [e for e in self._exchange(error) if e is not None]
        finally:
            if self.rank == 0 and os.path.exists(path):
                os.unlink(path)  # mapped everywhere by now: nothing is left behind, whatever happens next
        if errors or memory is None:
            raise CommError(errors[0])
        return memory

    def reduce_scatter(
        self, buffer: LocalBuffer, op: str, divisor: int = 1, cuts: Sequence[slice] = (slice(None),)
    ) -> list[Work]:
        window = self._own(buffer)
        if not window.data.numel():
            return [Done() for _ in cuts]

        def reduce(cut: slice) -> None:
            reduction.combine([shard[cut] for shard in window.shards], [window.shards[self.rank][cut]], op, divisor)

        step, window.spread, window.scattered = window.arrive(), 0, True
        # The own shard of a slot is read by nobody else, so nobody need be waited for afterwards.
        return [_Part(window, functools.partial(reduce, cut), step, self._all) for cut in cuts]

    def spread(self, buffer: LocalBuffer, cut: slice) -> None:
        # After reduce_scatter nobody but this rank reads or writes this shard of any slot.
        window = self._own(buffer)
        own = window.shards[self.rank][cut]
        for q, shard in enumerate(window.shards):
            if q != self.rank:
                shard[cut].copy_(own)
        window.spread += own.numel()

    def all_gather(self, buffer: LocalBuffer) -> Work:
        window = self._own(buffer)

        def push() -> None:
            if window.spread < window.shards[self.rank].numel():
                self.spread(window, slice(None))

        # After a reduce-scatter nobody reads the slots any more; alone, it must wait until they may be written.
        after = () if window.scattered else self._all
        window.spread, window.scattered = window.spread if window.scattered else 0, False
        return self._run(window, push, after, self._all)

    def all_reduce(self, buffer: LocalBuffer, op: str, divisor: int = 1) -> Work:
        window = self._own(buffer)
        parts = window.shards
        return self._run(window, lambda: reduction.combine(parts, parts, op, divisor), self._all, self._all)

    def broadcast(self, buffer: LocalBuffer, root: int) -> Work:
        window = self._own(buffer)

        def push() -> None:
            for q, slot in enumerate(window.slots):
                if q != root:
                    slot.copy_(window.slots[root])

        if self.rank == root:
            return self._run(window, push, self._all, ())
        return self._run(window, lambda: None, (), (root,))

    def _own(self, buffer: LocalBuffer) -> _Window:
        if not isinstance(buffer, _Window):
            raise CommError("the buffer was not allocated by the shared-memory level")
        return buffer

    def _run(self, window: _Window, act: Callable[[], None], after: Sequence[int], until: Sequence[int]) -> Work:
        if not window.data.numel():
            return Done()
        return _Operation(window, act, after=after, until=until)


def _open(path: str, nbytes: int, *, create: bool) -> tuple[mmap.mmap | None, str | None]:
    """The mapped file, or why it cannot be had."""
    fd = -1
    try:
        fd = os.open(path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0), 0o600)
        if create:
            os.posix_fallocate(fd, 0, nbytes)  # ENOSPC now, not SIGBUS at the first write
        return mmap.mmap(fd, nbytes), None
    except OSError as error:
        return None, os.strerror(error.errno or 0)
    finally:
        if fd >= 0:
            os.close(fd)


def _pages(nbytes: int) -> int:
    return -(-max(nbytes, 1) // _PAGE) * _PAGE


def _tensor(memory: memoryview, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
    if numel == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=numel, offset=offset)
