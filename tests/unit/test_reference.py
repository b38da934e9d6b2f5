"""The oracle of AS-SGD itself: nothing is lost, its synchronous limit is BSP, progress is never older than allowed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference.as_sgd import SGD, Cluster, exact, int8, synchronous, train

N = 13
OPTIMIZERS = {
    "sgd": lambda: SGD(0.1),
    "momentum": lambda: SGD(0.05, momentum=0.9),
    "nesterov": lambda: SGD(0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
}
X0 = np.random.default_rng(0).standard_normal(N)
TARGETS = np.random.default_rng(1).standard_normal((16, N))


def gradient(rank, step, x):
    noise = np.random.default_rng([rank, step]).standard_normal(N)
    return 0.3 * (x - TARGETS[rank]) + 0.1 * np.tanh(x) + 0.05 * noise


def assert_mass(cluster, tolerance=1e-12):
    assert np.abs(cluster.mass() - cluster.expected_mass()).max() < tolerance


@pytest.mark.parametrize("sizes", [(1,), (2, 2), (1, 1, 1), (3, 1), (1, 2, 3, 2)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_with_age_0_it_is_synchronous(sizes, name):
    cluster = Cluster(X0, sizes, gradient, OPTIMIZERS[name])
    train(cluster, [30] * len(sizes), max_age=0, period=1, speeds=[1.0 + n for n in range(len(sizes))], round_s=0.5)
    assert cluster.rounds == 30
    right = synchronous(X0, sum(sizes), gradient, OPTIMIZERS[name](), 30)
    assert np.abs(cluster.A - right).max() < 1e-12
    assert [node.oldest for node in cluster.nodes] == [0] * len(sizes)
    # One step more or less is seen: the comparison can fail.
    assert np.abs(right - synchronous(X0, sum(sizes), gradient, OPTIMIZERS[name](), 29)).max() > 1e-4


@given(
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    code=st.sampled_from([exact, int8]),
    actions=st.lists(st.tuples(st.sampled_from("sxmtc"), st.integers(0, 3), st.integers(1, 15)), max_size=60),
)
def test_nothing_is_lost_in_any_order_of_events(sizes, code, actions):
    cluster = Cluster(X0, sizes, gradient, OPTIMIZERS["momentum"], code)
    for action, n, some in actions:
        n %= len(sizes)
        if action == "s":
            cluster.step(n)
        elif action == "x":
            cluster.export(n)
        elif action == "m":
            cluster.merge(n)
        elif action == "t" and not cluster.sent:
            cluster.take(m for m in range(len(sizes)) if some >> m & 1)
        elif action == "c":
            cluster.commit()
        assert_mass(cluster)
    cluster.flush()
    assert_mass(cluster)
    for node in cluster.nodes:
        assert np.array_equal(node.x, cluster.A)
        assert not node.e.any()


@pytest.mark.parametrize("max_age", [0, 1, 3, 8])
@pytest.mark.parametrize("round_s", [0.1, 2.5, 30.0])
def test_progress_is_never_older_than_allowed(max_age, round_s):
    cluster = Cluster(X0, (1, 2, 1), gradient, OPTIMIZERS["momentum"], int8)
    train(cluster, [60, 25, 60], max_age=max_age, period=1, speeds=[1.0, 4.0, 1.3], round_s=round_s)
    oldest = max(node.oldest for node in cluster.nodes)
    assert oldest <= max_age
    assert oldest == max_age or round_s < 30.0, "on a slow link the bound is reached"
    assert_mass(cluster)
    assert [node.step for node in cluster.nodes] == [60, 25, 60]


def test_a_slow_node_does_not_hold_the_others_up():
    """Without rounds that wait, the fast node merges as often as the link allows."""
    fast = Cluster(X0, (1, 1), gradient, OPTIMIZERS["sgd"])
    train(fast, [40, 4], max_age=2, period=1, speeds=[1.0, 10.0], round_s=0.5)
    assert fast.rounds >= 40
