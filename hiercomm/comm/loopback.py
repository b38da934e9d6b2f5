"""Ranks as threads of one process: for tests of algorithms, modes and users' own code.

`Loopback(size)` is a world; `world.communicator(rank)` its Communicators. Messages may be delayed at
random (their order between two ranks is kept) and failures injected. Needs no MPI and no processes.
"""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import TypeVar, final

from torch import Tensor

from hiercomm.comm.base import Communicator, Done, Mailbox, Work, as_bytes
from hiercomm.errors import CommError, PeerLost

T = TypeVar("T")


@final
class Loopback:
    """A world of `size` ranks in one process. `max_delay_s` delays each message by up to that much."""

    def __init__(self, size: int, *, max_delay_s: float = 0.0, seed: int = 0) -> None:
        self.size = size
        self._lock = threading.Lock()
        self._queues: dict[tuple[object, ...], deque[tuple[float, bytes]]] = defaultdict(deque)
        self._posted: dict[tuple[object, ...], deque[object]] = defaultdict(deque)
        self._dead: set[int] = set()
        self._random = random.Random(seed)
        self._max_delay_s = max_delay_s

    def communicator(self, rank: int, ranks: Sequence[int] | None = None) -> Communicator:
        """The Communicator of world rank `rank` in the group `ranks` (default: all)."""
        return _LoopbackCommunicator(self, rank, tuple(range(self.size)) if ranks is None else tuple(ranks))

    def mailbox(self, rank: int) -> Mailbox:
        """The Mailbox of world rank `rank`."""
        return _LoopbackMailbox(self, rank)

    def kill(self, rank: int) -> None:
        """From now on whoever sends to `rank` or waits for it gets PeerLost."""
        with self._lock:
            self._dead.add(rank)

    def run(self, function: Callable[[int], T], timeout_s: float = 60.0) -> list[T]:
        """`function(rank)` on one thread per rank; results by rank. Raises the first exception of any."""
        results: dict[int, T] = {}
        errors: dict[int, BaseException] = {}

        def body(rank: int) -> None:
            try:
                results[rank] = function(rank)
            except BaseException as error:  # handed to the caller below
                errors[rank] = error
                self.kill(rank)

        threads = [threading.Thread(target=body, args=(r,), daemon=True) for r in range(self.size)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + timeout_s
        for rank, thread in enumerate(threads):
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive() and not errors:
                raise CommError(f"rank {rank} still runs after {timeout_s:g} s")
        if errors:
            # The cause, not a PeerLost that followed from it.
            raise next((e for e in errors.values() if not isinstance(e, PeerLost)), next(iter(errors.values())))
        return [results[rank] for rank in range(self.size)]

    def put(self, key: tuple[object, ...], message: bytes) -> None:
        """Queue a message under `key`. For the communicators."""
        with self._lock:
            queue = self._queues[key]
            due = time.monotonic() + self._random.uniform(0, self._max_delay_s)
            queue.append((max(due, queue[-1][0]) if queue else due, message))

    def post(self, key: tuple[object, ...], receiver: object) -> None:
        """Queue a receiver for messages under `key`: they are served in this order. For the communicators."""
        with self._lock:
            self._posted[key].append(receiver)

    def take(self, key: tuple[object, ...], receiver: object | None = None) -> bytes | None:
        """The next message under `key` that is due, if it is this receiver's turn. For the communicators."""
        with self._lock:
            queue, posted = self._queues[key], self._posted[key]
            if not queue or queue[0][0] > time.monotonic() or (posted and posted[0] is not receiver):
                return None
            if posted:
                posted.popleft()
            return queue.popleft()[1]

    def check(self, rank: int) -> None:
        """Raise PeerLost where `rank` was killed."""
        if rank in self._dead:
            raise PeerLost(f"rank {rank} has ended")


@final
class _LoopbackCommunicator(Communicator):
    def __init__(self, world: Loopback, rank: int, ranks: tuple[int, ...]) -> None:
        self._world = world
        self._ranks = ranks
        self.rank = ranks.index(rank)
        self.size = len(ranks)

    def send(self, buf: Tensor, dest: int, *, tag: int) -> Work:
        self._world.check(self._ranks[dest])
        self._world.put((self._ranks, self.rank, dest, tag), as_bytes(buf).numpy().tobytes())
        return Done()

    def recv(self, buf: Tensor, source: int, *, tag: int) -> Work:
        return _Receive(self._world, (self._ranks, source, self.rank, tag), buf, self._ranks[source])


@final
class _Receive(Work):
    def __init__(self, world: Loopback, key: tuple[object, ...], buf: Tensor, source: int) -> None:
        self._world, self._key, self._buf, self._source = world, key, buf, source
        self._done = False
        world.post(key, self)

    def is_completed(self) -> bool:
        if self._done:
            return True
        message = self._world.take(self._key, self)
        if message is None:
            self._world.check(self._source)
            return False
        target = as_bytes(self._buf).numpy()
        if len(message) != target.size:
            raise CommError(f"{len(message)} bytes came from rank {self._source} for a buffer of {target.size}")
        target[:] = memoryview(message)
        self._done = True
        return True

    def __str__(self) -> str:
        return f"receive from rank {self._source}, tag {self._key[-1]}"


@final
class _LoopbackMailbox(Mailbox):
    def __init__(self, world: Loopback, rank: int) -> None:
        self._world, self._rank = world, rank

    def post(self, dest: int, message: bytes) -> None:
        self._world.put(("mail", self._rank, dest), message)

    def poll(self) -> list[tuple[int, bytes]]:
        found = []
        for source in range(self._world.size):
            while (message := self._world.take(("mail", source, self._rank))) is not None:
                found.append((source, message))
        return found

    def close(self) -> None:
        pass
