"""What tests do with the nodes of `scripts/cluster`, and what they look at afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
import zlib
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "jobs"), str(ROOT / "tests" / "ranks")]
from job import BIN, PREAMBLE, Ended, Job  # noqa: E402

__all__ = ["BIN", "PREAMBLE", "Ended", "Job"]
SCRIPT = str(ROOT / "scripts" / "cluster")
# The title of /proc/net/tcp, and the states in which the kernel alone still has a socket, such as TIME_WAIT.
_CLOSED = (["st"], ["04"], ["05"], ["06"], ["09"], ["0B"])
NAME = os.environ.setdefault("CLUSTER_NAME", f"tests-{zlib.crc32(bytes(ROOT)):x}")  # another checkout's is another


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

    def run(self, source: str, ranks: int = 1, *options: str, **env: str) -> Started:
        """A job over all nodes, `ranks` on each."""
        return started([SCRIPT, "run", "-n", str(ranks), *options, str(self.write(source))], **env)

    def write(self, source: str) -> Path:
        """A script of the source, behind the imports of the jobs' tests."""
        script = self._folder / "job.py"
        script.write_text(PREAMBLE + textwrap.dedent(source))
        return script

    def left(self) -> list[str]:
        """What is in the nodes that does not belong there: processes, files in shared memory, sockets."""
        found = []
        for path in sorted(Path("/run/netns").glob(f"{NAME}.*[!e]")):  # all but the bridge
            node = path.name.removeprefix(f"{NAME}.")
            pids = subprocess.run(["ip", "netns", "pids", path.name], capture_output=True, text=True, check=True).stdout
            commands = [_read(f"/proc/{pid}/cmdline").replace("\0", " ") for pid in pids.split()]
            found += [f"{node}: {command}" for command in commands if command and "sleep infinity" not in command]
            look = self.attempt("exec", node, "sh", "-c", "ls -A /dev/shm; cat /proc/net/tcp")
            if look.returncode == 0:  # else the node is dead
                lines = [line for line in look.stdout.splitlines() if line.split()[3:4] not in _CLOSED]
                found += [f"{node}: {line}" for line in lines]
        return found

    def assert_clean(self, patience_s: float = 10.0) -> None:
        deadline = time.monotonic() + patience_s
        while (left := self.left()) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not left


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


class Started(Job):
    """A job of which the output is read while it runs."""

    def __init__(self, words: list[str], env: Mapping[str, str]) -> None:
        super().__init__(words, env)
        self._seen = b""

    def read(self, text: str, count: int = 1) -> None:
        """Wait until it has printed `text` so often."""
        assert self.process.stdout is not None
        while self._seen.count(text.encode()) < count:
            chunk = os.read(self.process.stdout.fileno(), 65536)
            assert chunk, self._seen.decode(errors="replace")
            self._seen += chunk

    def end(self, timeout_s: float = 120.0) -> Ended:
        ended = super().end(timeout_s)
        return Ended(ended.status, self._seen.decode(errors="replace") + ended.output, ended.seconds)


def started(words: list[str], **env: str) -> Started:
    """A command that starts a job."""
    return Started(words, {"PYTHONFAULTHANDLER": "1", **env})
