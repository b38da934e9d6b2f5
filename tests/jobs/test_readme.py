"""Every command in the README runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from job import BIN, ROOT

BLOCKS = re.findall(r"^```sh\n(.*?)^```", (ROOT / "README.md").read_text(), re.S | re.M)
COMMANDS = [line for block in BLOCKS for line in block.splitlines() if line]
# What these do is tested otherwise: test is what runs this, and pip install is packaging's test.
ELSEWHERE = {"./scripts/test", "pip install '.[mpi]' scikit-learn tqdm"}


def test_every_kind_of_command_is_there() -> None:
    assert set(COMMANDS) >= ELSEWHERE
    assert "./scripts/demo" in COMMANDS
    assert len(COMMANDS) >= 9


@pytest.mark.parametrize("command", [c for c in COMMANDS if c not in ELSEWHERE])
def test_command(command: str, tmp_path: Path) -> None:
    folder = ROOT
    if command.startswith("sed "):
        folder = tmp_path
        (folder / "train.py").write_text("import horovod.torch as hvd\nhvd.init()\nprint(hvd.size())\n")
    env = {k: v for k, v in os.environ.items() if not k.startswith("HIERCOMM_")}
    env["PATH"] = f"{BIN}:{env['PATH']}"
    ended = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=300,
        stdin=subprocess.DEVNULL,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    if command.startswith("sed "):
        run = subprocess.run(
            [sys.executable, "train.py"], cwd=folder, capture_output=True, text=True, errors="replace", timeout=60
        )
        assert run.stdout == "1\n", run.stderr
    elif "demo" in command or "--report" in command:
        for text in ("test accuracy", "samples/s", "share of time", "compute", "cross", "wait"):
            assert text in ended.stdout
    elif "--dry-run" in command:
        assert shutil.which("mpirun", path=env["PATH"]) in ended.stdout
