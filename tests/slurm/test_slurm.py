"""The shipped batch files and all ways to start ranks on a real Slurm, where n1 to n4 are nodes without emulation."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import LOOK, NODES, ROOT
from job import BIN, Ended

TWO_BY_TWO = (NODES, "--nodes=2", "--ntasks-per-node=2")
TWO_AND_ONE = (NODES, "--nodes=2", "--ntasks=3")
MNIST = ROOT / "scripts" / "examples" / "mnist.py"

Run = Callable[..., Ended]
Write = Callable[[str], Path]


def placed(ended: Ended, *rows: str) -> None:
    """The job went well, and its table of nodes has these rows."""
    assert ended.status == 0, ended.output
    for row in rows:
        assert row in ended.output, ended.output
    assert "Sorry!" not in ended.output, ended.output


# ---- the batch files ----------------------------------------------------------------------------------


def accuracy(output: str) -> float:
    found = re.search(r"^test accuracy +([0-9.]+) %$", output, re.MULTILINE)
    assert found is not None, output
    return float(found[1])


@pytest.mark.parametrize("name", ["train.sbatch", "train-mpirun.sbatch"])
def test_a_batch_file_trains_the_example(sbatch: Run, name: str) -> None:
    ended = sbatch(ROOT / "scripts" / "slurm" / name)
    placed(ended, "4 ranks on 2 nodes", "n1    0-1 (2)", "n2    2-3 (2)", "cross: 2 groups of 2 nodes")
    assert ended.output.count("4 ranks on 2 nodes") == 1, "the table is printed once"
    assert accuracy(ended.output) > 90.0


@pytest.mark.parametrize("name", ["train.sbatch", "train-mpirun.sbatch"])
def test_real_nodes_give_the_weights_of_emulated_ones(sbatch: Run, tmp_path: Path, emulated: Path, name: str) -> None:
    """Also without any variable of the user's: sites have --export=NONE as their default."""
    words = [str(MNIST), "--steps", "20", "--save", str(tmp_path / "real.pt")]
    ended = sbatch("--export=NONE", ROOT / "scripts" / "slurm" / name, *words)
    placed(ended, "4 ranks on 2 nodes")
    real, expected = torch.load(tmp_path / "real.pt"), torch.load(emulated)
    assert all(torch.equal(real[key], expected[key]) for key in expected)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights after 20 steps of a job of two emulated nodes of two ranks."""
    path = tmp_path_factory.mktemp("emulated") / "weights.pt"
    words = [BIN / "hiercommrun", "-np", "4", "--ranks-per-node", "2", MNIST, "--steps", "20", "--save", path]
    subprocess.run(words, check=True, capture_output=True, timeout=120)
    return path


# ---- srun and hiercommrun by hand ---------------------------------------------------------------------


def test_srun_with_pmix(run: Run, write: Write) -> None:
    ended = run("srun", *TWO_BY_TWO, "--mpi=pmix", "python", write(LOOK))
    placed(ended, "n1    0-1 (2)", "n2    2-3 (2)", "srun --mpi=pmix")


def test_ranks_dealt_out_to_the_nodes_in_turn(run: Run, write: Write) -> None:
    ended = run("srun", *TWO_BY_TWO, "--distribution=cyclic", "--mpi=pmix", "python", write(LOOK))
    placed(ended, "n1    0, 2 (2)", "n2    1, 3 (2)")


def test_unequal_nodes(run: Run, write: Write) -> None:
    script = write(LOOK)
    rows = ("n1    0-1 (2)", "n2    2 (1)", "cross: the first rank of each of 2 nodes")
    placed(run("srun", *TWO_AND_ONE, "--mpi=pmix", "python", script), *rows)
    placed(run("salloc", *TWO_AND_ONE, "hiercommrun", "-np", "3", script), *rows)


def test_hiercommrun_in_an_allocation_with_ranks_per_node(run: Run, write: Write) -> None:
    ended = run("salloc", *TWO_BY_TWO, "hiercommrun", "-np", "2", "--ranks-per-node", "1", write(LOOK))
    placed(ended, "2 ranks on 2 nodes", "n1    0 (1)", "n2    1 (1)", "('n1', 'n1'), ('n2', 'n2')")


# ---- what goes wrong ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mpi", ["none", "pmi2"])
def test_ranks_that_mpi_does_not_join_end_with_the_fix(run: Run, write: Write, mpi: str) -> None:
    ended = run("srun", *TWO_BY_TWO, f"--mpi={mpi}", "python", write("hvd.init()\nprint('never')"))
    assert ended.status != 0, ended.output
    sentences = [line for line in ended.output.splitlines() if "MPI's world has 1 rank, but srun" in line]
    assert len(sentences) == 4, ended.output
    for line in sentences:
        assert "started 4 processes: " in line
        assert "--mpi=pmix for Open MPI" in line
    assert "never" not in ended.output


RAISE = """
    hvd.init()
    model, optimizer = model_and_optimizer()
    for step in range(1000000):
        train(model, optimizer, 1)
        if step == 3 and hvd.rank() == 2:
            raise ValueError("broken in the loop")
"""


@pytest.mark.parametrize("launcher", ["srun", "hiercommrun"])
def test_a_rank_that_raises_ends_the_job(run: Run, write: Write, launcher: str) -> None:
    """And leaves no process on any node; srun without --kill-on-bad-exit."""
    script = write(RAISE)
    by_srun = ("srun", *TWO_BY_TWO, "--mpi=pmix", "python", script)
    ended = run(*(by_srun if launcher == "srun" else ("salloc", *TWO_BY_TWO, "hiercommrun", "-np", "4", script)))
    assert ended.status != 0, ended.output
    assert "uncaught exception on rank 2 on n2" in ended.output
    assert "ValueError: broken in the loop" in ended.output
    assert ended.seconds < 60.0


# ---- the README ---------------------------------------------------------------------------------------


def block(language: str) -> list[str]:
    """The commands of the README's one block of a language."""
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    return [line.partition("#")[0].strip() for line in found.splitlines()]


def test_the_commands_in_the_readme(sbatch: Run) -> None:
    commands = block("sh slurm")
    assert len(commands) == 2
    for command in commands:
        name, *words = command.split()
        assert name == "sbatch"
        placed(sbatch(*words), "4 ranks on 2 nodes", "test accuracy")


def test_the_commands_of_the_lab_in_the_readme(run: Run, tmp_path: Path) -> None:
    """All but the last, which `scripts/test slurm` calls. The lab is up already, and says so."""
    *commands, last = block("sh slurm-lab")
    assert last == "scripts/slurm-lab down"
    folder = f"cd {ROOT}; export SBATCH_OUTPUT={tmp_path / 'output'}"
    ended = run("bash", "-ec", "\n".join([folder, *commands]))
    assert ended.status == 0, ended.output
    assert "test accuracy" in (tmp_path / "output").read_text(errors="replace")
