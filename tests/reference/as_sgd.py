"""AS-SGD, the whole cluster in one loop: what hiercomm.rounds and hiercomm.modes.as_sgd must match.

Per node: x parameters; A anchor, the sum of all that was agreed (the same on every node); progress not in A yet:
`new` since the last export, `exported`, `flying` under way in a round; e residual of the compressor, already weighted.
After a merge x = A + flying + exported + new.
    step:    u = optimizer(mean over the node's ranks of g(x));  x += u;  new += u
    export:  exported += new;  new = 0
    take:    flying = exported;  exported = 0;  q = C(w flying + e);  e = w flying + e - q
    commit:  A += sum over the nodes that took part of q, in node order;  x follows A at the node's next merge
with w = ranks of the node / ranks of all. Mass: A + sum_n (w_n (new_n + exported_n) + e_n) + the q under way is
x_0 + sum_n w_n (all updates of n), always.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Gradient = Callable[[int, int, Array], Array]  # rank, step, parameters
Code = Callable[[Array], Array]  # what arrives of what is sent


def exact(x: Array) -> Array:
    """No compression."""
    return x


def int8(x: Array) -> Array:
    """127 steps to the largest magnitude: one block, the scale not rounded."""
    scale = np.abs(x).max(initial=0.0) / 127
    return np.zeros_like(x) if scale == 0 else np.clip(np.rint(x / scale), -127, 127) * scale


@dataclass
class SGD:
    """torch.optim.SGD: one node's optimizer."""

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    buffer: Array | None = None

    def update(self, g: Array, x: Array) -> Array:
        """What is added to x."""
        g = g + self.weight_decay * x
        if self.momentum:
            self.buffer = g if self.buffer is None else self.momentum * self.buffer + g
            g = g + self.momentum * self.buffer if self.nesterov else self.buffer
        return -self.lr * g


@dataclass
class Node:
    """One node's state."""

    ranks: tuple[int, ...]
    weight: float
    optimizer: SGD
    x: Array
    e: Array
    new: Array
    exported: Array
    flying: Array
    step: int = 0
    since: list[int] = field(default_factory=list)  # steps at which what is not merged yet was exported
    taken: int = 0  # of which so many are under way
    produced: Array | float = 0.0  # the sum of all updates
    oldest: int = 0  # the largest age so far


class Cluster:
    """Nodes of `sizes` ranks that train from `x0`."""

    def __init__(
        self, x0: Array, sizes: Sequence[int], gradient: Gradient, make: Callable[[], SGD], code: Code = exact
    ):
        self.x0, self.gradient, self.code = x0, gradient, code
        ends = np.cumsum(sizes)
        zero = np.zeros_like(x0)
        self.nodes = [
            Node(tuple(range(end - n, end)), n / ends[-1], make(), x0.copy(), zero, zero, zero, zero)
            for n, end in zip(sizes, ends, strict=True)
        ]
        self.A = x0.copy()
        self.sent: dict[int, Array] = {}  # of the round under way, by node
        self.rounds = 0

    def step(self, n: int) -> None:
        """One step of node n, alone."""
        node = self.nodes[n]
        g = sum(self.gradient(r, node.step, node.x) for r in node.ranks) / len(node.ranks)
        u = node.optimizer.update(g, node.x)
        node.x, node.new = node.x + u, node.new + u
        node.produced = node.produced + u
        node.step += 1
        if node.since:
            node.oldest = max(node.oldest, node.step - node.since[0])

    def export(self, n: int) -> None:
        """What node n has done since its last export may go."""
        node = self.nodes[n]
        node.exported, node.new = node.exported + node.new, np.zeros_like(self.A)
        node.since.append(node.step)

    def take(self, present: Iterable[int]) -> None:
        """Begin a round: these nodes take part with what they have exported, the others with nothing."""
        assert not self.sent, "one round at a time"
        for n in sorted(present):
            node = self.nodes[n]
            node.flying, node.exported, node.taken = node.exported, np.zeros_like(self.A), len(node.since)
            p = node.weight * node.flying + node.e
            self.sent[n] = self.code(p)
            node.e = p - self.sent[n]

    def commit(self) -> None:
        """End the round: the anchor moves, and what was under way is in it."""
        for n, q in self.sent.items():  # in node order
            self.A = self.A + q
            node = self.nodes[n]
            node.flying, node.since, node.taken = np.zeros_like(self.A), node.since[node.taken :], 0
        self.sent = {}
        self.rounds += 1

    def merge(self, n: int) -> None:
        """Node n goes on from the newest anchor; its steps that are not in it stay."""
        node = self.nodes[n]
        node.x = self.A + node.flying + node.exported + node.new

    def age(self, n: int) -> int:
        """Steps of node n since it exported what has waited longest to be in the anchor; 0 where nothing waits."""
        node = self.nodes[n]
        return node.step - node.since[0] if node.since else 0

    def flush(self) -> None:
        """All that is left goes into the anchor, uncompressed: afterwards all nodes are equal."""
        if self.sent:
            self.commit()
        for n, node in enumerate(self.nodes):
            self.export(n)
            self.A = self.A + (node.weight * node.exported + node.e)
            node.exported, node.e, node.since = np.zeros_like(self.A), np.zeros_like(self.A), []
        for n in range(len(self.nodes)):
            self.merge(n)

    def mass(self) -> Array:
        """What is where, added up: see the head of this file."""
        waiting = sum(n.weight * (n.new + n.exported) + n.e for n in self.nodes)
        return self.A + waiting + sum(self.sent.values())

    def expected_mass(self) -> Array:
        """x_0 and all updates of all nodes, weighted."""
        return self.x0 + sum(n.weight * n.produced for n in self.nodes)


def synchronous(x0: Array, ranks: int, gradient: Gradient, optimizer: SGD, steps: int) -> Array:
    """BSP: the parameters after so many steps on the mean gradient of all ranks."""
    x = x0
    for t in range(steps):
        x = x + optimizer.update(sum(gradient(r, t, x) for r in range(ranks)) / ranks, x)
    return x


def train(
    cluster: Cluster, steps: Sequence[int], max_age: int, period: int, speeds: Sequence[float], round_s: float
) -> None:
    """Let node n take steps[n] steps of speeds[n] seconds; a round takes `round_s`, and waits for nobody's steps.

    With max_age 0 a round waits until every node that still trains has exported.
    """
    count = len(cluster.nodes)
    due = list(speeds)  # when each node's step ends
    round_ends = np.inf

    def begin(now: float) -> None:
        nonlocal round_ends
        training = [n for n in range(count) if cluster.nodes[n].step < steps[n] or cluster.nodes[n].since]
        ready = [n for n in range(count) if cluster.nodes[n].since]
        if round_ends == np.inf and ready and (max_age or len(ready) == len(training)):
            cluster.take(ready)
            round_ends = now + round_s

    while any(node.step < s or node.since for node, s in zip(cluster.nodes, steps, strict=True)):
        # A node at its limit waits for the round.
        free = [n for n in range(count) if cluster.nodes[n].step < steps[n] and not _at_limit(cluster, n, max_age)]
        n = min(free, key=lambda n: due[n], default=None)
        if n is None or round_ends <= due[n]:
            now, round_ends = round_ends, np.inf
            cluster.commit()
            for m in range(count):
                if due[m] < now and not _at_limit(cluster, m, max_age):  # it waited until now
                    due[m] = now + speeds[m]
        else:
            now = due[n]
            cluster.merge(n)
            cluster.step(n)
            due[n] = now + speeds[n]
            if cluster.nodes[n].step % period == 0 or cluster.nodes[n].step == steps[n]:
                cluster.export(n)
        begin(now)


def _at_limit(cluster: Cluster, n: int, max_age: int) -> bool:
    return bool(cluster.nodes[n].since) and cluster.age(n) >= max_age
