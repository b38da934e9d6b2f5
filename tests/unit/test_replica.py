"""Replicas of nodes: as the oracle, in step inside a node, whatever the sizes of the nodes. Ranks are threads."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from meeting import Meeting
from reference.as_sgd import SGD, Cluster, synchronous
from torch import Tensor

from hiercomm import reduction
from hiercomm.bucket import Bucket, Spec, layout
from hiercomm.coded import CompressorCoding
from hiercomm.comm.base import Work
from hiercomm.comm.loopback import Loopback
from hiercomm.comm.shm import SharedMemory
from hiercomm.compress import ErrorFeedback, Int8
from hiercomm.progress import Progress
from hiercomm.replica import Replica, Waits, flush_all, shard
from hiercomm.rounds import Lag, Rounds
from hiercomm.shard import Shard
from hiercomm.timing import Timing
from hiercomm.topology import discover

WAIT_S = 30.0
SHAPES = ((5, 7), (3,), (11, 13), ())  # odd, and cut by shards in the middle
NUMELS = [int(np.prod(shape)) for shape in SHAPES]
GROUPS = ((0, 1), (2, 3))
N = sum(NUMELS)
X0 = np.random.default_rng(0).standard_normal(N)
TARGETS = np.random.default_rng(1).standard_normal((8, N))
LR, MU = 0.05, 0.9


class Direct(Waits):
    """Waits with a limit, and nothing else."""

    def local(self, work: Work, what: str) -> None:
        work.wait(WAIT_S)

    def rounds(self, work: Work, what: str) -> None:
        work.wait(WAIT_S)

    def flush(self, work: Work, what: str) -> None:
        work.wait(WAIT_S)


def gradient(rank: int, step: int, x: Any) -> Any:
    return 0.3 * (x - TARGETS[rank]) + 0.05 * np.random.default_rng([rank, step]).standard_normal(N)


def split(flat: Any) -> list[Any]:
    return np.split(flat, np.cumsum(NUMELS)[:-1])


def flatten(parameters: Sequence[Tensor]) -> Any:
    return np.concatenate([p.detach().double().numpy().reshape(-1) for p in parameters])


Body = Callable[[int, Replica, list[Tensor]], Any]


def run(nodes: str, dtype: torch.dtype, coded: bool, lag: Lag, body: Body) -> list[Any]:
    """`body(rank, replica, parameters)` on every rank."""
    cross = Loopback(len(nodes), max_delay_s=0.002, seed=3)
    meetings = {name: Meeting(nodes.count(name)) for name in nodes}

    def start(rank: int) -> Any:
        t = discover(nodes, rank)
        level = SharedMemory(t.local_rank, t.local_size, meetings[nodes[rank]].exchange(t.local_rank))
        parameters = [torch.tensor(x, dtype=dtype).reshape(s) for x, s in zip(split(X0), SHAPES, strict=True)]
        specs = [Spec.of(p) for p in parameters]
        sizes = [(layout([specs[i] for i in group])[1], dtype) for group in GROUPS]
        *buffers, news = level.allocate([*sizes, (1, torch.uint8)], torch.device("cpu"))
        buckets = [
            Bucket(i, group, [specs[k] for k in group], buffer, reduction.SUM, 1)
            for i, (group, buffer) in enumerate(zip(GROUPS, buffers, strict=True))
        ]
        shards = []
        for bucket in buckets:
            own = shard(t, bucket.buffer.data)
            coding = CompressorCoding(ErrorFeedback(Int8()), bucket.index, rank) if coded else None
            begin = own.storage_offset() - bucket.buffer.data.storage_offset()
            shards.append(Shard(own.numel(), begin, dtype, own.device, coding))
        progress, rounds = Progress(lambda: False), None
        if t.is_homogeneous or t.local_rank == 0:
            comm, weight = cross.communicator(rank, t.cross_ranks), t.local_size / t.size
            rounds = Rounds(comm, shards, weight, lag, lambda: False, progress, Timing(), 2, 256)
        local = level if t.local_size > 1 else None
        replica = Replica(t, parameters, buckets, news, local, rounds, Direct(), lambda digest: None)
        try:
            return body(rank, replica, parameters)
        finally:
            progress.close()

    return Loopback(len(nodes)).run(start)


def trainer(
    nodes: str, steps: Sequence[int], max_age: int, period: int, seen: dict[int, list[Any]], nap_s: float = 0.002
) -> Body:
    """Momentum SGD in double precision on the mean gradient of a node; every rank computes all of its node's."""

    def body(rank: int, replica: Replica, parameters: list[Tensor]) -> Any:
        t, jitter = discover(nodes, rank), random.Random(rank)
        optimizer = SGD(LR, MU)
        seen[rank] = []
        replica.begin()
        for step in range(steps[t.node]):
            x = flatten(parameters)
            u = optimizer.update(sum(gradient(r, step, x) for r in t.local_ranks) / t.local_size, x)
            for p, each in zip(parameters, split(u), strict=True):
                p.add_(torch.tensor(each).reshape(p.shape))
            replica.steps += 1
            time.sleep(jitter.choice((0, nap_s * t.node)))
            if replica.steps % period == 0:
                replica.exchange(max_age, period)
            seen[rank].append(flatten(parameters))
        flush_all([replica])
        end = flatten(parameters)
        flush_all([replica], leave=True)
        assert np.array_equal(flatten(parameters), end)
        return end

    return body


@pytest.mark.parametrize("nodes", ["ab", "aabb", "aaab", "abcd", "abab"])
def test_synchronous_it_is_one_process(nodes):
    """To rounding, at every step; the oracle says the same."""
    count, seen = len(set(nodes)), {}
    results = run(nodes, torch.float64, False, Lag(synchronous=10**9), trainer(nodes, [12] * count, 0, 1, seen))
    for step in range(1, 13):
        right = synchronous(X0, len(nodes), gradient, SGD(LR, MU), step)
        for rank in range(len(nodes)):
            assert np.abs(seen[rank][step - 1] - right).max() < 1e-12
    assert all(np.array_equal(result, results[0]) for result in results)


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize(
    ("nodes", "max_age", "period"), [("aabb", 3, 1), ("aaab", 2, 1), ("abcd", 8, 1), ("aabb", 6, 3)]
)
def test_replicas_of_a_node_are_equal_at_every_step_and_all_are_at_the_end(nodes, max_age, period, coded):
    count, seen = len(set(nodes)), {}
    steps = [15 + 4 * n for n in range(count)]
    results = run(nodes, torch.float32, coded, Lag(), trainer(nodes, steps, max_age, period, seen))
    assert all(np.array_equal(result, results[0]) for result in results)
    for name in set(nodes):
        first, *others = (seen[rank] for rank in range(len(nodes)) if nodes[rank] == name)
        for other in others:
            assert all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))
    # Further apart than rounding while they train: the equality at the end is the flush's.
    assert any(np.abs(seen[0][10] - seen[rank][10]).max() > 1e-6 for rank in range(len(nodes)))


def test_what_is_moved_between_steps_is_progress_and_a_retired_replica_is_left_alone():
    def body(rank: int, replica: Replica, parameters: list[Tensor]) -> Any:
        replica.begin()
        parameters[1].add_(2.0 if rank == 0 else 4.0)
        flush_all([replica])
        assert np.allclose(flatten(parameters[1:2]), split(X0)[1] + 3.0)
        replica.retire()
        parameters[1].zero_()
        flush_all([replica], leave=True)
        assert not parameters[1].any()

    run("ab", torch.float64, False, Lag(), body)


def test_the_oracle_with_one_rank_a_node_moves_the_same():
    """Rounds in which all take part: the package's replicas and the oracle's nodes, step by step."""
    seen: dict[int, list[Any]] = {}
    run("abc", torch.float64, False, Lag(synchronous=10**9), trainer("abc", [9] * 3, 0, 3, seen))
    cluster = Cluster(X0, [1] * 3, gradient, lambda: SGD(LR, MU))
    for step in range(9):
        for n in range(3):
            cluster.step(n)
            if step % 3 == 2:
                cluster.export(n)
        if step % 3 == 2:
            cluster.take(range(3))
            cluster.commit()
        for n in range(3):
            if step % 3 == 2:
                cluster.merge(n)
            assert np.abs(seen[n][step] - cluster.nodes[n].x).max() < 1e-12
