"""A Communicator seen through a slow link: what would this job do at 200 Mbit/s, without root or tc.

Wraps any Communicator; only completion is delayed, the bytes move as before.
"""

from __future__ import annotations

import time
from typing import final

from torch import Tensor

from hiercomm.comm.base import Communicator, Work


@final
class Throttled(Communicator):
    """Every send leaves over one link of `rate_bps` bit/s and arrives `delay_s` later.

    A rank's sends queue behind each other, as do its receives: the link is full duplex. Raises ValueError
    where the rate is not positive or the delay negative.
    """

    def __init__(self, inner: Communicator, rate_bps: float | None, delay_s: float = 0.0) -> None:
        if (rate_bps is not None and rate_bps <= 0) or delay_s < 0:
            raise ValueError(f"rate_bps={rate_bps} must be positive and delay_s={delay_s} not negative")
        self.rank = inner.rank
        self.size = inner.size
        self._inner = inner
        self._rate_bps = rate_bps
        self._delay_s = delay_s
        self._out_free_at = 0.0
        self._in_free_at = 0.0

    def send(self, buf: Tensor, dest: int, *, tag: int) -> Work:
        self._out_free_at = self._after(self._out_free_at, buf)
        return _Delayed(self._inner.send(buf, dest, tag=tag), self._out_free_at)

    def recv(self, buf: Tensor, source: int, *, tag: int) -> Work:
        return _Arrival(self, self._inner.recv(buf, source, tag=tag), buf)

    def close(self) -> None:
        self._inner.close()

    def _after(self, free_at: float, buf: Tensor) -> float:
        seconds = buf.numel() * buf.element_size() * 8 / self._rate_bps if self._rate_bps else 0.0
        return max(free_at, time.monotonic()) + seconds

    def arrival(self, buf: Tensor) -> float:
        """When a message that is here now would have come through the link."""
        self._in_free_at = self._after(self._in_free_at, buf)
        return self._in_free_at + self._delay_s


@final
class _Delayed(Work):
    def __init__(self, inner: Work, due: float) -> None:
        self._inner, self._due = inner, due

    def is_completed(self) -> bool:
        return self._inner.is_completed() and time.monotonic() >= self._due

    def __str__(self) -> str:
        return f"throttled {self._inner}"


@final
class _Arrival(Work):
    """The link's clock starts for a message when it is really here: its sender may have been late."""

    def __init__(self, link: Throttled, inner: Work, buf: Tensor) -> None:
        self._link, self._inner, self._buf = link, inner, buf
        self._due: float | None = None

    def is_completed(self) -> bool:
        if self._due is None:
            if not self._inner.is_completed():
                return False
            self._due = self._link.arrival(self._buf)
        return time.monotonic() >= self._due

    def __str__(self) -> str:
        return f"throttled {self._inner}"
