"""Tests on the nodes of `scripts/cluster`, as root: `scripts/test cluster`."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "jobs")]
from job import BIN, PREAMBLE, Job  # noqa: E402

SCRIPT = str(ROOT / "scripts" / "cluster")
NAME = os.environ.setdefault("CLUSTER_NAME", "tests")


class Cluster:
    """The cluster that is up. A method that starts something in it does so as a user would."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.nodes: list[str] = []

    def __call__(self, *words: object) -> str:
        """One command of `scripts/cluster`, which has to succeed; its output."""
        ended = self.attempt(*words)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    def attempt(self, *words: object) -> subprocess.CompletedProcess[str]:
        """One command of `scripts/cluster`, to its end."""
        return subprocess.run([SCRIPT, *map(str, words)], capture_output=True, text=True, timeout=120, check=False)

    def up(self, count: int, *options: object) -> None:
        self("up", count, *options)
        self.nodes = [f"n{number + 1}" for number in range(count)]

    def run(self, source: str, ranks: int = 1, *options: str, **env: str) -> Job:
        """A job over all nodes, `ranks` on each."""
        words = [SCRIPT, "run", "-n", str(ranks), *options, str(self.write(source))]
        return Job(words, {"PYTHONFAULTHANDLER": "1", **env})

    def write(self, source: str) -> Path:
        """A script of the source, behind the imports of the jobs' tests."""
        script = self._folder / "job.py"
        script.write_text(PREAMBLE + textwrap.dedent(source))
        return script

    def left(self) -> list[str]:
        """What is in the nodes that does not belong there: processes, files in shared memory, sockets."""
        found = []
        for node in [*self.nodes, "head"]:
            for pid in subprocess.run(["ip", "netns", "pids", f"{NAME}.{node}"], capture_output=True, text=True,
                                      check=True).stdout.split():  # fmt: skip
                command = _read(f"/proc/{pid}/cmdline").replace("\0", " ")
                if command and "sleep infinity" not in command:
                    found.append(f"{node}: {command}")
            look = self.attempt("exec", node, "sh", "-c", "ls -A /dev/shm; cat /proc/net/tcp")
            if look.returncode == 0:  # else the node is dead
                # Finished connections linger for a minute, as TIME_WAIT (06).
                found += [
                    f"{node}: {line}" for line in look.stdout.splitlines() if line.split()[3:4] not in (["st"], ["06"])
                ]
        return found

    def assert_clean(self, patience_s: float = 10.0) -> None:
        deadline = time.monotonic() + patience_s
        while self.left() and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not self.left()


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def wait_for(job: Job, text: str, count: int = 1) -> None:
    """Read the output of a job until `text` was printed `count` times; what is read is lost to `end`."""
    assert job.process.stdout is not None
    seen = b""
    while seen.count(text.encode()) < count:
        chunk = os.read(job.process.stdout.fileno(), 65536)
        assert chunk, seen.decode(errors="replace")
        seen += chunk


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster that the test brings up. Whatever the test does, nothing may be left in its nodes, or of it."""
    own = Cluster(tmp_path)
    yield own
    try:
        own.assert_clean()
    finally:
        own("down")
    assert NAME not in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert not Path(f"/run/hiercomm-{NAME}").exists()


Run = Callable[..., Job]
__all__ = ["BIN", "ROOT", "SCRIPT", "Cluster", "wait_for"]
