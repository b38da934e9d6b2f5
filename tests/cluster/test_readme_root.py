"""The commands of README that need root do what it says, one after the other."""

from __future__ import annotations

import os
import re
import subprocess

from nodes import BIN, NAME, ROOT, Cluster

BLOCKS = re.findall(r"^```sh root\n(.*?)^```", (ROOT / "README.md").read_text(), re.S | re.M)
COMMANDS = [line for block in BLOCKS for line in block.splitlines() if line]


def test_commands(cluster: Cluster) -> None:
    assert len(COMMANDS) >= 5
    assert COMMANDS[-1] == "scripts/cluster down"
    env = {name: value for name, value in os.environ.items() if not name.startswith("HIERCOMM_")}
    output = {}
    for command in COMMANDS:
        ended = subprocess.run(
            ["bash", "-c", command], cwd=ROOT, env={**env, "CLUSTER_NAME": NAME, "PATH": f"{BIN}:{env['PATH']}"},
            capture_output=True, text=True, timeout=240, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert ended.returncode == 0, command + ended.stdout + ended.stderr
        output[command] = ended.stdout
        if " cut " not in command and command != COMMANDS[-1]:
            cluster.assert_clean()
    (report,) = (text for command, text in output.items() if "--report" in command)
    for text in ("test accuracy", "share of time", "rank 3"):
        assert text in report
    (statistics,) = (text for command, text in output.items() if command.endswith("stat"))
    assert [line.split()[0] for line in statistics.splitlines()] == ["n1", "n2", "n3", "n4"]
