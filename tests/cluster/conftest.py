"""Tests on the nodes of `scripts/cluster`, as root: `scripts/test cluster`."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.register_assert_rewrite("nodes")
from nodes import NAME, Cluster  # noqa: E402


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster that the test brings up. Whatever the test does, nothing may be left in its nodes, or of it."""
    own = Cluster(tmp_path)
    yield own
    try:
        own.assert_clean()
    finally:
        own("down")
    assert f"{NAME}." not in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert not Path(f"/run/hiercomm-{NAME}").exists()
