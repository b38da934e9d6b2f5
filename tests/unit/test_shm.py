"""The shared-memory level: every operation, dtype and size, between threads and between processes."""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import resource
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from meeting import Meeting
from torch import Tensor

from hiercomm import reduction
from hiercomm.comm.base import LocalBuffer, Work, pieces
from hiercomm.comm.loopback import Loopback
from hiercomm.comm.shm import SharedMemory
from hiercomm.errors import CommError, CommTimeout
from hiercomm.exchange import cuts

WAIT_S = 20.0
CPU = torch.device("cpu")
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
DTYPES = (*FLOATS, torch.complex64, torch.uint8, torch.int64)
SIZES = (0, 1, 33, 70_001)


def left_behind(pids: Sequence[int]) -> list[str]:
    """Files of these processes that are still in /dev/shm."""
    return [name for name in os.listdir("/dev/shm") if name.startswith(tuple(f"hiercomm-{pid}-" for pid in pids))]


def values(rank: int, numel: int, dtype: torch.dtype, case: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * case + rank)
    return (torch.rand(numel, generator=generator, dtype=torch.float64) * 5 + 1).to(dtype)


def folded(ranks: int, numel: int, dtype: torch.dtype, case: int, op: str, divisor: int) -> Tensor:
    """The reduction in rank order, by the function that test_reduction.py tests."""
    out = torch.empty(numel, dtype=dtype)
    reduction.combine([values(q, numel, dtype, case) for q in range(ranks)], [out], op, divisor)
    return out


def check_one(level: SharedMemory, buffer: LocalBuffer, case: int, op: str, jitter: random.Random) -> None:
    """Every operation on one buffer, the results to the bit."""
    data, ranks = buffer.data, level.size
    numel, dtype = data.numel(), data.dtype
    divisor = ranks if op == reduction.AVERAGE else 1
    right = folded(ranks, numel, dtype, case, op, divisor)

    def end(work: Work) -> None:
        time.sleep(jitter.choice((0, 0, 0.001)))  # ranks are never in step
        work.wait(WAIT_S)

    data.copy_(values(level.rank, numel, dtype, case))
    (whole,) = level.reduce_scatter(buffer, op, divisor)
    end(whole)
    shard, right_shard = pieces(data, ranks)[level.rank], pieces(right, ranks)[level.rank]
    assert torch.equal(shard, right_shard)
    end(level.all_gather(buffer))
    assert torch.equal(data, right)

    data.copy_(values(level.rank, numel, dtype, case))
    parts = cuts(shard.numel(), -(-max(1, shard.numel()) // 3))
    works = level.reduce_scatter(buffer, op, divisor, parts)
    spread = jitter.sample(range(len(parts)), jitter.randint(0, len(parts)))  # some or all, as a hint
    for i in jitter.sample(range(len(parts)), len(parts)):
        end(works[i])
        assert torch.equal(shard[parts[i]], right_shard[parts[i]])
        if i in spread:
            level.spread(buffer, parts[i])
    end(level.all_gather(buffer))
    assert torch.equal(data, right)

    for again in range(2):  # a rank may begin the next one while others still read
        right = torch.cat([pieces(values(q, numel, dtype, case + again), ranks)[q] for q in range(ranks)])
        shard.copy_(pieces(right, ranks)[level.rank])
        end(level.all_gather(buffer))
        time.sleep(jitter.choice((0, 0, 0.001)))
        assert torch.equal(data, right), "an all-gather that stands alone"

    right = folded(ranks, numel, dtype, case, op, divisor)
    data.copy_(values(level.rank, numel, dtype, case))
    end(level.all_reduce(buffer, op, divisor))
    assert torch.equal(data, right)
    for root in range(ranks):
        data.copy_(values(level.rank, numel, dtype, case + root))
        end(level.broadcast(buffer, root))
        assert torch.equal(data, values(root, numel, dtype, case + root))


def check_all(rank: int, size: int, exchange: Callable[[Any], Sequence[Any]]) -> None:
    """One rank's part: buffers of all dtypes and sizes side by side."""
    level = SharedMemory(rank, size, exchange)
    specs = [(numel, dtype) for dtype in DTYPES for numel in SIZES]
    buffers = level.allocate(specs, CPU)
    jitter = random.Random(rank)
    for case, ((numel, dtype), buffer) in enumerate(zip(specs, buffers, strict=True)):
        assert (buffer.data.numel(), buffer.data.dtype) == (numel, dtype)
        assert not buffer.data.count_nonzero()
        ops = [reduction.SUM, reduction.AVERAGE if dtype in FLOATS else reduction.SUM]
        ops += [] if dtype.is_complex else [reduction.MIN, reduction.MAX]
        for op in [*ops, reduction.PRODUCT]:
            check_one(level, buffer, case, op, jitter)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_threads(ranks):
    meeting = Meeting(ranks)
    Loopback(ranks).run(lambda rank: check_all(rank, ranks, meeting.exchange(rank)))
    assert not left_behind([os.getpid()])


def test_several_buffers_in_flight():
    """Operations on different buffers are begun together and waited for in any order, for many rounds."""
    ranks, count = 3, 4
    meeting = Meeting(ranks)

    def body(rank: int) -> list[Tensor]:
        level = SharedMemory(rank, ranks, meeting.exchange(rank))
        buffers = level.allocate([(100 + i, torch.float32) for i in range(count)], CPU)
        order = random.Random(rank)
        for step in range(30):
            for i, buffer in enumerate(buffers):
                buffer.data.copy_(values(rank, 100 + i, torch.float32, step * count + i))
            for operation in (lambda b: level.reduce_scatter(b, reduction.SUM)[0], level.all_gather):
                works = [operation(buffer) for buffer in buffers]
                while works:
                    order.shuffle(works)
                    works = [work for work in works if not work.is_completed()]
                    time.sleep(0)
            for i, buffer in enumerate(buffers):
                right = folded(ranks, 100 + i, torch.float32, step * count + i, reduction.SUM, 1)
                assert torch.equal(buffer.data, right), f"step {step}, buffer {i}"
        return [buffer.data.clone() for buffer in buffers]

    Loopback(ranks).run(body)


def test_memory_is_unlinked_while_it_is_in_use_and_outlives_the_level():
    meeting = Meeting(2)

    def body(rank: int) -> LocalBuffer:
        level = SharedMemory(rank, 2, meeting.exchange(rank))
        (buffer,) = level.allocate([(10, torch.int64)], CPU)
        meeting.exchange(rank)(None)  # local rank 0, which unlinks, has come back as well
        assert not left_behind([os.getpid()])
        buffer.data.fill_(rank + 1)
        level.all_reduce(buffer, reduction.SUM).wait(WAIT_S)
        return buffer

    for buffer in Loopback(2).run(body):
        assert buffer.data.eq(3).all()
        buffer.data.fill_(7)


def test_a_late_rank_is_named():
    meeting = Meeting(3)

    def body(rank: int) -> None:
        level = SharedMemory(rank, 3, meeting.exchange(rank))
        (buffer,) = level.allocate([(10, torch.float32)], CPU)
        if rank == 0:
            work = level.all_reduce(buffer, reduction.SUM)
            with pytest.raises(CommTimeout, match=r"operation 1, waiting for local ranks \[1, 2\]"):
                work.wait(0.05)

    Loopback(3).run(body)


# ---- allocation that fails ----------------------------------------------------------------------------


def outcomes(size: int, body: Callable[[int], object]) -> list[BaseException | None]:
    """What each rank's body raised."""

    def caught(rank: int) -> BaseException | None:
        try:
            body(rank)
        except Exception as error:  # compared by the caller
            return error
        return None

    return Loopback(size).run(caught)


def test_no_space_is_an_error_on_every_rank():
    meeting = Meeting(3)
    specs = [(8, torch.float32), (1 << 50, torch.uint8)]
    errors = outcomes(3, lambda rank: SharedMemory(rank, 3, meeting.exchange(rank)).allocate(specs, CPU))
    assert [type(error) for error in errors] == [CommError] * 3
    assert all(f"bytes of shared memory in /dev/shm: {os.strerror(errno.ENOSPC)}" in str(error) for error in errors)
    assert not left_behind([os.getpid()])


def test_a_rank_that_cannot_open_the_memory_is_an_error_on_every_rank():
    meeting = Meeting(3)

    def body(rank: int) -> None:
        exchange = meeting.exchange(rank)

        def elsewhere(item: object) -> Sequence[Any]:
            """What local rank 2 would see in a container with a /dev/shm of its own."""
            return [(f"{i[0]}-elsewhere", i[1]) if isinstance(i, tuple) else i for i in exchange(item)]

        SharedMemory(rank, 3, elsewhere if rank == 2 else exchange).allocate([(8, torch.float32)], CPU)

    errors = outcomes(3, body)
    assert [type(error) for error in errors] == [CommError] * 3
    assert all("local rank 2 cannot open the shared memory of local rank 0" in str(error) for error in errors)
    assert not left_behind([os.getpid()])


def test_other_devices_and_other_levels_buffers_are_refused():
    level = SharedMemory(0, 1, lambda item: [item])
    with pytest.raises(CommError, match="meta"):
        level.allocate([(1, torch.float32)], torch.device("meta"))
    with pytest.raises(CommError, match="not allocated"):
        level.all_reduce(LocalBuffer(torch.zeros(1)), reduction.SUM)


# ---- processes ----------------------------------------------------------------------------------------

# Real processes, forked from one that has loaded torch: spawning four that load it takes 20 s on two cores.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["hiercomm.comm.shm"])


def check_in_process(rank: int, size: int, exchange: Callable[[Any], Sequence[Any]]) -> None:
    torch.set_num_threads(1)
    check_all(rank, size, exchange)


def allocate_where_memory_is_short(rank: int, size: int, exchange: Callable[[Any], Sequence[Any]]) -> None:
    """Local rank 1 may open the memory, but its address space has no room for it."""
    if rank == 1:
        with open("/proc/self/statm", encoding="ascii") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**22, used + 2**22))
    SharedMemory(rank, size, exchange).allocate([(2**24, torch.uint8)], CPU)


Body = Callable[[int, int, Callable[[Any], Sequence[Any]]], None]


def process_body(body: Body, rank: int, size: int, pipe: Connection) -> None:
    """One rank: exchanges go over the pipe, the outcome goes last."""

    def exchange(item: object) -> Any:
        pipe.send(("exchange", item))
        assert pipe.poll(WAIT_S)
        return pipe.recv()

    try:
        body(rank, size, exchange)
        pipe.send(("end", None))
    except BaseException as error:  # told to the parent, which compares
        pipe.send(("end", f"{type(error).__name__}: {error}"))


def run_processes(body: Body, size: int) -> list[str | None]:
    """`body` on `size` processes; what each raised. Nothing of theirs is left in /dev/shm."""
    pipes = [_context.Pipe() for _ in range(size)]
    processes = [
        _context.Process(target=process_body, args=(body, rank, size, pipe[1]), daemon=True)
        for rank, pipe in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    try:
        open_ = dict(enumerate(ours for ours, _ in pipes))
        ended: dict[int, str | None] = {}
        while open_:
            items = {}
            for rank, pipe in list(open_.items()):
                assert pipe.poll(WAIT_S * 2), f"rank {rank} says nothing"
                kind, item = pipe.recv()
                if kind == "end":
                    ended[rank] = item
                    del open_[rank]
                items[rank] = item
            for pipe in open_.values():
                pipe.send([items.get(rank) for rank in range(size)])
        return [ended[rank] for rank in range(size)]
    finally:
        for process in processes:
            process.join(WAIT_S)
            process.kill()
        assert not left_behind([process.pid or 0 for process in processes])


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_processes(ranks):
    assert run_processes(check_in_process, ranks) == [None] * ranks


def test_a_rank_that_cannot_map_the_memory_is_an_error_on_every_rank():
    errors = run_processes(allocate_where_memory_is_short, 2)
    assert all(error is not None and error.startswith("CommError: ") for error in errors), errors
