"""A Communicator seen through a slow link: what would this job do at 200 Mbit/s, without root or tc.

Wraps any Communicator; only completion is delayed, the bytes move as before.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import final

from torch import Tensor

from hiercomm.comm.base import Communicator, Work


@final
class Link:
    """A full-duplex link of `rate_bps` bit/s (None: any rate) and `delay_s` seconds; several Communicators of one
    process may share it. Raises ValueError where the rate is not positive or the delay negative.
    """

    def __init__(self, rate_bps: float | None, delay_s: float = 0.0) -> None:
        if (rate_bps is not None and rate_bps <= 0) or delay_s < 0:
            raise ValueError(f"rate_bps={rate_bps} must be positive and delay_s={delay_s} not negative")
        self._rate_bps = rate_bps
        self._delay_s = delay_s
        self._out_free_at = 0.0
        self._in_free_at = 0.0

    def leave(self, buf: Tensor) -> float:
        """When a message that is sent now has left: sends queue behind each other."""
        self._out_free_at = self._after(self._out_free_at, buf)
        return self._out_free_at

    def arrive(self, buf: Tensor) -> float:
        """When a message that is here now would have come through the link: so do receives."""
        self._in_free_at = self._after(self._in_free_at, buf)
        return self._in_free_at + self._delay_s

    def _after(self, free_at: float, buf: Tensor) -> float:
        seconds = buf.numel() * buf.element_size() * 8 / self._rate_bps if self._rate_bps else 0.0
        return max(free_at, time.monotonic()) + seconds


@final
class Throttled(Communicator):
    """A Communicator whose messages go over a link of `rate_bps` bit/s and `delay_s` seconds, or over `link`, which
    others may share. `far`: the ranks behind the link; default: all others.
    """

    def __init__(
        self,
        inner: Communicator,
        rate_bps: float | None = None,
        delay_s: float = 0.0,
        *,
        link: Link | None = None,
        far: Collection[int] | None = None,
    ) -> None:
        self.rank = inner.rank
        self.size = inner.size
        self._inner = inner
        self._link = Link(rate_bps, delay_s) if link is None else link
        self._far = range(inner.size) if far is None else far

    def send(self, buf: Tensor, dest: int, *, tag: int) -> Work:
        work = self._inner.send(buf, dest, tag=tag)
        return _Delayed(work, self._link.leave(buf)) if dest in self._far else work

    def recv(self, buf: Tensor, source: int, *, tag: int) -> Work:
        work = self._inner.recv(buf, source, tag=tag)
        return _Arrival(self._link, work, buf) if source in self._far else work


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

    def __init__(self, link: Link, inner: Work, buf: Tensor) -> None:
        self._link, self._inner, self._buf = link, inner, buf
        self._due: float | None = None

    def is_completed(self) -> bool:
        if self._due is None:
            if not self._inner.is_completed():
                return False
            self._due = self._link.arrive(self._buf)
        return time.monotonic() >= self._due

    def __str__(self) -> str:
        return f"throttled {self._inner}"
