"""What ends a job from outside: one line that names it, soon, the ranks gone on every node."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from nodes import BIN, ROOT, SCRIPT, Cluster, Ended, Started, started

SOON_S = 15.0
TRAIN = """
    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Linear(1000, 1000)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3))
    for step in range(1000000):
        optimizer.zero_grad()
        model(torch.ones(2, 1000)).sum().backward()
        optimizer.step()
        if step == 3:
            print("going", flush=True)
"""


def ends(job: Started, since: float, *texts: str) -> Ended:
    """The job, which has to end soon after `since`, with a failure and one line that has all the texts."""
    ended = job.end(60.0)
    seconds = time.monotonic() - since
    assert ended.status != 0, ended.output
    assert [line for line in ended.output.splitlines() if all(text in line for text in texts)], ended.output
    assert seconds < SOON_S, f"{seconds:.1f} s\n{ended.output}"
    return ended


def test_a_node_that_is_unreachable_at_the_start(cluster: Cluster) -> None:
    cluster.up(3)
    cluster("cut", "n2")
    begin = time.monotonic()
    ended = ends(cluster.run("hvd.init()"), begin, "hiercommrun: cannot start anything", "n2 (", "No route to host")
    assert len(ended.output.splitlines()) == 1, ended.output


def test_nodes_that_cannot_reach_each_other_at_the_start(cluster: Cluster) -> None:
    cluster.up(2)
    cluster("cut", "n1", "n2")
    job = cluster.run("print('here', flush=True); hvd.init()")
    job.read("here", 2)
    ends(job, time.monotonic(), "hiercomm: 10.78.0.", "has not answered", "the ranks cannot be joined")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_link_that_is_cut_in_an_exchange(cluster: Cluster, ranks: int) -> None:
    """Only that between two nodes: the launcher reaches both."""
    cluster.up(2)
    job = cluster.run(TRAIN, ranks)
    job.read("going", 2 * ranks)
    cluster("cut", "n1", "n2")
    ends(job, time.monotonic(), "PeerLost: n", "(10.78.0.", "has not answered rank", "down or the link to it is cut")


@pytest.mark.parametrize("crash", [False, True], ids=["cut off", "without power"])
def test_a_node_that_is_lost_in_an_exchange(cluster: Cluster, crash: bool) -> None:
    cluster.up(3)
    job = cluster.run(TRAIN)
    job.read("going", 3)
    cluster("cut", "n2")
    begin = time.monotonic()
    if crash:
        cluster("kill", "n2")
    ends(job, begin, "n2 (10.78.0.2) has not answered", "down or the link to it is cut")


def test_a_node_that_is_lost_while_it_computes_and_others_wait(cluster: Cluster) -> None:
    """Nothing is on its way then: the words that waiting ranks send find out. Without the launcher's help."""
    cluster.up(3)
    job = cluster.run(
        """
        hvd.init()
        hvd.barrier()
        print("going", flush=True)
        if hvd.rank() == 1:
            time.sleep(1000)
        elif hvd.rank() == 0:
            begin = time.monotonic()
            while time.monotonic() < begin + 1000:  # the coordinator computes, too: it waits for nobody
                torch.ones(100, 100) @ torch.ones(100, 100)
        hvd.allreduce(torch.ones(1), name="late")
        """,
        1, "--mpi-args=--prtemca oob_tcp_keepalive_time 0",
    )  # fmt: skip
    job.read("going", 3)
    cluster("cut", "n1", "n3")
    ends(job, time.monotonic(), "PeerLost: n1 (10.78.0.1) has not answered rank 2 on n3")


def test_a_node_that_is_killed(cluster: Cluster) -> None:
    cluster.up(2)
    job = cluster.run(TRAIN)
    job.read("going", 2)
    cluster("kill", "n2")
    begin = time.monotonic()
    ended = job.end(60.0)
    # No word on the status: mpirun 5.0.11 returns 0 where it was first to see the node go.
    assert "n2" in ended.output
    assert time.monotonic() - begin < SOON_S


def test_two_nodes_of_one_name(cluster: Cluster) -> None:
    cluster.up(2, "--hostname", "twin")
    begin = time.monotonic()
    ended = ends(cluster.run("hvd.init()"), begin, "n1 and n2 both have the host name 'twin'", "host name of its own")
    assert len(ended.output.splitlines()) == 1, ended.output


def test_no_mpirun(cluster: Cluster) -> None:
    """Hidden on the head, for this test's cluster alone: each node has mounts of its own."""
    cluster.up(1)
    for name in ("mpirun", "mpiexec"):
        cluster("exec", "head", "mount", "--bind", "/dev/null", BIN / name)
    begin = time.monotonic()
    job = cluster.run("hvd.init()")
    ended = ends(job, begin, "hiercommrun: no mpirun here or on PATH; `pip install 'hiercomm[mpi]'` brings one")
    assert len(ended.output.splitlines()) == 1, ended.output


def test_no_mpi_on_a_node(cluster: Cluster) -> None:
    cluster.up(2)
    cluster("exec", "n2", "mount", "--bind", "/dev/null", BIN / "prted")
    begin = time.monotonic()
    ends(cluster.run("hvd.init()"), begin, "Remote host:", "n2")


@pytest.fixture(scope="module")
def mpich() -> Path:
    """Another MPI than that of .venv, beside it; kept there."""
    folder = ROOT / ".venv" / "another-mpi"
    if not (folder / "bin" / "mpiexec").exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), "mpich"]
        subprocess.run(pip, check=True, timeout=300)
    return folder / "bin" / "mpiexec"


def test_the_launcher_of_another_mpi(cluster: Cluster, mpich: Path) -> None:
    cluster.up(1)
    begin = time.monotonic()
    words = [SCRIPT, "exec", "n1", str(mpich), "-n", "2", sys.executable, str(cluster.write("hvd.init()"))]
    ends(started(words), begin, "ConfigError: MPI's world has 1 rank, but", "MPICH's mpiexec started 2 processes",
         "belongs to another MPI")  # fmt: skip
