"""Ranks as threads that hand in objects and all get all of them: the set-up exchange of SharedMemory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, final


@final
class Meeting:
    """`meeting.exchange(rank)` is that rank's function; each call waits for the others' calls."""

    def __init__(self, size: int, timeout_s: float = 20.0) -> None:
        self._barrier = threading.Barrier(size, timeout=timeout_s)
        self._items: list[Any] = [None] * size

    def exchange(self, rank: int) -> Callable[[Any], Sequence[Any]]:
        """The exchange function of `rank`."""

        def call(item: Any) -> Sequence[Any]:
            self._items[rank] = item
            self._barrier.wait()
            everybody = list(self._items)
            self._barrier.wait()
            return everybody

        return call
