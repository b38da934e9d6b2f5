"""From facts to findings: pure, so that every fault can be planted in a test.

A finding is one fault and its fix, a command or variable as one would type it. What is merely unusual is none.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hiercomm import launcher
from hiercomm.cli import links, networks
from hiercomm.cli.examination import Finding, Job, listing
from hiercomm.cli.facts import Facts
from hiercomm.config import variable

_MIN_BUCKETS = 2  # buckets of a small model that have to fit into shared memory


def diagnose(job: Job) -> list[Finding]:
    """All findings, causes before what follows from them."""
    return [finding for examine in _EXAMINATIONS for finding in examine(job)]


def _on(job: Job, ranks: Sequence[int]) -> str:
    """'on n1, n2', or 'on every node'."""
    names = [job.nodes[rank] for rank in ranks]
    return "on every node" if len({*job.nodes.values()}) > 1 and {*names} == {*job.nodes.values()} else (
        f"on {listing(names)}"
    )  # fmt: skip


def _ranks_with(job: Job, value: Callable[[Facts], Any]) -> dict[Any, list[int]]:
    """The ranks by a value of their facts."""
    found: dict[Any, list[int]] = {}
    for rank, facts in job.facts.items():
        found.setdefault(value(facts), []).append(rank)
    return found


# ---- libraries and launcher -------------------------------------------------------------------------------


def _libraries(job: Job) -> Iterator[Finding]:
    for error, ranks in _ranks_with(job, lambda f: f.mpi_error).items():
        if error is not None:
            yield Finding(
                "mpi",
                f"MPI cannot be used {_on(job, ranks)}: {error}",
                "pip install 'hiercomm[mpi]', or name this machine's library: export MPI4PY_LIBMPI=/path/libmpi.so",
            )
    for key in ("hiercomm", "torch", "mpi4py"):
        yield from _difference(job, key, lambda f, key=key: f.versions.get(key), f"pip install {key}=={{}}")  # type: ignore[misc]
    yield from _difference(job, "MPI library", lambda f: f.library, "export MPI4PY_LIBMPI to name one library, {}")


def _difference(job: Job, what: str, value: Callable[[Facts], Any], fix: str) -> Iterator[Finding]:
    groups = {v: ranks for v, ranks in _ranks_with(job, value).items() if v is not None}
    if len(groups) > 1:
        parts = "; ".join(f"{v} {_on(job, ranks)}" for v, ranks in groups.items())
        most = max(groups, key=lambda v: len(groups[v]))
        yield Finding("versions", f"{what} is not the same on all ranks: {parts}", f"{fix.format(most)}, on every node")


def _launcher(job: Job) -> Iterator[Finding]:
    for rank, facts in job.facts.items():
        if facts.launcher is None or facts.claimed_size is None or facts.claimed_size == job.size:
            continue
        if facts.library is not None and launcher.is_misfit(facts.launcher, facts.library):
            started = f"{facts.launcher} ({facts.launcher_path or 'path unknown'}) started {facts.claimed_size} ranks"
            yield Finding(
                "launcher",
                f"{started}, but mpi4py loads another MPI's library: {facts.library} ({facts.library_path})",
                _launcher_fix(facts),
            )
        elif facts.mpi_error is None and job.size == 1:
            claim = launcher.Claim(facts.launcher, facts.claimed_rank or rank, facts.claimed_size, None, None)
            fault, _, fix = launcher.disagreement(claim, job.size).partition(": ")
            yield Finding("launcher", fault, fix.rstrip("."))
        return


def _launcher_fix(facts: Facts) -> str:
    if "MPI4PY_LIBMPI" in facts.variables:
        fix = "unset MPI4PY_LIBMPI"
    elif facts.launcher_library is not None:
        fix = f"export MPI4PY_LIBMPI={facts.launcher_library}"
    else:
        fix = f"export MPI4PY_LIBMPI to the library of {facts.launcher}"
    return f"{fix}, or start with the mpirun that belongs to the library"


def _thread_level(job: Job) -> Iterator[Finding]:
    for level in ("single", "funneled"):
        ranks = [rank for rank, facts in job.facts.items() if facts.thread_level == level]
        if ranks:
            variables = {v for rank in ranks for v in job.facts[rank].variables if v.startswith("MPI4PY_RC_THREAD")}
            fix = f"unset {' '.join(sorted(variables))}" if variables else (
                "use an MPI library that was built with threads (export MPI4PY_LIBMPI=...)"
            )  # fmt: skip
            yield Finding(
                "thread-level",
                f"MPI runs at thread level {level} {_on(job, ranks)}: communication needs a thread of its own, so "
                "serialized or multiple",
                fix,
            )


def _options(job: Job) -> Iterator[Finding]:
    for error, ranks in _ranks_with(job, lambda f: f.options_error).items():
        if error is not None:
            yield Finding("options", f"{error} ({_on(job, ranks)})", "set or unset that variable, on every node")
    known = {rank: f.options for rank, f in job.facts.items() if f.options is not None}
    for name in dict.fromkeys(name for options in known.values() for name in options):
        groups: dict[str, list[int]] = {}
        for rank, options in known.items():
            groups.setdefault(repr(options.get(name)), []).append(rank)
        if len(groups) > 1:
            parts = "; ".join(f"{value} {_on(job, ranks)}" for value, ranks in groups.items())
            yield Finding(
                "options", f"{variable(name)} is not the same on all ranks: {parts}", f"unset {variable(name)}, or set "
                "it where you start the job: hiercommrun hands it on to every node",
            )  # fmt: skip


def _placement(job: Job) -> Iterator[Finding]:
    if job.placement_error is not None:
        yield Finding("placement", job.placement_error, "unset HIERCOMM_NODE HIERCOMM_RANKS_PER_NODE")
    own = sorted(tuple(ranks) for ranks in job.members().values())
    if job.mpi_nodes is not None and sorted(job.mpi_nodes) != own:
        yield Finding(
            "placement",
            f"MPI finds the nodes {sorted(job.mpi_nodes)} (ranks of each), host names show {own}",
            "give every node a host name of its own, and start with hiercommrun or mpirun",
        )


# ---- network ------------------------------------------------------------------------------------------------


def _interfaces(job: Job) -> Iterator[Finding]:
    hosts = [job.facts[ranks[0]] for ranks in job.hosts().values()]
    first = {f.machine: job.nodes[rank] for rank, f in reversed(list(job.facts.items()))}
    if len(hosts) < 2 or not any((f.library or "").startswith("Open MPI") for f in hosts):
        return
    groups: dict[str, list[str]] = {}
    stray = [(facts, reason) for facts in hosts if (reason := _astray(facts)) is not None]
    for facts, reason in stray:
        groups.setdefault(reason, []).append(first[facts.machine])
    # A way that one host alone offers is not taken: no other host has an interface that seems to fit it.
    if len(stray) == 1 and "OMPI_MCA_btl_tcp_if_include" not in stray[0][0].variables:
        return
    for reason, names in groups.items():
        yield Finding("interface", f"{reason} (on {listing(names)})", _interface_fix(hosts))


def _astray(facts: Facts) -> str | None:
    """Why Open MPI would send messages for other hosts where none get through."""
    include, exclude = (facts.variables.get(f"OMPI_MCA_btl_tcp_if_{word}") for word in ("include", "exclude"))
    if not networks.detour(facts.interfaces, include, exclude):
        return None
    ways = networks.open_mpi_ways(facts.interfaces, include, exclude)
    if include and not ways:
        return f"Open MPI is limited to {include} (btl_tcp_if_include), of which no interface is up and has an address"
    wrong = [f"{i.name} ({i.kind} {i.address})" for i in ways if i.stays_inside]
    how = "is limited to" if include else "may choose"
    return f"Open MPI {how} {listing(wrong)}, from which no other host can be reached"


def _interface_fix(hosts: Sequence[Facts]) -> str:
    found = [facts.interfaces for facts in hosts]
    best = networks.suggestion(found)
    leave_out = f"OMPI_MCA_btl_tcp_if_exclude={','.join(networks.inside_only(found))}"
    if best is None:
        return f"unset OMPI_MCA_btl_tcp_if_include; export {leave_out}"
    nccl = "" if "/" in best else f" NCCL_SOCKET_IFNAME={best}"
    return f"export OMPI_MCA_btl_tcp_if_include={best}{nccl} (or leave out the others: {leave_out})"


def _speeds(job: Job) -> Iterator[Finding]:
    speeds: dict[str, dict[str, int]] = {}
    for ranks in job.hosts().values():
        for i in job.facts[ranks[0]].interfaces:
            if i.is_usable and i.speed_mbit is not None:
                speeds.setdefault(i.name, {})[job.nodes[ranks[0]]] = i.speed_mbit
    for name, by_node in speeds.items():
        usual = statistics.median_high(by_node.values())
        slow = {node: speed for node, speed in by_node.items() if speed < links.SLOW * usual}
        for node, speed in slow.items():
            yield Finding(
                "interface-speed",
                f"{name} on {node} runs at {speed} Mbit/s, on other nodes at {usual}",
                f"check its cable and switch port, then on {node}: ethtool -s {name} speed {usual} autoneg on",
            )


# ---- inside the nodes -------------------------------------------------------------------------------------


def _shared_memory(job: Job) -> Iterator[Finding]:
    for name, ranks in job.members().items():
        options = job.facts[ranks[0]].options or {}
        if options.get("local", "auto") not in ("auto", "shm") or (len(ranks) == 1 and job.size > 1):
            continue
        need = _MIN_BUCKETS * len(ranks) * int(options.get("bucket_bytes", 0))
        free = min(job.facts[rank].shm_free for rank in ranks)
        error = next((job.facts[rank].shm_error for rank in ranks if job.facts[rank].shm_error), None)
        fallback = next((e.fallback for e in job.exchanges if e.level == "local" and name in e.nodes), None)
        slower = "so ranks of a node exchange through sockets (Gloo), which is many times slower"
        if error is not None or fallback is not None:
            fault = f"memory cannot be shared on {name}, {slower}: {error or fallback}"
        elif free < need:
            fault = f"only {free >> 20} MB are free in /dev/shm on {name}, {slower} for all but small models"
        else:
            continue
        yield Finding(
            "shared-memory", fault, f"mount -t tmpfs -o size={max(1, 4 * need >> 30)}g tmpfs /dev/shm; in a container: "
            "docker run --ipc=host. To live with it: export HIERCOMM_LOCAL=gloo",
        )  # fmt: skip


def _single_copy(job: Job) -> Iterator[Finding]:
    # From version 5 on Open MPI tries it first, and goes another way without a word.
    ranks = [
        rank
        for rank in job.unreadable
        if re.match(r"Open MPI v[234]\.", job.facts[rank].library or "")
        and job.facts[rank].variables.get("OMPI_MCA_btl_vader_single_copy_mechanism") != "none"
    ]
    if ranks:
        boxed = " (in a container without the right to trace)" if job.facts[ranks[0]].in_container else ""
        yield Finding(
            "single-copy",
            f"ranks {_on(job, ranks)} may not read each other's memory{boxed}: Open MPI says 'Read -1, expected N, "
            "errno = 1' for large messages",
            "export OMPI_MCA_btl_vader_single_copy_mechanism=none (hiercommrun does so in a container)",
        )


def _cores(job: Job) -> Iterator[Finding]:
    for ranks in job.hosts().values():
        name, cores = job.nodes[ranks[0]], job.facts[ranks[0]].host_cores
        if cores >= 2 * len(ranks) and any(len(job.facts[rank].cores) == 1 for rank in ranks):
            yield Finding(
                "binding",
                f"ranks on {name} may use one of its {cores} cores each: computation and communication share it",
                "mpirun --bind-to none (hiercommrun does so), or srun --cpus-per-task="
                f"{cores // len(ranks)} under Slurm",
            )
        usable = {core for rank in ranks for core in job.facts[rank].cores}
        asked = [job.facts[rank].variables.get("OMP_NUM_THREADS", "") for rank in ranks]
        threads = [int(text) for text in asked if text.isdecimal()]
        if max(threads, default=1) > 1 and sum(threads) > len(usable):
            yield Finding(
                "threads",
                f"{len(ranks)} ranks on {name} run {sum(threads)} threads on {len(usable)} cores (OMP_NUM_THREADS)",
                f"export OMP_NUM_THREADS={max(1, len(usable) // len(ranks))}",
            )


def _gpus(job: Job) -> Iterator[Finding]:
    for ranks in job.hosts().values():
        seen = {gpu for rank in ranks for gpu in job.facts[rank].gpus}
        if seen and len(seen) < len(ranks):
            yield Finding(
                "gpus",
                f"{len(ranks)} ranks on {job.nodes[ranks[0]]} share {len(seen)} GPU{'s' if len(seen) > 1 else ''}",
                f"hiercommrun --ranks-per-node {len(seen)}, or srun --ntasks-per-node={len(seen)} --gpus-per-task=1",
            )


_EXAMINATIONS: tuple[Callable[[Job], Iterator[Finding]], ...] = (
    _libraries, _launcher, _thread_level, _options, _placement, _interfaces, _speeds, _shared_memory, _single_copy,
    _cores, _gpus, links.examine,
)  # fmt: skip
