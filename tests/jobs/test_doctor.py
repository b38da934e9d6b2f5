"""`hiercomm doctor` on jobs of this machine: silent where nothing is wrong, and each real fault is found."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from job import BIN, Ended, Job

DOCTOR = (str(BIN / "hiercomm"), "doctor")
# Two cores are shared by four ranks and other tests: a link inside the machine may stand still for a while.
SLOW_S = 200.0


def examine(
    np: int, ranks_per_node: int | None, *words: str, env: Mapping[str, str] | None = None, before: tuple[str, ...] = ()
) -> Ended:
    split = () if ranks_per_node is None else ("--ranks-per-node", str(ranks_per_node))
    command = [*before, str(BIN / "hiercommrun"), "-np", str(np), *split, *DOCTOR, *words]
    return Job(command, env or {}).end(SLOW_S)


def faults(ended: Ended) -> list[str]:
    return [line for line in ended.output.splitlines() if line.startswith("FAULT ")]


def only(ended: Ended, about: str, *texts: str) -> None:
    assert [line.split()[1] for line in faults(ended)] == [f"{about}:"], ended.output
    assert ended.status == 1, ended.output
    assert "1 fault found" in ended.output
    for text in texts:
        assert text in ended.output, ended.output


@pytest.mark.parametrize(("np", "ranks_per_node"), [(1, None), (2, None), (2, 1), (4, 2), (3, 2)])
def test_silent_where_nothing_is_wrong(np: int, ranks_per_node: int | None, tmp_path: Path) -> None:
    ended = examine(np, ranks_per_node, "--json", str(tmp_path / "record"))
    assert ended.status == 0, ended.output
    assert not faults(ended), ended.output
    lines = ended.output.splitlines()
    assert lines[-1] == "no faults found", ended.output
    assert not [line for line in lines if line.startswith("FAULT")]
    record = json.loads((tmp_path / "record").read_text())
    nodes = 1 if ranks_per_node is None else -(-np // ranks_per_node)
    assert [len(record[key]) for key in ("facts", "nodes", "findings")] == [np, nodes, 0]
    assert len(record["links"]) == nodes * (nodes - 1) // 2
    levels = {exchange["level"]: exchange for exchange in record["exchanges"]}
    assert ("local" in levels, "cross" in levels, "whole" in levels) == (np > nodes, nodes > 1, np > 1)
    assert all(exchange["seconds"] > 0 and exchange["error"] is None for exchange in record["exchanges"])


def test_alone_without_a_launcher() -> None:
    ended = Job(list(DOCTOR), {}).end()
    assert ended.status == 0, ended.output
    assert "1 rank on 1 node" in ended.output
    assert "nobody: one rank alone" in ended.output


def test_thread_level_single() -> None:
    ended = examine(2, 1, env={"MPI4PY_RC_THREAD_LEVEL": "single"})
    only(ended, "thread-level", "MPI runs at thread level single on every node", "unset MPI4PY_RC_THREAD_LEVEL")
    assert "cross  OK (1/1)" in ended.output  # what can be measured is


def test_a_link_without_end() -> None:
    """Four ranks on two nodes, and a cross level that fails: the report says which level, and between whom."""
    ended = examine(4, 2, env={"HIERCOMM_CROSS_RATE": "1kbit"})
    only(ended, "link", "node0 and node1 cannot exchange messages")
    assert "local  OK (2/2)" in ended.output, ended.output
    assert "cross  FAIL hosts node0-node1" in ended.output
    assert ended.seconds < 90.0


def test_a_slow_node_and_options_that_differ() -> None:
    """With three nodes it is the node that is named, not its links."""
    script = f"""
import os, sys
if os.environ["OMPI_COMM_WORLD_RANK"] == "2":
    os.environ["HIERCOMM_CROSS_RATE"] = "50mbit"
os.execv({DOCTOR[0]!r}, {list(DOCTOR)!r})
"""
    words = [str(BIN / "hiercommrun"), "-np", "3", "--ranks-per-node", "1", sys.executable, "-c", script]
    ended = Job(words, {}).end(SLOW_S)
    assert ended.status == 1, ended.output
    assert "HIERCOMM_CROSS_RATE is not the same on all ranks: None on node0, node1; 50000000.0 on node2" in ended.output
    assert any("FAULT slow-node: every link of node2 is slow: " in line for line in faults(ended)), ended.output
    assert "whole  not tried: the options cannot be used" in ended.output


def test_a_rank_that_does_not_answer() -> None:
    source = "from mpi4py import MPI; import time; time.sleep(600)"
    script = f'[ $OMPI_COMM_WORLD_RANK != 1 ] || exec {sys.executable} -c "{source}"; exec "$@"'
    ended = Job([str(BIN / "hiercommrun"), "-np", "3", "sh", "-c", script, "-", *DOCTOR], {}).end(SLOW_S)
    only(ended, "unreachable", "hears nothing from rank 1", "(1 rank silent)")
    assert ended.seconds < 60.0


def test_a_rank_that_never_starts_mpi() -> None:
    script = '[ $OMPI_COMM_WORLD_RANK != 1 ] || exec sleep 600; exec "$@"'
    ended = Job([str(BIN / "hiercommrun"), "-np", "2", "sh", "-c", script, "-", *DOCTOR], {}).end(SLOW_S)
    assert ended.status != 0
    assert "rank 0 on" in ended.output, ended.output
    assert "MPI has not started within 60 s: some rank has not come so far (Open MPI v" in ended.output


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare")
@pytest.mark.parametrize(("options", "text"), [("ro", "Read-only file system"), ("size=8m", "/dev/shm")])
def test_no_shared_memory(options: str, text: str) -> None:
    """A /dev/shm that cannot be written, or holds next to nothing, in a mount namespace of the job's own."""
    mount = f'mount -t tmpfs -o {options} none /dev/shm && exec "$@"'
    ended = examine(2, None, before=("unshare", "--mount", "--propagation", "private", "sh", "-c", mount, "-"))
    only(ended, "shared-memory", text, "--ipc=host", "export HIERCOMM_LOCAL=gloo")
    assert "local  OK (1/1)  Gloo" in ended.output
    assert "whole  OK" in ended.output


def test_gloo_by_choice_is_no_fault() -> None:
    ended = examine(2, None, env={"HIERCOMM_LOCAL": "gloo"})
    assert ended.status == 0, ended.output
    assert "local  OK (1/1)  Gloo" in ended.output


def test_bad_options_are_told_once() -> None:
    ended = examine(2, 1, env={"HIERCOMM_BUKET_BYTES": "1"})
    only(ended, "options", "the nearest known one is HIERCOMM_BUCKET_BYTES")


def test_misuse() -> None:
    ended = examine(2, 1, "--jsn", "x")
    assert ended.status == 2, ended.output
    ended = examine(2, 1, "--json", "/nowhere/at/all")
    assert ended.status == 2, ended.output
    assert "--json /nowhere/at/all cannot be written: No such file or directory" in ended.output


# ---- another MPI ----------------------------------------------------------------------------------------------


def install(folder: Path, package: str) -> Path:
    """Another MPI beside the Open MPI of the tests; its folder."""
    # Without --ignore-installed pip would first take away the one that runs the tests.
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--ignore-installed", "--prefix", str(folder)]
    answer = subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, package], capture_output=True, text=True, check=False
    )
    if answer.returncode != 0:
        pytest.skip(f"{package} cannot be installed here: {answer.stderr.strip().splitlines()[-1:]}")
    return folder


@pytest.fixture(scope="session")
def mpich(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("mpich"), "mpich")


@pytest.fixture(scope="session")
def openmpi4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("openmpi"), "openmpi<5")


def test_the_library_of_another_mpi(mpich: Path) -> None:
    """Its MPI_Init would end the process under Open MPI's mpirun."""
    library = mpich / "lib" / "libmpi.so.12"
    ended = examine(2, None, env={"MPI4PY_LIBMPI": str(library)})
    only(ended, "launcher", "Open MPI's mpirun (", "started 2 ranks, but mpi4py loads another MPI's library: MPICH")
    assert str(library) in ended.output
    assert "fix: unset MPI4PY_LIBMPI" in ended.output


def test_the_launcher_of_another_mpi(mpich: Path) -> None:
    mpiexec = mpich / "bin" / "mpiexec"
    ended = Job([str(mpiexec), "-n", "2", *DOCTOR], {}).end(SLOW_S)
    assert "MPICH's mpiexec (" in ended.output, ended.output
    assert "started 2 ranks, but mpi4py loads another MPI's library: Open MPI" in ended.output
    assert len(faults(ended)) == 1, ended.output
    assert ended.status != 0


def test_mpich_alone_is_healthy(mpich: Path) -> None:
    env: dict[str, Any] = {"MPI4PY_LIBMPI": str(mpich / "lib" / "libmpi.so.12"), "HIERCOMM_RANKS_PER_NODE": "1"}
    ended = Job([str(mpich / "bin" / "mpiexec"), "-n", "2", *DOCTOR], env).end(SLOW_S)
    assert ended.status == 0, ended.output
    assert "MPICH Version" in ended.output
    assert "no faults found" in ended.output


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv")
def test_ranks_that_may_not_read_each_others_memory(openmpi4: Path) -> None:
    """As in a container: rank 0 lacks a right that rank 1 has. Started by plain mpirun, which does not cure it."""
    script = (
        'if [ $OMPI_COMM_WORLD_RANK = 0 ]; then exec setpriv --bounding-set=-all --inh-caps=-all "$@"; fi; exec "$@"'
    )
    env = {"MPI4PY_LIBMPI": str(openmpi4 / "lib" / "libmpi.so.40")}
    words = [
        "--allow-run-as-root",
        "--oversubscribe",
        "--bind-to",
        "none",
        "-np",
        "2",
        "sh",
        "-c",
        script,
        "-",
        *DOCTOR,
    ]
    ended = Job([str(openmpi4 / "bin" / "mpirun"), *words], env).end(SLOW_S)
    only(ended, "single-copy", "may not read each other's memory", "Open MPI v4")
    env["OMPI_MCA_btl_vader_single_copy_mechanism"] = "none"
    cured = Job([str(openmpi4 / "bin" / "mpirun"), *words], env).end(SLOW_S)
    assert cured.status == 0, cured.output
    assert "Read -1" not in cured.output
    newer = Job([str(BIN / "mpirun"), *words], {}).end(SLOW_S)
    assert newer.status == 0, newer.output
    assert "Read -1" not in newer.output
