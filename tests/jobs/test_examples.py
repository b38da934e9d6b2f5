"""The shipped examples: a Horovod script, only sed-changed, trains on every placement as one process would."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from job import ROOT, Start

EXAMPLES = ROOT / "scripts" / "examples"
BATCH = 48  # the joint batch, over 4 ranks or on one


@pytest.fixture(scope="module")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The examples as Horovod scripts, and back by the sed of the README."""
    folder = tmp_path_factory.mktemp("migrated")
    for path in EXAMPLES.glob("*.py"):
        horovod = path.read_text().replace("hiercomm", "horovod")
        assert "hiercomm" not in horovod
        (folder / path.name).write_text(horovod.replace("horovod", "hiercomm"))
        assert (folder / path.name).read_text() == path.read_text()
    return folder


def weights(start: Start, script: Path, np: int, per_node: int, file: Path, *arguments: str) -> torch.Tensor:
    ended = start(
        np, script, "--batch-size", str(BATCH // np), "--no-scale-lr", "--save", str(file), "--steps", "20", *arguments,
        ranks_per_node=per_node,
    ).end()  # fmt: skip
    assert ended.status == 0, ended.output
    state = torch.load(file)
    return torch.cat([value.double().reshape(-1) for value in state.values()])


CASES = [
    ((), (1, 2, 3, 4)),
    (("--optimizer", "nesterov"), (2,)),
    (("--optimizer", "adam", "--lr", "0.0003"), (3,)),
    (("--optimizer", "adamw", "--lr", "0.0003"), (2,)),
    (("--clip", "0.5"), (2,)),
    # Within the first epoch: at its end one process has a short batch where four ranks pad.
    (("--backward-passes", "2", "--steps", "14"), (3,)),
]


@pytest.mark.parametrize(("arguments", "placements"), CASES, ids=[" ".join(a) or "sgd" for a, _ in CASES])
def test_four_ranks_equal_one_process(
    start: Start, migrated: Path, tmp_path: Path, arguments: tuple[str, ...], placements: tuple[int, ...]
) -> None:
    script = migrated / "mnist.py"
    expected = weights(start, script, 1, 1, tmp_path / "one.pt", *arguments)
    results = [weights(start, script, 4, k, tmp_path / f"{k}.pt", *arguments) for k in placements]
    for per_node, result in zip(placements, results, strict=True):
        difference = float((result - expected).abs().max() / expected.abs().max())
        assert difference <= 1e-6, f"{per_node} ranks a node: relative difference {difference}"


def test_digits_are_learnt(start: Start) -> None:
    ended = start(4, EXAMPLES / "mnist.py", "--epochs", "12", ranks_per_node=2).end(300)
    assert ended.status == 0, ended.output
    line = next(line for line in ended.output.splitlines() if line.startswith("test accuracy"))
    assert float(line.split()[2]) > 95.0


def test_synthetic_benchmark(start: Start) -> None:
    words = ("--model", "mlp", "--batch-size", "4", "--num-warmup-batches", "1", "--num-batches-per-iter", "1")
    ended = start(2, EXAMPLES / "synthetic_benchmark.py", *words, "--num-iters", "2", "--fp16-allreduce").end(300)
    assert ended.status == 0, ended.output
    assert "img/s" in ended.output.lower()


def test_resnet_accumulates_and_resumes(start: Start, tmp_path: Path) -> None:
    words = [
        "--width", "8", "--layers", "1,1,1,1", "--data", "synthetic", "--batch-size", "8", "--batches-per-allreduce",
        "2", "--warmup-epochs", "1", "--fp16-allreduce", "--checkpoint-format", str(tmp_path / "epoch{epoch}.pt"),
    ]  # fmt: skip
    for epochs, extra in ((1, ()), (2, ("--amp",))):
        ended = start(2, EXAMPLES / "resnet50.py", *words, "--epochs", str(epochs), *extra, ranks_per_node=1).end(300)
        assert ended.status == 0, ended.output
    assert len(list(tmp_path.glob("epoch*.pt"))) == 2
