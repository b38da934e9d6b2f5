"""Between nodes: all-to-all as links like it, and what an exchange in fewer bytes is to the all-reduce around it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from hiercomm.comm.base import AllOf, Communicator
from hiercomm.compress import Sites
from hiercomm.progress import Task

# Smaller pieces go out at once: they fill no queue, and rounds would cost their latency.
_ROUNDS_BYTES = 32 << 10


@dataclass(frozen=True)
class Chunk:
    """What crosses at a time: elements `cut` of a rank's part of a buffer; `task` is made with the tag to run on."""

    cut: slice
    task: Callable[[int], Task]


class Coding(ABC):
    """How one bucket crosses the links between nodes in fewer bytes, with what is remembered from step to step."""

    # Whether every rank of a node takes part in the exchange of the whole bucket, in place of a shard.
    takes_whole: bool
    # What of its sites can be summed for another world, as merge.py says.
    keeps: str
    sites: Sites

    @abstractmethod
    def chunks(self, comm: Communicator, part: Tensor, begin: int, divisor: int) -> Iterator[Chunk]:
        """Afterwards `part` holds its mean over the nodes, the same bits on every rank.

        The part begins with element `begin` of the bucket. What the sites inherited is shared out at once.
        """

    @abstractmethod
    def describe(self) -> str:
        """As one would write it."""


def cuts(numel: int, each: int) -> list[slice]:
    """`numel` elements, `each` at a time; one empty cut where there are none."""
    return [slice(begin, min(begin + each, numel)) for begin in range(0, max(numel, 1), each)]


def all_to_all(comm: Communicator, out: Sequence[Tensor], buf: Sequence[Tensor], tag: int) -> Task:
    """Task: `buf[q]` goes to rank q, `out[q]` comes from it; of a piece without elements nothing is sent.

    Piece 0 is the largest: it decides, so it must be as large on every rank.
    """
    if max(out[0].nbytes, buf[0].nbytes) < _ROUNDS_BYTES:
        yield comm.all_to_all(out, buf, tag=tag)
        return
    for distance in range(1, comm.size):
        source, dest = (comm.rank - distance) % comm.size, (comm.rank + distance) % comm.size
        parts = [comm.recv(out[source], source, tag=tag)] if out[source].numel() else []
        yield AllOf([*parts, comm.send(buf[dest], dest, tag=tag)] if buf[dest].numel() else parts)
