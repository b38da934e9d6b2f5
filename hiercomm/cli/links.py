"""The links between nodes: which pairs to try in which order, and what their figures say. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from hiercomm.cli import networks
from hiercomm.cli.examination import Finding, Job, Link, listing, rate

# A direction counts as slow below this share of what the other nodes' links reach.
SLOW = 0.4
# A latency counts as high where it is so many times, and so many seconds above the usual one.
_HIGH_TIMES, _HIGH_S = 5.0, 2e-3
_ALL_PAIRS = 8  # nodes, up to which all pairs are measured one by one
_MAX_ROUNDS = 16


def schedule(nodes: int) -> list[list[tuple[int, int]]]:
    """Pairs of nodes in rounds; the pairs of a round are measured at the same time and have no node in common.

    Few nodes: every pair alone. More: a tournament, in which every node plays every other. Many: its first rounds, in
    which every node plays many others.
    """
    if nodes <= _ALL_PAIRS:
        return [[(a, b)] for a in range(nodes) for b in range(a + 1, nodes)]
    seats = list(range(nodes + nodes % 2))  # an odd one out plays a seat that is nobody
    rounds = []
    for _ in range(min(len(seats) - 1, _MAX_ROUNDS)):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        rounds.append([(min(p), max(p)) for p in pairs if max(p) < nodes])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def directions(links: Sequence[Link]) -> dict[tuple[str, str], float]:
    """bit/s from node to node, where measured."""
    found = {(link.a, link.b): link.bps[0] for link in links} | {(link.b, link.a): link.bps[1] for link in links}
    return {pair: bps for pair, bps in found.items() if bps is not None}


def usual_bps(links: Sequence[Link]) -> float | None:
    """What links reach on this network: the median of the nodes' best ones, which one slow node does not move."""
    best: dict[str, float] = {}
    for pair, bps in directions(links).items():
        for node in pair:
            best[node] = max(best.get(node, 0.0), bps)
    return statistics.median_high(best.values()) if best else None


def slow(links: Sequence[Link]) -> dict[tuple[str, str], float]:
    """The directions that are much slower than usual."""
    usual = usual_bps(links) or 0.0
    real = directions([link for link in links if not link.inside])
    return {pair: bps for pair, bps in real.items() if bps < SLOW * usual}


def better(one: Link, other: Link) -> Link:
    """The better figures of two measurements of one link."""
    if one.error or other.error:
        return other if one.error is None else one
    bps = tuple(max(a or 0.0, b or 0.0) for a, b in zip(one.bps, other.bps, strict=True))
    latency_s = min(one.latency_s or 0.0, other.latency_s or 0.0)
    return Link(a=one.a, b=one.b, inside=one.inside, latency_s=latency_s, bps=(bps[0], bps[1]))


def late(links: Sequence[Link]) -> list[Link]:
    """The links whose latency is much higher than that of most."""
    known = [link for link in links if link.latency_s is not None]
    usual = statistics.median_low([link.latency_s or 0.0 for link in known]) if len(known) > 1 else float("inf")
    known = [link for link in known if not link.inside]
    return [link for link in known if (link.latency_s or 0.0) > max(_HIGH_TIMES * usual, usual + _HIGH_S)]


def examine(job: Job) -> Iterator[Finding]:
    """Findings of what was measured."""
    yield from _unheard(job)
    yield from _broken(job)
    yield from _slow(job)
    yield from _late(job)
    for exchange in job.exchanges:
        if exchange.error is not None:
            yield Finding(
                exchange.level,
                f"{exchange.level} exchange FAIL on {listing(exchange.nodes)} ({exchange.transport}): {exchange.error}",
                _exchange_fix(exchange.level),
            )
    if job.stuck is not None:
        yield Finding("stuck", job.stuck, "ask again with HIERCOMM_LOCAL=gloo, then on fewer nodes: hiercommrun -H ...")


def _exchange_fix(level: str) -> str:
    if level == "local":
        return "export HIERCOMM_LOCAL=gloo, to go round what fails"
    return "run it again on pairs of these nodes: hiercommrun -H one,other hiercomm doctor"


def _unheard(job: Job) -> Iterator[Finding]:
    if job.silent:
        first = job.nodes[0]
        reason = next(iter(job.silent.values()))
        yield Finding(
            "unreachable",
            f"rank 0 on {first} hears nothing from rank {', '.join(map(str, job.silent))}: {reason}",
            f"the lines of those ranks name their nodes; from there: ping -c 3 {_address(job, first)}, and let all "
            "TCP ports pass between the nodes (firewall)",
        )


def _network_fix(job: Job, a: str, b: str) -> str:
    """What to do where no message passes between two nodes."""
    fix = f"on {a}: ping -c 3 {_address(job, b)}, and let all TCP ports pass between the nodes (firewall)"
    best = networks.suggestion([_ways(job, a), _ways(job, b)])
    if best is not None and max(len(_ways(job, a)), len(_ways(job, b))) > 1:
        fix += f"; if they have several networks: export OMPI_MCA_btl_tcp_if_include={best}"
    return fix


def _broken(job: Job) -> Iterator[Finding]:
    failed = [link for link in job.links if link.error is not None]
    alone = _in_all_of(failed, job.links)
    for node in alone:
        link = next(link for link in failed if node in (link.a, link.b))
        other = link.b if link.a == node else link.a
        fault = f"{node} cannot exchange messages with any other node: {link.error}"
        yield Finding("link", fault, _network_fix(job, other, node))
    for link in failed:
        if link.a not in alone and link.b not in alone:
            fault = f"{link.a} and {link.b} cannot exchange messages: {link.error}"
            yield Finding("link", fault, _network_fix(job, link.a, link.b))


def _in_all_of(bad: Sequence[Link], links: Sequence[Link]) -> list[str]:
    """The nodes, of three or more, all of whose links are bad; none where that is true of all nodes."""
    nodes = list(dict.fromkeys(node for link in links for node in (link.a, link.b)))
    if len(nodes) < 3:
        return []
    return [node for node in nodes if all(link in bad for link in links if node in (link.a, link.b))]


def _slow(job: Job) -> Iterator[Finding]:
    found, usual = slow(job.links), usual_bps(job.links)
    covered: set[tuple[str, str]] = set()
    for node, word, pairs in _slow_nodes(job.links):
        if not covered.issuperset(pairs):
            covered.update(pairs)
            yield Finding(
                "slow-node",
                f"every link {word} {node} is slow: {rate(statistics.median(found[p] for p in pairs))}, where others "
                f"reach {rate(usual)}",
                f"check the cable and switch port of {node}: ethtool {_port(job, node)}; or leave it out",
            )
    for (a, b), bps in found.items():
        if (a, b) not in covered:
            yield Finding(
                "slow-link",
                f"the link from {a} to {b} is slow: {rate(bps)}, where others reach {rate(usual)}",
                f"check the path: on {a}, tracepath {_address(job, b)}; ethtool {_port(job, a)}; on {b}, "
                f"ethtool {_port(job, b)}",
            )


def _slow_nodes(links: Sequence[Link]) -> Iterator[tuple[str, str, list[tuple[str, str]]]]:
    """(node, which way, pairs) for nodes whose links are all slow: both ways first, then one way."""
    found, measured = slow(links), directions(links)
    nodes = list(dict.fromkeys(node for link in links for node in (link.a, link.b)))
    for word, ends in (("of", (0, 1)), ("from", (0,)), ("to", (1,))):
        for node in nodes:
            pairs = [pair for pair in measured if any(pair[end] == node for end in ends)]
            # With two pairs or fewer one slow pair would be a slow node.
            if len(pairs) >= 2 and len(nodes) > 2 and all(pair in found for pair in pairs):
                yield node, word, pairs


def _late(job: Job) -> Iterator[Finding]:
    for link in late(job.links):
        usual = statistics.median_low([other.latency_s for other in job.links if other.latency_s is not None])
        yield Finding(
            "slow-link",
            f"messages between {link.a} and {link.b} take {(link.latency_s or 0) * 1e3:.3g} ms, on most links "
            f"{usual * 1e3:.3g} ms",
            f"check the path: on {link.a}, tracepath {_address(job, link.b)}",
        )


def _ways(job: Job, node: str) -> list[networks.Interface]:
    facts = next(job.facts[rank] for rank, name in job.nodes.items() if name == node)
    return [i for i in facts.interfaces if i.is_usable and not i.stays_inside]


def _port(job: Job, node: str) -> str:
    return next((i.name for i in _ways(job, node)), "eth0")


def _address(job: Job, node: str) -> str:
    return next((str(i.address).partition("/")[0] for i in _ways(job, node)), node)
