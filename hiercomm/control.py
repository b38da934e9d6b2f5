"""The control plane of one rank: requests go to the coordinator (rank 0), its decisions come back.

Nothing is sent while nothing is submitted. Also knows which threads of this rank wait for what, so that
a job in which nobody can go on ends with a sentence instead of a hang, and which ranks have shut down.
Knows nothing of tensors; `run` and `fail` of an operation are its owner's.
"""

from __future__ import annotations

import concurrent.futures.thread
import math
import pickle
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, final

from hiercomm.comm.base import Mailbox, Work
from hiercomm.errors import CommError, CommTimeout, HierCommError, PeerLost, RankMismatch
from hiercomm.links import Links
from hiercomm.negotiate import Blocked, Key, Negotiator, Request, Response, Waiting
from hiercomm.stalls import Limits, Message, StallFinder

COORDINATOR = 0
_SLICE_S = 0.1  # how often a waiting thread looks whether anything has gone wrong
_BLOCKED_AFTER_S = 0.5  # how long all threads must wait before the coordinator hears of it


class Operation(Protocol):
    """What a rank has submitted and not yet been told to run."""

    def run(self, response: Response) -> None:
        """Every rank is ready: carry it out."""

    def fail(self, error: HierCommError) -> None:
        """It will never be carried out."""


def _non_daemons() -> set[int | None]:
    # Threads that libraries start are daemons.
    return {t.ident for t in threading.enumerate() if not t.daemon}


_IDLE_IN = (threading.__file__, queue.__file__, concurrent.futures.thread.__file__)


def _idle_threads() -> set[int]:
    """Threads that wait for another thread of this process (an event, a queue, an end): they cannot go on alone.

    One that waits with a time limit can.
    """
    return {
        ident
        for ident, frame in sys._current_frames().items()
        if frame.f_code.co_filename in _IDLE_IN and frame.f_locals.get("timeout") in (None, -1)
    }


@final
class Control:
    """`poll` is called by the progress thread, all else by any thread. `wake` makes `poll` come soon.

    `bystanders`: ids of threads that may yet communicate although they have not so far. `stalls` finds out who
    is late where somebody waits long, `links` which links are gone.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        rank: int,
        size: int,
        wake: Callable[[], None],
        bystanders: Callable[[], set[int | None]] = _non_daemons,
        stalls: StallFinder | None = None,
        links: Links | None = None,
    ) -> None:
        self._mailbox = mailbox
        self._rank = rank
        self._size = size
        self._wake = wake
        self._bystanders = bystanders
        self._stalls = stalls or StallFinder(rank, [""] * size, Limits(0.0, 0.0))
        self._links = links or Links(rank, [""] * size, {}, 0.0)
        self._negotiator = Negotiator(size) if rank == COORDINATOR else None
        self._lock = threading.Lock()
        self._operations: dict[Key, Operation] = {}
        self._outgoing: deque[tuple[str, Any]] = deque()
        self._waiting: dict[int, tuple[float, Waiting]] = {}
        self._threads: set[int] = set()
        self._started: dict[int, int] = {}
        self._gone: dict[int, dict[int, int]] = {}
        self._reported: tuple[Waiting, ...] = ()
        self._stuck = ""
        self.epoch = 0  # how often all ranks were told that none can go on
        self._ended = threading.Event()
        self._left_at: float | None = None
        self._closed: CommError | None = None
        self.lost: PeerLost | None = None  # a node that cannot be reached any more

    # ---- called by user threads -------------------------------------------------------------------

    def submit(self, request: Request, operation: Operation) -> None:
        """Announce an operation. Raises ValueError (Horovod's words) where its name is in use, CommError where
        the other ranks cannot be reached any more.
        """
        with self._lock:
            if self._closed is not None:
                raise self._closed
            if request.key in self._operations:
                raise ValueError(
                    "Requested to allreduce, allgather, or broadcast a tensor with the same name as another tensor "
                    "that is currently being processed. If you want to request another tensor, use a different "
                    f"tensor name. (the name: {request.name!r})"
                )
            self._operations[request.key] = operation
            self._threads.add(threading.get_ident())
        self._send("submit", request)

    def count(self, channel: int) -> int:
        """This rank begins the next event of `channel`. Returns its number, from 1."""
        with self._lock:
            self._threads.add(threading.get_ident())
            self._started[channel] = number = self._started.get(channel, 0) + 1
        return number

    def wait(self, work: Work, waiting: Waiting, timeout_s: float = math.inf) -> None:
        """Block until `work` completes. Raises what it raises; PeerLost where a rank that it needs has shut
        down, RankMismatch where no rank can go on, CommTimeout after `timeout_s` seconds or where all give up.
        """
        if work.is_completed():
            return
        deadline = time.monotonic() + timeout_s
        epoch = self.epoch
        with self._registered(waiting):
            while True:
                try:
                    work.wait(_SLICE_S)
                except CommTimeout:
                    error = self._reason(waiting, epoch)
                    if error is not None:
                        raise error from None
                    if time.monotonic() > deadline:
                        raise CommTimeout(f"{waiting.what} did not complete within {timeout_s:g} s: {work}") from None
                else:
                    break
        if waiting.key is None and self.epoch != epoch:
            # It completed with what another rank has begun since: all ranks raise, or their steps come apart.
            raise RankMismatch(self._stuck)

    def leave(self) -> None:
        """Shut down: tell the others, then wait until all ranks have (the progress thread goes on)."""
        self._left_at = time.monotonic()
        self._send("leave", dict(self._started))
        self._ended.wait()

    def awaits_others(self) -> bool:
        """Whether a thread of this rank waits for an operation that, as far as is known, not all have submitted."""
        with self._lock:
            return any(waiting.key in self._operations for _, waiting in self._waiting.values())

    # ---- called by the progress thread ------------------------------------------------------------

    def poll(self) -> bool:
        """Send what is to be sent, take in what has come. Returns whether anything happened."""
        try:
            return self._poll()
        except BaseException as error:
            # The other ranks cannot be reached any more: nothing that was submitted can end well.
            self.close(CommError(f"the control plane has failed: {error}"))
            raise

    def is_busy(self) -> bool:
        """Whether this rank waits for the coordinator's answer."""
        return bool(self._operations)

    def close(self, error: CommError) -> None:
        """Fail everything that was submitted and not run, and wait for nobody any more."""
        with self._lock:
            self._closed = error
            operations = list(self._operations.values())
            self._operations.clear()
        for operation in operations:
            operation.fail(error)
        self._ended.set()

    def _poll(self) -> bool:
        moved = bool(self._outgoing)
        while self._outgoing:
            self._to_coordinator(*self._outgoing.popleft())
        self._report_blocked()
        self._look_at_links()
        for source, message in self._mailbox.poll():
            moved = True
            verb, content = pickle.loads(message)
            if verb == "stall":
                self._post_stall(self._stalls.receive(source, content, self, time.monotonic()))
            elif verb == "word":
                self._links.heard(time.monotonic())
            elif verb in ("submit", "blocked", "running", "leave"):
                self._coordinate(source, verb, content)
            else:
                self._obey(verb, content)
        self._look_for_stalls()
        if self._negotiator is not None and (error := self._negotiator.stuck(time.monotonic())) is not None:
            self._to_all("stuck", error)
            for response in self._negotiator.abandon(error):
                self._to_all("respond", response)
            moved = True
        return moved

    def _send(self, verb: str, content: Any) -> None:
        self._outgoing.append((verb, content))
        self._wake()

    def _to_coordinator(self, verb: str, content: Any) -> None:
        if self._negotiator is not None:
            self._coordinate(self._rank, verb, content)
        else:
            self._mailbox.post(COORDINATOR, pickle.dumps((verb, content)))

    def _to_all(self, verb: str, content: Any) -> None:
        message = pickle.dumps((verb, content))
        for rank in range(self._size):
            if rank != self._rank:
                self._mailbox.post(rank, message)
        self._obey(verb, content)

    def _coordinate(self, source: int, verb: str, content: Any) -> None:
        negotiator = self._negotiator
        assert negotiator is not None
        responses: list[Response] = []
        if verb == "submit":
            response = negotiator.submit(source, content)
            responses = [response] if response is not None else []
        elif verb == "blocked":
            negotiator.blocked(source, content)
        elif verb == "running":
            negotiator.running(source)
        else:
            responses = negotiator.leave(source, content)
            self._to_all("gone", (source, content))
        for response in responses:
            self._to_all("respond", response)
        if verb == "leave" and negotiator.all_gone:
            self._to_all("end", None)

    def _obey(self, verb: str, content: Any) -> None:
        if verb == "respond":
            with self._lock:
                operation = self._operations.pop(content.key, None)
            if operation is not None:  # None: it failed before this rank submitted its part
                if content.error:
                    operation.fail((PeerLost if content.peer_lost else RankMismatch)(content.error))
                else:
                    operation.run(content)
        elif verb == "gone":
            self._gone[content[0]] = content[1]
        elif verb == "stuck":
            self._stuck = content
            self.epoch += 1
        elif verb == "give up":
            self.close(CommTimeout(content))
        else:
            self._ended.set()

    def _report_blocked(self) -> None:
        if self._left_at is not None:
            return
        with self._lock:
            alive: set[int | None] = set()
            if self._waiting:
                alive = self._bystanders() | {t.ident for t in threading.enumerate() if t.ident in self._threads}
                alive -= _idle_threads() - self._waiting.keys()
            waits = [item for thread, item in self._waiting.items() if thread in alive]
            old = all(time.monotonic() - since > _BLOCKED_AFTER_S for since, _ in waits)
            waiting = tuple(what for _, what in waits) if waits and len(waits) == len(alive) and old else ()
            if waiting == self._reported:
                return
            self._reported = waiting
            blocked = Blocked(waiting, dict(self._started))
        if waiting:
            self._to_coordinator("blocked", blocked)
        else:
            self._to_coordinator("running", None)

    # ---- who is late ------------------------------------------------------------------------------

    def waits(self) -> list[tuple[float, Waiting]]:
        """What threads of this rank wait for, each with the time since when."""
        with self._lock:
            return list(self._waiting.values())

    def started(self) -> dict[int, int]:
        """How many events of each channel this rank has begun."""
        with self._lock:
            return dict(self._started)

    def missing(self, key: Key) -> Collection[int]:
        """On the coordinator: who has not submitted `key`, for which others wait; nobody where it is carried out."""
        assert self._negotiator is not None
        return self._negotiator.missing(key)

    def _look_for_stalls(self) -> None:
        now = time.monotonic()
        self._post_stall(self._stalls.turn(self, now))
        if (sentence := self._stalls.verdict(now)) is not None:
            self._to_all("give up", sentence)

    def _post_stall(self, messages: list[tuple[int, Message]]) -> None:
        for dest, message in messages:
            self._mailbox.post(dest, pickle.dumps(("stall", message)))

    def _look_at_links(self) -> None:
        since = [begin for begin, _ in self.waits()] if self._left_at is None else [self._left_at]
        audience, lost = self._links.turn(since, time.monotonic())
        for rank in audience:
            self._mailbox.post(rank, pickle.dumps(("word", None)))
        if lost is not None and self.lost is None:
            self.lost = PeerLost(lost)
            self.close(self.lost)

    # ---- waiting ------------------------------------------------------------------------------------

    @contextmanager
    def _registered(self, waiting: Waiting) -> Iterator[None]:
        thread = threading.get_ident()
        with self._lock:
            self._threads.add(thread)
            self._waiting[thread] = (time.monotonic(), waiting)
        try:
            yield
        finally:
            with self._lock:
                self._waiting.pop(thread, None)

    def _reason(self, waiting: Waiting, epoch: int) -> CommError | None:
        """Why `waiting`, which began in `epoch`, can never end, where that is known."""
        if self._closed is not None:
            return self._closed
        if waiting.key is not None:
            return None  # the coordinator answers for operations
        if self.epoch != epoch:
            return RankMismatch(self._stuck)
        gone = dict(self._gone)
        missing = waiting.missing(lambda q: gone[q].get(waiting.channel, 0) if q in gone else math.inf, self._size)
        if missing:
            return PeerLost(
                f"{waiting.what} cannot complete: rank {min(missing)} has shut down hiercomm (its script ended or "
                "raised an exception; if so, the exception is in its output)"
            )
        return None
