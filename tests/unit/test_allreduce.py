"""All-reduce between ranks as threads: the values of one process, the same bits on every rank."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from meeting import Meeting
from torch import Tensor

import hiercomm.exchange
from hiercomm.allreduce import LANES, PIECE_BYTES, HierarchicalAllReduce, reduce_scatter, tree_broadcast, two_phase
from hiercomm.coded import CompressorCoding
from hiercomm.comm.base import pieces
from hiercomm.comm.loopback import Loopback
from hiercomm.comm.shm import SharedMemory
from hiercomm.compress import ErrorFeedback, Int8, TopK
from hiercomm.eager import Communicators, EagerOperation
from hiercomm.errors import PeerLost
from hiercomm.negotiate import Request
from hiercomm.progress import Progress, drive
from hiercomm.reduction import AVERAGE, MAX, MIN, PRODUCT, SUM
from hiercomm.timing import Timing
from hiercomm.topology import discover

WAIT_S = 20.0
NODES = ("aabb", "aaab", "aaaa", "abcd", "aaabb", "abab", "abaab", "a")
FLOATS = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
EXACT = (torch.uint8, torch.int8, torch.int32, torch.int64)
CASES = [
    *itertools.product((SUM, AVERAGE, MIN, MAX, PRODUCT), FLOATS),
    *itertools.product((SUM, MIN, MAX, PRODUCT), EXACT),
    *((op, torch.bool) for op in (MIN, MAX, PRODUCT)),
    *((op, torch.complex64) for op in (SUM, AVERAGE, PRODUCT)),
]


def values(rank: int, numel: int, dtype: torch.dtype, case: int) -> Tensor:
    """Between 0.5 and 1.5, or small integers: no cancellation, no overflow."""
    generator = torch.Generator().manual_seed(1000 * case + rank)
    uniform = torch.rand(numel, generator=generator, dtype=torch.float64)
    if dtype.is_floating_point or dtype.is_complex:
        return (uniform + 0.5).to(dtype)
    return (uniform * (2 if dtype == torch.bool else 3)).to(dtype)


def in_one_process(tensors: Sequence[Tensor], op: str) -> Tensor:
    """The reduction in double precision, or exactly."""
    dtype = tensors[0].dtype
    wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
    stacked = torch.stack([t.to(wide) for t in tensors])
    if op in (SUM, AVERAGE):
        total = stacked.sum(0)
        return total / len(tensors) if op == AVERAGE else total
    if op == PRODUCT:
        return stacked.prod(0)
    return stacked.amin(0) if op == MIN else stacked.amax(0)


def assert_right(results: Sequence[Tensor], right: Tensor) -> None:
    dtype = results[0].dtype
    for result in results:
        assert torch.equal(result, results[0]), "replicas differ"
    if dtype.is_floating_point or dtype.is_complex:
        tolerance = FLOATS.get(dtype, 1e-6)
        torch.testing.assert_close(results[0].to(right.dtype), right, rtol=tolerance, atol=0)
    else:
        assert torch.equal(results[0].to(torch.int64), right)


def by_case(results: Sequence[Sequence[Tensor]]) -> list[tuple[Tensor, ...]]:
    """What each rank has for each case, as what each case has on each rank."""
    return list(zip(*results, strict=True))


# ---- the flat algorithms ------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_two_phase(ranks):
    world = Loopback(ranks, max_delay_s=0.001, seed=ranks)
    cases = [(op, dtype, numel) for op, dtype in CASES for numel in (0, 1, 33, 1001)]

    def body(rank: int) -> list[Tensor]:
        comm, found = world.communicator(rank), []
        for case, (op, dtype, numel) in enumerate(cases):
            flat = values(rank, numel, dtype, case)
            drive(two_phase(comm, flat, op, ranks if op == AVERAGE else 1, tag=LANES * case))
            found.append(flat)
        return found

    for case, ((op, dtype, numel), results) in enumerate(zip(cases, by_case(world.run(body)), strict=True)):
        assert_right(results, in_one_process([values(r, numel, dtype, case) for r in range(ranks)], op))


@pytest.fixture
def _small_rounds(monkeypatch):
    """Rounds at sizes that tests can afford."""
    monkeypatch.setattr(hiercomm.exchange, "_ROUNDS_BYTES", 128)


@pytest.mark.usefixtures("_small_rounds")
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_two_phase_in_many_chunks(ranks):
    """Every number of chunks around the number of lanes, odd remainders, the same bits as in one chunk."""
    world = Loopback(ranks, max_delay_s=0.001, seed=ranks)
    numels = [n * 64 * ranks + extra for n in (1, 2, 3, 4, 7, 10) for extra in (-17, 0, 1)]

    def body(rank: int) -> list[Tensor]:
        found = []
        for case, numel in enumerate(numels):
            flat = values(rank, numel, torch.float32, case)
            drive(two_phase(world.communicator(rank), flat, AVERAGE, ranks, LANES * case, 256))
            found.append(flat)
        return found

    for case, (numel, results) in enumerate(zip(numels, by_case(world.run(body)), strict=True)):
        each = [values(r, numel, torch.float32, case) for r in range(ranks)]
        in_rank_order = each[0].clone()
        for other in each[1:]:
            in_rank_order += other
        assert torch.equal(results[0], in_rank_order / ranks)
        assert_right(results, in_one_process(each, AVERAGE))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_reduce_scatter_leaves_the_own_piece(ranks):
    world = Loopback(ranks, max_delay_s=0.001)

    def body(rank: int) -> None:
        for tag, numel in enumerate((0, 1, 16, 17, 500)):
            flat = values(rank, numel, torch.float32, tag)
            drive(reduce_scatter(world.communicator(rank), flat, AVERAGE, ranks, tag))
            right = in_one_process([values(r, numel, torch.float32, tag) for r in range(ranks)], AVERAGE).float()
            torch.testing.assert_close(pieces(flat, ranks)[rank], pieces(right, ranks)[rank], rtol=1e-6, atol=0)

    world.run(body)


@pytest.mark.parametrize("size", range(1, 10))
def test_tree_broadcast(size):
    """Any root, any order of the others, any subset of the world."""
    world = Loopback(size, max_delay_s=0.001)
    orders = [random.Random(seed).sample(range(size), max(1, size - seed % 3)) for seed in range(6)]

    def body(rank: int) -> None:
        for tag, ranks in enumerate(orders):
            for numel in (0, 5):
                buf = torch.full((numel,), float(ranks[0] + 1) if rank == ranks[0] else -1.0)
                if rank in ranks:
                    drive(tree_broadcast(world.communicator(rank), ranks, buf, 2 * tag + bool(numel)))
                    assert buf.eq(ranks[0] + 1).all()

    world.run(body)


# ---- operations on the user's own tensors -------------------------------------------------------------


class Ranks:
    """Ranks as threads on nodes, with the three groups that eager operations run over."""

    def __init__(self, nodes: str) -> None:
        self.nodes, self.size = nodes, len(nodes)
        self.world, self._local, self._cross = (Loopback(self.size, max_delay_s=0.001, seed=s) for s in range(3))

    def operation(self, rank: int) -> Callable[..., Any]:
        """A function that carries out one operation on `rank` after the other."""
        t = discover(self.nodes, rank)
        crosses = len(t.nodes) > 1 and (t.is_homogeneous or t.local_rank == 0)
        cross = self._cross.communicator(rank, t.cross_ranks) if crosses else None
        comms = Communicators(t, self.world.communicator(rank), self._local.communicator(rank, t.local_ranks), cross)
        numbers = itertools.count()

        def run(request: Request, data: Tensor, divisor: int = 1, rows: tuple[int, ...] = ()) -> Any:
            operation = EagerOperation(request, data, divisor, comms, lambda *_: None)
            return drive(operation.task(4 * next(numbers), rows))

        return run


@pytest.mark.parametrize("nodes", NODES)
def test_eager_all_reduce(nodes):
    ranks = Ranks(nodes)
    cases = [(op, dtype, shape) for op, dtype in CASES for shape in ((), (0, 3), (7, 11))]

    def body(rank: int) -> list[Tensor]:
        run, found = ranks.operation(rank), []
        for case, (op, dtype, shape) in enumerate(cases):
            data = values(rank, math.prod(shape), dtype, case).reshape(shape)
            result = run(Request("allreduce", "x", op=op), data, ranks.size if op == AVERAGE else 1)
            assert (result.shape, result.dtype) == (data.shape, dtype)
            found.append(result)
        return found

    for case, ((op, dtype, shape), results) in enumerate(zip(cases, by_case(ranks.world.run(body)), strict=True)):
        inputs = [values(r, math.prod(shape), dtype, case).reshape(shape) for r in range(ranks.size)]
        assert_right(results, in_one_process(inputs, op))


@pytest.mark.parametrize("nodes", ["aabb", "aaab"])
def test_scales(nodes):
    ranks = Ranks(nodes)

    def body(rank: int) -> tuple[Tensor, Tensor]:
        run = ranks.operation(rank)
        scaled = Request("allreduce", "x", op=SUM, prescale=0.5, postscale=3.0)
        return run(scaled, torch.tensor([rank + 1.0])), run(scaled, torch.tensor([rank + 1]))

    for real, whole in ranks.world.run(body):
        assert real.item() == 0.5 * (1 + 2 + 3 + 4) * 3
        assert whole.item() == (0 + 1 + 1 + 2) * 3  # each truncated first, as Horovod does


@pytest.mark.parametrize("nodes", NODES)
def test_eager_all_gather(nodes):
    ranks = Ranks(nodes)
    rows = tuple((3 * r + 2) % 4 for r in range(ranks.size))  # 2 1 0 3 2: some have none

    def body(rank: int) -> None:
        run = ranks.operation(rank)
        for tail, dtype in itertools.product(((), (5,), (0, 2)), (torch.float32, torch.bool, torch.bfloat16)):
            inputs = [values(r, math.prod((n, *tail)), dtype, 0).reshape(n, *tail) for r, n in enumerate(rows)]
            assert torch.equal(run(Request("allgather", "x"), inputs[rank], 1, rows), torch.cat(inputs))
        ones = (1,) * ranks.size
        assert run(Request("allgather", "x"), torch.tensor(rank), 1, ones).tolist() == list(range(ranks.size))

    ranks.world.run(body)


@pytest.mark.parametrize("nodes", NODES)
def test_eager_broadcast_and_barrier(nodes):
    ranks = Ranks(nodes)

    def body(rank: int) -> None:
        run = ranks.operation(rank)
        for root, shape in itertools.product(range(ranks.size), ((), (0,), (3, 4))):
            data = torch.full(shape, rank, dtype=torch.int16)
            result = run(Request("broadcast", "x", root=root), data)
            assert result.shape == shape
            assert result.eq(root).all()
        run(Request("barrier", "x"), torch.empty(0))

    ranks.world.run(body)


# ---- buckets: shared memory inside the nodes, messages between them ------------------------------------

BUCKETS = [
    (1000, torch.float32, SUM),
    (77, torch.bfloat16, AVERAGE),
    (5, torch.uint8, MAX),
    (1, torch.float64, AVERAGE),
]


def finish(engine: HierarchicalAllReduce, exchange: Any) -> None:
    """As the optimizer does."""
    for work in (exchange.cross, exchange.local):
        if work is not None:
            work.wait(WAIT_S)
    engine.distribute(exchange).wait(WAIT_S)


def run_engines(
    nodes: str,
    body: Callable[[int, HierarchicalAllReduce, list[Any]], Any],
    *,
    lost: int = -1,
    max_delay_s: float = 0.002,
    buckets: Any = BUCKETS,
    piece_bytes: int = PIECE_BYTES[0],
) -> list[Any]:
    """`body(rank, engine, buffers)` on every rank; `lost` is dead between the nodes."""
    size = len(nodes)
    cross_world = Loopback(size, max_delay_s=max_delay_s, seed=7)
    meetings = {name: Meeting(nodes.count(name)) for name in nodes}
    if lost >= 0:
        cross_world.kill(lost)

    def start(rank: int) -> Any:
        t = discover(nodes, rank)
        local = SharedMemory(t.local_rank, t.local_size, meetings[nodes[rank]].exchange(t.local_rank))
        buffers = local.allocate([(numel, dtype) for numel, dtype, _ in buckets], torch.device("cpu"))
        crosses = len(t.nodes) > 1 and (t.is_homogeneous or t.local_rank == 0)
        cross = cross_world.communicator(rank, t.cross_ranks) if crosses else None
        progress = Progress(lambda: False)
        try:
            engine = HierarchicalAllReduce(
                t, local if t.local_size > 1 else None, cross, progress, Timing(), 5, piece_bytes
            )
            return body(rank, engine, buffers)
        finally:
            progress.close()

    return Loopback(size).run(start)


@pytest.mark.usefixtures("_small_rounds")
@pytest.mark.parametrize(
    ("nodes", "piece_bytes"),
    [*((nodes, PIECE_BYTES[0]) for nodes in ("aabb", "aaab", "abcd", "aaa", "abaab")), ("aabb", 256), ("abcd", 64)],
)
def test_buckets_in_flight(nodes, piece_bytes):
    rounds, size = 20, len(nodes)

    def body(rank: int, engine: HierarchicalAllReduce, buffers: list[Any]) -> list[Tensor]:
        jitter, found = random.Random(rank), []
        for step in range(rounds):
            exchanges = []
            for i, (buffer, (numel, dtype, op)) in enumerate(zip(buffers, BUCKETS, strict=True)):
                buffer.data.copy_(values(rank, numel, dtype, step))
                time.sleep(jitter.choice((0, 0, 0.002)))  # ranks are never in step
                divisor = size if op == AVERAGE else 1
                exchanges.append(engine.start(buffer, op, divisor, f"bucket {i}"))
            for exchange in exchanges:
                finish(engine, exchange)
            found += [buffer.data.clone() for buffer in buffers]
        return found

    results = by_case(run_engines(nodes, body, piece_bytes=piece_bytes))
    for (step, (numel, dtype, op)), replicas in zip(itertools.product(range(rounds), BUCKETS), results, strict=True):
        assert_right(replicas, in_one_process([values(r, numel, dtype, step) for r in range(size)], op))


@pytest.mark.parametrize("nodes", ["ab", "aabb"])
@pytest.mark.parametrize("choice", [None, Int8(), ErrorFeedback(Int8()), ErrorFeedback(TopK(0.01))], ids=repr)
def test_whoever_starts_an_exchange_goes_on_while_the_links_are_slow(nodes, choice):
    def body(rank: int, engine: HierarchicalAllReduce, buffers: list[Any]) -> bool:
        coding = None if choice is None else CompressorCoding(choice, 0, rank)
        exchange = engine.start(buffers[0], SUM, 1, "x", coding)
        under_way = not exchange.cross.has_ended()
        finish(engine, exchange)
        return under_way

    assert all(run_engines(nodes, body, max_delay_s=1.0))


def test_a_lost_node_is_an_error_of_the_exchange_and_not_a_hang():
    def body(rank: int, engine: HierarchicalAllReduce, buffers: list[Any]) -> None:
        exchange = engine.start(buffers[0], SUM, 1, "bucket 0")
        if rank == 3:  # its partner between the nodes is dead
            with pytest.raises(PeerLost, match="rank 1"):
                finish(engine, exchange)
        elif rank != 1:
            exchange.cross.wait(WAIT_S)

    run_engines("aabb", body, lost=1)


@pytest.mark.parametrize("nodes", ["aabb", "aaab", "abcd", "aaaa"])
def test_a_mean_of_halves_never_passes_through_their_sum(nodes):
    def body(rank: int, engine: HierarchicalAllReduce, buffers: list[Any]) -> None:
        buffers[0].data.fill_(60000)
        finish(engine, engine.start(buffers[0], AVERAGE, 4, "bucket 0"))
        assert buffers[0].data.eq(60000).all()

    run_engines(nodes, body, buckets=[(77, torch.float16, AVERAGE)])
