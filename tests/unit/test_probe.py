"""The size of pieces: from the rate of the link, the same on every rank."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from meeting import Meeting

from hiercomm.allreduce import PIECE_BYTES
from hiercomm.comm.loopback import Loopback
from hiercomm.comm.throttle import Throttled
from hiercomm.probe import measure, piece_bytes
from hiercomm.progress import drive


@given(st.floats(1, 1e12))
def test_pieces_are_some_milliseconds_of_the_link(rate):
    found = piece_bytes(rate)
    assert found in PIECE_BYTES
    if found > PIECE_BYTES[0]:
        assert found / rate <= 2.5e-3
    if found < PIECE_BYTES[-1]:
        assert PIECE_BYTES[PIECE_BYTES.index(found) + 1] / rate > 2.5e-3


def test_no_message_ends_just_behind_64_kb():
    """What the kernel sends at a time: a small rest of it is held back, and the link stands still."""
    for size in PIECE_BYTES:
        assert size < 60 << 10 or 8 << 10 < size % (64 << 10) < 56 << 10


@pytest.mark.parametrize("mbit", [1, 100])
def test_slow_links_get_the_smallest_pieces_soon_and_every_rank_the_same(mbit):
    """One rank of three does not cross; another's link is slow."""
    world, meeting = Loopback(2), Meeting(3)

    def body(rank: int) -> int:
        exchange = meeting.exchange(rank)
        cross = None
        if rank < 2:
            cross = world.communicator(rank)
            cross = Throttled(cross, rate_bps=mbit * 1e6) if rank == 1 else cross
        return measure(cross, 0, lambda task: drive(task), lambda seconds: max(exchange(seconds)))

    begin = time.monotonic()
    assert Loopback(3).run(body) == [PIECE_BYTES[0]] * 3
    assert time.monotonic() - begin < 30
