"""Where the time goes: compute, local, cross and wait, measured apart on every rank.

`wait` is what the training thread loses; `local` and `cross` are the times during which the two levels
work, beside the computation as well as in its way. Knows nothing of what is timed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import final

PARTS = ("local", "cross", "wait")


@final
class Timing:
    """Seconds per part: the time during which at least one span of it was open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = dict.fromkeys(PARTS, 0)
        self._since = dict.fromkeys(PARTS, 0.0)
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._first: float | None = None
        self._last = 0.0

    def begin(self, part: str) -> None:
        """Open a span of `part`; spans may overlap and end on other threads."""
        now = time.perf_counter()
        with self._lock:
            self._first = now if self._first is None else self._first
            if not self._open[part]:
                self._since[part] = now
            self._open[part] += 1

    def end(self, part: str) -> None:
        """Close a span of `part`."""
        now = time.perf_counter()
        with self._lock:
            self._open[part] -= 1
            if not self._open[part]:
                self._seconds[part] += now - self._since[part]
            self._last = now

    @contextmanager
    def span(self, part: str) -> Iterator[None]:
        """`begin` and `end` around a block."""
        self.begin(part)
        try:
            yield
        finally:
            self.end(part)

    def seconds(self, part: str) -> float:
        """Seconds of `part` so far, in spans that have ended."""
        with self._lock:
            return self._seconds[part]

    def shares(self) -> dict[str, float]:
        """Share of the wall time from the first span to the last end, by part; `compute` is 1 - wait."""
        with self._lock:
            total = self._last - self._first if self._first is not None else 0.0
            if total <= 0:
                return {"compute": 1.0, **dict.fromkeys(PARTS, 0.0)}
            shares = {part: self._seconds[part] / total for part in PARTS}
        return {"compute": 1.0 - shares["wait"], **shares}


def table(shares: Sequence[Mapping[str, float]]) -> str:
    """The shares of all ranks, for people."""
    parts = ("compute", *PARTS)
    rows = ["share of time    " + "".join(f"{part:>9}" for part in parts)]
    for rank, share in enumerate(shares):
        rows.append(f"  rank {rank:<10}" + "".join(f"{share[part]:>8.1%} " for part in parts))
    rows.append("  (compute + wait = 100 %; local and cross run beside the computation as far as they can)")
    return "\n".join(rows)
