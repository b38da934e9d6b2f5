"""Checkpoints of one world in another: what is left out is kept, element by element. Ranks are threads."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from hiercomm.bucket import Bucket, Spec, layout
from hiercomm.coded import CompressorCoding
from hiercomm.comm.base import LocalBuffer, bounds
from hiercomm.comm.loopback import Loopback
from hiercomm.compress import FP8, Compressor, ErrorFeedback, Int4, Int8, PowerSGD, RandomK, Sign, Site, Sites, TopK
from hiercomm.compress.merge import merge
from hiercomm.errors import ConfigError
from hiercomm.exchange import Coding
from hiercomm.factored import FactoredCoding
from hiercomm.progress import drive
from hiercomm.torch.checkpoint import merge_optimizer_states

World = list[int]  # ranks of each node
CHOICES: list[ErrorFeedback] = [
    ErrorFeedback(Int8()), ErrorFeedback(Int4("stochastic")), ErrorFeedback(FP8()), ErrorFeedback(Sign()),
    ErrorFeedback(TopK(0.05)), ErrorFeedback(RandomK(0.05)),
]  # fmt: skip
SHAPES = [(32, 20), (16,), (4, 4, 3), (1, 48)]  # without gaps
SPECS = [Spec.of(torch.empty(shape)) for shape in SHAPES]
WHOLE = layout(SPECS)[1]
worlds = st.lists(st.integers(1, 3), min_size=2, max_size=4)


def nodes_of(world: World) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(range(sum(world[:i]), sum(world[: i + 1]))) for i in range(len(world)))


class Ranks:
    """A world with one bucket, and what every rank remembers of it."""

    def __init__(self, choice: Any, world: World, numel: int) -> None:
        self.nodes, self.numel, self.choice = nodes_of(world), numel, choice
        size = sum(world)
        if isinstance(choice, PowerSGD):
            self.buckets = [Bucket(0, [0], SPECS, LocalBuffer(torch.zeros(numel)), "sum", 1) for _ in range(size)]
            self.codings: list[Any] = [FactoredCoding(choice, bucket, r) for r, bucket in enumerate(self.buckets)]
        else:
            self.codings = [CompressorCoding(choice, 0, rank) for rank in range(size)]
        self.uniform = len(set(world)) == 1

    def step(self, given: list[Tensor]) -> Tensor:
        """One exchange of what the nodes have; what all of them have afterwards."""
        local = len(self.nodes[0]) if self.uniform else 1
        whole = isinstance(self.choice, PowerSGD)
        found = [torch.zeros(self.numel) for _ in self.nodes]
        results: list[Tensor] = []
        for at in range(local):  # ranks that have the same local rank cross together
            low, high = (0, self.numel) if whole else bounds(self.numel, local, at)
            group = Loopback(len(self.nodes))

            def body(node: int, at: int = at, low: int = low, high: int = high, group: Loopback = group) -> Tensor:
                rank = self.nodes[node][at]
                coding: Coding = self.codings[rank]
                part = given[node][low:high].clone()
                if whole:
                    part = self.buckets[rank].flat
                    part.copy_(given[node])
                chunks = list(coding.chunks(group.communicator(node), part, low, 1))
                coding.sites.begin()
                for chunk in chunks:
                    drive(chunk.task(1))
                return part.clone()

            for node, part in enumerate(group.run(body)):
                found[node][low:high] = part
            results += [f.clone() for f in found] if whole else []
        for node in self.nodes:
            for rank in node[local:]:
                self.codings[rank].sites.begin()  # it does not cross
        assert all(torch.equal(found[0], other) for other in [*found, *results])
        return found[0]

    def saved(self) -> list[dict[str, Any]]:
        """What Distribution.state_dict() gives on each rank."""
        return [
            {
                "rank": rank, "nodes": self.nodes,
                "parts": [{0: (coding.describe(), coding.keeps, (self.numel, torch.float32))}],
                "codings": [{0: coding.sites.state_dict()}],
            }
            for rank, coding in enumerate(self.codings)
        ]  # fmt: skip

    def load(self, merged: dict[str, Any]) -> None:
        for coding in self.codings:
            coding.sites.load_state_dict(merged["codings"][0][0], torch.device("cpu"))

    def left_out(self) -> Tensor:
        """What is yet to come, of each element."""
        found = torch.zeros(self.numel, dtype=torch.float64)
        crossing = [node[0] for node in self.nodes] if isinstance(self.choice, PowerSGD) else range(len(self.codings))
        for rank in crossing:
            for place, state in self.codings[rank].sites.state_dict()["sites"].items():
                begin = layout(SPECS)[0][place] if isinstance(self.choice, PowerSGD) else place
                residual = state["residual"].reshape(-1)
                found[begin : begin + residual.numel()] += residual
        return found


def gradients(world: World, numel: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=generator) for _ in world]


def saved_and_loaded(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def inherited(merged: dict[str, Any], choice: Any, numel: int) -> Tensor:
    whole = merged["codings"][0][0]["inherited"]
    if not isinstance(choice, PowerSGD):
        return whole[0]["residual"]
    found = torch.zeros(numel)
    for place, state in whole.items():
        begin = layout(SPECS)[0][place]
        found[begin : begin + state["residual"].numel()] = state["residual"].reshape(-1)
    return found


@given(
    old=worlds, new=worlds, numel=st.integers(1, 5000), choice=st.sampled_from([*CHOICES, PowerSGD(2)]), data=st.data()
)
@example(old=[2, 2], new=[1, 2, 3], numel=200_000, choice=ErrorFeedback(Int8()), data=None)  # in several chunks
@example(old=[1, 1, 1], new=[2, 2], numel=700_000, choice=ErrorFeedback(TopK(0.01)), data=None)
@example(old=[3, 3], new=[1, 2], numel=1, choice=PowerSGD(3), data=None)
def test_what_is_left_out_is_the_same_in_any_other_world(
    old: World, new: World, numel: int, choice: Any, data: Any
) -> None:
    numel = WHOLE if isinstance(choice, PowerSGD) else numel
    before = Ranks(choice, old, numel)
    for step in range(2):
        before.step(gradients(old, numel, step))
    states = before.saved()
    if data is not None:
        states = data.draw(st.permutations(states))
    merged = saved_and_loaded(merge(states))
    left = before.left_out()
    assert left.any() or numel < 10
    assert torch.equal(inherited(merged, choice, numel), left.float())

    after = Ranks(choice, new, numel)
    after.load(merged)
    # Before an exchange it can be saved again, by any one rank, or merged again.
    for again in (after.saved()[-1], merge(after.saved())):
        assert torch.equal(inherited(again, choice, numel), left.float())
    assert all(saved["codings"][0][0]["number"] == 2 for saved in after.saved())

    fresh = gradients(new, numel, 7)
    arrived = after.step(fresh)
    wanted = left + sum(fresh).double()
    largest = float(wanted.abs().max()) + max(float(each.abs().max()) for each in fresh)
    assert float((arrived + after.left_out() - wanted).abs().max()) <= 2.0**-20 * len(new) * largest
    assert all(coding.sites.inherited is None for coding in after.codings)
    assert all(saved["codings"][0][0]["number"] == 3 for saved in after.saved())


@pytest.mark.parametrize("choice", [*CHOICES, PowerSGD(2)], ids=repr)
def test_each_node_begins_with_its_part(choice: Any) -> None:
    """Nothing is lost before the first exchange has compressed it: zeros in, what is left out comes out, by and by."""
    numel = WHOLE if isinstance(choice, PowerSGD) else 3000
    before = Ranks(choice, [1, 1, 1], numel)
    before.step(gradients([1, 1, 1], numel, 0))
    after = Ranks(choice, [2, 2], numel)
    after.load(merge(before.saved()))
    total = torch.zeros(numel, dtype=torch.float64)
    for _ in range(150):
        total += after.step([torch.zeros(numel)] * 2)
    left = before.left_out()
    assert float((total + after.left_out() - left).abs().max()) <= 1e-5 * float(left.abs().max())
    # What is coarse takes its time, but it comes.
    assert float(after.left_out().norm()) < 0.5 * float(left.norm())


def test_forgetting_and_loading_without_anything() -> None:
    sites = Sites(0, 0)
    sites.load_state_dict(
        {"number": 4, "sites": {}, "inherited": {0: {"residual": torch.ones(3)}}}, torch.device("cpu")
    )
    assert sites.state_dict()["inherited"][0]["residual"].tolist() == [1.0, 1.0, 1.0]
    sites.forget()
    assert sites.state_dict() == {"number": 4, "sites": {}}
    sites.load_state_dict({"number": 5, "sites": {}}, torch.device("cpu"))  # as saved by earlier versions
    assert sites.state_dict() == {"number": 5, "sites": {}}


class Counting(Compressor):
    """A user's own, with something to remember."""

    recompressible = True

    def nbytes(self, numel: int) -> int:
        return 2 * numel

    def compress(self, x: Tensor, payload: Tensor, site: Site) -> None:
        site.state["calls"] = site.state.get("calls", torch.zeros(1)) + 1
        payload.view(torch.bfloat16).copy_(x)

    def decompress(self, payload: Tensor, out: Tensor, accumulate: bool) -> None:
        numbers = payload.view(torch.bfloat16).float()
        out.copy_(out + numbers if accumulate else numbers)


@pytest.mark.parametrize("choice", [Counting(), ErrorFeedback(Counting())])
def test_what_a_users_compressor_keeps_is_named(choice: Any) -> None:
    ranks = Ranks(choice, [2, 2], 100)
    ranks.step(gradients([2, 2], 100, 0))
    merged = merge(ranks.saved())
    assert merged["dropped"] == ["calls"]
    assert [list(state) for state in merged["codings"][0][0]["inherited"].values()] == [["residual"]] * isinstance(
        choice, ErrorFeedback
    )
    after = Ranks(choice, [1, 2], 100)
    after.load(merged)
    after.step(gradients([1, 2], 100, 0))


# ---- whole optimizer states ------------------------------------------------------------------------------------


def states(choice: Any = CHOICES[0], world: World = [2, 1]) -> list[dict[str, Any]]:  # noqa: B006 (not changed)
    ranks = Ranks(choice, world, 100)
    ranks.step(gradients(world, 100, 0))
    return [
        {"state": {0: {"momentum": torch.tensor(rank)}}, "param_groups": [{"lr": rank}], "hiercomm": saved}
        for rank, saved in enumerate(ranks.saved())
    ]


def test_all_else_is_rank_0s() -> None:
    for saved in (states(), states()[::-1], iter(states()), dict(enumerate(states())).values()):
        found = merge_optimizer_states(saved)
        assert (found["state"][0]["momentum"], found["param_groups"]) == (0, [{"lr": 0}])
        assert set(found["hiercomm"]) == {"parts", "codings", "dropped"}
    plain = [{k: v for k, v in state.items() if k != "hiercomm"} for state in states()]
    assert merge_optimizer_states(plain) == plain[0]


def test_states_that_make_no_job() -> None:
    good = states()

    def changed(rank: int, **entry: Any) -> list[dict[str, Any]]:
        found = copy.deepcopy(good)
        found[rank]["hiercomm"].update(entry)
        return found

    late = copy.deepcopy(good)
    late[2]["hiercomm"]["codings"][0][0]["number"] = 9
    damaged = copy.deepcopy(good)
    damaged[2]["hiercomm"]["codings"][0][0]["sites"][64] = {"residual": torch.zeros(64)}
    fresh = Ranks(CHOICES[0], [2, 1], 100)
    fresh.load(merge([state["hiercomm"] for state in good]))
    mixed = copy.deepcopy(good)
    mixed[1]["hiercomm"] = fresh.saved()[1]
    for bad, complaint in (
        ([], "was given no states"),
        (good[0], "takes the states of all ranks: this is one"),
        ([good[0], "x"], "state 1 of merge_optimizer_states is not what optimizer.state_dict"),
        (good[:1], "the state of rank 1-2 is missing: one of each rank is needed"),
        ([good[0], good[2]], "the state of rank 1 is missing"),
        ([*good, good[1]], "two of the states are of rank 1: one of each rank is needed"),
        (changed(1, nodes=((0,), (1, 2))), r"ranks 0 and 1 are of different jobs: the ranks .* 0-1 \| 2 and 0 \| 1-2"),
        (changed(2, parts=[]), "the states of ranks 0 and 2 differ in compression, model or bucket size"),
        (late, "ranks 0 and 2 were not saved at the same step: after 1 and 9 exchanges"),
        (damaged, "what rank 2 has left out does not fit into its bucket: the state is damaged"),
        (mixed, "some of the states go back to a merged one, and some do not"),
        ([merge_optimizer_states(good)], "one of the states is a merged one: it can be loaded as it is"),
        ([*good[:2], {"state": {}, "param_groups": []}], "state 2 of merge_optimizer_states has nothing of compr"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            merge_optimizer_states(bad)  # type: ignore[arg-type]
