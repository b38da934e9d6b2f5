"""An examination as text for people and as JSON for programs. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from hiercomm.cli import links, networks
from hiercomm.cli.examination import Exchange, Finding, Job, listing, rate
from hiercomm.cli.facts import Facts
from hiercomm.topology import ranges

_WIDEST = 16  # nodes, up to which the matrix is printed whole


def text(job: Job, found: Sequence[Finding]) -> str:
    """What was found, then the faults with their fixes; the last line counts them."""
    lines = [*_head(job), "", *_nodes(job), ""]
    lines += [*_exchanges(job), *_matrix(job)]
    for finding in found:
        lines += [f"FAULT {finding.about}: {finding.fault}", f"  fix: {finding.fix}"]
    count = f"{len(found)} fault{'s' if len(found) > 1 else ''} found" if found else "no faults found"
    return "\n".join([*lines, count])


def record(job: Job, found: Sequence[Finding]) -> dict[str, Any]:
    """All of it, as JSON can hold it."""
    return {
        "size": job.size,
        "nodes": [{"name": name, "ranks": ranks} for name, ranks in job.members().items()],
        "facts": [{"rank": rank, **dataclasses.asdict(facts)} for rank, facts in sorted(job.facts.items())],
        "silent": [{"rank": rank, "reason": reason} for rank, reason in job.silent.items()],
        "links": [dataclasses.asdict(link) for link in job.links],
        "exchanges": [dataclasses.asdict(exchange) for exchange in job.exchanges],
        "skipped": dict(job.skipped),
        "stuck": job.stuck,
        "findings": [dataclasses.asdict(finding) for finding in found],
    }


def _head(job: Job) -> Iterator[str]:
    facts = job.facts[min(job.facts)]
    members = job.members()
    silent = f" ({_count(len(job.silent), 'rank')} silent)" if job.silent else ""
    yield f"hiercomm doctor: {_count(job.size, 'rank')} on {_count(len(members), 'node')}{silent}"
    threads = "" if facts.thread_level is None else f", thread level {facts.thread_level}"
    yield f"  MPI         {facts.library or 'none'} ({facts.library_path or 'no path'}){threads}"
    by = "nobody: one rank alone" if facts.launcher is None and job.size == 1 else facts.launcher or "unknown"
    yield f"  started by  {by}{f' ({facts.launcher_path})' if facts.launcher_path else ''}"
    yield f"  versions    {', '.join(f'{name} {version}' for name, version in facts.versions.items())}"


def _nodes(job: Job) -> Iterator[str]:
    rows = [("node", "ranks", "cores", "threads", "GPUs", "/dev/shm", "interfaces (* used by MPI)")]
    for name, ranks in job.members().items():
        first = job.facts[ranks[0]]
        shm = "no" if first.shm_error else f"{first.shm_free / 2**30:.1f} GB"
        rows.append((
            name if name == first.host or name.startswith(f"{first.host}#") else f"{name} ({first.host})",
            f"{ranges(ranks)} ({len(ranks)})",
            str(len({core for rank in ranks for core in job.facts[rank].cores})),
            first.variables.get("OMP_NUM_THREADS", "auto"),
            str(len({gpu for rank in ranks for gpu in job.facts[rank].gpus})),
            shm,
            "; ".join(_interfaces(first)) or "none",
        ))  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _interfaces(facts: Facts) -> Iterator[str]:
    limits = (facts.variables.get(f"OMPI_MCA_btl_tcp_if_{word}") for word in ("include", "exclude"))
    is_open_mpi = (facts.library or "").startswith("Open MPI")
    used = networks.open_mpi_ways(facts.interfaces, *limits) if is_open_mpi else []
    for interface in facts.interfaces:
        if interface.address is not None:
            yield f"{interface}{'*' if interface in used else ''}"


def _exchanges(job: Job) -> Iterator[str]:
    for level in ("local", "cross", "whole"):
        those = [exchange for exchange in job.exchanges if exchange.level == level]
        good = [exchange for exchange in those if exchange.error is None]
        if level in job.skipped:
            yield f"  {level}  {job.skipped[level]}"
        elif len(good) < len(those):
            where = listing([name for e in those if e.error is not None for name in e.nodes])
            yield f"  {level}  FAIL ({len(good)}/{len(those)} OK) hosts {where}"
        elif those:
            yield f"  {level}  OK ({len(good)}/{len(those)})  {_slowest(good)}"


def _slowest(exchanges: Sequence[Exchange]) -> str:
    worst = max(exchanges, key=lambda e: e.seconds or 0.0)
    return f"{worst.transport}, {worst.nbytes / 2**20:.3g} MB in {(worst.seconds or 0.0) * 1e3:.3g} ms"


def _matrix(job: Job) -> Iterator[str]:
    names = list(job.members())
    if len(names) < 2 or not job.links:
        return
    usual = links.usual_bps(job.links)
    yield f"  links  {len(job.links)} measured, usual bandwidth {rate(usual)}"
    if len(names) > _WIDEST:
        return
    cells = {(link.a, link.b): _cell(link.error, link.bps[0], link.latency_s) for link in job.links}
    cells |= {(link.b, link.a): _cell(link.error, link.bps[1], link.latency_s) for link in job.links}
    width = max(len(cell) for cell in [*cells.values(), *names])
    first = max(len(name) for name in [*names, "from \\ to"])
    yield "  " + "  ".join(["from \\ to".ljust(first), *(name.rjust(width) for name in names)]) + "   (Mbit/s, ms)"
    for a in names:
        row = [cells.get((a, b), "" if a == b else "-").rjust(width) for b in names]
        yield "  " + "  ".join([a.ljust(first), *row])


def _cell(error: str | None, bps: float | None, latency_s: float | None) -> str:
    if error is not None:
        return "FAIL"
    return f"{(bps or 0.0) / 1e6:.4g}, {(latency_s or 0.0) * 1e3:.2f}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
