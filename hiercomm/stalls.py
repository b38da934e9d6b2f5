"""Stalls: who is late, where, for what, and since when.

A rank of which a thread has waited longer than the limit says so to rank 0, which then asks every rank how far
it is and where, and so knows who has not come. `StallFinder` is one rank's part in that, without thread or
network: Control carries its messages, and `watch` prints what it finds. None is sent while nobody waits so long.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, final

from hiercomm.negotiate import Key, Waiting

_COORDINATOR = 0
_ANSWER_S = 2.0  # a rank that has not answered for so long is silent
_ASK_EVERY_S = 5.0
_NAMED = 8  # ranks that one line names, at most
_PACKAGE = os.path.dirname(os.path.abspath(__file__))
_LIBRARIES = (_PACKAGE + os.sep, *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")))


@dataclass(frozen=True)
class Limits:
    """Seconds that a thread may wait before all hear of it, and before the job is given up; 0 means never."""

    warn_s: float
    abort_s: float

    @property
    def first_s(self) -> float:
        """The smaller of those that are set; 0 where none is."""
        return min((limit for limit in (self.warn_s, self.abort_s) if limit), default=0.0)


class Facts(Protocol):
    """What `StallFinder` asks about its own rank."""

    def waits(self) -> Sequence[tuple[float, Waiting]]:
        """What its threads wait for, each with the time since when."""

    def started(self) -> Mapping[int, int]:
        """How many events of each channel it has begun."""

    def missing(self, key: Key) -> Collection[int]:
        """On rank 0: who has not submitted the operation `key`, for which others wait."""


@dataclass(frozen=True)
class Overdue:
    """To rank 0: what has been waited for too long, each with its seconds; empty: nothing any more."""

    waits: tuple[tuple[float, Waiting], ...]
    started: Mapping[int, int]


@dataclass(frozen=True)
class Ask:
    """From rank 0: how far are you?"""


@dataclass(frozen=True)
class Place:
    """To rank 0: how far this rank is; `where` is the line of the user's program that it executes."""

    started: Mapping[int, int]
    where: str


Message = Overdue | Ask | Place
Messages = list[tuple[int, Message]]  # with their destinations


@dataclass(frozen=True)
class Late:
    """A rank that is waited for. `where` says what is known of it, "" where nothing is."""

    rank: int
    where: str = ""


@dataclass(frozen=True)
class Stall:
    """A wait that takes too long. `late` is empty where every rank has begun what is waited for."""

    waiting: Waiting
    since: float
    waiters: tuple[int, ...]
    late: tuple[Late, ...]


@final
class StallFinder:
    """One rank's part in finding stalls. Called by the thread that polls; `stall` may be read by any.

    `stall` is what rank 0 has found, on rank 0. On the others it says that rank 0 itself does not answer.
    """

    def __init__(self, rank: int, hosts: Sequence[str], limits: Limits) -> None:
        self.hosts = hosts
        self.limits = limits
        self.stall: Stall | None = None
        self.has_given_up = False
        self._rank = rank
        self._tick_s = min(limits.first_s / 10, 1.0)
        self._ask_every_s = min(limits.first_s / 2, _ASK_EVERY_S)
        self._next_turn = 0.0
        self._reported: tuple[Waiting, ...] = ()
        self._heard = 0.0  # when this rank last reported a wait or was asked
        # On rank 0, by rank:
        self._overdue: dict[int, tuple[tuple[float, Waiting], ...]] = {}
        self._started: dict[int, Mapping[int, int]] = {}
        self._where: dict[int, str] = {}
        self._unanswered: dict[int, float] = {}
        self._asked: float | None = None

    def turn(self, facts: Facts, now: float) -> Messages:
        """Look whether anything is overdue. Returns what to send."""
        if not self.limits.first_s or now < self._next_turn:
            return []
        self._next_turn = now + self._tick_s
        messages = self._report(facts, now)
        if self._rank == _COORDINATOR:
            return self._coordinate(facts, now)
        patience_s = max(self.limits.first_s, 2 * self._ask_every_s + _ANSWER_S)
        if not self._reported or now - self._heard < patience_s:
            self.stall = None
        elif self.stall is None:
            since, waiting = min(facts.waits(), key=lambda wait: wait[0], default=(now, self._reported[0]))
            late = Late(_COORDINATOR, "does not answer")
            self.stall = Stall(waiting, since, (self._rank,), (late,))
        return messages

    def receive(self, source: int, message: Message, facts: Facts, now: float) -> Messages:
        """Take in a message. Returns what to send."""
        if isinstance(message, Ask):
            self._heard = now
            return [(source, Place(facts.started(), position()))]
        self._started[source] = message.started
        if isinstance(message, Place):
            self._where[source] = message.where
            self._unanswered.pop(source, None)
        else:
            self._overdue[source] = tuple((now - age_s, waiting) for age_s, waiting in message.waits)
        return []

    def verdict(self, now: float) -> str | None:
        """On rank 0, once: why the job is to be given up, as a sentence; None while it is not."""
        stall, limit_s = self.stall, self.limits.abort_s
        if stall is None or self._rank != _COORDINATOR or self.has_given_up:
            return None
        if not limit_s or now - stall.since < limit_s:
            return None
        self.has_given_up = True
        return f"gave up {describe(stall, self.hosts, now)} (HIERCOMM_STALL_ABORT={limit_s:g})"

    def _report(self, facts: Facts, now: float) -> Messages:
        overdue = [(since, waiting) for since, waiting in facts.waits() if now - since >= self.limits.first_s]
        what = tuple(waiting for _, waiting in overdue)
        if what == self._reported:
            return []
        if not self._reported:
            self._heard = now
        self._reported = what
        message = Overdue(tuple((now - since, waiting) for since, waiting in overdue), facts.started())
        if self._rank == _COORDINATOR:
            return self.receive(self._rank, message, facts, now)
        return [(_COORDINATOR, message)]

    def _coordinate(self, facts: Facts, now: float) -> Messages:
        if not any(self._overdue.values()):
            self.stall = self._asked = None
            self._unanswered.clear()
            return []
        if self._asked is None or now - self._asked >= self._ask_every_s:
            self._asked = now
            self._started[self._rank], self._where[self._rank] = facts.started(), position()
            others = [rank for rank in range(len(self.hosts)) if rank != self._rank]
            for rank in others:
                self._unanswered.setdefault(rank, now)
            return [(rank, Ask()) for rank in others]
        if all(now - asked >= _ANSWER_S for asked in self._unanswered.values()):
            self.stall = self._find(facts)
        return []

    def _find(self, facts: Facts) -> Stall:
        """Who is late for the oldest wait; ranks that are held up by others are not."""
        waits = sorted(
            ((since, waiting) for overdue in self._overdue.values() for since, waiting in overdue),
            key=lambda wait: wait[0],
        )
        held_up = {rank for rank, overdue in self._overdue.items() if overdue}
        missing = [self._missing(waiting, facts) for _, waiting in waits]
        culprits = set().union(*missing) - held_up or set().union(*missing)
        # Where nobody is late, whoever does not answer may be why nothing arrives.
        late = culprits or set(self._unanswered)
        index = next((i for i, ranks in enumerate(missing) if ranks & culprits), 0)
        since, waiting = waits[index]
        blamed = late & missing[index] if culprits else late
        waiters = [rank for rank, overdue in self._overdue.items() if any(is_same(w, waiting) for _, w in overdue)]
        return Stall(waiting, since, tuple(sorted(waiters)), tuple(self._late(rank) for rank in sorted(blamed)))

    def _missing(self, waiting: Waiting, facts: Facts) -> set[int]:
        if waiting.key is not None:
            return set(facts.missing(waiting.key))
        return waiting.missing(lambda rank: self._started.get(rank, {}).get(waiting.channel, 0), len(self.hosts))

    def _late(self, rank: int) -> Late:
        return Late(rank, "does not answer" if rank in self._unanswered else self._where.get(rank, ""))


def is_same(one: Waiting, other: Waiting) -> bool:
    """Whether ranks wait for the same; their words for it may differ, or their places in it."""
    if one.what == other.what:
        return True
    return (one.key, one.channel, one.number) == (other.key, other.channel, other.number)


# ---- sentences ------------------------------------------------------------------------------------------


def describe(stall: Stall, hosts: Sequence[str], now: float) -> str:
    """What is waited for, for whom and since when, in one line."""
    who = ", ".join(map(str, stall.waiters[:_NAMED])) + _more(len(stall.waiters))
    waits = f"rank {who} waits" if len(stall.waiters) == 1 else f"ranks {who} wait"
    if not stall.late:
        return (
            f"waiting since {clock(stall.since, now)} for the messages of {stall.waiting.what}: every rank has begun "
            f"it, so they are slow or lost between the ranks; {waits} in it"
        )
    has = "it has" if len(stall.late) == 1 else "they have"
    behind = f"{has} not begun {stall.waiting.what}, where {waits}"
    if any(late.where == "does not answer" and late.rank == _COORDINATOR for late in stall.late):
        behind = f"it would know who is late in {stall.waiting.what}, where {waits}"
    return f"waiting for {names(stall.late, hosts)} since {clock(stall.since, now)}: {behind}"


def names(late: Sequence[Late], hosts: Sequence[str]) -> str:
    """Ranks with their hosts, and what is known of them."""
    words = (f"rank {one.rank} on {hosts[one.rank]}" + (f" ({one.where})" if one.where else "") for one in late)
    return ", ".join(list(words)[:_NAMED]) + _more(len(late))


def _more(number: int) -> str:
    return f" and {number - _NAMED} more" if number > _NAMED else ""


def clock(since: float, now: float) -> str:
    """The time of day at which the monotonic clock was `since`, and how long ago that is."""
    return f"{time.strftime('%H:%M:%S', time.localtime(time.time() - (now - since)))} ({now - since:.1f} s)"


def position() -> str:
    """The line of the user's program at which the main thread of this process is; "" where there is none."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_code.co_filename.startswith((*_LIBRARIES, "<")):
        frame = frame.f_back
    if frame is None:
        return ""
    name = frame.f_code.co_name
    within = "" if name == "<module>" else f" in {name}"
    return f"at {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}{within}"
