"""Shares of time: overlapping spans count once, whatever thread ends them; shares are of the wall time."""

from __future__ import annotations

import contextlib
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hiercomm import timing
from hiercomm.timing import PARTS, Timing


@pytest.fixture
def clock(monkeypatch):
    """A clock that is set by hand."""
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    return now


def test_overlapping_spans_of_a_part_count_once(clock):
    t = Timing()
    clock[0] = 100.0
    t.begin("wait")
    t.begin("cross")
    clock[0] = 102.0
    t.begin("cross")
    t.end("wait")
    clock[0] = 106.0
    t.end("cross")
    clock[0] = 108.0
    t.end("cross")
    t.begin("local")
    clock[0] = 110.0
    t.end("local")
    assert t.shares() == pytest.approx({"compute": 0.8, "wait": 0.2, "cross": 0.8, "local": 0.2})


def test_nothing_measured_is_all_compute():
    assert Timing().shares() == {"compute": 1.0, "local": 0.0, "cross": 0.0, "wait": 0.0}
    t = Timing()
    t.begin("wait")
    assert t.shares()["compute"] == 1.0  # nothing has ended


def test_a_span_ends_though_its_block_raises(clock):
    t = Timing()
    t.begin("local")
    with contextlib.suppress(ZeroDivisionError), t.span("wait"):
        clock[0] = 1.0
        raise ZeroDivisionError
    clock[0] = 4.0
    t.end("local")
    assert t.shares()["wait"] == 0.25


SPANS = st.lists(
    st.tuples(st.sampled_from(PARTS), st.integers(0, 20), st.integers(0, 20)).map(lambda s: (s[0], *sorted(s[1:]))),
    min_size=1,
    max_size=12,
)


@given(SPANS)
def test_shares_are_the_measure_of_the_union(spans):
    events = sorted(
        [(begin, 0, part) for part, begin, _ in spans] + [(end, 1, part) for part, _, end in spans],
        key=lambda event: event[:2],
    )
    t = Timing()
    with pytest.MonkeyPatch.context() as patch:
        now = [0]
        patch.setattr(timing.time, "perf_counter", lambda: now[0])
        for at, is_end, part in events:
            now[0] = at
            (t.end if is_end else t.begin)(part)
    first, last = events[0][0], events[-1][0]
    shares = t.shares()
    for part in PARTS:
        covered = {unit for p, begin, end in spans if p == part for unit in range(begin, end)}
        assert shares[part] == pytest.approx(len(covered) / (last - first) if last > first else 0.0)
    assert shares["compute"] == pytest.approx(1 - shares["wait"])


def test_threads_may_begin_and_end_at_once():
    t = Timing()

    def body() -> None:
        for _ in range(300):
            with t.span("cross"):
                t.begin("wait")
            t.end("wait")

    threads = [threading.Thread(target=body) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    shares = t.shares()
    assert all(0 < shares[part] <= 1 for part in ("cross", "wait"))
    assert shares["local"] == 0
    # All spans are closed: a new one begins at its own begin.
    with t.span("local"):
        pass
    assert t.shares()["local"] < 0.5
