"""One thread that drives communication while the training thread computes.

A task is a generator that yields each Work it has to wait for. Tasks of one key run one after the
other, in the order in which they were submitted (on one tag the order must be the same on every rank);
different keys run side by side. The thread polls, sleeps between polls, and sleeps longer when idle.
Knows nothing of MPI or buckets.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable
from typing import Any, final

from hiercomm.comm.base import Work
from hiercomm.errors import CommError, CommTimeout

Task = Generator[Work, None, Any]

_BUSY_SLEEP_S = (50e-6, 1e-3)  # nothing moved although work is under way: between these
_IDLE_SLEEP_S = 10e-3  # no work at all: only messages from other ranks can come


@final
class Pending(Work):
    """A task under way. Any thread may ask or wait."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._event = threading.Event()
        self._error: BaseException | None = None
        self.result: Any = None

    def finish(self, result: Any = None, error: BaseException | None = None) -> None:
        """End the task; the first call counts."""
        if not self._event.is_set():
            self.result, self._error = result, error
            self._event.set()

    def is_completed(self) -> bool:
        if self._event.is_set() and self._error is not None:
            raise self._error
        return self._event.is_set()

    def has_ended(self) -> bool:
        """As `is_completed`, but raises nothing."""
        return self._event.is_set()

    def wait(self, timeout_s: float | None = None) -> None:
        if not self._event.wait(timeout_s):
            raise CommTimeout(f"{self._what} did not complete within {timeout_s:g} s")
        self.is_completed()

    def __str__(self) -> str:
        return self._what


class _Queue:
    """The tasks of one key; the first one runs."""

    def __init__(self) -> None:
        self.tasks: deque[tuple[Task, Pending]] = deque()
        self.waiting: Work | None = None

    def advance(self) -> bool:
        """Run the first task as far as it goes. Returns whether anything moved."""
        moved = False
        while self.tasks:
            task, pending = self.tasks[0]
            try:
                if not self._can_go_on(task):
                    return moved or (isinstance(self.waiting, Together) and self.waiting.has_moved)
                moved = True
                self.waiting = next(task)
            except StopIteration as stop:
                self._end(pending, stop.value, None)
            except BaseException as error:  # raised by the Work it belongs to
                self._end(pending, None, error)
        return moved

    def _can_go_on(self, task: Task) -> bool:
        """Whether what the task waits for has completed; its error is raised inside the task."""
        try:
            return self.waiting is None or self.waiting.is_completed()
        except BaseException as error:
            self.waiting = task.throw(error)
            return False

    def _end(self, pending: Pending, result: Any, error: BaseException | None) -> None:
        self.tasks.popleft()
        self.waiting = None
        pending.finish(result, error)


@final
class Together(Work):
    """Tasks side by side, moved by whoever polls; for a task to yield. Raises the first error, once all have ended."""

    def __init__(self, tasks: Iterable[Task]) -> None:
        self.has_moved = False  # whether the last poll moved any
        self._parts: list[tuple[_Queue, Pending]] = []
        for index, task in enumerate(tasks):
            queue, pending = _Queue(), Pending(f"part {index}")
            queue.tasks.append((task, pending))
            self._parts.append((queue, pending))

    def is_completed(self) -> bool:
        moved = [queue.advance() for queue, _ in self._parts]
        self.has_moved = any(moved)
        if not all(pending.has_ended() for _, pending in self._parts):
            return False
        for _, pending in self._parts:
            pending.is_completed()
        return True

    def __str__(self) -> str:
        waiting = [str(queue.waiting) for queue, _ in self._parts if queue.waiting is not None]
        return " beside ".join(waiting) or "nothing"


@final
class Progress:
    """Runs tasks, and `poll` between them; `poll` returns whether anything happened, `is_busy` whether it soon may.

    An error that `poll` raises ends all tasks, present and future, with that error.
    """

    def __init__(self, poll: Callable[[], bool], is_busy: Callable[[], bool] = lambda: False) -> None:
        self._poll = poll
        self._is_busy = is_busy
        self._inbox: deque[tuple[Hashable, Task, Pending]] = deque()
        self._queues: dict[Hashable, _Queue] = {}
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stop = False
        self._moved_at = 0.0
        self._gap_s = 0.0  # between movements, smoothed
        self._error: BaseException | None = None
        self._turns = 0
        self._thread = threading.Thread(target=self._run, name="hiercomm-progress", daemon=True)
        self._thread.start()

    @property
    def native_id(self) -> int | None:
        """The thread's id, as the operating system counts."""
        return self._thread.native_id

    @property
    def turns(self) -> int | None:
        """Grows unless the thread is stuck in a call; None where it has ended."""
        return self._turns if self._thread.is_alive() else None

    def submit(self, key: Hashable, task: Task, pending: Pending) -> Pending:
        """Run `task` behind the earlier ones of `key`; `pending` ends with it, and is returned."""
        with self._lock:
            if self._error is not None or self._stop:
                pending.finish(error=self._error or CommError("hiercomm has been shut down"))
                return pending
            self._inbox.append((key, task, pending))
        self._wake.set()
        return pending

    def wake(self) -> None:
        """Have `poll` called soon."""
        self._wake.set()

    def drain(self, patience_s: float) -> None:
        """Let tasks under way end, while any moved within `patience_s` seconds: messages may be coming for them."""
        begin = time.monotonic()
        while (self._queues or self._inbox) and time.monotonic() - max(begin, self._moved_at) < patience_s:
            time.sleep(1e-3)

    def close(self) -> None:
        """Stop the thread; tasks that have not ended fail."""
        with self._lock:
            self._stop = True
        self._wake.set()
        self._thread.join()
        self._fail(CommError("hiercomm has been shut down"))

    def _run(self) -> None:
        sleep_s, longest_s = _BUSY_SLEEP_S
        while not self._stop:
            self._turns += 1
            self._wake.clear()
            try:
                moved = self._poll() | self._advance()
            except BaseException as error:  # there is nobody to raise it to: every waiter gets it
                with self._lock:
                    self._error = error
                self._fail(error)
                return
            if moved:
                sleep_s = self._pace()
                os.sched_yield()
            elif self._queues or self._is_busy():
                self._wake.wait(sleep_s)
                sleep_s = min(sleep_s * 1.1, longest_s)
            else:
                self._wake.wait(_IDLE_SLEEP_S)

    def _pace(self) -> float:
        """Something moved: how long to sleep before the next look. Looking costs a core that the model could use."""
        now = time.monotonic()
        self._gap_s += (min(now - self._moved_at, _BUSY_SLEEP_S[1]) - self._gap_s) / 4
        self._moved_at = now
        return max(_BUSY_SLEEP_S[0], self._gap_s)

    def _advance(self) -> bool:
        moved = False
        while self._inbox:
            key, task, pending = self._inbox.popleft()
            self._queues.setdefault(key, _Queue()).tasks.append((task, pending))
        for key, queue in list(self._queues.items()):
            moved |= queue.advance()
            if not queue.tasks:
                del self._queues[key]
        return moved

    def _fail(self, error: BaseException) -> None:
        for _, _, pending in self._inbox:
            pending.finish(error=error)
        for queue in self._queues.values():
            for _, pending in queue.tasks:
                pending.finish(error=error)


def drive(task: Task) -> Any:
    """Run a task to its end on the calling thread."""
    try:
        while True:
            next(task).wait()
    except StopIteration as stop:
        return stop.value
