"""The thread that says what has stalled: it never calls MPI, so it can speak where the thread that does is stuck.

On rank 0 it prints who is late, as `stalls` has found; on every rank it notices when the progress thread stands
still, and prints the stacks of this rank. Knows nothing of messages, MPI or configuration.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import final

from hiercomm.stalls import Late, Stall, StallFinder, clock, describe, is_same, names


def stacks() -> str:
    """The Python stacks of all threads of this process but the calling one."""
    threads = {thread.ident: thread.name for thread in threading.enumerate()}
    return "".join(
        f"thread {threads.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    )


@final
class _Backoff:
    """When to speak of something that lasts: after `first_s` seconds, and whenever that has doubled."""

    def __init__(self, first_s: float) -> None:
        self._first_s = first_s
        self.reset()

    def reset(self) -> None:
        self._next_s = self._first_s
        self.has_spoken = False

    def is_due(self, age_s: float) -> bool:
        if not self._first_s or age_s < self._next_s:
            return False
        while self._next_s <= age_s:
            self._next_s *= 2
        self.has_spoken = True
        return True


@final
class Watch:
    """A thread that says what `finder` has found, and notices when `turns`, a count (None: ended), stands still.

    `name` is this rank's, with its host. `say` takes a text that ends a line; `give_up` ends the job.
    """

    def __init__(
        self, finder: StallFinder, turns: Callable[[], int | None], name: str, give_up: Callable[[], None],
        say: Callable[[str], None] | None = None,
    ) -> None:  # fmt: skip
        self._finder = finder
        self._limits = finder.limits
        self._turns = turns
        self._name = name
        self._give_up = give_up
        self._say = say or _to_stderr
        self._tick_s = min(self._limits.first_s / 8, 1.0)
        self._told: Stall | None = None
        self._lines = _Backoff(self._limits.warn_s)
        self._last_turns: int | None = None
        self._last_look: float | None = None
        self._still_s = 0.0
        self._stacks = _Backoff(self._limits.warn_s)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hiercomm-watch", daemon=True)

    def start(self) -> None:
        """Begin to look; nothing is to be looked for where no limit is set."""
        if self._limits.first_s:
            self._thread.start()

    def close(self) -> None:
        """End the thread; nobody waits any more."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self._look_at_stall(None, time.monotonic())

    def _run(self) -> None:
        while not self._stop.wait(self._tick_s):
            self.look(time.monotonic())

    def look(self, now: float) -> None:
        """Say what is to be said. Called every eighth of the limit, at least every second."""
        self._look_at_stall(self._finder.stall, now)
        self._look_at_thread(now)

    def _look_at_stall(self, stall: Stall | None, now: float) -> None:
        if self._finder.has_given_up:
            return  # all ranks raise it
        told = self._told
        if told is not None and (stall is None or not is_same(stall.waiting, told.waiting)):
            if self._lines.has_spoken:
                whom = f" for {names([Late(one.rank) for one in told.late], self._finder.hosts)}" if told.late else ""
                self._say(f"hiercomm: the wait{whom} in {told.waiting.what} ended after {now - told.since:.1f} s\n")
            self._lines.reset()
        self._told = stall
        if stall is not None and self._lines.is_due(now - stall.since):
            self._say(f"hiercomm: {describe(stall, self._finder.hosts, now)}\n")

    def _look_at_thread(self, now: float) -> None:
        turns, last = self._turns(), self._last_look
        self._last_look = now
        if last is None or turns is None or turns != self._last_turns:
            if self._stacks.has_spoken and turns is not None:
                self._say(f"hiercomm: {self._name} moves messages again, after {self._still_s:.1f} s\n")
            self._last_turns, self._still_s = turns, 0.0
            self._stacks.reset()
            return
        # Capped: where the whole process was stopped for a while, no thread of it is to blame.
        self._still_s += min(now - last, 2 * self._tick_s)
        stuck = (
            f"{self._name} cannot send or receive since {clock(now - self._still_s, now)}: "
            "its thread hiercomm-progress is stuck in a call"
        )
        if self._stacks.is_due(self._still_s):
            self._say(f"hiercomm: {stuck}. The stacks of this rank's threads:\n{stacks()}")
        if self._limits.abort_s and self._still_s >= self._limits.abort_s:
            self._say(f"hiercomm: gave up: {stuck} (HIERCOMM_STALL_ABORT={self._limits.abort_s:g}); ending the job\n")
            self._give_up()


def _to_stderr(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # closed by the user's program
        sys.stderr.write(text)  # one write, so that the ranks' lines do not mix
        sys.stderr.flush()
