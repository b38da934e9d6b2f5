"""The pure part of `hiercomm doctor`: each fault planted in facts or figures is found, healthy ones give none."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from hiercomm.cli import doctor, facts, findings, links, networks, table
from hiercomm.cli.examination import Exchange, Finding, Job, Link
from hiercomm.cli.facts import Facts
from hiercomm.cli.networks import Interface
from hiercomm.config import Config
from hiercomm.launcher import HYDRA, INTEL_MPI, OPEN_MPI, SRUN_PMIX, is_misfit

LO = Interface("lo", "loopback", address="127.0.0.1/8")
DOCKER = Interface("docker0", "bridge", address="172.17.0.1/16")
VIRBR = Interface("virbr0", "bridge", address="192.168.122.1/24")
GIB = 2**30


def eth(host: int, **changes: Any) -> Interface:
    return dataclasses.replace(Interface("eth0", "ethernet", address=f"10.0.0.{host}/24", speed_mbit=1000), **changes)


def ib(host: int) -> Interface:
    return Interface("ib0", "infiniband", address=f"10.1.0.{host}/24", speed_mbit=100000)


def fact(number: int = 1, **changes: Any) -> Facts:
    """A rank of a healthy job on host n<number>."""
    base = Facts(
        host=f"n{number}", machine=f"n{number} boot{number} net", pid=100,
        versions={"hiercomm": "0.1.0", "torch": "2.13.0", "mpi4py": "4.1.2", "python": "3.11.7"},
        library="Open MPI v5.0.11", library_path="/usr/lib/libmpi.so.40", launcher=OPEN_MPI,
        launcher_path="/usr/bin/prterun", claimed_rank=0, claimed_size=4, claimed_local_size=2,
        thread_level="multiple", options=Config().shared(), variables={}, interfaces=(LO, eth(number)),
        shm_free=8 * GIB, cores=(0, 1, 2, 3), host_cores=4,
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


def job(*of_ranks: Facts, **changes: Any) -> Job:
    known = dict(enumerate(of_ranks))
    nodes, error = doctor.place(known, len(known))
    return dataclasses.replace(Job(size=len(known), facts=known, nodes=nodes, placement_error=error), **changes)


def two_by_two(**changes: Any) -> Job:
    """2 nodes of 2 ranks, all with the same changes."""
    return job(*(fact(host, **changes) for host in (1, 1, 2, 2)))


def only(found: list[Finding], about: str) -> Finding:
    assert [f.about for f in found] == [about], found
    return found[0]


def full(names: str, bps: float = 1e9, **special: Link) -> list[Link]:
    """Links between all nodes, one letter each; `ab=Link(...)` in place of one."""
    pairs = itertools.combinations(names, 2)
    return [special.get(a + b) or Link(a=a, b=b, latency_s=5e-5, bps=(bps, bps)) for a, b in pairs]


# ---- healthy ----------------------------------------------------------------------------------------------


def test_a_healthy_job_has_no_findings():
    exchanges = [Exchange(level="local", nodes=(n,), transport="shared memory", seconds=1e-3) for n in ("n1", "n2")]
    healthy = dataclasses.replace(
        two_by_two(), exchanges=exchanges, links=[Link(a="n1", b="n2", latency_s=5e-5, bps=(9.4e8, 9.3e8))],
        mpi_nodes=((0, 1), (2, 3)),
    )  # fmt: skip
    assert findings.diagnose(healthy) == []
    assert table.text(healthy, []).endswith("\nno faults found")


@pytest.mark.parametrize(
    "usual",
    [
        {"launcher": SRUN_PMIX, "launcher_path": None},
        {"library": "MPICH Version: 5.0.2", "launcher": HYDRA},
        {"options": Config(local="gloo").shared(), "shm_error": "/dev/shm: Read-only file system"},
        {"interfaces": (LO, eth(1), DOCKER), "variables": {"OMPI_MCA_btl_tcp_if_include": "eth0"}},
        {"interfaces": (LO, eth(1), DOCKER), "variables": {"OMPI_MCA_btl_tcp_if_include": "10.0.0.0/24"}},
        {"interfaces": (LO, eth(1), DOCKER), "variables": {"OMPI_MCA_btl_tcp_if_exclude": "docker0,lo"}},
        {"interfaces": (LO, eth(1), dataclasses.replace(DOCKER, up=False))},
        {"interfaces": (LO, Interface("br0", "bridge", address="10.0.0.1/24", uplinks=("eno1",)))},
        {"interfaces": (LO, Interface("eth0", "virtual", address="10.0.0.1/24"))},  # inside a container
        {"variables": {"OMP_NUM_THREADS": "2"}},
        {"variables": {"OMP_NUM_THREADS": "1"}, "cores": (0,), "host_cores": 1},
        {"gpus": ("H200 a", "H200 b")},
        {"in_container": True},
    ],
    ids=str,
)
def test_what_is_merely_unusual_is_no_fault(usual: dict[str, Any]):
    assert findings.diagnose(two_by_two(**usual)) == []


def test_unequal_nodes_and_emulated_nodes_are_healthy():
    assert findings.diagnose(job(fact(1), fact(1), fact(1), fact(2))) == []
    split = {"options": Config(ranks_per_node=2).shared(), "interfaces": (LO, eth(1), DOCKER)}
    emulated = job(*(fact(1, **split) for _ in range(4)))
    assert list(emulated.nodes.values()) == ["node0", "node0", "node1", "node1"]
    assert findings.diagnose(emulated) == []


def test_one_rank_alone_is_healthy():
    alone = fact(launcher=None, launcher_path=None, claimed_rank=None, claimed_size=None, interfaces=(LO, DOCKER))
    assert findings.diagnose(job(alone)) == []


# ---- libraries and launcher -------------------------------------------------------------------------------


def test_no_mpi():
    found = only(findings.diagnose(job(fact(library=None, mpi_error="cannot load MPI library", claimed_size=1))), "mpi")
    assert "cannot load MPI library" in found.fault
    assert "MPI4PY_LIBMPI" in found.fix


@pytest.mark.parametrize(
    ("launcher", "library", "wrong"),
    [
        (OPEN_MPI, "MPICH Version: 5.0.2", True),
        (OPEN_MPI, "Intel(R) MPI Library 2021.13 for Linux* OS", True),
        (OPEN_MPI, "Open MPI v4.1.4", False),
        (OPEN_MPI, "IBM Spectrum MPI v10.4", False),
        (HYDRA, "Open MPI v5.0.11", True),
        (INTEL_MPI, "Open MPI v5.0.11", True),
        (INTEL_MPI, "Intel(R) MPI Library 2021.13 for Linux* OS", False),
        (SRUN_PMIX, "MPICH Version: 5.0.2", False),
    ],
)
def test_launcher_and_library_of_different_mpis(launcher: str, library: str, wrong: bool):
    assert is_misfit(launcher, library) == wrong
    found = findings.diagnose(job(fact(launcher=launcher, library=library)))
    if wrong:
        assert "another MPI's library: " + library in only(found, "launcher").fault
        assert launcher in found[0].fault
        assert "(/usr/bin/prterun)" in found[0].fault


def test_the_fix_of_a_wrong_library_is_what_the_user_can_type():
    wrong = {"library": "MPICH Version: 5.0.2", "claimed_size": 2}
    set_by_user = job(fact(**wrong, variables={"MPI4PY_LIBMPI": "/x/libmpi.so.12"}))
    assert findings.diagnose(set_by_user)[0].fix.startswith("unset MPI4PY_LIBMPI")
    beside = job(fact(**wrong, launcher_library="/usr/lib/libmpi.so.40"))
    assert findings.diagnose(beside)[0].fix.startswith("export MPI4PY_LIBMPI=/usr/lib/libmpi.so.40")


def test_ranks_that_are_each_alone():
    found = only(findings.diagnose(job(fact(launcher=SRUN_PMIX, claimed_size=4))), "launcher")
    assert "MPI's world has 1 rank, but srun --mpi=pmix started 4 processes" in found.fault
    assert "--mpi=pmi2 for MPICH" in found.fix


@pytest.mark.parametrize(
    ("level", "variables", "fix"),
    [
        ("single", {"MPI4PY_RC_THREAD_LEVEL": "single"}, "unset MPI4PY_RC_THREAD_LEVEL"),
        ("single", {"MPI4PY_RC_THREADS": "0"}, "unset MPI4PY_RC_THREADS"),
        ("funneled", {}, "MPI4PY_LIBMPI"),
    ],
)
def test_thread_level(level: str, variables: dict[str, str], fix: str):
    found = only(findings.diagnose(two_by_two(thread_level=level, variables=variables)), "thread-level")
    assert f"level {level} on every node" in found.fault
    assert fix in found.fix
    assert findings.diagnose(two_by_two(thread_level="serialized")) == []


@pytest.mark.parametrize("package", ["hiercomm", "torch", "mpi4py"])
def test_versions_that_differ(package: str):
    other = fact(2, versions={**fact().versions, package: "9.9"})
    found = only(findings.diagnose(job(fact(), fact(), fact(), other)), "versions")
    assert f"{package} is not the same on all ranks" in found.fault
    assert "9.9 on n2" in found.fault
    assert found.fix == f"pip install {package}=={fact().versions[package]}, on every node"


def test_libraries_that_differ():
    found = findings.diagnose(job(fact(1), fact(2, library="Open MPI v4.1.4")))
    assert "Open MPI v4.1.4 on n2" in only(found, "versions").fault


def test_options():
    found = findings.diagnose(job(fact(1), fact(2, options=Config(cross_rate=1e6).shared())))
    assert "HIERCOMM_CROSS_RATE is not the same" in only(found, "options").fault
    assert "1000000.0 on n2" in found[0].fault
    assert found[0].fix.startswith("unset HIERCOMM_CROSS_RATE")
    found = findings.diagnose(two_by_two(options=None, options_error="unknown environment variable HIERCOMM_X"))
    assert "HIERCOMM_X (on every node)" in only(found, "options").fault


def test_nodes_that_cannot_be():
    joined = job(fact(1, node="a"), fact(2, node="a"))
    assert "would hold ranks 0-1" in only(findings.diagnose(joined), "placement").fault
    seen = dataclasses.replace(two_by_two(), mpi_nodes=((0,), (1,), (2,), (3,)))
    assert "[(0,), (1,), (2,), (3,)]" in only(findings.diagnose(seen), "placement").fault


def test_hosts_with_one_name_are_told_apart():
    of_ranks = {0: fact(1), 1: fact(2, host="n1"), 2: fact(1)}
    assert doctor.place(of_ranks, 3) == ({0: "n1#0", 1: "n1#1", 2: "n1#0"}, None)


# ---- network ------------------------------------------------------------------------------------------------


def test_docker_bridge_beside_ethernet_and_infiniband():
    of_hosts = [fact(host, interfaces=(LO, DOCKER, eth(host), ib(host))) for host in (1, 2)]
    found = only(findings.diagnose(job(*of_hosts)), "interface")
    assert "Open MPI may choose docker0 (bridge 172.17.0.1/16)" in found.fault
    assert "(on n1, n2)" in found.fault
    assert "OMPI_MCA_btl_tcp_if_include=ib0 NCCL_SOCKET_IFNAME=ib0" in found.fix
    assert "OMPI_MCA_btl_tcp_if_exclude=docker0,lo" in found.fix


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"btl_tcp_if_include": "docker0"}, "is limited to docker0 (bridge 172.17.0.1/16)"),
        ({"btl_tcp_if_include": "172.17.0.0/16"}, "is limited to docker0 (bridge 172.17.0.1/16)"),
        ({"btl_tcp_if_include": "lo"}, "is limited to lo (loopback 127.0.0.1/8)"),
        ({"btl_tcp_if_include": "eth7"}, "limited to eth7 (btl_tcp_if_include), of which no interface is up"),
        ({"btl_tcp_if_include": "ib1"}, "limited to ib1 (btl_tcp_if_include), of which no interface is up"),
        ({"btl_tcp_if_exclude": "docker0"}, "may choose lo (loopback 127.0.0.1/8)"),
        ({"btl_tcp_if_exclude": "lo"}, "may choose docker0 (bridge 172.17.0.1/16)"),
    ],
    ids=str,
)
def test_interfaces_that_lead_nowhere(variables: dict[str, str], text: str):
    down = Interface("ib1", "infiniband", up=False, address="10.2.0.1/24")
    wrong = {f"OMPI_MCA_{name}": value for name, value in variables.items()}
    ranks = [fact(host, interfaces=(LO, eth(host), DOCKER, down), variables=wrong) for host in (1, 2)]
    found = only(findings.diagnose(job(*ranks)), "interface")
    assert text in found.fault
    assert "OMPI_MCA_btl_tcp_if_include=eth0" in found.fix


def test_a_bridge_on_one_host_alone_is_no_fault():
    assert findings.diagnose(job(fact(1), fact(2, interfaces=(LO, DOCKER, eth(2))), fact(3))) == []
    limited = fact(2, interfaces=(LO, DOCKER, eth(2)), variables={"OMPI_MCA_btl_tcp_if_include": "docker0"})
    only(findings.diagnose(job(fact(1), limited, fact(3))), "interface")


def test_the_wrong_interface_does_not_matter_inside_one_host():
    wrong = {"OMPI_MCA_btl_tcp_if_include": "docker0"}
    assert findings.diagnose(job(*(fact(1, interfaces=(LO, DOCKER, eth(1)), variables=wrong) for _ in range(4)))) == []


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        (None, None, {"include": None, "exclude": "127.0.0.0/8,docker0,lo"}),
        ("docker0", None, {"include": None, "exclude": "127.0.0.0/8,docker0,lo"}),
        ("eth0,docker0", None, {}),
        (None, "eth1,lo", {"include": None, "exclude": "docker0,eth1,lo"}),
        (None, "docker0,lo", {}),
    ],
)
def test_the_detour_leaves_out_what_leads_nowhere(include: str | None, exclude: str | None, expected: dict[str, Any]):
    detour = networks.detour((LO, eth(1), DOCKER), include, exclude)
    assert detour == {f"OMPI_MCA_btl_tcp_if_{word}": value for word, value in expected.items()}


def test_suggestions():
    suggest = networks.suggestion
    assert suggest([(LO, DOCKER, eth(1), ib(1)), (LO, DOCKER, eth(2), ib(2))]) == "ib0"
    assert suggest([(LO, eth(1), ib(1)), (LO, eth(2))]) == "eth0"
    assert suggest([(eth(1),), (eth(2, name="eno1"),)]) == "10.0.0.0/24"
    assert suggest([(eth(1),), (eth(2, address="10.9.0.2/24"),)]) == "eth0"  # routed
    assert suggest([(LO, DOCKER), (LO, eth(1))]) is None
    assert suggest([(eth(1), eth(1, name="eth1", speed_mbit=25000, address="10.3.0.1/24")),
                    (eth(2), eth(2, name="eth1", address="10.3.0.2/24"))]) == "eth1"  # fmt: skip
    assert networks.inside_only([(LO, VIRBR, eth(1)), (LO, DOCKER)]) == ["docker0", "virbr0", "lo"]


def test_a_port_that_came_up_slowly():
    slow = fact(3, interfaces=(LO, eth(3, speed_mbit=100)))
    found = only(findings.diagnose(job(fact(1), fact(2), slow)), "interface-speed")
    assert "eth0 on n3 runs at 100 Mbit/s, on other nodes at 1000" in found.fault


def test_interfaces_of_this_machine(tmp_path: Path):
    found = networks.interfaces()
    assert ("lo", "loopback", True) in [(i.name, i.kind, i.stays_inside) for i in found]
    for folder, content in (("lo/bridge", None), ("lo/brif/eth9", None), ("eth9/device", None)):
        (tmp_path / folder).mkdir(parents=True)
        assert content is None
    with_uplink = next(i for i in networks.interfaces(tmp_path) if i.name == "lo")
    assert with_uplink.uplinks == ("eth9",)


# ---- inside the nodes -------------------------------------------------------------------------------------


def test_shared_memory_that_cannot_be_used():
    found = findings.diagnose(job(fact(1), fact(1), *[fact(2, shm_error="/dev/shm: Read-only file system")] * 2))
    only(found, "shared-memory")
    assert "cannot be shared on n2" in found[0].fault
    assert "Read-only" in found[0].fault
    assert "--ipc=host" in found[0].fix
    assert "HIERCOMM_LOCAL=gloo" in found[0].fix


def test_shared_memory_that_is_too_small():
    found = only(findings.diagnose(job(*[fact(1, shm_free=64 << 20)] * 4)), "shared-memory")
    assert "only 64 MB are free in /dev/shm on n1" in found.fault


def test_a_local_exchange_that_took_another_way():
    fallen = Exchange(level="local", nodes=("n1",), transport="Gloo", fallback="No space left on device", seconds=1.0)
    found = only(findings.diagnose(dataclasses.replace(two_by_two(), exchanges=[fallen])), "shared-memory")
    assert "on n1" in found.fault
    assert "No space left on device" in found.fault


def test_ranks_that_may_not_read_each_other():
    boxed = dataclasses.replace(two_by_two(library="Open MPI v4.1.4", in_container=True), unreadable=[0, 1])
    found = only(findings.diagnose(boxed), "single-copy")
    assert "on n1 may not read each other's memory (in a container" in found.fault
    assert "export OMPI_MCA_btl_vader_single_copy_mechanism=none" in found.fix
    for harmless in (
        {"library": "Open MPI v4.1.4", "variables": {"OMPI_MCA_btl_vader_single_copy_mechanism": "none"}},
        {"library": "Open MPI v5.0.11"},
        {"library": "MPICH Version: 5.0.2", "launcher": HYDRA},
    ):
        assert findings.diagnose(dataclasses.replace(two_by_two(**harmless), unreadable=[0])) == []


def test_cores():
    found = findings.diagnose(job(*(fact(1, cores=(i,), host_cores=16) for i in range(4))))
    assert "--bind-to none" in only(found, "binding").fix
    assert "--cpus-per-task=4" in found[0].fix
    found = findings.diagnose(two_by_two(variables={"OMP_NUM_THREADS": "4"}))
    assert [f.about for f in found] == ["threads", "threads"]
    assert "2 ranks on n1 run 8 threads on 4 cores" in found[0].fault
    assert found[0].fix == "export OMP_NUM_THREADS=2"


def test_gpus():
    found = findings.diagnose(job(*[fact(1, gpus=("H200 a", "H200 b"))] * 4))
    assert only(found, "gpus").fault == "4 ranks on n1 share 2 GPUs"
    own = [fact(1, gpus=(f"H200 {i}",)) for i in range(4)]  # --gpus-per-task=1
    assert findings.diagnose(job(*own)) == []


def test_shared_memory_is_looked_at(tmp_path: Path):
    assert facts.shared_memory(tmp_path)[0] is None
    assert facts.shared_memory(tmp_path)[1] > 0
    assert list(tmp_path.iterdir()) == []
    error, free = facts.shared_memory(tmp_path / "missing")
    assert error is not None
    assert "No such file" in error
    assert free == 0


# ---- links --------------------------------------------------------------------------------------------------


def measured(of_links: list[Link], nodes: int) -> list[Finding]:
    letters = [fact(i, host="abcdefgh"[i]) for i in range(nodes)]
    return findings.diagnose(dataclasses.replace(job(*letters), links=of_links))


@pytest.mark.parametrize("nodes", [2, 3, 4, 8])
def test_equal_links_are_healthy(nodes: int):
    assert measured(full("abcdefgh"[:nodes]), nodes) == []


@pytest.mark.parametrize("nodes", [3, 4, 8])
@pytest.mark.parametrize("way", ["of", "from", "to"])
def test_a_slow_node_is_named_not_its_links(nodes: int, way: str):
    names = "abcdefgh"[:nodes]
    slow = {"of": (1e7, 1e7), "from": (1e9, 1e7), "to": (1e7, 1e9)}[way]
    last = names[-1]
    special = {a + last: Link(a=a, b=last, latency_s=5e-5, bps=slow) for a in names[:-1]}
    found = only(measured(full(names, **special), nodes), "slow-node")
    assert f"every link {way} {last} is slow: 10 Mbit/s, where others reach 1 Gbit/s" in found.fault


@pytest.mark.parametrize("nodes", [3, 4, 8])
def test_a_slow_pair_is_named(nodes: int):
    special = {"ab": Link(a="a", b="b", latency_s=5e-5, bps=(2e7, 2e7))}
    found = measured(full("abcdefgh"[:nodes], **special), nodes)
    assert [f.about for f in found] == ["slow-link", "slow-link"]
    assert "from a to b is slow: 20 Mbit/s" in found[0].fault
    assert "from b to a" in found[1].fault


def test_of_two_nodes_one_direction_can_be_slow():
    found = only(measured([Link(a="a", b="b", latency_s=5e-5, bps=(1e9, 1e8))], 2), "slow-link")
    assert "from b to a is slow: 100 Mbit/s" in found.fault


def test_parts_of_one_host_have_no_slow_links():
    special = {"ab": Link(a="a", b="b", inside=True, latency_s=0.1, bps=(1e7, 1e7))}
    assert measured(full("abc", **special), 3) == []


def test_a_high_latency_is_named():
    special = {"bc": Link(a="b", b="c", latency_s=2e-2, bps=(1e9, 1e9))}
    found = only(measured(full("abcd", **special), 4), "slow-link")
    assert "between b and c take 20 ms, on most links 0.05 ms" in found.fault


def test_failing_links():
    broken = {"ab": Link(a="a", b="b", error="the first message did not arrive within 8 s")}
    found = only(measured(full("abc", **broken), 3), "link")
    assert "a and b cannot exchange messages: the first message did not arrive" in found.fault
    assert "ping -c 3 10.0.0.1" in found.fix
    gone = {f"{x}c": Link(a=x, b="c", error="nothing arrives") for x in "ab"}
    assert "c cannot exchange messages with any other node" in only(measured(full("abc", **gone), 3), "link").fault


def test_local_works_and_cross_fails():
    """The failing level and the hosts are named."""
    good = [Exchange(level="local", nodes=(n,), transport="shared memory", seconds=1e-3) for n in ("A", "B")]
    bad = Exchange(level="cross", nodes=("A", "B"), transport="MPI", error="rank 0: nothing arrives")
    sick = dataclasses.replace(two_by_two(), exchanges=[*good, bad])
    found = only(findings.diagnose(sick), "cross")
    text = table.text(sick, [found])
    assert "local  OK (2/2)" in text
    assert "cross  FAIL (0/1 OK) hosts A, B" in text
    assert text.endswith("\n1 fault found")


def test_silent_ranks_and_what_is_stuck():
    silent = dataclasses.replace(job(fact(1)), size=2, silent={1: "no message within 10 s"})
    assert "rank 0 on n1 hears nothing from rank 1" in only(findings.diagnose(silent), "unreachable").fault
    stuck = dataclasses.replace(two_by_two(), stuck="the whole exchange did not end within 60 s")
    assert "whole exchange" in only(findings.diagnose(stuck), "stuck").fault


@pytest.mark.parametrize("nodes", [*range(1, 14), 31, 32, 33, 200])
def test_the_schedule_of_links(nodes: int):
    rounds = links.schedule(nodes)
    pairs = [pair for pairs in rounds for pair in pairs]
    assert all(0 <= a < b < nodes for a, b in pairs)
    assert len(set(pairs)) == len(pairs)
    for together in rounds:
        seats = [node for pair in together for node in pair]
        assert len(set(seats)) == len(seats)
    if nodes <= 17:
        assert len(pairs) == nodes * (nodes - 1) // 2
    assert len(rounds) <= 28
    counts = [sum(node in pair for pair in pairs) for node in range(nodes)]
    assert max(counts) - min(counts) <= 1


def test_the_better_of_two_measurements():
    one = Link(a="a", b="b", latency_s=1e-3, bps=(1e9, 1e7))
    other = Link(a="a", b="b", latency_s=2e-3, bps=(1e8, 1e9))
    assert links.better(one, other) == Link(a="a", b="b", latency_s=1e-3, bps=(1e9, 1e9))
    broken = Link(a="a", b="b", error="nothing arrives")
    assert links.better(one, broken) == broken
    assert links.better(broken, one) == broken


# ---- the report -------------------------------------------------------------------------------------------


def test_the_record_is_json_and_complete():
    sick = dataclasses.replace(
        two_by_two(thread_level="single"), links=[Link(a="n1", b="n2", latency_s=1e-4, bps=(1e9, 9e8))],
        skipped={"whole": "not tried: MPI has no thread support"},
    )  # fmt: skip
    found = findings.diagnose(sick)
    record = json.loads(json.dumps(table.record(sick, found)))
    assert record["nodes"] == [{"name": "n1", "ranks": [0, 1]}, {"name": "n2", "ranks": [2, 3]}]
    assert [f["rank"] for f in record["facts"]] == [0, 1, 2, 3]
    assert record["links"][0]["bps"] == [1e9, 9e8]
    assert record["findings"][0]["about"] == "thread-level"
    text = table.text(sick, found)
    assert "1000, 0.10" in text
    assert "whole  not tried: MPI has no thread support" in text
    for finding in found:
        assert f"FAULT {finding.about}: {finding.fault}\n  fix: {finding.fix}" in text


def test_a_file_that_cannot_be_written_is_misuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert doctor.main(["--json", str(tmp_path / "missing" / "file")]) == 2
    assert "No such file or directory" in capsys.readouterr().err
