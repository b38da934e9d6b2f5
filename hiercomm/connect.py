"""How the ranks of a job find each other at `init`: which nodes there are, and the groups that send over MPI.

Collective, on the thread that initializes, before the progress thread starts. Knows nothing of optimizers.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hiercomm import config as configuration
from hiercomm import launcher, links, topology
from hiercomm.comm import mpi, tcp
from hiercomm.comm.base import Communicator
from hiercomm.comm.loopback import Loopback
from hiercomm.comm.throttle import Link, Throttled
from hiercomm.config import Config
from hiercomm.eager import Communicators
from hiercomm.errors import ConfigError, ConfigMismatch
from hiercomm.topology import Topology


@dataclass(frozen=True)
class Groups:
    """Over what a rank sends: `eager` for users' own tensors, `buckets` between the nodes for optimizers.

    `buckets` is None where this rank sends no buckets to other nodes.
    """

    eager: Communicators
    buckets: Communicator | None


def find_world(comm: Any) -> mpi.MpiWorld | None:
    """The ranks of `comm` (as `init` takes it); None for one process without MPI.

    Raises ConfigError where MPI cannot be used but is needed, or counts other ranks than the launcher.
    """
    claim = launcher.claim(configuration.process_environment())
    reason = mpi.available()
    if reason is not None:
        if comm is not None:
            raise ConfigError(f"init(comm=...) needs MPI, which cannot be used: {reason}")
        if claim is not None and claim.size > 1:
            raise ConfigError(f"{launcher.disagreement(claim, 1)} (MPI cannot be used: {reason})")
        return None
    world = mpi.connect(comm)
    if comm is None and claim is not None and claim.size > 1 and world.size == 1:
        raise ConfigError(launcher.disagreement(claim, world.size))
    return world


@dataclass(frozen=True)
class Hosts:
    """`names`: the host of every rank; `owners`: the host that has an address, where one host alone has it."""

    names: tuple[str, ...]
    owners: Mapping[str, str]


def discover(config: Config, world: mpi.MpiWorld | None) -> tuple[Topology, Hosts]:
    """The nodes and hosts of the job. Raises ConfigMismatch where configurations differ."""
    host = socket.gethostname()
    if world is None:
        return topology.discover([config.node or host], 0), Hosts((host,), {})
    facts = world.all_gather((config.shared(), config.node))
    compare([shared for shared, _ in facts], "the configuration (HIERCOMM_* variables or arguments of init)")
    names = topology.name_nodes(world.all_gather(world.host()), [node for _, node in facts], config.ranks_per_node)
    hosts, addresses = zip(*world.all_gather((host, tcp.addresses())), strict=True)
    return topology.discover(names, world.rank), Hosts(hosts, links.owners(addresses, hosts))


def connect(config: Config, world: mpi.MpiWorld | None, t: Topology) -> Groups:
    """The groups of this rank in topology `t`."""
    if world is None or world.size == 1:
        alone = Loopback(1)
        return Groups(Communicators(t, alone.communicator(0), alone.communicator(0), None), None)
    # Of unequal nodes the first ranks alone cross; the group of the others has no use.
    crosses = len(t.nodes) > 1 and (t.is_homogeneous or t.local_rank == 0)
    throttled = throttle(config, t.local_size if t.is_homogeneous else 1)
    far = [r for r in range(t.size) if r not in t.local_ranks]
    every = throttled(world.communicator(range(t.size)), far)
    local = world.communicator(t.local_ranks)
    cross = throttled(world.communicator(t.cross_ranks), None) if crosses else None
    buckets = throttled(world.communicator(t.cross_ranks), None) if crosses else None
    return Groups(Communicators(t, every, local, cross), buckets)


def throttle(config: Config, sharers: int) -> Callable[[Communicator, Sequence[int] | None], Communicator]:
    """How communicators are wrapped: `sharers` ranks of this node share one link to the other nodes."""
    rate, delay = config.cross_rate, config.cross_delay
    if rate is None and delay is None:
        return lambda comm, far: comm
    link = Link(None if rate is None else rate / sharers, delay or 0.0)
    return lambda comm, far: Throttled(comm, link=link, far=far)


def compare(facts: Sequence[dict[str, Any]], what: str) -> None:
    """Raise ConfigMismatch where the dictionaries differ: the field, the values and the ranks."""
    for field in dict.fromkeys(key for fact in facts for key in fact):
        values: dict[str, list[int]] = {}
        for rank, fact in enumerate(facts):
            values.setdefault(repr(fact.get(field)), []).append(rank)
        if len(values) > 1:
            parts = ", ".join(f"{value} on rank {', '.join(map(str, ranks))}" for value, ranks in values.items())
            raise ConfigMismatch(f"{what} differs between ranks in {field}: {parts}. It must be the same on all ranks.")
