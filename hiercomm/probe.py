"""How large the pieces of an exchange should be: measured once, the same answer on every rank.

What is under way must cover the time that a rank takes to notice and to answer, and must not fill the queues of the
link: a piece should be on the link for a few milliseconds. Fixed pieces cost either a fifth of a slow link or half of
a fast one. Knows nothing of MPI.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from hiercomm.allreduce import PIECE_BYTES, two_phase
from hiercomm.comm.base import Communicator
from hiercomm.progress import Task
from hiercomm.reduction import SUM

_SMALL_BYTES, _LARGE_BYTES = 64 << 10, 1 << 20
_QUICK_S = 20e-3  # a link on which the small one takes longer needs the smallest pieces
_PIECE_S = 2.5e-3


def measure(cross: Communicator | None, tag: int, run: Callable[[Task], None], worst: Callable[[float], float]) -> int:
    """Bytes of a piece on the links of `cross` (None on ranks that do not cross).

    `run` sees a task through, `worst` is the largest value of all ranks. Collective over all ranks; uses LANES tags.
    """

    def seconds(nbytes: int) -> float:
        begin = time.perf_counter()
        if cross is not None:
            run(two_phase(cross, torch.zeros(nbytes, dtype=torch.uint8), SUM, 1, tag))
        return worst(time.perf_counter() - begin)

    seconds(_SMALL_BYTES)  # connections are made, ranks come to the same place
    if seconds(_SMALL_BYTES) > _QUICK_S:
        return PIECE_BYTES[0]
    return piece_bytes(_LARGE_BYTES / min(seconds(_LARGE_BYTES) for _ in range(2)))


def piece_bytes(rate: float) -> int:
    """The largest size of PIECE_BYTES that a link of `rate` bytes a second carries in 2.5 ms, at least the first."""
    return max((size for size in PIECE_BYTES if size <= rate * _PIECE_S), default=PIECE_BYTES[0])
