"""`hiercomm bench`: what it writes is complete and consistent. How fast anything is, no test says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from job import BIN, Start

HIERCOMM = BIN / "hiercomm"


def records(start: Start, ranks: int, per_node: int, path: Path, *words: str) -> list[dict[str, Any]]:
    ended = start(ranks, HIERCOMM, "bench", *words, "--json", str(path), ranks_per_node=per_node).end(200)
    assert ended.status == 0, ended.output
    found: list[dict[str, Any]] = json.loads(path.read_text())
    return found


@pytest.mark.parametrize(("ranks", "per_node"), [(4, 2), (3, 1), (3, 2)])
def test_allreduce(start: Start, tmp_path: Path, ranks: int, per_node: int) -> None:
    words = ("allreduce", "--sizes", "4KB,1MB", "--dtypes", "float32,bfloat16", "--rate", "1gbit", "--repeat", "3",
             "--compression", "int8,topk:0.01")  # fmt: skip
    nodes = -(-ranks // per_node)
    found = records(start, ranks, per_node, tmp_path / "a.json", *words)
    for dtype in ("float32", "bfloat16"):
        for nbytes in (4096, 1 << 20):
            row = {r["peer"]: r for r in found if (r["dtype"], r["bytes"]) == (dtype, nbytes)}
            assert set(row) >= {"MPI_Send", "hiercomm", "allreduce_", "MPI_Allreduce", "Gloo", "int8", "topk:0.01"}
            for peer, record in row.items():
                compression = peer if peer in ("int8", "topk:0.01") else "none"
                assert (record["nodes"], record["compression"]) == (nodes, compression)
                assert 0 < record["seconds_min"] <= record["seconds"]
                share = 2 * (nodes - 1) / nodes * nbytes * 8 / (1e9 * record["seconds"])
                assert record["link_share"] == pytest.approx(share)


def test_allreduce_needs_two_nodes(start: Start) -> None:
    ended = start(2, HIERCOMM, "bench", "allreduce").end(60)
    assert ended.status != 0
    assert "bench allreduce needs two nodes" in ended.output


def test_train_gives_everybody_the_same_model(start: Start, tmp_path: Path) -> None:
    found = records(start, 2, 1, tmp_path / "t.json", "train", "--repeat", "5", "--compression", "int8,topk:0.01")
    by_peer = {r["peer"]: r for r in found}
    assert by_peer["BSP int8"]["compression"] == "int8"
    assert by_peer["BSP int8"]["accuracy"] == pytest.approx(by_peer["BSP"]["accuracy"], abs=0.1)
    assert by_peer["BSP topk:0.01"]["accuracy"] > by_peer["no exchange"]["accuracy"] - 0.2
    assert by_peer["BSP"]["accuracy"] == pytest.approx(by_peer["DDP (Gloo)"]["accuracy"], abs=0.01)
    assert by_peer["BSP"]["accuracy"] > by_peer["no exchange"]["accuracy"]
    for record in found:
        assert 0 <= record["exposed"] < 1
        assert record["samples_per_s"] == pytest.approx(64 / record["seconds"])


def test_overlap(start: Start, tmp_path: Path) -> None:
    (record,) = records(start, 2, 1, tmp_path / "o.json", "overlap", "--sizes", "1MB", "--repeat", "3")
    assert record["bytes"] == 1 << 20
    assert record["both"] > 0
    shorter = min(record["exchange"], record["compute"])
    assert record["hidden"] == pytest.approx((record["exchange"] + record["compute"] - record["both"]) / shorter)


def test_kernels(start: Start, tmp_path: Path) -> None:
    found = records(start, 1, 1, tmp_path / "k.json", "kernels", "--sizes", "4KB,1MB", "--repeat", "3")
    assert len(found) == 2 * 25
    for record in found:
        assert record["backend"] in ("twin", "numpy")
        assert record["wire_bytes"] < record["bytes"] // 3
        assert record["ratio"] == pytest.approx(record["seconds"] / record["copy_seconds"])
