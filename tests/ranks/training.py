"""A small training job in two forms: all ranks on their parts of each batch, one process on the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import hiercomm.torch as hvd

BATCH = 24  # divisible by 1, 2, 3 and 4 ranks
Make = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-2),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-2),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
}


def make_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 16), nn.Tanh(),
        nn.Linear(16, 5),
    )  # fmt: skip


def batch(step: int) -> tuple[Tensor, Tensor]:
    """The joint batch of a step."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, 1, 8, 8, generator=generator), torch.randint(0, 5, (BATCH,), generator=generator)


def part(step: int) -> tuple[Tensor, Tensor]:
    """This rank's part of it."""
    images, labels = batch(step)
    return images[hvd.rank() :: hvd.size()], labels[hvd.rank() :: hvd.size()]


def loss_of(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(data[0]), data[1])


def train(model: nn.Module, optimizer: Any, steps: range, data: Callable[[int], tuple[Tensor, Tensor]]) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, data(step)).backward()
        optimizer.step()


def wrap(model: nn.Module, optimizer: torch.optim.Optimizer, **arguments: Any) -> Any:
    return hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **arguments)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def assert_same(model: nn.Module, reference: nn.Module, tolerance: float = 1e-6) -> None:
    """Equal to the reference to rounding (relative to the largest weight), and the same bits on all ranks."""
    mine, expected = weights(model), weights(reference)
    difference = float((mine - expected).abs().max() / expected.abs().max())
    assert difference <= tolerance, f"relative difference {difference}"
    assert_identical(model)
    if hvd.size() == 1:
        assert torch.equal(mine, expected), "one rank must equal the plain optimizer bit for bit"


def assert_identical(model: nn.Module) -> None:
    assert len(set(hvd.allgather_object(weights(model).numpy().tobytes()))) == 1, "replicas differ"
