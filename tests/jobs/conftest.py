"""The fixture with which tests start jobs."""

from __future__ import annotations

import textwrap
import uuid
from collections.abc import Mapping
from pathlib import Path

import pytest
from job import BIN, PREAMBLE, Job, Start


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """start(np, source or script, *arguments, ranks_per_node=..., env=...): a job under hiercommrun."""

    def begin(
        np: int, program: str | Path, *arguments: str, ranks_per_node: int | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Job:  # fmt: skip
        if isinstance(program, str):
            script = tmp_path / f"job{uuid.uuid4().hex[:6]}.py"
            script.write_text(PREAMBLE + textwrap.dedent(program))
            program = script
        words = [str(BIN / "hiercommrun"), "-np", str(np)]
        if ranks_per_node is not None:
            words += ["--ranks-per-node", str(ranks_per_node)]
        return Job([*words, str(program), *arguments], {"PYTHONFAULTHANDLER": "1", **(env or {})})

    return begin
