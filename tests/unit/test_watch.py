"""Stalls: who is blamed, when a line is due, that quiet ranks send nothing; clocks are injected."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hiercomm.comm.base import Mailbox
from hiercomm.comm.loopback import Loopback
from hiercomm.control import Control
from hiercomm.errors import CommTimeout
from hiercomm.negotiate import Key, Waiting
from hiercomm.progress import Pending, Progress
from hiercomm.stalls import Ask, Late, Limits, Message, Overdue, Place, Stall, StallFinder, describe, position
from hiercomm.watch import Watch

HOSTS = ("ant", "bee", "cow", "dog")


def exchange(number: int, channel: int = 0) -> Waiting:
    return Waiting(f"exchange {number} of channel {channel}", channel=channel, number=number)


def operation(name: str) -> Waiting:
    return Waiting(f"allreduce {name!r}", key=("allreduce", name))


@final
class Rank:
    """What one rank does, and its StallFinder."""

    def __init__(self, world: World, number: int, limits: Limits) -> None:
        self.stalls = StallFinder(number, HOSTS[: world.size], limits)
        self.waiting: list[tuple[float, Waiting]] = []
        self.begun: dict[int, int] = {}
        self.is_silent = False
        self._world = world

    def waits(self) -> Sequence[tuple[float, Waiting]]:
        return self.waiting

    def started(self) -> Mapping[int, int]:
        return dict(self.begun)

    def missing(self, key: Key) -> Collection[int]:
        return self._world.unsubmitted.get(key, ())


@final
class World:
    """Ranks on one clock, whose messages arrive at once; `sent` keeps those between ranks."""

    def __init__(self, size: int, warn_s: float = 10.0, abort_s: float = 0.0) -> None:
        self.size = size
        self.now = 1000.0
        self.unsubmitted: dict[Key, Collection[int]] = {}
        self.sent: list[tuple[int, int, Message]] = []
        self.ranks = [Rank(self, number, Limits(warn_s, abort_s)) for number in range(size)]

    def wait(self, rank: int, waiting: Waiting) -> None:
        self.ranks[rank].waiting.append((self.now, waiting))
        if waiting.key is None:
            self.ranks[rank].begun[waiting.channel] = waiting.number

    def go_on(self, rank: int) -> None:
        self.ranks[rank].waiting.clear()

    def run(self, seconds: float, each: Callable[[float], None] = lambda now: None) -> None:
        for _ in range(round(seconds / 0.25)):
            self.now += 0.25
            for number, rank in enumerate(self.ranks):
                if not rank.is_silent:
                    self._deliver(number, rank.stalls.turn(rank, self.now))
            each(self.now)

    def _deliver(self, source: int, messages: list[tuple[int, Message]]) -> None:
        for dest, message in messages:
            self.sent.append((source, dest, message))
            rank = self.ranks[dest]
            if not rank.is_silent:
                self._deliver(dest, rank.stalls.receive(source, message, rank, self.now))

    @property
    def stall(self) -> Stall | None:
        return self.ranks[0].stalls.stall

    def late(self) -> list[int]:
        assert self.stall is not None
        return [one.rank for one in self.stall.late]


# ---- who is late ----------------------------------------------------------------------------------------


def test_the_rank_that_has_not_begun_is_late():
    world = World(3)
    world.wait(0, exchange(2))
    world.wait(1, exchange(2))
    world.ranks[2].begun[0] = 1
    world.run(9.5)
    assert world.stall is None
    assert not world.sent
    world.run(3.5)
    assert world.stall is not None
    assert world.late() == [2]
    assert world.stall.waiters == (0, 1)
    assert world.stall.waiting.what == "exchange 2 of channel 0"
    assert world.stall.since == pytest.approx(1000.0, abs=0.01)
    world.go_on(0)
    world.go_on(1)
    world.run(2.0)
    assert world.stall is None


def test_rank_0_is_late_like_any_other():
    world = World(2)
    world.wait(1, exchange(1))
    world.run(13.0)
    assert world.late() == [0]


def test_the_one_that_holds_up_the_late_ones_is_named():
    """0 waits for 1, which waits for 2 in something else, which computes."""
    world = World(3)
    world.unsubmitted = {("allreduce", "a"): {1, 2}, ("allreduce", "b"): {0, 2}}
    world.wait(0, operation("a"))
    world.wait(1, operation("b"))
    world.run(13.0)
    assert world.late() == [2]


def test_a_rank_that_arrives_meanwhile_is_not_named():
    world = World(4)
    for rank in (0, 3):
        world.wait(rank, exchange(1))
    world.run(13.0)
    assert world.late() == [1, 2]
    world.wait(1, exchange(1))
    world.run(6.0)  # before it has waited too long itself
    assert world.late() == [2]


def test_where_every_rank_has_begun_nobody_is_late():
    world = World(2)
    for rank in (0, 1):
        world.wait(rank, exchange(1))
    world.run(13.0)
    assert world.late() == []
    assert world.stall is not None
    assert "every rank has begun it" in describe(world.stall, HOSTS, world.now)


def test_a_silent_rank_is_named_as_such():
    world = World(3)
    world.ranks[2].is_silent = True
    world.wait(0, exchange(1))
    world.run(12.0)
    assert world.stall is None  # it may yet answer
    world.run(2.0)
    assert world.stall is not None
    assert world.stall.late == (Late(1, world.stall.late[0].where), Late(2, "does not answer"))
    assert world.stall.late[0].where != "does not answer"


def test_a_silent_rank_is_suspected_where_all_have_begun():
    world = World(3)
    for rank in range(3):
        world.wait(rank, exchange(1))
    world.run(11.5)
    world.ranks[1].is_silent = True
    world.run(10.0)
    assert world.late() == [1]


def test_the_others_say_that_rank_0_does_not_answer():
    world = World(3)
    world.ranks[0].is_silent = True
    world.wait(1, exchange(1))
    world.run(30.0)
    stall = world.ranks[1].stalls.stall
    assert stall is not None
    assert stall.late == (Late(0, "does not answer"),)
    assert "rank 0 on ant (does not answer)" in describe(stall, HOSTS, world.now)
    assert world.ranks[2].stalls.stall is None  # it does not wait
    world.ranks[0].is_silent = False
    world.go_on(1)
    world.run(2.0)
    assert world.ranks[1].stalls.stall is None


EVENTS = st.lists(
    st.tuples(st.integers(0, 2), st.floats(0.0, 30.0), st.floats(0.5, 40.0)), max_size=6
)  # who, when it begins, how long it lasts


@given(EVENTS)
def test_nothing_is_sent_unless_a_wait_takes_too_long(waits):
    """Nor is anybody blamed; and whoever is blamed has not begun what is waited for."""
    world = World(3)
    begin = world.now
    numbers = [0, 0, 0]
    longest = 0.0
    history: list[tuple[int, ...]] = []

    def each(now: float) -> None:
        nonlocal longest
        for rank in range(3):
            mine = [w for w in waits if w[0] == rank and w[1] <= now - begin < w[1] + w[2]]
            if mine and not world.ranks[rank].waiting:
                numbers[rank] += 1
                world.wait(rank, exchange(numbers[rank]))
            elif not mine:
                world.go_on(rank)
        history.append(tuple(numbers))
        for rank in range(3):
            longest = max([longest, *(now - since for since, _ in world.ranks[rank].waiting)])
        if world.stall is not None:
            needed = world.stall.waiting.number
            # Since it was last asked, which is not long ago, it may have gone on.
            assert all(history[-28][late] < needed for late in world.late())

    world.run(75.0, each)
    if longest < 9.5:
        assert not world.sent
        assert world.stall is None
    if longest > 13.0:
        assert world.sent


def test_messages_while_a_wait_lasts_are_few():
    world = World(4, warn_s=60.0)
    world.wait(0, exchange(1))
    world.run(120.0)
    assert len(world.sent) <= 2 * 3 * (60 / 5 + 2)  # a question and an answer every five seconds
    assert {type(message) for _, _, message in world.sent} == {Ask, Place}
    sent = len(world.sent)
    world.go_on(0)
    world.run(100.0)
    assert len(world.sent) <= sent + 6


def test_a_wait_that_ended_is_taken_back():
    world = World(2)
    world.wait(1, exchange(1))
    world.run(12.0)
    world.go_on(1)
    world.run(1.5)
    reports = [message for source, _, message in world.sent if source == 1 and isinstance(message, Overdue)]
    assert [len(report.waits) for report in reports] == [1, 0]


def test_no_limits_no_watch():
    world = World(2, warn_s=0.0)
    world.wait(0, exchange(1))
    world.run(1e3)
    assert not world.sent
    assert world.stall is None


# ---- giving up ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("warn_s", [0.0, 10.0, 60.0])
def test_the_verdict_comes_once_and_not_before_its_time(warn_s):
    world = World(2, warn_s, abort_s=30.0)
    world.wait(0, exchange(1))
    verdicts: list[tuple[float, str]] = []

    def each(now: float) -> None:
        verdict = world.ranks[0].stalls.verdict(now)
        if verdict is not None:
            verdicts.append((now - 1000.0, verdict))

    world.run(60.0, each)
    ((age, sentence),) = verdicts
    assert 30.0 <= age <= 34.0
    assert re.search(r"gave up waiting for rank 1 on bee .*exchange 1 of channel 0.*HIERCOMM_STALL_ABORT=30", sentence)
    assert world.ranks[1].stalls.verdict(world.now) is None


def test_no_verdict_unless_asked_for():
    world = World(2)
    world.wait(0, exchange(1))
    world.run(1000.0)
    assert world.stall is not None
    assert world.ranks[0].stalls.verdict(world.now) is None


# ---- what is printed ------------------------------------------------------------------------------------


@final
class Lines:
    """A Watch on a clock of its own, and what it has said, with the time."""

    def __init__(self, warn_s: float = 1.0, abort_s: float = 0.0) -> None:
        self.said: list[tuple[float, str]] = []
        self.now = 50.0
        self.turns: int | None = None  # None: the thread goes on
        self.has_ended = False
        self.given_up: list[float] = []
        self.stalls = StallFinder(0, HOSTS, Limits(warn_s, abort_s))
        self.watch = Watch(self.stalls, self._count, "rank 0 on ant", lambda: self.given_up.append(self.now), self._say)

    def _count(self) -> int | None:
        if self.has_ended:
            return None
        return round(self.now * 1000) if self.turns is None else self.turns

    def _say(self, text: str) -> None:
        assert text.endswith("\n")
        self.said.append((self.now, text))

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.125)):
            self.now += 0.125
            self.watch.look(self.now)


def test_a_line_at_each_doubling_and_one_at_the_end():
    lines = Lines()
    lines.stalls.stall = Stall(exchange(3), lines.now, (0, 1), (Late(2, "at train.py:7 in evaluate"), Late(3)))
    lines.run(9.0)
    assert [round(now - 50.0) for now, _ in lines.said] == [1, 2, 4, 8]
    for _, text in lines.said:
        assert text.count("\n") == 1
        assert "waiting for rank 2 on cow (at train.py:7 in evaluate), rank 3 on dog since " in text
        assert "they have not begun exchange 3 of channel 0, where ranks 0, 1 wait" in text
    lines.stalls.stall = None
    lines.run(5.0)
    assert len(lines.said) == 5
    assert "the wait for rank 2 on cow, rank 3 on dog in exchange 3 of channel 0 ended after 9." in lines.said[-1][1]


def test_a_wait_that_ends_in_time_is_not_spoken_of():
    lines = Lines()
    lines.stalls.stall = Stall(exchange(3), lines.now, (0,), (Late(2),))
    lines.run(0.75)
    lines.stalls.stall = None
    lines.run(5.0)
    assert lines.said == []


def test_the_next_stall_begins_anew():
    lines = Lines()
    lines.stalls.stall = Stall(exchange(3), lines.now, (0,), (Late(2),))
    lines.run(5.0)
    lines.stalls.stall = Stall(exchange(4), lines.now, (0,), (Late(1),))
    lines.run(2.5)
    heads = [(round(now - 50.0), text.partition(" since")[0].partition(" ended")[0]) for now, text in lines.said]
    three = "hiercomm: waiting for rank 2 on cow"
    four = "hiercomm: waiting for rank 1 on bee"
    end = "hiercomm: the wait for rank 2 on cow in exchange 3 of channel 0"
    assert heads == [(1, three), (2, three), (4, three), (5, end), (6, four), (7, four)]


def test_many_late_ranks_fit_into_one_line():
    late = tuple(Late(rank) for rank in range(1000))
    text = describe(Stall(exchange(1), 0.0, tuple(range(1000)), late), ["host"] * 1000, 70.0)
    assert "rank 7 on host and 992 more" in text
    assert "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 992 more wait" in text
    assert len(text) < 400


def test_a_thread_that_stands_still_is_reported_with_stacks_within_twice_the_limit():
    lines = Lines()
    lines.run(20.0)
    assert lines.said == []
    lines.turns = 7
    lines.run(9.0)
    assert [round(now - 70.0) for now, _ in lines.said] == [1, 2, 4, 8]
    assert lines.said[0][0] - 70.0 <= 2.0
    for _, text in lines.said:
        assert text.startswith("hiercomm: rank 0 on ant cannot send or receive since ")
    lines.turns = None
    lines.run(3.0)
    assert len(lines.said) == 5
    assert "moves messages again" in lines.said[-1][1]
    assert not lines.given_up


def test_a_thread_that_has_ended_is_not_stuck():
    """Its error was raised to all who wait; the program may go on alone."""
    lines = Lines(abort_s=5.0)
    lines.run(1.0)
    lines.has_ended = True
    lines.run(20.0)
    assert lines.said == []
    assert not lines.given_up


def test_a_process_that_was_stopped_blames_no_thread():
    lines = Lines()
    lines.turns = 7
    lines.run(0.5)
    lines.now += 3600.0
    lines.watch.look(lines.now)
    lines.turns = 8
    lines.run(0.5)
    assert lines.said == []


def test_a_thread_that_stands_still_ends_the_job_where_that_is_asked_for():
    lines = Lines(warn_s=0.0, abort_s=3.0)
    lines.turns = 7
    lines.run(2.5)
    assert not lines.given_up
    lines.run(1.5)
    assert lines.given_up
    assert "rank 0 on ant cannot send or receive" in lines.said[0][1]
    assert "HIERCOMM_STALL_ABORT=3" in lines.said[0][1]


def test_position_names_the_users_line():
    here = sys._getframe()
    first = here.f_lineno
    found = re.fullmatch(r"at test_watch\.py:(\d+) in test_position_names_the_users_line", position())
    assert found is not None
    assert int(found[1]) == first + 1


# ---- with threads ---------------------------------------------------------------------------------------


@final
class Blocking(Mailbox):
    """A mailbox whose next poll blocks for a while, once told."""

    def __init__(self, inner: Mailbox) -> None:
        self._inner = inner
        self.block_s = 0.0

    def post(self, dest: int, message: bytes) -> None:
        self._inner.post(dest, message)

    def poll(self) -> list[tuple[int, bytes]]:
        block_s, self.block_s = self.block_s, 0.0
        time.sleep(block_s)
        return self._inner.poll()

    def close(self) -> None:
        self._inner.close()


@final
class Node:
    """One rank with its threads."""

    def __init__(self, mailbox: Mailbox, rank: int, size: int, limits: Limits) -> None:
        self.said: list[tuple[float, str]] = []
        stalls = StallFinder(rank, HOSTS[:size], limits)
        self.control = Control(mailbox, rank, size, lambda: self.progress.wake(), set, stalls)
        self.progress = Progress(self.control.poll, self.control.is_busy)
        self.given_up = threading.Event()
        self.watch = Watch(
            stalls, lambda: self.progress.turns, f"rank {rank} on {HOSTS[rank]}", self.given_up.set,
            lambda text: self.said.append((time.monotonic(), text)),
        )  # fmt: skip
        self.watch.start()

    def close(self) -> None:
        self.watch.close()
        self.progress.close()


def test_a_transport_that_blocks_is_reported_by_the_other_thread():
    mailbox = Blocking(Loopback(1).mailbox(0))
    node = Node(mailbox, 0, 1, Limits(1.0, 0.0))
    begin = time.monotonic()
    mailbox.block_s = 5.0
    while not node.said and time.monotonic() < begin + 60.0:
        time.sleep(0.02)
    when, text = node.said[0]
    assert when - begin < 4.5  # while it is blocked; 2 s where the machine has time
    assert "rank 0 on ant cannot send or receive" in text
    assert "thread hiercomm-progress:" in text
    assert "time.sleep(block_s)" in text
    node.close()
    assert not node.given_up.is_set()


def test_all_ranks_give_up_with_one_sentence():
    """Those that wait, at once; the late one as soon as it asks for anything."""
    world = Loopback(3)
    given_up = threading.Event()

    def body(number: int) -> str:
        node = Node(world.mailbox(number), number, 3, Limits(0.2, 1.0))
        try:
            if number == 2:
                assert given_up.wait(60.0)
            waiting = exchange(node.control.count(0))
            with pytest.raises(CommTimeout) as caught:
                node.control.wait(Pending("never"), waiting)
            given_up.set()
            node.control.leave()  # ends: nobody is waited for any more
            if number == 0:
                assert any("waiting for rank 2 on cow" in text for _, text in node.said)
                assert not any("ended" in text for _, text in node.said)
            return str(caught.value)
        finally:
            node.close()

    sentences = world.run(body)
    assert len(set(sentences)) == 1
    assert "gave up waiting for rank 2 on cow" in sentences[0]
