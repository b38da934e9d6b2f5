"""The contract of a Communicator, over every one that needs no processes: all sizes, dtypes and ranks."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hiercomm.comm.base import AllOf, Communicator, Done, wait_until
from hiercomm.comm.loopback import Loopback
from hiercomm.comm.throttle import Throttled
from hiercomm.errors import CommError, CommTimeout, PeerLost

SIZES = (0, 1, 7, 100_000)
DTYPES = (torch.float32, torch.bfloat16, torch.bool, torch.int8, torch.int64, torch.complex128, torch.float8_e4m3fn)
CASES = [(7, dtype) for dtype in DTYPES] + [(numel, torch.bfloat16) for numel in SIZES]
WAIT_S = 20.0

KINDS: dict[str, Callable[[Loopback, int], Communicator]] = {
    "loopback": lambda world, rank: world.communicator(rank),
    "throttled": lambda world, rank: Throttled(world.communicator(rank), 50e9, 0.001),
    "delayed only": lambda world, rank: Throttled(world.communicator(rank), None, 0.002),
}


def filled(numel: int, dtype: torch.dtype, value: int) -> Tensor:
    """Bytes that depend on `value` and position, as a tensor of any dtype."""
    count = numel * dtype.itemsize
    return ((torch.arange(count) * 7 + value * 13) % (2 if dtype == torch.bool else 251)).to(torch.uint8).view(dtype)


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_all_to_all(kind, ranks):
    world = Loopback(ranks, max_delay_s=0.003, seed=ranks)

    def body(rank: int) -> None:
        comm = KINDS[kind](world, rank)
        assert (comm.rank, comm.size) == (rank, ranks)
        for tag, (numel, dtype) in enumerate(CASES):
            # Every pair has a size of its own.
            sizes = [[numel + (p + q if numel else 0) for q in range(ranks)] for p in range(ranks)]
            buf = [filled(sizes[rank][q], dtype, rank * ranks + q) for q in range(ranks)]
            out = [filled(sizes[q][rank], dtype, 99) for q in range(ranks)]
            comm.all_to_all(out, buf, tag=tag).wait(WAIT_S)
            for q in range(ranks):
                assert same(out[q], filled(sizes[q][rank], dtype, 99 if q == rank else q * ranks + rank))

    world.run(body)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_all_gather(kind, ranks):
    world = Loopback(ranks, max_delay_s=0.003, seed=ranks)

    def body(rank: int) -> None:
        comm = KINDS[kind](world, rank)
        works = []
        for tag, numel in enumerate(SIZES):  # all under way at once, on tags of their own
            out = [filled(numel + q, torch.float32, q if q == rank else 99) for q in range(ranks)]
            works.append((numel, out, comm.all_gather(out, out[rank], tag=tag)))
        for numel, out, work in reversed(works):
            work.wait(WAIT_S)
            assert all(same(out[q], filled(numel + q, torch.float32, q)) for q in range(ranks))

    world.run(body)


@pytest.mark.parametrize("kind", KINDS)
def test_messages_of_one_tag_arrive_in_order(kind):
    world = Loopback(2, max_delay_s=0.01, seed=3)
    tags = [1, 2, 7] * 10
    random.Random(5).shuffle(tags)

    def body(rank: int) -> None:
        comm = KINDS[kind](world, rank)
        if rank == 0:
            works = [comm.send(torch.tensor([i]), 1, tag=tag) for i, tag in enumerate(tags)]
            AllOf(works).wait(WAIT_S)
            return
        for tag in (7, 1, 2):  # not in the order in which they were sent
            for number in (i for i, t in enumerate(tags) if t == tag):
                got = torch.tensor([-1])
                comm.recv(got, 0, tag=tag).wait(WAIT_S)
                assert got.item() == number

    world.run(body)


@pytest.mark.parametrize("kind", KINDS)
def test_receives_of_one_tag_are_served_in_the_order_of_their_posting(kind):
    """As in MPI, whichever of them is asked first."""
    world = Loopback(2)
    sender, receiver = KINDS[kind](world, 0), KINDS[kind](world, 1)
    first, second = torch.tensor([-1]), torch.tensor([-1])
    works = [receiver.recv(first, 0, tag=0), receiver.recv(second, 0, tag=0)]
    for number in (1, 2):
        sender.send(torch.tensor([number]), 1, tag=0)
    wait_until(lambda: sum(work.is_completed() for work in reversed(works)) == 2, WAIT_S, "both")
    assert (first.item(), second.item()) == (1, 2)


def test_groups_have_ranks_of_their_own():
    world = Loopback(5, max_delay_s=0.002)

    def body(rank: int) -> None:
        group = (3, 1) if rank in (1, 3) else (0, 2, 4)
        comm = world.communicator(rank, group)
        assert comm.rank == group.index(rank)
        out = [torch.tensor([rank if q == comm.rank else -1]) for q in range(comm.size)]
        comm.all_gather(out, out[comm.rank], tag=0).wait(WAIT_S)
        assert [int(t) for t in out] == list(group)

    world.run(body)


def test_the_buffer_is_free_once_the_send_is_completed():
    world = Loopback(2)
    buf = torch.ones(100)
    world.communicator(0).send(buf, 1, tag=0).wait(WAIT_S)
    buf.zero_()
    got = torch.zeros(100)
    world.communicator(1).recv(got, 0, tag=0).wait(WAIT_S)
    assert got.eq(1).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_of_another_size_is_an_error(kind):
    world = Loopback(2)
    KINDS[kind](world, 0).send(torch.zeros(3), 1, tag=0)
    work = KINDS[kind](world, 1).recv(torch.zeros(4), 0, tag=0)
    with pytest.raises(CommError, match="12 bytes came from rank 0 for a buffer of 16"):
        work.wait(WAIT_S)


@pytest.mark.parametrize("buf", [torch.zeros(4, 4).t(), torch.zeros(3, device="meta")], ids=["strided", "elsewhere"])
def test_buffers_that_are_no_flat_memory_are_refused(buf):
    with pytest.raises(ValueError, match="contiguous CPU tensor"):
        Loopback(2).communicator(0).send(buf, 1, tag=0)


# ---- failures -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_rank_is_lost_to_all_others(kind):
    world = Loopback(3)

    def body(rank: int) -> None:
        comm = KINDS[kind](world, rank)
        if rank == 1:
            comm.send(torch.ones(1), 0, tag=5).wait(WAIT_S)
            world.kill(1)
            return
        with pytest.raises(PeerLost, match="rank 1"):  # under way or not yet begun, as it happens
            comm.recv(torch.zeros(1), 1, tag=0).wait(WAIT_S)
        with pytest.raises(PeerLost, match="rank 1"):
            comm.send(torch.zeros(1), 1, tag=0)
        if rank == 0:  # what it had sent before is there
            got = torch.zeros(1)
            comm.recv(got, 1, tag=5).wait(WAIT_S)
            assert got.item() == 1

    world.run(body)


def test_nothing_comes():
    work = Loopback(2).communicator(0).recv(torch.zeros(1), 1, tag=9)
    assert not work.is_completed()
    with pytest.raises(CommTimeout, match=r"rank 1, tag 9 did not complete within 0\.02 s"):
        work.wait(0.02)


def test_run_raises_the_cause_and_not_what_followed():
    world = Loopback(3)

    def body(rank: int) -> None:
        if rank == 2:
            raise ZeroDivisionError
        world.communicator(rank).recv(torch.zeros(1), 2, tag=0).wait(WAIT_S)

    with pytest.raises(ZeroDivisionError):
        world.run(body)


def test_run_ends_where_a_rank_does_not():
    never = threading.Event()
    with pytest.raises(CommError, match="rank 1 still runs"):
        Loopback(2).run(lambda rank: rank == 0 or never.wait(), timeout_s=0.05)
    never.set()


# ---- the slow link ------------------------------------------------------------------------------------


def test_rate_bounds_what_passes_in_a_time():
    """80 KB at 8 Mbit/s take 80 ms, however many messages and tags they are."""
    world = Loopback(2)

    def body(rank: int) -> float:
        comm = Throttled(world.communicator(rank), 8e6)
        begin = time.monotonic()
        if rank == 0:
            AllOf([comm.send(torch.zeros(5000), 1, tag=tag) for tag in range(4)]).wait(WAIT_S)
        else:
            AllOf([comm.recv(torch.zeros(5000), 0, tag=tag) for tag in range(4)]).wait(WAIT_S)
        return time.monotonic() - begin

    assert min(world.run(body)) >= 0.08


def test_delay_is_added_to_every_message():
    world = Loopback(2)
    sender, receiver = (Throttled(world.communicator(rank), None, 0.05) for rank in range(2))
    for _ in range(2):
        begin = time.monotonic()
        assert sender.send(torch.zeros(10), 1, tag=0).is_completed()  # a delay does not hold up the sender
        receiver.recv(torch.zeros(10), 0, tag=0).wait(WAIT_S)
        assert time.monotonic() - begin >= 0.05


def test_the_clock_of_a_message_starts_when_it_was_sent():
    """A sender that is late does not find that its message has passed already."""
    world = Loopback(2)
    sender, receiver = (Throttled(world.communicator(rank), 8e6) for rank in range(2))
    work = receiver.recv(torch.zeros(10_000), 0, tag=0)
    with pytest.raises(CommTimeout):
        work.wait(0.06)
    begin = time.monotonic()
    sender.send(torch.zeros(10_000), 1, tag=0)
    work.wait(WAIT_S)
    assert time.monotonic() - begin >= 0.04


@pytest.mark.parametrize(("rate_bps", "delay_s"), [(0.0, 0.0), (-1.0, 0.0), (None, -0.1)])
def test_impossible_links_are_refused(rate_bps, delay_s):
    with pytest.raises(ValueError, match="rate_bps"):
        Throttled(Loopback(1).communicator(0), rate_bps, delay_s)


# ---- mailboxes, Work ----------------------------------------------------------------------------------


def test_mail_of_any_length_arrives_in_order_with_its_sender():
    world = Loopback(3, max_delay_s=0.003)
    letters = [bytes([i]) * length for i, length in enumerate((0, 1, 1000, 10**6))]

    def body(rank: int) -> None:
        mailbox = world.mailbox(rank)
        for letter in letters:
            for dest in range(3):
                mailbox.post(dest, bytes([rank]) + letter)
        got: list[tuple[int, bytes]] = []
        wait_until(lambda: bool(got.extend(mailbox.poll())) or len(got) == 12, WAIT_S, "mail")
        for source in range(3):
            assert [m for s, m in got if s == source] == [bytes([source]) + letter for letter in letters]

    world.run(body)


def test_all_of():
    assert AllOf([]).is_completed()
    assert AllOf([Done(), Done()]).is_completed()
    world = Loopback(2)
    buf = torch.zeros(1)
    work = AllOf([Done(), world.communicator(0).recv(buf, 1, tag=3), Done()])
    assert not work.is_completed()
    assert str(work) == "1 operations, first receive from rank 1, tag 3"
    world.communicator(1).send(torch.ones(1), 0, tag=3)
    work.wait(WAIT_S)
    assert buf.item() == 1
