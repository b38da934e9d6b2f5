"""Tests that every rank runs, under mpirun: `scripts/test ranks`.

A failure on one rank ends the job at once with that rank's report: the others would wait for it for ever.
A test that hangs is ended with the stacks of all threads (pytest's faulthandler_timeout).
"""

from __future__ import annotations

import sys

import pytest
import torch

import hiercomm.torch as hvd
from hiercomm import runtime


def pytest_configure(config: pytest.Config) -> None:
    hvd.init()
    torch.set_num_threads(1)


def pytest_report_header() -> str:
    return hvd.topology()


@pytest.fixture(autouse=True)
def same_seed() -> None:
    torch.manual_seed(1234)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed and hvd.is_initialized() and hvd.size() > 1:
        sys.stderr.write(f"\nFAILED on rank {hvd.rank()}: {report.nodeid} ({report.when})\n{report.longreprtext}\n")
        sys.stderr.flush()
        runtime.current().abort(1)
