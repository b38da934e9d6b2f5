"""`hiercomm doctor` on real links: silent on a healthy cluster, and each planted fault is named, with its fix."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from nodes import SCRIPT, Cluster, Ended, Job

RATE = 200e6


def examine(cluster: Cluster, *options: str, ranks: int = 1, json_to: Path | None = None, **env: str) -> Ended:
    words = [SCRIPT, "run", "-n", str(ranks), *options, str(Path(sys.executable).parent / "hiercomm"), "doctor"]
    return Job([*words, *(["--json", str(json_to)] if json_to else [])], env).end(240.0)


def only(ended: Ended, about: str, *texts: str) -> None:
    found = [line.split()[1] for line in ended.output.splitlines() if line.startswith("FAULT ")]
    assert found == [f"{about}:"], ended.output
    assert ended.status == 1, ended.output
    for text in texts:
        assert text in ended.output, ended.output


def silent(ended: Ended) -> None:
    assert ended.status == 0, ended.output
    assert "FAULT" not in ended.output, ended.output
    assert "no faults found" in ended.output, ended.output


def bridge(cluster: Cluster, node: str) -> None:
    """What Docker leaves on a host: a bridge with an address of its own, the same on all."""
    for words in ("link add docker0 type bridge", "addr add 172.17.0.1/16 dev docker0", "link set docker0 up"):
        cluster("exec", node, "ip", *words.split())


@pytest.mark.parametrize(("nodes", "ranks"), [(2, 1), (3, 2)])
def test_silent_on_a_healthy_cluster(cluster: Cluster, tmp_path: Path, nodes: int, ranks: int) -> None:
    cluster.up(nodes, "--rate", "200mbit")
    silent(examine(cluster, ranks=ranks, json_to=tmp_path / "record"))
    record = json.loads((tmp_path / "record").read_text())
    assert [node["name"] for node in record["nodes"]] == cluster.nodes
    assert len(record["links"]) == nodes * (nodes - 1) // 2
    for link in record["links"]:
        assert all(0.6 * RATE < bps < 1.1 * RATE for bps in link["bps"]), link
    assert {e["level"] for e in record["exchanges"]} == {"cross", "whole"} | ({"local"} if ranks > 1 else set())


def test_a_slow_node_is_named(cluster: Cluster) -> None:
    cluster.up(3, "--rate", "200mbit", "--node-rates", "n2=20mbit")
    only(examine(cluster), "slow-node", "every link of n2 is slow: ", "where others reach ", "ethtool eth0")


def test_one_slow_direction_between_two_nodes(cluster: Cluster) -> None:
    cluster.up(2, "--rate", "200mbit")
    shape = "qdisc replace dev eth0 root tbf rate 20mbit burst 256kb latency 50ms"
    cluster("exec", "n2", "tc", *shape.split())
    only(examine(cluster), "slow-link", "the link from n2 to n1 is slow: ")


def test_two_nodes_that_cannot_reach_each_other_are_named(cluster: Cluster) -> None:
    cluster.up(3, "--rate", "200mbit")
    cluster("cut", "n2", "n3")
    ended = examine(cluster, ranks=2)
    only(ended, "link", "n2 and n3 cannot exchange messages", "local  OK (3/3)", "cross  FAIL hosts n2-n3")
    assert "ping -c 3 10.78.0.3" in ended.output
    assert ended.seconds < 60.0


def test_a_node_that_cannot_reach_the_first_is_named(cluster: Cluster) -> None:
    cluster.up(3, "--rate", "200mbit")
    cluster("cut", "n1", "n3")
    ended = examine(cluster)
    only(ended, "unreachable", "rank 0 on n1 hears nothing from rank 2", "rank 2 on n3: cannot reach rank 0")
    assert ended.seconds < 60.0


def test_bridges_that_lead_nowhere(cluster: Cluster) -> None:
    """Open MPI would take docker0, and hang or abort; doctor goes round it and says what to set."""
    cluster.up(2, "--rate", "200mbit")
    for node in cluster.nodes:
        bridge(cluster, node)
    fix = "export OMPI_MCA_btl_tcp_if_include=eth0 NCCL_SOCKET_IFNAME=eth0"
    only(examine(cluster), "interface", "Open MPI may choose docker0 (bridge 172.17.0.1/16)", "(on n1, n2)", fix)
    ended = examine(cluster, "--network-interface", "docker0")
    only(ended, "interface", "Open MPI is limited to docker0 (bridge 172.17.0.1/16)", fix)
    ended = examine(cluster, "--network-interface", "eth7")
    only(ended, "interface", "limited to eth7 (btl_tcp_if_include), of which no interface is up", fix)
    silent(examine(cluster, "--network-interface", "eth0"))
    silent(examine(cluster, OMPI_MCA_btl_tcp_if_exclude="docker0,lo"))


def test_no_shared_memory_on_one_node(cluster: Cluster) -> None:
    cluster.up(2, "--rate", "200mbit")
    cluster("exec", "n2", "mount", "-o", "remount,ro", "/dev/shm")
    only(
        examine(cluster, ranks=2), "shared-memory", "memory cannot be shared on n2", "Read-only file system",
        "local  OK (2/2)  Gloo", "whole  OK",
    )  # fmt: skip
