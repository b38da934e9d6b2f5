"""Compressed exchanges between nodes, in training: replicas stay equal, it works, a resumed run is the same run."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from training import assert_identical, loss_of, make_model, part, train, weights, wrap

import hiercomm
import hiercomm.torch as hvd
from hiercomm.errors import ConfigError, ConfigMismatch, UsageError

CHOICES: dict[str, Any] = {
    "int8": hvd.Compression.int8,
    "int8 alone": hiercomm.Int8(),
    "int4 stochastic": hiercomm.ErrorFeedback(hiercomm.Int4("stochastic")),
    "fp8": hvd.Compression.fp8,
    "bf16": hiercomm.BF16(),
    "sign": hvd.Compression.sign,
    "topk": hvd.Compression.topk(0.05),
    "randomk": hvd.Compression.randomk(0.1),
    "powersgd": hvd.Compression.powersgd(2),
    "by name": "int4",
    "per layer": hiercomm.PerLayer(
        hvd.Compression.int8, min_numel=10, rules={"0.*": None, "6.*": hvd.Compression.sign}
    ),
}


def make(compression: Any) -> tuple[torch.nn.Module, Any]:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, wrap(model, optimizer, compression=compression)


@pytest.mark.parametrize("name", list(CHOICES))
def test_training(name: str) -> None:
    """Losses come down about as far as without compression."""
    model, optimizer = make(CHOICES[name])
    plain, reference = make(hvd.Compression.none)
    begin = loss_of(model, part(0)).item()
    train(model, optimizer, range(30), lambda step: part(step % 3))
    train(plain, reference, range(30), lambda step: part(step % 3))
    assert_identical(model)
    end, wanted = loss_of(model, part(0)).item(), loss_of(plain, part(0)).item()
    assert end < begin - 0.5 * (begin - wanted), (begin, end, wanted)


@pytest.mark.parametrize("name", list(CHOICES))
def test_saved_and_loaded_in_the_middle_is_the_same_run(name: str) -> None:
    model, optimizer = make(CHOICES[name])
    train(model, optimizer, range(10), part)
    half, first = make(CHOICES[name])
    train(half, first, range(5), part)
    saved = copy.deepcopy((half.state_dict(), first.state_dict()))
    again, second = make(CHOICES[name])
    again.load_state_dict(saved[0])
    second.load_state_dict(saved[1])
    train(again, second, range(5, 10), part)
    assert torch.equal(weights(again), weights(model))


def test_a_plain_optimizer_reads_the_state_and_broadcast_keeps_each_ranks_residuals() -> None:
    model, optimizer = make(hvd.Compression.int8)
    train(model, optimizer, range(2), part)
    state = optimizer.state_dict()
    plain = torch.optim.SGD(make_model().parameters(), lr=0.1, momentum=0.9)
    plain.load_state_dict(state)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    train(model, optimizer, range(2, 4), part)
    assert_identical(model)


@pytest.mark.parametrize("compression", [hvd.Compression.int8, hvd.Compression.randomk(0.1)], ids=repr)
@pytest.mark.parametrize("last", [False, True])
def test_one_ranks_checkpoint_on_all_ranks(last: bool, compression: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """Residuals of others are dropped with a word, said once; what must be the same on all ranks is."""
    model, optimizer = make(compression)
    train(model, optimizer, range(2), part)
    root = hvd.size() - 1 if last else 0
    fresh, second = make(compression)
    second.load_state_dict(hvd.broadcast_object(optimizer.state_dict(), root_rank=root))
    said = "saved with another rank, and is dropped: to resume exactly" in capfd.readouterr().err
    compressed = hvd.broadcast_object("hiercomm" in optimizer.state_dict(), root_rank=0)
    assert sum(hvd.allgather_object(said)) == (compressed and hvd.size() > 1)
    train(fresh, second, range(2, 4), part)
    assert_identical(fresh)
    if compressed:
        numbers = [c["number"] for p in second.state_dict()["hiercomm"]["codings"] for c in p.values()]
        assert hvd.allgather_object(numbers) == [[4] * len(numbers)] * hvd.size()


def left_out(optimizer: Any) -> dict[tuple[int, int, int], Tensor]:
    """What all ranks have yet to bring: of each bucket (place -1), or of each matrix."""
    total: dict[tuple[int, int, int], Tensor] = {}
    own = optimizer.state_dict().get("hiercomm", {"codings": [], "nodes": ()})
    for rank, codings in enumerate(hvd.allgather_object(own["codings"])):
        for p, buckets in enumerate(codings):
            for bucket, coding in buckets.items():
                _, keeps, (numel, _) = own["parts"][p][bucket]
                for place, state in coding["sites"].items():
                    residual = state.get("residual")
                    if keeps == "elements":
                        found = total.setdefault((p, bucket, -1), torch.zeros(numel, dtype=torch.float64))
                        found[place : place + residual.numel()] += residual
                    elif keeps == "matrices" and any(rank == node[0] for node in own["nodes"]):
                        total.setdefault((p, bucket, place), torch.zeros_like(residual).double()).add_(residual)
    return total


@pytest.mark.parametrize("name", list(CHOICES))
def test_merged_and_loaded_on_all_ranks_keeps_what_is_left_out(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Where gradients are zeros it comes, and nothing else. Until then one rank's checkpoint has it all."""
    model, optimizer = make(CHOICES[name])
    train(model, optimizer, range(3), part)
    before = left_out(optimizer)
    fresh, second = make(CHOICES[name])
    second.load_state_dict(hvd.merge_optimizer_states(hvd.allgather_object(optimizer.state_dict())[::-1]))
    again = hvd.broadcast_object(second.state_dict(), root_rank=hvd.size() - 1)
    merged = hvd.merge_optimizer_states(hvd.allgather_object(second.state_dict()))
    assert str(merged.get("hiercomm", {}).get("codings")) == str(again.get("hiercomm", {}).get("codings"))
    second.load_state_dict(again)
    assert bool(before) == (name not in ("int8 alone", "bf16") and len(second._hiercomm._runtime.topology.nodes) > 1)
    (0.0 * torch.stack([p.sum() for p in fresh.parameters()]).sum()).backward()
    second.synchronize()
    arrived = {(i, b.index): b for i, p in enumerate(second._hiercomm._parts) for b in p.reducer._buckets}
    second.step()
    for (i, bucket, place), rest in left_out(second).items():
        came = arrived[i, bucket].flat if place < 0 else arrived[i, bucket].views[place].reshape(rest.shape)
        wanted = before.pop((i, bucket, place))
        assert wanted.any()
        assert float((came + rest - wanted).abs().max()) <= 1e-6 * float(wanted.abs().max())
    assert not before
    train(fresh, second, range(3, 5), part)
    assert_identical(fresh)
    assert "dropped" not in capfd.readouterr().err


@pytest.mark.parametrize("own", [False, True])
def test_a_checkpoint_of_another_placement_is_dropped_with_a_word(own: bool, capfd: pytest.CaptureFixture[str]) -> None:
    made = make(hvd.Compression.int8)
    train(*made, range(2), part)
    state = made[1].state_dict()
    if not own:
        state = hvd.broadcast_object(state, root_rank=0)
    if "hiercomm" in state:
        state["hiercomm"]["nodes"] = ((0, 1, 2, 3, 4), (5,))
    _, second = make(hvd.Compression.int8)
    second.load_state_dict(state)
    said = "number or placement of ranks" in (err := capfd.readouterr().err) and "hvd.merge_optimizer_states()" in err
    assert sum(hvd.allgather_object(said)) == ("hiercomm" in state)
    assert not left_out(second)


def test_a_merged_checkpoint_says_what_it_cannot_keep(capfd: pytest.CaptureFixture[str]) -> None:
    _, optimizer = made = make(Doubled(4.0))
    train(*made, range(2), part)
    states = hvd.allgather_object(optimizer.state_dict())
    several = "hiercomm" in states[0]
    for compression, said in (
        (Doubled(4.0), "'steps', which compressors kept beside"),
        (hvd.Compression.int8, "another compression, model or bucket size, and is dropped"),
    ):
        _, second = make(compression)
        second.load_state_dict(hvd.merge_optimizer_states(states))
        err = capfd.readouterr().err
        assert hvd.allgather_object(said in err) == [several and rank == 0 for rank in range(hvd.size())]
    if several:
        with pytest.raises(ConfigError, match="the state of rank 0 is missing"):
            hvd.merge_optimizer_states(states[1:])


def test_a_checkpoint_without_residuals_begins_without_any() -> None:
    model, optimizer = make(hvd.Compression.sign)
    fresh = copy.deepcopy({k: v for k, v in optimizer.state_dict().items() if k != "hiercomm"})
    begin = {name: t.clone() for name, t in model.state_dict().items()}
    train(model, optimizer, range(4), part)
    expected = weights(model).clone()
    model.load_state_dict(begin)
    optimizer.load_state_dict(fresh)
    train(model, optimizer, range(4), part)
    assert torch.equal(weights(model), expected)


def test_no_state_while_gradients_are_under_way() -> None:
    model, optimizer = make(hvd.Compression.int8)
    loss_of(model, part(0)).backward()
    if any(p.codings for p in optimizer._hiercomm._parts):
        with pytest.raises(UsageError, match=r"state_dict\(\) between backward\(\) and step\(\)"):
            optimizer.state_dict()
    optimizer.step()
    optimizer.state_dict()


def test_users_own_tensors_stay_exact() -> None:
    make(hvd.Compression.sign)
    x = torch.randn(3000, generator=torch.Generator().manual_seed(hvd.rank()))
    total = hvd.allreduce(x, op=hvd.Sum)
    expected = sum(torch.randn(3000, generator=torch.Generator().manual_seed(r)) for r in range(hvd.size()))
    torch.testing.assert_close(total, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_of_halves(dtype: torch.dtype) -> None:
    model = torch.nn.Linear(64, 32).to(dtype)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.01), compression=hvd.Compression.int8)
    for step in range(3):
        torch.manual_seed(100 * step + hvd.rank())
        model(torch.randn(8, 64, dtype=dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(set(hvd.allgather_object(weights(model).view(torch.uint8).numpy().tobytes()))) == 1


class Doubled(hiercomm.Compressor):
    """A user's own: a parameter, and a number kept for each tensor place."""

    recompressible = True

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def nbytes(self, numel: int) -> int:
        return 2 * numel

    def compress(self, x: Tensor, payload: Tensor, site: Any) -> None:
        site.state["steps"] = site.state.get("steps", torch.zeros(1)) + 1
        payload.view(torch.bfloat16).copy_(x * self.scale)

    def decompress(self, payload: Tensor, out: Tensor, accumulate: bool) -> None:
        numbers = payload.view(torch.bfloat16) / self.scale
        out.copy_(numbers + out if accumulate else numbers)


def test_a_users_own_compressor() -> None:
    model, optimizer = make(Doubled(4.0))
    plain, reference = make(hvd.Compression.none)
    train(model, optimizer, range(5), part)
    train(plain, reference, range(5), part)
    assert_identical(model)
    assert torch.allclose(weights(model), weights(plain), atol=2e-2)


@pytest.mark.parametrize("max_error", [1e-6, 0.05, 1.0])
def test_auto(max_error: float, capfd: pytest.CaptureFixture[str]) -> None:
    """All ranks take the same, also for parameters that come later; rank 0 says what is expected, and what came."""
    model, optimizer = make(hvd.Compression.auto(min_numel=64, max_error=max_error))
    train(model, optimizer, range(11), part)
    more = torch.nn.Linear(64, 32)
    hvd.broadcast_parameters(more.state_dict(), root_rank=0)
    optimizer.add_param_group({"params": list(more.parameters())})
    train(model, optimizer, range(11, 13), part)
    assert_identical(model)
    chosen = {index: coding.describe() for p in optimizer._hiercomm._parts for index, coding in p.codings.items()}
    assert len(set(hvd.allgather_object(str(chosen)))) == 1
    crosses = hvd.size() > 1 and hvd.size() != hvd.local_size()
    said = [line for line in capfd.readouterr().err.splitlines() if "compression=auto: " in line]
    assert len(said) == (2 if crosses and hvd.rank() == 0 else 0), said
    if said:
        assert "MB of gradients should take" in said[0]
        assert "exchanges between the nodes took" in said[1]
        assert said[0].endswith("none it is") == (not chosen)
        assert ("ms with" in said[0]) == (max_error > 1e-6)
    if max_error == 1e-6:
        assert not chosen


def test_auto_waits_for_parameters_that_can_be_compressed() -> None:
    first, later = torch.nn.Parameter(torch.zeros(7)), torch.nn.Linear(64, 32)
    hvd.broadcast_parameters(later.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD([first], lr=0.01)
    optimizer = hvd.DistributedOptimizer(optimizer, compression=hvd.Compression.auto())
    assert optimizer._hiercomm.options.forecast is None
    optimizer.add_param_group({"params": list(later.parameters())})
    (first.sum() + later(torch.ones(1, 64)).sum()).backward()
    optimizer.step()
    crosses = hvd.size() > 1 and hvd.size() != hvd.local_size()
    assert (optimizer._hiercomm.options.forecast is not None) == crosses


def test_bad_arguments() -> None:
    for compression, complaint in (
        (hiercomm.Sign(), "without error feedback"), ("int9", "unknown compression 'int9'"), (3, "compression=3 "),
        (hiercomm.Int8, "Int8 is a class: an object of it is needed"),
        (hiercomm.PerLayer(None, rules={"embedding.*": None}), "'embedding.*' of PerLayer matches no"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=complaint):
            make(compression)
    model = make_model()
    with pytest.raises(ConfigError, match="op=Max cannot be compressed"):
        wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), compression=hvd.Compression.int8, op=hvd.Max)
    with pytest.raises(ConfigError, match="is for gradients in DistributedOptimizer"):
        hvd.allreduce(torch.ones(3), compression=hvd.Compression.int8)
    if hvd.size() > 1:
        with pytest.raises(ConfigMismatch, match="compression"):
            make(hvd.Compression.int8 if hvd.rank() else hvd.Compression.int4)
