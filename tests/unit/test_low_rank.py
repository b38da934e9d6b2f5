"""PowerSGD: low ranks exactly, nothing lost, what is not finite noticed. Nodes are generators run in step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hiercomm.compress import PowerSGD, Site
from hiercomm.errors import ConfigError


def step(choice: PowerSGD, given: list[list[Tensor]], sites: list[list[Site]]) -> list[list[Tensor]]:
    """One exchange: the nodes' matrices, and what each node has afterwards."""
    found = [[m.clone() for m in matrices] for matrices in given]
    nodes = [choice.reduce(matrices, own) for matrices, own in zip(found, sites, strict=True)]
    while (parts := [next(node, None) for node in nodes])[0] is not None:
        total = sum(part.clone() for part in parts)  # type: ignore[union-attr]
        for part in parts:
            part.copy_(total)  # type: ignore[union-attr, arg-type]
    for matrices in found[1:]:
        assert all(torch.equal(a, b) or a.isnan().any() for a, b in zip(found[0], matrices, strict=True))
    return found


def places(nodes: int, matrices: int) -> list[list[Site]]:
    return [[Site((0, i), node) for i in range(matrices)] for node in range(nodes)]


@pytest.mark.parametrize("nodes", [1, 2, 3])
@pytest.mark.parametrize("shapes", [[(40, 30)], [(3, 50), (1, 7), (20, 1)]])
def test_what_arrived_and_what_is_kept_make_up_what_was_given(nodes, shapes):
    torch.manual_seed(nodes)
    sites, total, given = places(nodes, len(shapes)), [0.0] * len(shapes), [0.0] * len(shapes)
    for _ in range(5):
        each = [[torch.randn(shape) for shape in shapes] for _ in range(nodes)]
        results = step(PowerSGD(2), each, sites)
        for i in range(len(shapes)):
            total[i] = total[i] + results[0][i]
            given[i] = given[i] + sum(matrices[i] for matrices in each)
    for i in range(len(shapes)):
        kept = sum(own[i].state["residual"] for own in sites)
        torch.testing.assert_close(total[i] + kept, given[i], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rank", [3, 5])
def test_matrices_of_no_higher_rank_arrive_whole(rank):
    torch.manual_seed(0)
    low = torch.randn(40, 3) @ torch.randn(3, 30)
    sites = places(2, 1)
    for _ in range(3):
        (result,), _ = step(PowerSGD(rank), [[low], [2 * low]], sites)
        torch.testing.assert_close(result, 3 * low, rtol=1e-3, atol=1e-3)


def test_zeros_stay_zeros_and_do_not_end_it():
    sites = places(2, 1)
    for _ in range(3):
        (result,), _ = step(PowerSGD(2), [[torch.zeros(10, 5)]] * 2, sites)
        assert not result.any()
    low = torch.ones(10, 5)
    (result,), _ = step(PowerSGD(2), [[low]] * 2, sites)
    torch.testing.assert_close(result, 2 * low)


def test_nan_is_seen_on_every_node_and_forgotten():
    sites, good = places(2, 2), torch.ones(10, 5)
    bad = good.clone()
    bad[3, 3] = torch.nan
    first, second = step(PowerSGD(2), [[good, good], [bad, good]], sites)
    assert first[0].isnan().all()
    assert second[0].isnan().all()
    torch.testing.assert_close(first[1], 2 * good)
    (result, _), _ = step(PowerSGD(2), [[good, good]] * 2, sites)
    torch.testing.assert_close(result, 2 * good)


def test_bad_ranks():
    for rank in (0, -1, 1.5, "4"):
        with pytest.raises(ConfigError, match="rank="):
            PowerSGD(rank)  # type: ignore[arg-type]
