"""`hiercomm doctor`: looks at nodes, libraries and links, and says what is wrong and what to do about it.

    hiercommrun -np 4 hiercomm doctor                    on the nodes where a job shall run
    hiercomm doctor                                      on this machine alone

Rank 0 tells the others what to do, one exercise after another, and prints what came out; every wait has a limit.
Exit status: 0 where no fault was found, 1 where one was, 2 where the command line cannot be used.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

from hiercomm import launcher, topology
from hiercomm.cli import facts as own
from hiercomm.cli import findings, links, networks, table
from hiercomm.cli.examination import Exchange, Job, Link, listing
from hiercomm.cli.facts import Facts
from hiercomm.cli.limits import leave, limit, starting
from hiercomm.cli.measure import CONTACT_S, EXCHANGE_S, FIRST_TAG, LINK_S, LinkResult, Post, Rank, SumResult
from hiercomm.comm import mpi
from hiercomm.comm.base import Communicator
from hiercomm.config import Config, override_mpi, process_environment
from hiercomm.errors import CommError, ConfigError

_HELLO_S = 10.0  # until a rank has sent its facts
_ORDER_S = 600.0  # until the next exercise
_LINKS_S = 90.0  # no new link is measured after this
_AGAIN = 2  # how often a link that seems slow is measured again
_SUM_BYTES = 8 << 20
_SUM_S = 0.5  # what a sum may take over the slowest link


def main(argv: Sequence[str]) -> int:
    """Examine the job of which this process is a rank. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="hiercomm doctor", description="Check nodes, links and libraries.")
    parser.add_argument("--json", metavar="FILE", help="write facts, measurements and findings here (rank 0)")
    options = parser.parse_args(argv)
    facts = own.gather(process_environment())
    first = facts.claimed_rank in (None, 0)
    if first and options.json and (refusal := _refusal(Path(options.json))) is not None:
        print(f"hiercomm doctor: --json {options.json} cannot be written: {refusal}", file=sys.stderr)
        return 2
    if facts.mpi_error is not None or _is_misfit(facts):
        return _alone(facts, options.json) if first else _stay_quiet(facts)
    level, rank, size = _start(facts)
    facts = dataclasses.replace(facts, thread_level=level)
    if size == 1:
        return _alone(facts, options.json) if first else _stay_quiet(facts)
    mailbox, comm = mpi.direct()
    post = Post(mailbox, rank, size)
    if rank == 0:
        return _Examiner(post, comm, facts, options.json).examine()
    return _assist(post, comm, facts)


def _refusal(path: Path) -> str | None:
    """Why the file cannot be written."""
    try:
        with path.open("a"):
            return None
    except OSError as error:
        return os.strerror(error.errno or 0)


def _is_misfit(facts: Facts) -> bool:
    """Whether MPI must not even be started, since some libraries would end the process."""
    return (
        facts.launcher is not None and facts.library is not None and launcher.is_misfit(facts.launcher, facts.library)
    )


def _start(facts: Facts) -> tuple[str, int, int]:
    """Start MPI. Returns the thread level, this rank and the number of ranks."""
    if facts.claimed_local_size is None or facts.claimed_local_size != facts.claimed_size:
        # What would lead astray must not keep the ranks from telling us so.
        limits = (facts.variables.get(f"OMPI_MCA_btl_tcp_if_{word}") for word in ("include", "exclude"))
        override_mpi(networks.detour(facts.interfaces, *limits))
    with starting(facts):
        level = mpi.thread_level()
        rank, size = mpi.place()
    return level, rank, size


def _alone(facts: Facts, path: str | None) -> int:
    nodes = {0: facts.node or facts.host}
    return _report(Job(size=1, facts={0: facts}, nodes=nodes), path)


def _stay_quiet(facts: Facts) -> int:
    # Rank 0 says it for all; where it has no such fault, its launcher learns by this exit status.
    time.sleep(3.0)
    leave(facts, f"MPI cannot be used: {facts.mpi_error or f'{facts.library} was not started by {facts.launcher}'}")
    return 1


def _report(job: Job, path: str | None) -> int:
    found = findings.diagnose(job)
    print(table.text(job, found), flush=True)
    if path is not None:
        Path(path).write_text(json.dumps(table.record(job, found), indent=1) + "\n")
    return 1 if found else 0


def place(facts: Mapping[int, Facts], size: int) -> tuple[dict[int, str], str | None]:
    """The node of every rank, as training would name it, and why the user's own division cannot be."""
    hosts = {f.host: {g.machine for g in facts.values() if g.host == f.host} for f in facts.values()}
    firsts: dict[str, int] = {}
    found = {}
    for rank, f in sorted(facts.items()):
        first = firsts.setdefault(f.machine, rank)
        found[rank] = f.host if len(hosts[f.host]) == 1 else f"{f.host}#{first}"
    given = [facts[rank].node for rank in sorted(facts)]
    per_node = next(iter(facts.values())).options or {}
    if len(facts) < size:
        return found, None
    try:
        names = topology.name_nodes([found[r] for r in range(size)], given, per_node.get("ranks_per_node"))
    except ConfigError as error:
        return found, str(error)
    return dict(enumerate(names)), None


def _part(post: Post, comm: Communicator, facts: Facts, nodes: Mapping[int, str]) -> Rank:
    """This rank's part, where the silent ranks have nodes of their own."""
    names = [nodes.get(rank, f"silent {rank}") for rank in range(post.size)]
    config = facts.config if facts.options_error is None else Config()
    return Rank(post, comm, topology.discover(names, post.rank), config)


# ---- all ranks but the first ------------------------------------------------------------------------------


def _assist(post: Post, comm: Communicator, facts: Facts) -> int:
    try:
        post.send(0, "facts", facts)
        part = _part(post, comm, facts, post.receive(0, "nodes", _HELLO_S + 1.0))
        while True:
            what, arguments, limit_s = post.receive(0, "do", _ORDER_S)
            if what == "end":
                break
            with limit(limit_s + 10.0, lambda: leave(facts, f"the {what} exchange hangs")):  # noqa: B023
                post.send(0, "done", part.run(what, *arguments))
    except CommError as error:
        leave(facts, f"cannot reach rank 0: {error}", grace_s=15.0)
    if not arguments[0]:
        os._exit(1)  # MPI's own end would wait for messages that never come
    return 0


# ---- rank 0 -------------------------------------------------------------------------------------------------


@final
class _Examiner:
    """Rank 0: gives the orders, keeps what comes back."""

    def __init__(self, post: Post, comm: Communicator, facts: Facts, path: str | None) -> None:
        self._post = post
        self._comm = comm
        self._path = path
        self._tag = FIRST_TAG
        self._own = facts
        self._job = Job(size=post.size, facts={0: facts}, nodes={0: facts.host})

    def examine(self) -> int:
        """All exercises, then the report. Returns the exit status, where the ranks can still end together."""
        self._meet()
        self._local()
        if len(self._job.members()) > 1:
            self._links()
            self._cross()
        self._whole()
        job = self._job
        healthy = not (job.silent or any(e.error for e in job.exchanges) or any(link.error for link in job.links))
        status = _report(job, self._path)
        for rank in job.facts:
            if rank != 0:
                self._post.send(rank, "do", ("end", (healthy,), 0.0))
        if not healthy:
            time.sleep(0.5)
            os._exit(status)
        return status

    def _update(self, **changes: Any) -> None:
        self._job = dataclasses.replace(self._job, **changes)

    def _meet(self) -> None:
        others = range(1, self._post.size)
        facts = {0: self._own}
        with self._within(_HELLO_S, "the first messages"):
            facts |= self._post.gather(others, "facts", _HELLO_S)
            nodes, error = place(facts, self._post.size)
            silent = {r: f"no message within {_HELLO_S:g} s" for r in others if r not in facts}
            facts = dict(sorted(facts.items()))
            self._update(facts=facts, nodes=nodes, placement_error=error, silent=silent)
            for rank in facts:
                if rank != 0:
                    self._post.send(rank, "nodes", nodes)
        self._part = _part(self._post, self._comm, self._own, nodes)
        if silent:
            time.sleep(3.0)  # they are about to say on which node they are

    @contextmanager
    def _within(self, seconds: float, what: str) -> Iterator[None]:
        with limit(seconds + 5.0, lambda: self._give_up(f"{what} did not end within {seconds + 5.0:g} s")):
            yield

    def _give_up(self, why: str) -> None:
        self._update(stuck=why)
        os._exit(_report(self._job, self._path))

    def _order(self, what: str, orders: Mapping[int, tuple[Any, ...]], limit_s: float) -> dict[int, Any]:
        """Have ranks carry out an exercise, each with its arguments. Returns their results, as far as they come."""
        begin = time.monotonic()
        with self._within(limit_s + 5.0, f"the {what} exchange"):
            for rank, arguments in orders.items():
                if rank != 0:
                    self._post.send(rank, "do", (what, arguments, limit_s))
            results = {0: self._part.run(what, *orders[0])} if 0 in orders else {}
            left_s = max(1.0, begin + limit_s + 4.0 - time.monotonic())
            return results | self._post.gather([rank for rank in orders if rank != 0], "done", left_s)

    # ---- exercises ---------------------------------------------------------------------------------------

    def _local(self) -> None:
        members = {name: ranks for name, ranks in self._job.members().items() if len(ranks) > 1}
        if not members:
            return self._skip("local", "one rank on each node")
        orders = {
            rank: (_SUM_BYTES, [self._job.facts[q].pid for q in ranks if q != rank and self._are_close(rank, q)])
            for ranks in members.values()
            for rank in ranks
        }
        results: dict[int, SumResult] = self._order("local", orders, 2 * EXCHANGE_S)
        for name, ranks in members.items():
            self._keep("local", (name,), _SUM_BYTES, {rank: results.get(rank) for rank in ranks})
        self._update(unreadable=[rank for rank, result in sorted(results.items()) if result.unreadable])

    def _are_close(self, a: int, b: int) -> bool:
        return self._job.facts[a].pid_space == self._job.facts[b].pid_space

    def _links(self) -> None:
        names = list(self._job.members())
        begin = time.monotonic()
        measured: dict[tuple[int, int], Link] = {}
        for pairs in links.schedule(len(names)):
            failures = [node for pair, link in measured.items() if link.error for node in pair]
            # A node that is cut off would cost its whole limit with each of the others.
            pairs = [p for p in pairs if max(failures.count(node) for node in p) < 2]
            if pairs and time.monotonic() - begin < _LINKS_S:
                measured |= self._measure(names, pairs)
        for _ in range(_AGAIN):
            suspects = links.slow(list(measured.values())).keys()
            for pair, link in list(measured.items()):
                if {(link.a, link.b), (link.b, link.a)} & suspects:
                    again = self._measure(names, [pair])[pair]
                    measured[pair] = links.better(link, again)
        self._update(links=list(measured.values()))

    def _measure(self, names: Sequence[str], pairs: Sequence[tuple[int, int]]) -> dict[tuple[int, int], Link]:
        leaders = [ranks[0] for ranks in self._job.members().values()]
        self._tag += 1
        orders: dict[int, tuple[Any, ...]] = {}
        for a, b in pairs:
            orders |= {leaders[a]: (leaders[b], self._tag), leaders[b]: (leaders[a], self._tag)}
        results: dict[int, LinkResult] = self._order("link", orders, CONTACT_S + LINK_S)
        found = {}
        for a, b in pairs:
            seen = results.get(min(leaders[a], leaders[b]), LinkResult("its end did not answer"))
            found[a, b] = Link(
                a=names[a], b=names[b], inside=self._are_inside(leaders[a], leaders[b]), error=seen.error,
                latency_s=seen.latency_s, bps=(seen.bps_to, seen.bps_from),
            )  # fmt: skip
        return found

    def _are_inside(self, a: int, b: int) -> bool:
        """Whether messages between two ranks stay in one host, and at its own speed."""
        both = [self._job.facts[rank] for rank in (a, b)]
        slowed = any((f.options or {}).get(name) for f in both for name in ("cross_rate", "cross_delay"))
        return both[0].machine == both[1].machine and not slowed

    def _cross(self) -> None:
        pairs = [f"{link.a}-{link.b}" for link in self._job.links if link.error]
        if pairs:
            return self._skip("cross", f"FAIL hosts {listing(pairs)}")
        if self._job.silent:
            return self._skip("cross", f"FAIL no word from rank {', '.join(map(str, self._job.silent))}")
        nodes = list(self._job.members().values())
        equal = len({len(ranks) for ranks in nodes}) == 1
        groups = list(zip(*nodes, strict=True)) if equal else [tuple(ranks[0] for ranks in nodes)]
        self._tag += 2
        nbytes = self._bytes()
        orders = {rank: (nbytes, self._tag) for group in groups for rank in group}
        results: dict[int, SumResult] = self._order("cross", orders, EXCHANGE_S)
        for group in groups:
            names = tuple(self._job.nodes[rank] for rank in group)
            self._keep("cross", names, nbytes, {rank: results.get(rank) for rank in group})

    def _bytes(self) -> int:
        """As much as the slowest link carries in little time."""
        slowest = min(links.directions(self._job.links).values(), default=1e12)
        return max(1 << 16, min(_SUM_BYTES, int(slowest / 8 * _SUM_S) >> 6 << 6))

    def _whole(self) -> None:
        reason = self._unfit()
        if reason is not None:
            return self._skip("whole", f"not tried: {reason}")
        nbytes = self._bytes()
        orders = dict.fromkeys(range(self._job.size), (nbytes,))
        results: dict[int, SumResult] = self._order("whole", orders, 2 * EXCHANGE_S)
        self._keep("whole", tuple(self._job.members()), nbytes, {rank: results.get(rank) for rank in orders})
        self._update(mpi_nodes=results[0].nodes)

    def _unfit(self) -> str | None:
        """Why the whole would only hang or fail as its parts did."""
        job = self._job
        failed = [exchange.level for exchange in job.exchanges if exchange.error is not None]
        if job.silent:
            return f"no word from rank {', '.join(map(str, job.silent))}"
        if failed or "FAIL" in job.skipped.get("cross", ""):
            return "a part of it fails"
        if any(f.thread_level not in ("serialized", "multiple") for f in job.facts.values()):
            return "MPI has no thread support"
        options = [f.options for f in job.facts.values()]
        if job.placement_error or None in options or any(o != options[0] for o in options):
            return "the options cannot be used"
        return None

    def _keep(self, level: str, nodes: tuple[str, ...], nbytes: int, results: Mapping[int, SumResult | None]) -> None:
        known = [result for result in results.values() if result is not None]
        errors = [f"rank {rank}: {result.error}" for rank, result in results.items() if result and result.error]
        errors += [f"rank {rank} did not answer" for rank, result in results.items() if result is None]
        exchange = Exchange(
            level=level,
            nodes=nodes,
            transport=known[0].transport if known else "none",
            error=errors[0] if errors else None,
            fallback=next((result.fallback for result in known if result.fallback), None),
            seconds=max((result.seconds for result in known if result.seconds), default=None),
            nbytes=nbytes,
        )
        self._update(exchanges=[*self._job.exchanges, exchange])

    def _skip(self, level: str, why: str) -> None:
        self._update(skipped={**self._job.skipped, level: why})
