"""Where the ranks are: node names -> Topology. Pure; knows nothing of MPI, sockets or torch.

Nodes with different numbers of ranks are normal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hiercomm.errors import ConfigError, ConfigMismatch


@dataclass(frozen=True)
class Topology:
    """One rank's view of the job. `nodes[i]` are the world ranks of node i, ascending.

    `local_*` counts inside the node; `cross_*` counts the ranks that have the same local rank, over
    the nodes that have one (Horovod's words and meaning).
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    node: int
    nodes: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """World ranks of this node."""
        return self.nodes[self.node]

    @property
    def cross_ranks(self) -> tuple[int, ...]:
        """World ranks with this local rank, one for each node that has it."""
        return tuple(node[self.local_rank] for node in self.nodes if len(node) > self.local_rank)

    @property
    def is_homogeneous(self) -> bool:
        """Whether every node has the same number of ranks."""
        return len({len(node) for node in self.nodes}) == 1

    def inside_node(self) -> Topology:
        """This node as if there were no other."""
        members = tuple(range(self.local_size))
        return Topology(self.local_rank, self.local_size, self.local_rank, self.local_size, 0, 1, 0, (members,),
                        (self.names[self.node],))  # fmt: skip

    def describe(self) -> str:
        """A table of nodes and ranks, and what is synchronous where (for people)."""
        width = max(len("node"), *(len(name) for name in self.names))
        rows = [f"{self.size} ranks on {len(self.nodes)} node{'s' if len(self.nodes) > 1 else ''}"]
        rows.append(f"  {'node':<{width}}  ranks")
        rows += [
            f"  {name:<{width}}  {ranges(node)} ({len(node)})"
            for name, node in zip(self.names, self.nodes, strict=True)
        ]
        if len(self.nodes) == 1:
            rows.append("  local: one node; nothing crosses the network")
        elif self.is_homogeneous:
            local, cross = len(self.nodes[0]), len(self.nodes)
            rows.append(f"  local: groups of {local}; cross: {local} group{'s' if local > 1 else ''} of {cross} nodes")
        else:
            rows.append(f"  local: groups of {', '.join(str(len(node)) for node in self.nodes)}; "
                        f"cross: the first rank of each of {len(self.nodes)} nodes")  # fmt: skip
        rows.append(f"  effective batch: {self.size} x the batch of one rank")
        return "\n".join(rows)


def ranges(ranks: Sequence[int]) -> str:
    """'0-3, 8' for (0, 1, 2, 3, 8)."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def discover(nodes: Sequence[str], rank: int) -> Topology:
    """The topology seen by `rank`, where `nodes[r]` names the node of rank r.

    Nodes are numbered in the order of their first rank. Raises ValueError where `rank` is not in
    `range(len(nodes))`.
    """
    if not 0 <= rank < len(nodes):
        raise ValueError(f"rank {rank} is not in a world of {len(nodes)}")
    members: dict[str, list[int]] = {}
    for r, name in enumerate(nodes):
        members.setdefault(name, []).append(r)
    groups = tuple(tuple(ranks) for ranks in members.values())
    node = list(members).index(nodes[rank])
    local_rank = groups[node].index(rank)
    peers = [g for g in groups if len(g) > local_rank]
    return Topology(
        rank=rank,
        size=len(nodes),
        local_rank=local_rank,
        local_size=len(groups[node]),
        cross_rank=peers.index(groups[node]),
        cross_size=len(peers),
        node=node,
        nodes=groups,
        names=tuple(members),
    )


def name_nodes(found: Sequence[str], given: Sequence[str | None], ranks_per_node: int | None) -> tuple[str, ...]:
    """Each rank's node name: what the user gave, else every `ranks_per_node` ranks, else what MPI found.

    Args are indexed by rank. Raises ConfigMismatch where only some ranks were given a name, ConfigError where a
    node would hold ranks that MPI finds on several hosts.
    """
    missing = [r for r, name in enumerate(given) if name is None]
    if len(missing) < len(given):
        if missing:
            raise ConfigMismatch(
                f"HIERCOMM_NODE is set on some ranks but not on rank {ranges(missing)}: set it on every rank or on none"
            )
        names = tuple(str(name) for name in given)
    elif ranks_per_node is not None:
        names = tuple(f"node{r // ranks_per_node}" for r in range(len(found)))
    else:
        return tuple(found)
    for name in dict.fromkeys(names):
        hosts = dict.fromkeys(host for host, n in zip(found, names, strict=True) if n == name)
        if len(hosts) > 1:
            ranks = ranges([r for r, n in enumerate(names) if n == name])
            raise ConfigError(
                f"node {name!r} (HIERCOMM_NODE or HIERCOMM_RANKS_PER_NODE) would hold ranks {ranks}, which cannot "
                f"share memory: MPI finds them on {', '.join(hosts)}. A host can be split, not joined"
            )
    return names
