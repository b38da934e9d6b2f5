"""Rounds between nodes: as the oracle, the same bits on every node, nothing lost, nobody held up. Nodes are threads."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference.as_sgd import SGD, Cluster, exact
from torch import Tensor

import hiercomm.rounds
import hiercomm.shard
from hiercomm.coded import CompressorCoding
from hiercomm.comm.loopback import Loopback
from hiercomm.compress import Compressor, ErrorFeedback, Int4, Int8, RandomK, Sign, Site, TopK
from hiercomm.errors import CommError, PeerLost
from hiercomm.progress import Progress
from hiercomm.rounds import Head, Lag, Rounds, compare
from hiercomm.shard import Shard
from hiercomm.timing import Timing

WAIT_S = 30.0
CPU = torch.device("cpu")
F32, F64 = torch.float32, torch.float64
PIECE = 256  # bytes: several chunks at sizes that tests can afford
Choice = Compressor | ErrorFeedback | None
CHOICES: dict[str, Choice] = {
    "none": None, "int8": ErrorFeedback(Int8()), "int8 alone": Int8(), "int4": ErrorFeedback(Int4("stochastic")),
    "sign": ErrorFeedback(Sign()), "topk": ErrorFeedback(TopK(0.1)), "randomk": ErrorFeedback(RandomK(0.1)),
}  # fmt: skip


@dataclass
class Buckets:
    """What a model is cut into: elements and dtype of each part, and through what it crosses."""

    parts: Sequence[tuple[int, torch.dtype, Choice]]

    def shards(self, rank: int) -> list[Shard]:
        return [
            Shard(n, 16, d, CPU, None if c is None else CompressorCoding(c, i, rank))
            for i, (n, d, c) in enumerate(self.parts)
        ]

    def values(self, *seed: int) -> list[Tensor]:
        rng = np.random.default_rng(seed)
        return [torch.from_numpy(rng.standard_normal(n)).to(d) for n, d, _ in self.parts]


@dataclass
class Seen:
    """What one node has seen: (step, rounds merged, parameters) after each step, and the largest age."""

    merges: list[tuple[int, int, list[Tensor]]] = field(default_factory=list)
    ages: list[int] = field(default_factory=list)
    final: list[Tensor] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)


Log = dict[int, list[dict[int, Head]]]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    """The headers of every round, by thread; anchors are compared in every round."""
    found: Log = defaultdict(list)

    def recording(heads: dict[int, Head]) -> None:
        found[threading.get_ident()].append(heads)
        compare(heads)

    monkeypatch.setattr(hiercomm.rounds, "compare", recording)
    monkeypatch.setattr(hiercomm.rounds, "CHECK_ROUNDS", 1)
    return found


def busy() -> bool:
    return False


def out_of(rounds: Rounds, like: Sequence[Tensor]) -> tuple[int, list[Tensor]]:
    out = [torch.empty_like(each) for each in like]
    return rounds.merge(out), out


def run(
    buckets: Buckets,
    weights: Sequence[float],
    steps: Sequence[int],
    *,
    max_age: int = 3,
    lag: Lag | None = None,
    max_delay_s: float = 0.001,
    before: Callable[[int, int], None] = lambda node, step: None,
) -> list[Seen]:
    """Every node makes steps[node] steps of `buckets.values(1 + node, step)`; `before(node, step)` each."""
    world = Loopback(len(weights), max_delay_s=max_delay_s, seed=1)

    def node(rank: int) -> Seen:
        progress, seen = Progress(lambda: False), Seen()
        rounds = Rounds(
            world.communicator(rank),
            buckets.shards(rank),
            weights[rank],
            lag or Lag(),
            busy,
            progress,
            Timing(),
            7,
            PIECE,
        )
        try:
            rounds.begin(buckets.values(0))
            for step in range(1, steps[rank] + 1):
                before(rank, step)
                moved = buckets.values(1 + rank, step)
                rounds.export(moved, step)
                seen.ages.append(rounds.age(step))
                rounds.until_younger(max_age, step).wait(WAIT_S)
                seen.ages.append(rounds.age(step) if max_age else 0)
                seen.merges.append((step, *out_of(rounds, moved)))
            rounds.flush().wait(WAIT_S)
            _, seen.final = out_of(rounds, buckets.values(0))
            seen.steps = list(rounds.steps)
            rounds.flush(leave=True).wait(WAIT_S)
            assert torch.equal(out_of(rounds, seen.final)[1][0], seen.final[0])
            progress.drain(5.0)
            assert not progress._queues, "the last flush ends the rounds"
        finally:
            progress.close()
        return seen

    return world.run(node)


def jitter(*speeds: float) -> Callable[[int, int], None]:
    """Random sleeps; the mean of each node's, in seconds."""
    generators = [random.Random(n) for n in range(len(speeds))]
    return lambda node, step: time.sleep(generators[node].expovariate(1 / speeds[node]) if speeds[node] else 0.0)


def assert_equal_and_nothing_lost(
    seen: Sequence[Seen], buckets: Buckets, weights: Sequence[float], steps: Sequence[int], tolerance: float
) -> None:
    for i, first in enumerate(seen[0].final):
        assert all(torch.equal(first, other.final[i]) for other in seen)
        right = buckets.values(0)[i].double()
        for n, (weight, count) in enumerate(zip(weights, steps, strict=True)):
            right = right + weight * sum(buckets.values(1 + n, s)[i].double() for s in range(1, count + 1))
        limit = 1e-12 if first.dtype == F64 else tolerance
        assert float((first.double() - right).abs().max() if right.numel() else 0) < limit
    assert all(node.steps == list(steps) for node in seen)


# ---- nothing is lost, and all nodes agree after every round -------------------------------------------


@pytest.mark.parametrize("many", [False, True], ids=["gathered", "two phases"])
@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("nodes", [2, 3, 4])
def test_all_nodes_have_the_same_bits_after_every_round(nodes, name, many, log, monkeypatch):
    monkeypatch.setattr(hiercomm.shard, "_GATHER_NODES", 1 if many else 8)
    choice = CHOICES[name]
    buckets = Buckets([(1237, F32, choice), (0, F32, choice), (5, F32, None), (401, F64, None)])
    weights = [(1 + n) / sum(range(1, nodes + 1)) for n in range(nodes)]  # unequal nodes
    steps = [12 + 5 * n for n in range(nodes)]
    seen = run(buckets, weights, steps, before=jitter(*(0.002 * n for n in range(nodes))))
    feeds_back = not (isinstance(choice, Int8))
    if feeds_back:
        assert_equal_and_nothing_lost(seen, buckets, weights, steps, 2e-4)
    assert len(log) == nodes
    first, *others = log.values()
    assert len(first) > 5
    assert all(other == first for other in others), "every node has seen the same headers, digests among them"


def test_a_compressor_without_feedback_does_lose_something():
    """So that the test above can fail."""
    buckets = Buckets([(1237, F32, Int8())])
    seen = run(buckets, [0.5, 0.5], [20, 20])
    with pytest.raises(AssertionError):
        assert_equal_and_nothing_lost(seen, buckets, [0.5, 0.5], [20, 20], 2e-4)


# ---- the oracle ---------------------------------------------------------------------------------------


def package_code(choice: Choice) -> Callable[[Any], Any]:
    """A compressor of the package, without what it remembers."""
    if choice is None:
        return exact
    inner = choice.inner if isinstance(choice, ErrorFeedback) else choice

    def code(x: Any) -> Any:
        payload = torch.empty(inner.nbytes(x.size), dtype=torch.uint8)
        inner.compress(torch.from_numpy(x), payload, Site((0, 0), 0))
        out = torch.empty(x.size)
        inner.decompress(payload, out, False)
        return out.numpy()

    return code


@pytest.mark.parametrize(("name", "tolerance"), [("none", 1e-13), ("int8", 1e-5), ("topk", 1e-5)])
@pytest.mark.parametrize("nodes", [2, 3, 4])
def test_as_the_oracle(nodes, name, tolerance, log):
    """The rounds that the package made, made again in the oracle: every merge of every node is right."""
    buckets = Buckets([(700, F64 if name == "none" else F32, CHOICES[name])])
    weights, steps = [1 / nodes] * nodes, [15 + 4 * n for n in range(nodes)]
    seen = run(buckets, weights, steps, before=jitter(*(0.003 * n for n in range(nodes))))
    x0 = buckets.values(0)[0].numpy()
    cluster = Cluster(
        x0, [1] * nodes, lambda rank, t, x: -buckets.values(1 + rank, t + 1)[0].numpy(), lambda: SGD(1.0),
        package_code(CHOICES[name]),
    )  # fmt: skip
    for node in cluster.nodes:
        node.weight = x0.dtype.type(node.weight)
    anchors, covered = [x0], [[0] * nodes]
    for heads in next(iter(log.values())):
        for n, head in heads.items():
            while cluster.nodes[n].step < head.steps:
                cluster.step(n)
                cluster.export(n)
        if all(head.flushes for head in heads.values()):
            break
        cluster.take([n for n, head in heads.items() if head.adds])
        cluster.commit()
        anchors.append(cluster.A)
        covered.append([heads[n].steps for n in range(nodes)])
    merged = 0
    for n, node in enumerate(seen):
        for step, number, (x,) in node.merges:
            waiting = [buckets.values(1 + n, s)[0].numpy() for s in range(covered[number][n] + 1, step + 1)]
            np.testing.assert_allclose(x.numpy(), anchors[number] + sum(waiting, 0.0), rtol=0, atol=tolerance)
            merged += number > 0
    assert merged > 10
    cluster.flush()
    np.testing.assert_allclose(seen[0].final[0].numpy(), cluster.A, rtol=0, atol=tolerance)


# ---- who waits for whom -------------------------------------------------------------------------------


@pytest.mark.parametrize("max_age", [0, 1, 4])
def test_nothing_waits_longer_than_allowed(max_age):
    """On a slow link the bound is reached, and kept."""
    buckets = Buckets([(300, F32, CHOICES["int8"])])
    seen = run(buckets, [0.25, 0.75], [25, 25], max_age=max_age, max_delay_s=0.01)
    ages = [age for node in seen for age in node.ages]
    assert max(ages) == max_age


def test_a_node_that_computes_holds_nobody_up():
    """Node 2 makes no step until node 0 has made all of its, each of them seen by a round."""
    buckets, done = Buckets([(100, F32, None)]), threading.Event()

    def before(node: int, step: int) -> None:
        if node == 2 and step == 2:
            assert done.wait(WAIT_S)
        elif node == 0 and step == 60:
            done.set()

    weights, steps = [1 / 3] * 3, [60, 30, 5]
    seen = run(buckets, weights, steps, max_age=0, before=before)
    assert_equal_and_nothing_lost(seen, buckets, weights, steps, 1e-4)


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_a_bound_on_how_far_a_node_may_lag_is_kept_and_reached(lag, log):
    buckets, weights, steps = Buckets([(100, F32, None)]), [0.5, 0.25, 0.25], [40, 40, 10]
    seen = run(buckets, weights, steps, max_age=1, lag=Lag(lag), before=jitter(0.0005, 0.0005, 0.01))
    assert_equal_and_nothing_lost(seen, buckets, weights, steps, 1e-4)
    longest = [0, 0, 0]
    absent = [0, 0, 0]
    for heads in next(iter(log.values())):
        for n, head in heads.items():
            absent[n] = 0 if head.adds or head.flushes else absent[n] + 1
            longest[n] = max(longest[n], absent[n])
    assert max(longest) == lag


def test_the_first_rounds_are_synchronous(log):
    buckets, weights = Buckets([(40, F64, None)]), [0.5, 0.5]
    run(buckets, weights, [30, 30], lag=Lag(synchronous=6), before=jitter(0.0002, 0.004))
    rounds = next(iter(log.values()))
    assert all(head.adds for heads in rounds[:6] for head in heads.values())
    assert not all(head.adds for heads in rounds[6:] for head in heads.values())


def test_without_lag_and_age_0_every_step_is_a_round_of_all(log):
    buckets, weights = Buckets([(333, F64, None)]), [0.25, 0.5, 0.25]
    seen = run(buckets, weights, [20] * 3, max_age=0, lag=Lag(0), before=jitter(0.001, 0.0, 0.003))
    x = buckets.values(0)[0]
    for step in range(1, 21):
        for n, weight in enumerate(weights):
            x = x + weight * buckets.values(1 + n, step)[0]
        for node in seen:
            assert torch.equal(node.merges[step - 1][2][0], x), "in node order, to the bit"
    assert_equal_and_nothing_lost(seen, buckets, weights, [20] * 3, 0.0)


# ---- errors -------------------------------------------------------------------------------------------


def make_steps(rounds: Rounds, count: int, after: Callable[[int], None] = lambda step: None) -> None:
    for step in range(1, count + 1):
        rounds.export([torch.ones(20)], step)
        rounds.until_younger(0, step).wait(WAIT_S)
        after(step)


def two(body: Callable[[int, Rounds, Loopback], None]) -> None:
    world = Loopback(2)

    def node(rank: int) -> None:
        progress = Progress(lambda: False)
        rounds = Rounds(
            world.communicator(rank), [Shard(20, 0, F32, CPU, None)], 0.5, Lag(0), busy, progress, Timing(), 3, PIECE
        )
        try:
            rounds.begin([torch.zeros(20)])
            body(rank, rounds, world)
        finally:
            progress.close()

    world.run(node)


def test_a_lost_node_is_an_error_of_the_step():
    def body(rank: int, rounds: Rounds, world: Loopback) -> None:
        if rank == 1:
            world.kill(1)
            return
        with pytest.raises(PeerLost, match="rank 1"):
            make_steps(rounds, 10000)
        with pytest.raises(PeerLost, match="rank 1"):
            rounds.flush().wait(WAIT_S)

    two(body)


def test_anchors_that_differ_are_an_error(monkeypatch):
    monkeypatch.setattr(hiercomm.rounds, "CHECK_ROUNDS", 4)
    made = []

    def body(rank: int, rounds: Rounds, world: Loopback) -> None:
        def damage(step: int) -> None:
            made.append(step)
            if step == 2:
                rounds._shards[0].anchor[7] += 1e-3

        with pytest.raises(CommError, match="the anchors of nodes 0 and 1 differ after round 3"):
            make_steps(rounds, 20, damage if rank == 1 else made.append)

    two(body)
    assert sorted(made) == [1, 1, 2, 2, 3, 3, 4, 4]


def test_headers_of_something_else_are_an_error():
    world = Loopback(2)
    progress = Progress(lambda: False)
    try:
        rounds = Rounds(
            world.communicator(0), [Shard(20, 0, F32, CPU, None)], 0.5, Lag(), busy, progress, Timing(), 0, PIECE
        )
        rounds.begin([torch.zeros(20)])
        data = Head(0, 0).encoded()
        data[0] = 0
        world.communicator(1).send(data, 0, tag=hiercomm.rounds.LANES)
        with pytest.raises(CommError, match="rank 1 of the group sent is no header"):
            make_steps(rounds, 1)
    finally:
        progress.close()


# ---- pure ---------------------------------------------------------------------------------------------

heads = st.builds(
    Head, st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.booleans(), st.booleans(), st.booleans(),
    st.none() | st.integers(0, 2**32 - 1),
)  # fmt: skip


@given(heads)
def test_headers_come_back(head):
    assert Head.decoded(head.encoded(), 0) == head


def test_rounds_that_come_apart_are_named():
    compare({0: Head(3, 1), 1: Head(3, 2)})
    with pytest.raises(CommError, match="node 1 is in round 4, node 0 in round 3"):
        compare({0: Head(3, 1), 1: Head(4, 1)})


def test_lag():
    assert all(Lag().allows(number, absent, idle=False) for number, absent in itertools.product((0, 9), (0, 99)))
    assert [Lag(2).allows(0, absent, idle=False) for absent in range(4)] == [True, True, False, False]
    assert not Lag(0).allows(5, 0, idle=False)
    assert Lag(0).allows(5, 0, idle=True)
    assert [Lag(synchronous=2).allows(number, 0, idle=True) for number in range(4)] == [False, False, True, True]


@given(st.integers(0, 5000), st.integers(2, 12), st.sampled_from(list(CHOICES)))
def test_chunks_are_the_shard(numel, nodes, name):
    choice = CHOICES[name]
    shard = Shard(numel, 0, F32, CPU, None if choice is None else CompressorCoding(choice, 0, 0))
    chunks = shard.chunks(nodes, 64)
    assert [i for cut in chunks for i in range(cut.start, cut.stop)] == list(range(numel))
