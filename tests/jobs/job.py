"""Tests that start whole jobs with hiercommrun and look at what people see: output, exit status, what is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


@dataclass
class Ended:
    """A job that has ended."""

    status: int
    output: str
    seconds: float


class Job:
    """A running job, in a process group of its own and with a mark in the environment of its processes."""

    def __init__(self, words: list[str], env: Mapping[str, str]) -> None:
        self.mark = uuid.uuid4().hex
        self.begin = time.monotonic()
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("HIERCOMM_", "OMPI_"))}
        self.process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
            env={**clean, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **env, "TEST_MARK": self.mark},
        )  # fmt: skip

    def processes(self) -> list[int]:
        """Ids of the job's processes that are alive."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                marked = f"TEST_MARK={self.mark}".encode() in (folder / "environ").read_bytes()
                alive = (folder / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
            except OSError:
                continue
            if marked and alive:
                found.append(int(folder.name))
        return found

    def end(self, timeout_s: float = 120.0) -> Ended:
        """Wait for the end; fails where the job hangs or leaves processes behind."""
        try:
            output = self.process.communicate(timeout=timeout_s)[0].decode(errors="replace")
        except subprocess.TimeoutExpired:
            for pid in self.processes():
                os.kill(pid, signal.SIGABRT)  # faulthandler prints the stacks
            time.sleep(1.0)
            self.kill()
            output = self.process.communicate()[0].decode(errors="replace")
            pytest.fail(f"the job hangs; its output:\n{output}")
        seconds = time.monotonic() - self.begin
        deadline = time.monotonic() + 10.0
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.1)
        left = self.processes()
        self.kill()
        assert not left, f"processes are left behind: {left}\n{output}"
        return Ended(self.process.returncode, output, seconds)

    def kill(self) -> None:
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


Start = Callable[..., Job]


PREAMBLE = """\
import os, signal, sys, time
import torch
import hiercomm, hiercomm.torch as hvd

def model_and_optimizer():
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

def train(model, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()

"""
