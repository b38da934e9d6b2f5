"""Parameters and optimizer state from one rank to all, and the documented way to resume."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from training import OPTIMIZERS, assert_identical, loss_of, make_model, part, train, weights, wrap

import hiercomm.torch as hvd
from hiercomm.errors import ConfigMismatch

KINDS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "tensor_lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), foreach=False),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
    "sparse_adam": lambda p: torch.optim.SparseAdam(p, lr=0.1),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
}


def make(kind: str, history: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and optimizer, fresh or after two steps that differ between the ranks."""
    torch.manual_seed(hvd.rank())
    if kind == "sparse_adam":
        model: nn.Module = nn.Sequential(nn.Embedding(6, 3, sparse=True))
    else:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    if history == "frozen":
        next(iter(model.parameters())).requires_grad_(kind == "sparse_adam")
    optimizer = KINDS[kind](list(model.parameters()))
    optimizer.param_groups[0]["lr"] *= 1.0 + hvd.rank()
    if history != "fresh":

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            inputs = torch.tensor([1, 2, 2]) if kind == "sparse_adam" else torch.randn(5, 3)
            loss = model(inputs).square().sum()
            loss.backward()
            return loss  # type: ignore[no-any-return]

        # The root alone has state in one case: Horovod hangs there.
        for _ in range(2 if history != "root_only" or hvd.rank() == 0 else 0):
            optimizer.step(closure)
    return model, optimizer


def plain(item: Any) -> Any:
    """Something comparable: tensors as bytes with their dtype, everything with its type."""
    if isinstance(item, torch.Tensor):
        return ("tensor", str(item.dtype), tuple(item.shape), item.detach().contiguous().numpy().tobytes())
    if isinstance(item, dict):
        return {str(key): plain(value) for key, value in item.items()}
    if isinstance(item, (list, tuple)):
        return [plain(value) for value in item]
    return (type(item).__name__, repr(item))


@pytest.mark.parametrize("history", ["fresh", "two_steps", "frozen", "root_only"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_broadcast_optimizer_state(kind: str, history: str) -> None:
    root = 0 if history == "root_only" else hvd.size() - 1
    model, optimizer = make(kind, history)
    before = plain(optimizer.state_dict())
    parameters = weights(model).clone()
    gradients = [None if p.grad is None else plain(p.grad.to_dense()) for p in model.parameters()]
    hvd.broadcast_optimizer_state(optimizer, root)
    after = plain(optimizer.state_dict())
    assert hvd.allgather_object(after) == [hvd.allgather_object(before)[root]] * hvd.size()
    if hvd.rank() == root:
        assert after == before, "the root's optimizer must not change"
    assert torch.equal(weights(model), parameters), "parameters must not move"
    assert [None if p.grad is None else plain(p.grad.to_dense()) for p in model.parameters()] == gradients


def test_broadcast_parameters_takes_what_torch_gives() -> None:
    model = make_model(seed=hvd.rank())
    expected = make_model(seed=0)
    for form in (lambda: model.state_dict(), lambda: model.named_parameters(), lambda: list(model.parameters())):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(hvd.rank())
        hvd.broadcast_parameters(form(), root_rank=0)
        assert torch.equal(weights(model), weights(expected))
    buffers = nn.BatchNorm1d(3)
    buffers.num_batches_tracked.add_(hvd.rank() + 5)
    hvd.broadcast_parameters(buffers.state_dict(), root_rank=0)
    assert int(buffers.num_batches_tracked) == 5


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_resume_equals_the_uninterrupted_run_bit_for_bit(kind: str) -> None:
    model = make_model()
    optimizer = wrap(model, OPTIMIZERS[kind](model.parameters()))
    train(model, optimizer, range(5), part)
    saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    train(model, optimizer, range(5, 10), part)

    resumed = make_model(seed=100 + hvd.rank())
    again = wrap(resumed, OPTIMIZERS[kind](resumed.parameters()))
    if hvd.rank() == 0:
        resumed.load_state_dict(saved["model"])
        again.load_state_dict(saved["optimizer"])
    hvd.broadcast_parameters(resumed.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(again, root_rank=0)
    train(resumed, again, range(5, 10), part)
    assert torch.equal(weights(resumed), weights(model))
    assert_identical(resumed)


def test_different_optimizers_are_told_apart() -> None:
    if hvd.size() == 1:
        pytest.skip("one rank cannot differ")
    sizes = 3 if hvd.rank() == 0 else 4
    optimizer = torch.optim.SGD(nn.Linear(sizes, 2).parameters(), lr=0.1)
    with pytest.raises(ConfigMismatch, match="the optimizer differs between ranks in parameter shapes"):
        hvd.broadcast_optimizer_state(optimizer, 0)


def test_loading_a_state_into_the_wrapped_optimizer() -> None:
    model = make_model()
    optimizer = wrap(model, OPTIMIZERS["adam"](model.parameters()))
    train(model, optimizer, range(3), part)
    state = copy.deepcopy(optimizer.state_dict())
    loss_of(model, part(3)).backward()
    optimizer.load_state_dict(state)
    optimizer.zero_grad()
    train(model, optimizer, range(4, 6), part)
    assert_identical(model)
