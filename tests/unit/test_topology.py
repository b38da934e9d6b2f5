"""From node names to ranks: a partition that all ranks see alike, whatever the sizes and the order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hiercomm.errors import ConfigError, ConfigMismatch
from hiercomm.topology import discover, name_nodes

PLACEMENTS = st.lists(st.sampled_from("abcd"), min_size=1, max_size=12)


@given(PLACEMENTS)
def test_nodes_partition_the_ranks(placement):
    seen = discover(placement, 0)
    assert sorted(rank for node in seen.nodes for rank in node) == list(range(len(placement)))
    assert all(list(node) == sorted(node) for node in seen.nodes)
    assert all({placement[r] for r in node} == {name} for node, name in zip(seen.nodes, seen.names, strict=True))
    # Numbered by first rank.
    assert [node[0] for node in seen.nodes] == sorted(node[0] for node in seen.nodes)


@given(PLACEMENTS)
def test_ranks_agree_on_who_is_where(placement):
    views = [discover(placement, rank) for rank in range(len(placement))]
    assert len({(v.size, v.nodes, v.names, v.is_homogeneous, v.describe()) for v in views}) == 1
    for rank, view in enumerate(views):
        assert view.rank == rank
        assert view.local_ranks[view.local_rank] == rank
        assert len(view.local_ranks) == view.local_size
        assert view.cross_ranks[view.cross_rank] == rank
        assert len(view.cross_ranks) == view.cross_size
        assert view.nodes[view.node] == view.local_ranks
        for other in view.cross_ranks:
            assert views[other].local_rank == view.local_rank
            assert views[other].cross_ranks == view.cross_ranks
        for other in view.local_ranks:
            assert views[other].local_ranks == view.local_ranks


@given(PLACEMENTS)
def test_cross_groups_reach_every_node_that_is_large_enough(placement):
    for rank in range(len(placement)):
        view = discover(placement, rank)
        assert view.cross_size == sum(len(node) > view.local_rank for node in view.nodes)
        if view.local_rank == 0:
            assert view.cross_size == len(view.nodes)
    assert view.is_homogeneous == (len({placement.count(name) for name in placement}) == 1)


def test_unequal_nodes():
    placement = ["a", "b", "a", "a", "b"]
    view = discover(placement, 3)
    assert view.nodes == ((0, 2, 3), (1, 4))
    assert not view.is_homogeneous
    assert (view.local_rank, view.local_size, view.cross_rank, view.cross_size, view.node) == (2, 3, 0, 1, 0)
    assert discover(placement, 4).cross_ranks == (2, 4)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_the_world_is_refused(rank):
    with pytest.raises(ValueError, match=f"rank {rank} .* world of 2"):
        discover(["a", "a"], rank)


def test_describe_two_by_two():
    assert discover(["node0", "node0", "node1", "node1"], 2).describe() == (
        "4 ranks on 2 nodes\n"
        "  node   ranks\n"
        "  node0  0-1 (2)\n"
        "  node1  2-3 (2)\n"
        "  local: groups of 2; cross: 2 groups of 2 nodes\n"
        "  effective batch: 4 x the batch of one rank"
    )


def test_describe_three_plus_two():
    assert discover(["a", "a", "gpu-box", "a", "gpu-box"], 0).describe() == (
        "5 ranks on 2 nodes\n"
        "  node     ranks\n"
        "  a        0-1, 3 (3)\n"
        "  gpu-box  2, 4 (2)\n"
        "  local: groups of 3, 2; cross: the first rank of each of 2 nodes\n"
        "  effective batch: 5 x the batch of one rank"
    )


def test_describe_one_node():
    assert discover(["a", "a"], 0).describe() == (
        "2 ranks on 1 node\n  node  ranks\n  a     0-1 (2)\n  local: one node; nothing crosses the network\n"
        "  effective batch: 2 x the batch of one rank"
    )


# ---- names --------------------------------------------------------------------------------------------


def test_a_node_cannot_join_hosts():
    found = ["h", "h", "g", "g"]
    assert name_nodes(found, ["x", "y", "z", "z"], None) == ("x", "y", "z", "z")
    with pytest.raises(ConfigError, match=r"node 'x' .*ranks 1-2.* on h, g"):
        name_nodes(found, ["w", "x", "x", "z"], None)
    with pytest.raises(ConfigError, match=r"node 'node0' .*ranks 0-2"):
        name_nodes(found, [None] * 4, 3)


def test_users_names_beat_ranks_per_node_beats_what_mpi_found():
    found = ["h", "h", "h", "h"]
    assert name_nodes(found, ["x", "y", "x", "y"], 3) == ("x", "y", "x", "y")
    assert name_nodes(found, [None] * 4, 3) == ("node0", "node0", "node0", "node1")
    assert name_nodes(["h", "g"], [None, None], None) == ("h", "g")


@given(st.lists(st.sampled_from([None, "a", "b"]), min_size=1, max_size=8), st.none() | st.integers(1, 4))
def test_names_on_some_ranks_only_is_a_mismatch_that_names_the_others(given_names, ranks_per_node):
    found = ["h"] * len(given_names)
    missing = [rank for rank, name in enumerate(given_names) if name is None]
    if 0 < len(missing) < len(given_names):
        with pytest.raises(ConfigMismatch) as caught:
            name_nodes(found, given_names, ranks_per_node)
        listed = str(caught.value).partition("on rank ")[2].partition(":")[0]
        ranges = [[int(r) for r in part.split("-")] for part in listed.split(", ")]
        assert [r for part in ranges for r in range(part[0], part[-1] + 1)] == missing
        assert "HIERCOMM_NODE" in str(caught.value)
    else:
        assert len(name_nodes(found, given_names, ranks_per_node)) == len(found)
