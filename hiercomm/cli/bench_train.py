"""`hiercomm bench train`: a model whose exchange takes longer than its computation, by mode and beside the peers.

Digits of scikit-learn (1,797 images of 8x8), a perceptron of 2.2 million weights (9 MB of gradients a step). Everybody
starts from the same weights and sees the same batches. Exposed communication is what a step takes beyond the same
computation without an exchange, as a share of the step.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

import hiercomm.torch as hvd
from hiercomm import runtime
from hiercomm.cli import peers
from hiercomm.comm import mpi

Record = dict[str, Any]
_Trained = tuple[torch.nn.Module, torch.optim.Optimizer]
_Prepare = Callable[[torch.nn.Module, torch.optim.Optimizer], _Trained]
_BATCH = 32
_TURN = 5  # steps before it is the next one's turn: the machine's speed drifts


@final
class _Digits:
    """This rank's share of the training images, in the order of `batches`, and the test images."""

    def __init__(self, rank: int, size: int) -> None:
        try:
            digits = importlib.import_module("sklearn.datasets").load_digits()
        except ImportError as error:
            raise SystemExit(
                "hiercomm bench train needs scikit-learn for its data: pip install scikit-learn"
            ) from error
        images = torch.tensor(digits.data, dtype=torch.float32) / 16
        labels = torch.tensor(digits.target)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        test, train = order[:360], order[360:]
        self._images, self._labels = images[train][rank::size], labels[train][rank::size]
        self.test = images[test], labels[test]

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """For ever."""
        generator = torch.Generator().manual_seed(1)
        while True:
            for part in torch.randperm(len(self._labels), generator=generator).split(_BATCH):
                yield self._images[part], self._labels[part]


@dataclass
class _Contestant:
    """A model in training. `prepare` wraps it, and returns the model to call and the optimizer."""

    name: str
    digits: _Digits
    prepare: _Prepare
    compression: str = "none"
    seconds: list[float] = field(default_factory=list)
    link_bytes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        nn = torch.nn
        self.model: torch.nn.Module = nn.Sequential(
            nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 1024), nn.ReLU(), nn.Linear(1024, 10)
        )
        self.gradient_bytes = sum(p.nbytes for p in self.model.parameters())
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self._batches = self.digits.batches()
        self.model, self._optimizer = self.prepare(self.model, optimizer)

    def steps(self, world: mpi.MpiWorld, count: int) -> None:
        """`count` steps; the slowest rank's seconds are kept."""
        world.barrier()
        sent = _sent_bytes()
        for _ in range(count):
            begin = time.perf_counter()
            images, labels = next(self._batches)
            self._optimizer.zero_grad()
            torch.nn.functional.cross_entropy(self.model(images), labels).backward()
            self._optimizer.step()
            self.seconds.append(time.perf_counter() - begin)
        self.link_bytes.append((_sent_bytes() - sent) // count)

    def record(self, world: mpi.MpiWorld, compute_s: float) -> Record:
        """What came of it, the same on every rank."""
        # The first turn meets connections that are being made.
        times = [max(step) for step in zip(*world.all_gather(self.seconds[_TURN:]), strict=True)]
        median = statistics.median(times)
        images, labels = self.digits.test
        with torch.no_grad():
            accuracy = (self.model(images).argmax(1) == labels).float().mean().item()
        nodes = runtime.current().topology.nodes
        return {
            "op": "train", "peer": self.name, "dtype": "float32", "compression": self.compression, "nodes": len(nodes),
            "ranks_per_node": hvd.local_size(), "bytes": self.gradient_bytes, "seconds": median,
            "seconds_min": min(times), "samples_per_s": _BATCH * world.size / median,
            "exposed": max(0.0, 1 - compute_s / median), "steps": len(self.seconds),
            "link_bytes": max(world.all_gather(statistics.median(self.link_bytes))), "accuracy": accuracy,
        }  # fmt: skip


def _sent_bytes() -> int:
    """Bytes that this host has sent over all its interfaces but the loopback."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return sum(int(line.split(":")[1].split()[8]) for line in lines if line.split(":")[0].strip() != "lo")


def run(options: argparse.Namespace) -> tuple[int, list[Record]]:
    """Everybody in turns, Horovod last. Returns the rank and the records."""
    world = mpi.connect()
    hvd.init()
    digits = _Digits(world.rank, world.size)
    peers.begin_torch_distributed(world)
    plain = _Contestant("no exchange", digits, lambda model, optimizer: (model, optimizer))
    crowd = [_Contestant("BSP", digits, _bsp("none")), _Contestant("DDP (Gloo)", digits, _ddp)]
    crowd += [_Contestant(f"BSP {c}", digits, _bsp(c), c) for c in filter(None, options.compression.split(","))]
    turns = max(2, options.repeat // _TURN + 1)
    for _ in range(turns):
        for contestant in (plain, *crowd):
            contestant.steps(world, _TURN)
    horovod = peers.horovod()
    if horovod is not None:
        # Its thread sends messages all the time, so nobody may run beside it.
        last = _Contestant("Horovod", digits, _horovod(horovod))
        for _ in range(turns):
            last.steps(world, _TURN)
        crowd.append(last)
    slowest = [max(step) for step in zip(*world.all_gather(plain.seconds[_TURN:]), strict=True)]
    records = [contestant.record(world, statistics.median(slowest)) for contestant in (plain, *crowd)]
    if horovod is not None:
        horovod.shutdown()
    if world.rank == 0:
        _print(records)
    return world.rank, records


def _bsp(compression: str) -> _Prepare:
    def prepare(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> _Trained:
        return model, hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=compression)

    return prepare


def _ddp(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> _Trained:
    return peers.data_parallel(model), optimizer


def _horovod(module: Any) -> _Prepare:
    def prepare(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> _Trained:
        return model, module.DistributedOptimizer(optimizer, model.named_parameters())

    return prepare


def _print(records: list[Record]) -> None:
    first = records[0]
    print(f"{first['nodes']} nodes, {first['bytes'] / 1e6:.1f} MB of gradients a step, {first['steps']} steps each")
    print(f"{'':>13} {'samples/s':>10} {'ms a step':>10} {'exposed':>8} {'MB sent a step':>15} {'accuracy':>9}")
    for r in records:
        print(
            f"{r['peer']:>13} {r['samples_per_s']:>10.1f} {r['seconds'] * 1e3:>10.1f} {r['exposed']:>8.1%} "
            f"{r['link_bytes'] / 1e6:>15.2f} {r['accuracy']:>9.2%}"
        )
