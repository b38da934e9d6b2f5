"""The README's commands for a cluster on one machine, one after the other."""

from __future__ import annotations

import re

from nodes import ROOT, Cluster, Job


def test_commands(cluster: Cluster) -> None:
    blocks = re.findall(r"^```sh cluster\n(.*?)^```", (ROOT / "README.md").read_text(), re.S | re.M)
    assert len(blocks) == 1
    ended = Job(["bash", "-e", "-c", f"cd {ROOT}\n{blocks[0]}"], {}).end(200)
    assert ended.status == 0, ended.output
    assert "test accuracy" in ended.output
    assert re.search(r"float32 +1048576", ended.output)
    assert "n2" in ended.output.split("doctor: ")[1].split("doctor has found the slow node")[0]
