"""All-to-all between nodes as links like it: in rounds, in each of which nobody is sent to by two ranks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hiercomm.comm.base import AllOf, Communicator
from hiercomm.progress import Task

# Smaller pieces go out at once: they fill no queue, and rounds would cost their latency.
_ROUNDS_BYTES = 32 << 10


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
