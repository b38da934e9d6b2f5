"""Which GPU a rank gets, and when ranks would share one, without a GPU: counts and identities are arguments."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hiercomm import devices
from hiercomm.devices import Visible, choose, crowding, sharing
from hiercomm.topology import discover


def test_local_rank_counts_round_the_visible_gpus():
    assert choose(3, 1) == torch.device("cuda:0"), "--gpus-per-task=1: each rank sees one"
    assert [choose(rank, 4).index for rank in range(6)] == [0, 1, 2, 3, 0, 1]
    assert choose(3, 0) == torch.device("cpu")


def crowded(nodes: str, *visible: Visible) -> str | None:
    return crowding(discover(nodes, 0), visible)


ALL_OF_FOUR = Visible(4, None)


def test_forty_ranks_on_four_gpus():
    sentence = crowded("a" * 4 + "b" * 40, *[ALL_OF_FOUR] * 44)
    assert sentence is not None
    assert "node b has 40 ranks but 4 visible GPUs" in sentence
    assert "start 4 a node" in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize(
    ("nodes", "visible"),
    {
        "one rank a GPU": ("aaaabb", [ALL_OF_FOUR] * 6),
        "no GPU": ("aaaa", [Visible(0, None)] * 4),
        "GPUs hidden": ("aaaa", [Visible(0, "")] * 4),
        "--gpus-per-task=1": ("aaaa", [Visible(1, str(number)) for number in range(4)]),
        "--gpus-per-task=1 with cgroups": ("aaaa", [Visible(1, "0")] * 4),
        "--gpus-per-task=2": ("aaa", [Visible(2, "0,1"), Visible(2, "2,3"), Visible(2, "4,5")]),
        "a rank that sees none": ("aa", [Visible(0, ""), Visible(1, "0")]),
    }.values(),
)
def test_no_false_alarm(nodes, visible):
    assert crowded(nodes, *visible) is None


@pytest.mark.parametrize(
    ("nodes", "visible", "numbers"),
    {
        "a workstation": ("aa", [Visible(1, None)] * 2, "2 ranks but 1 visible GPU,"),
        "--gpus-per-node=2": ("aaaa", [Visible(2, "0,1")] * 4, "4 ranks but 2 visible GPUs,"),
        "the second node only": ("abb", [Visible(1, None)] * 3, "node b has 2 ranks but 1 visible GPU,"),
    }.values(),
)
def test_crowded(nodes, visible, numbers):
    assert numbers in str(crowded(nodes, *visible))


def test_two_ranks_on_one_gpu():
    assert sharing(["x", "y", "z"]) is None
    assert sharing(["x"]) is None
    sentence = sharing(["x", "y", "x", "x"])
    assert sentence is not None
    assert sentence.startswith("ranks 0, 2-3 are on one GPU (x): ")
    assert "hvd.device()" in sentence
    assert "and so it is with 1 more" in str(sharing(["x", "y", "x", "y"]))


@given(st.lists(st.sampled_from("xyz"), min_size=1))
def test_a_warning_exactly_where_an_identity_comes_twice(identities):
    assert (sharing(identities) is None) == (len(set(identities)) == len(identities))


def test_rank_0_says_it_once(capsys):
    for rank in (1, 0, 0):
        topology = discover("aa", rank)
        devices.warn_of_crowding(topology, lambda mine, name: [Visible(1, None)] * 2)
    assert capsys.readouterr().err.count("2 ranks but 1 visible GPU") == 1
    devices.warn_of_crowding(discover("a", 0), lambda mine, name: pytest.fail("one rank asks nobody"))


def test_identities_are_of_the_ranks_own_device(monkeypatch, capsys):
    class Properties:
        def __init__(self, device: torch.device) -> None:
            self.uuid = f"uuid-{device.index}"

    monkeypatch.setattr(torch.cuda, "get_device_properties", Properties)
    devices.warn_of_sharing(torch.device("cuda", 2), 0, lambda mine, name: [mine, "uuid-2"])
    assert "ranks 0-1 are on one GPU (uuid-2)" in capsys.readouterr().err
