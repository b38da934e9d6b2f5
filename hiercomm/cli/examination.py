"""What an examination of a job holds: facts and measurements in, findings out. Data and words alone; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hiercomm.cli.facts import Facts


@dataclass(frozen=True)
class Finding:
    """One fault. `about` is a word for programs."""

    about: str
    fault: str
    fix: str


@dataclass(frozen=True, kw_only=True)
class Link:
    """What the messages between two nodes did. `bps` is bit/s from `a` to `b` and back; None: not measured.

    `inside`: both nodes are parts of one host, so what is slow is no link.
    """

    a: str
    b: str
    inside: bool = False
    error: str | None = None
    latency_s: float | None = None
    bps: tuple[float | None, float | None] = (None, None)


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """A sum at one level over `nodes`. `error`: why it failed; `fallback`: why it went another way than it should."""

    level: str
    nodes: tuple[str, ...]
    transport: str
    error: str | None = None
    fallback: str | None = None
    seconds: float | None = None
    nbytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Job:
    """All ranks of which something is known: facts and node name by rank, and what was measured."""

    size: int
    facts: Mapping[int, Facts]
    nodes: Mapping[int, str]
    placement_error: str | None = None
    silent: Mapping[int, str] = field(default_factory=dict)  # ranks that did not answer, and why
    links: Sequence[Link] = ()
    exchanges: Sequence[Exchange] = ()
    unreadable: Sequence[int] = ()  # ranks that may not read the memory of others on their host
    mpi_nodes: tuple[tuple[int, ...], ...] | None = None  # the ranks of each node as MPI finds them
    skipped: Mapping[str, str] = field(default_factory=dict)  # what was not measured, and why
    stuck: str | None = None  # what did not end in time and took the examination with it

    def hosts(self) -> dict[str, list[int]]:
        """The ranks of every machine, whatever nodes it was split into."""
        found: dict[str, list[int]] = {}
        for rank, facts in self.facts.items():
            found.setdefault(facts.machine, []).append(rank)
        return found

    def members(self) -> dict[str, list[int]]:
        """The ranks of every node."""
        found: dict[str, list[int]] = {}
        for rank, name in self.nodes.items():
            found.setdefault(name, []).append(rank)
        return found


def listing(names: Sequence[str], most: int = 6) -> str:
    """'n1, n2 and 3 more', each once."""
    names = list(dict.fromkeys(names))
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def rate(bps: float | None) -> str:
    """'190 Mbit/s'."""
    if bps is None:
        return "-"
    return f"{bps / 1e9:.3g} Gbit/s" if bps >= 1e9 else f"{bps / 1e6:.3g} Mbit/s"
