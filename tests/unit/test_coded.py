"""The compressed exchange between nodes: the same bits everywhere, nothing lost, errors named. Ranks are threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hiercomm.coded import CompressorCoding
from hiercomm.comm.base import Communicator
from hiercomm.comm.loopback import Loopback
from hiercomm.compress import BF16, FP8, Compressor, ErrorFeedback, Int4, Int8, RandomK, Sign, Site, TopK
from hiercomm.errors import CommError, PeerLost
from hiercomm.progress import drive

CHOICES: list[Compressor | ErrorFeedback] = [
    BF16(), Int8(), ErrorFeedback(Int8()), ErrorFeedback(Int4("stochastic")), ErrorFeedback(FP8()),
    ErrorFeedback(Sign()), ErrorFeedback(TopK(0.05)), ErrorFeedback(RandomK(0.05)),
]  # fmt: skip


def values(rank: int, step: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 * step + rank)).to(dtype)


def exchange(coding: CompressorCoding, comm: Communicator, part: Tensor, begin: int, divisor: int) -> None:
    chunks = list(coding.chunks(comm, part, begin, divisor))
    coding.sites.begin()  # as HierarchicalAllReduce.start
    for chunk in chunks:
        drive(chunk.task(5))


@pytest.mark.parametrize("choice", CHOICES, ids=repr)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("numel", [1, 15, 16, 513, 9000])
def test_replicas_hold_the_same_bits_and_nothing_is_lost(choice, ranks, numel):
    """What arrived in all steps and what is kept back on all ranks make up what was given."""
    world, steps = Loopback(ranks, max_delay_s=0.0005, seed=numel), 4

    def body(rank: int) -> Any:
        coding, found = CompressorCoding(choice, 0, rank), []
        for step in range(steps):
            chunk = values(rank, step, numel)
            exchange(coding, world.communicator(rank), chunk, 0, 1)
            found.append(chunk)
        return found, coding.sites.state_dict()

    results = world.run(body)
    for replicas in zip(*(found for found, _ in results), strict=True):
        assert all(torch.equal(replicas[0], replica) for replica in replicas)
    if not isinstance(choice, ErrorFeedback):
        return
    kept = torch.zeros(numel)
    for _, state in results:
        assert state["number"] == steps
        for begin, saved in state["sites"].items():
            residual = saved["residual"]
            kept[begin : begin + residual.numel()] += residual
    given = sum(values(rank, step, numel) for rank in range(ranks) for step in range(steps))
    torch.testing.assert_close(sum(results[0][0]) + kept, given, rtol=1e-5, atol=1e-5)
    # One residual for each number: in two phases every rank has its piece of the sum and of the others its own part.
    assert all(sum(s["residual"].numel() for s in state["sites"].values()) == numel for _, state in results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_means_and_halves(dtype):
    world = Loopback(3)

    def body(rank: int) -> Tensor:
        chunk = values(rank, 0, 3000, dtype)
        exchange(CompressorCoding(Int8(), 0, rank), world.communicator(rank), chunk, 0, 3)
        return chunk

    results = world.run(body)
    assert results[0].dtype == dtype
    assert all(torch.equal(results[0], result) for result in results)
    mean = sum(values(rank, 0, 3000, dtype).float() for rank in range(3)) / 3
    torch.testing.assert_close(results[0].float(), mean, rtol=0.02, atol=0.05)


def test_half_the_steps_saved_and_loaded_are_all_the_steps():
    world = Loopback(2)

    def body(rank: int, cut: int) -> list[Tensor]:
        found, coding = [], CompressorCoding(ErrorFeedback(Int4("stochastic")), 2, rank)
        for step in range(10):
            if step == cut:
                state = coding.sites.state_dict()
                coding = CompressorCoding(ErrorFeedback(Int4("stochastic")), 2, rank)
                coding.sites.load_state_dict(state, torch.device("cpu"))
            chunk = values(rank, step, 5000)
            exchange(coding, world.communicator(rank), chunk, 512, 2)
            found.append(chunk)
        return found

    for whole, resumed in zip(world.run(lambda r: body(r, -1)), world.run(lambda r: body(r, 5)), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))


class _Scaled(Compressor):
    """What a user may write: with a parameter, and something of its own at every place."""

    recompressible = True

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def nbytes(self, numel: int) -> int:
        return 2 * numel

    def compress(self, x: Tensor, payload: Tensor, site: Site) -> None:
        site.state["calls"] = site.state.get("calls", torch.zeros(1)) + 1
        payload.view(torch.float16).copy_(x * self.scale)

    def decompress(self, payload: Tensor, out: Tensor, accumulate: bool) -> None:
        numbers = payload.view(torch.float16).float() / self.scale
        out.copy_(out + numbers if accumulate else numbers)


@pytest.mark.parametrize("choice", [_Scaled(8.0), ErrorFeedback(_Scaled(8.0))])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_compressor_of_the_users_own(choice, ranks):
    world = Loopback(ranks)

    def body(rank: int) -> Any:
        coding = CompressorCoding(choice, 0, rank)
        for step in range(3):
            chunk = values(rank, step, 1000)
            exchange(coding, world.communicator(rank), chunk, 0, 1)
        return chunk, coding.sites.state_dict()

    (chunk, state), *others = world.run(body)
    assert all(torch.equal(chunk, other) for other, _ in others)
    torch.testing.assert_close(chunk, sum(values(rank, 2, 1000) for rank in range(ranks)), rtol=1e-2, atol=1e-2)
    assert [saved["calls"].item() for saved in state["sites"].values()] == [3.0] * (1 if ranks == 2 else 3)


def test_bytes_that_are_no_payload_are_an_error_that_names_the_sender():
    world = Loopback(2)

    def body(rank: int) -> str:
        coding = CompressorCoding(Int8() if rank == 0 else FP8(), 0, rank)
        try:
            exchange(coding, world.communicator(rank), values(rank, 0, 1000), 0, 1)
        except PeerLost:
            raise
        except CommError as error:
            return str(error)
        return "none"

    first, second = world.run(body)
    assert first == "what rank 1 of the group sent cannot be decoded: a payload of code fp8 where int8 is expected"
    assert second.startswith("what rank 0 of the group sent cannot be decoded: a payload of code int8")


@pytest.mark.parametrize("choice", CHOICES, ids=repr)
def test_pieces_are_messages_that_tcp_does_not_hold_back(choice):
    """See allreduce.PIECE_BYTES. What is cut must not depend on the link."""
    coding = CompressorCoding(choice, 0, 0)
    for nodes in (2, 3, 4, 8):
        elements = coding.chunk_elements(nodes) // (nodes if coding.in_two_phases(nodes) else 1)
        size = coding.compressor.nbytes(elements)
        assert size < 60_000 or 8_000 < size % 65_536 < 60_000, size
        assert elements % 512 == 0
