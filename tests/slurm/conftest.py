"""Fixtures that start jobs on the Slurm of `scripts/slurm-lab up`; `scripts/test slurm` starts it and takes it down."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "jobs"))
from job import BIN, PREAMBLE, Ended, Job  # noqa: E402

CONFIGURATION = Path("/var/tmp/slurm-lab/slurm.conf")
# The last test's nodes may still be completing: wait for them, rather than take others.
NODES = "--nodelist=n1,n2"
SUBMIT_AND_WAIT = 'job=$(sbatch --parsable "${@:2}") && exec "$1" wait "$job" 120'

# What each rank finds, compared with what the launcher and MPI say.
LOOK = """\
    from hiercomm import launcher
    hvd.init()
    t = (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size())
    claim = launcher.claim(os.environ)
    assert (claim.rank, claim.size, claim.local_rank, claim.local_size) == t, (claim, t)
    mine = torch.arange(1000.0) * (1 + hvd.rank())
    flat = sum(torch.arange(1000.0) * (1 + rank) for rank in range(hvd.size())) / hvd.size()
    parameter = torch.nn.Parameter(torch.zeros(1000))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0))
    (parameter * mine).sum().backward()
    optimizer.step()
    assert torch.allclose(-parameter, flat)
    hosts = hvd.allgather_object((os.uname().nodename, os.environ.get("SLURMD_NODENAME")))
    if hvd.rank() == 0:
        print(hvd.topology(), claim.launcher, hosts, sep="\\n", flush=True)
"""


@pytest.fixture(scope="session", autouse=True)
def lab() -> None:
    if not CONFIGURATION.exists():
        pytest.fail("no Slurm here: scripts/test slurm starts one, or scripts/slurm-lab up")


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    """write(source): a script of it, behind the imports of the jobs' tests."""

    def script(source: str) -> Path:
        path = tmp_path / "job.py"
        path.write_text(PREAMBLE + textwrap.dedent(source))
        return path

    return script


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Ended]:
    """run(*words): a command such as srun or salloc, to its end."""

    def command(*words: str | Path) -> Ended:
        return Job([str(word) for word in words], environment(tmp_path)).end()

    return command


@pytest.fixture
def sbatch(tmp_path: Path) -> Callable[..., Ended]:
    """sbatch(*words): a batch job, to its end, with the output that Slurm wrote."""

    def command(*words: str | Path) -> Ended:
        output = tmp_path / "output"
        lab_script = str(ROOT / "scripts" / "slurm-lab")
        options = ["-D", str(ROOT), "--output", str(output), NODES, *map(str, words)]
        ended = Job(["bash", "-c", SUBMIT_AND_WAIT, "-", lab_script, *options], environment(tmp_path)).end()
        written = output.read_text(errors="replace") if output.exists() else ""
        return Ended(ended.status, ended.output + written, ended.seconds)

    return command


def environment(folder: Path) -> dict[str, str]:
    """Variables of a user who has activated the virtual environment and may be root."""
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    return {"SLURM_CONF": str(CONFIGURATION), "VENV": str(BIN.parent), "PATH": path, "TMPDIR": str(folder)}
