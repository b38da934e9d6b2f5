"""Bulk-synchronous parallel SGD: every step waits for everyone (Valiant, 1990; Goyal et al., 2017).

    g = (1/P) sum_p g_p        x <- update(x, g)        the same on every rank

The exchange of a bucket starts during backward, as soon as the bucket is full. One rank equals the plain
optimizer bit for bit; P ranks equal one process on the joint batch to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

from hiercomm.allreduce import Exchange
from hiercomm.bucket import Bucket
from hiercomm.modes.base import Context, Mode


@final
@dataclass(kw_only=True)
class BSP(Mode):
    """Synchronous training; the default."""

    def attach(self, context: Context) -> None:
        self._context = context
        self._exchanges: list[Exchange] = []

    def on_bucket(self, bucket: Bucket) -> None:
        self._exchanges.append(self._context.start(bucket))

    def synchronize(self) -> None:
        exchanges, self._exchanges = self._exchanges, []
        for exchange in exchanges:
            self._context.finish(exchange)

    def step(self, apply: Callable[[], Any]) -> Any:
        return apply()

    def flush(self) -> None:
        pass  # replicas are equal after every step

    def retire(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            raise ValueError(f"BSP has no state, but was given {sorted(state)}")
