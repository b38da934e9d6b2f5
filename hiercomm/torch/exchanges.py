"""Bucket exchanges, counted so that a rank that is late, or has done something else, can be named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from hiercomm import runtime
from hiercomm.allreduce import Exchange, HierarchicalAllReduce
from hiercomm.bucket import Bucket
from hiercomm.exchange import Coding


@final
class Exchanges:
    """A mode's context: bucket exchanges of one set of parameters, counted so that ranks can be compared.

    Every rank starts and later distributes the same exchanges in the same order; each is counted on a channel.
    """

    def __init__(
        self, engine: HierarchicalAllReduce, buckets: int, owner: str, codings: Mapping[int, Coding],
        ranks: tuple[int, ...] | None = None,
    ) -> None:  # fmt: skip
        self._runtime = runtime.current()
        self._ranks = ranks  # who takes part; None: all
        self._engine = engine
        self._codings = codings
        self._starts = self._runtime.new_channel()
        self._distributions = self._runtime.new_channel()
        self._buckets = buckets
        self._owner = owner
        self._numbers: dict[int, int] = {}

    def start(self, bucket: Bucket) -> Exchange:
        """Begin the exchange of a bucket."""
        self._numbers[id(bucket.buffer)] = number = self._runtime.count(self._starts)
        # Steps count from 0, as people's loops do.
        what = f"the exchange of bucket {bucket.index} in step {(number - 1) // self._buckets} of {self._owner}"
        coding = self._codings.get(bucket.index)
        if coding is not None:
            bucket.clear_padding()
        return self._engine.start(bucket.buffer, bucket.op, bucket.divisor, what, coding)

    def finish(self, exchange: Exchange) -> None:
        """See an exchange through."""
        number = self._numbers[id(exchange.buffer)]
        timing = self._runtime.timing
        with timing.span("wait"):
            for work in (exchange.cross, exchange.local):
                if work is not None:
                    self._runtime.wait_counted(work, self._starts, number, exchange.what, self._ranks)
            number = self._runtime.count(self._distributions)
            with timing.span("local"):
                work = self._engine.distribute(exchange)
                self._runtime.wait_counted(work, self._distributions, number, exchange.what, self._ranks)
