"""AS-SGD: synchronous inside a node, asynchronous between nodes, quantized, decentralised (MWSCAS 2023, pp. 526-530).

Every step, on node n with ranks R_n:
    g = (1/|R_n|) sum_{r in R_n} g_r        x_n <- update(x_n, g)        the wrapped optimizer's own step
Every `period` steps, what x_n has moved by is exported. Beside the steps, in rounds (rounds.py):
    A <- A + sum_n C(w_n progress_n + e_n)        w_n = |R_n| / P, C int8 with error feedback e_n
and at its next export node n goes on from
    x_n <- A + (its progress that is not in A)        never x_n <- average: steps made meanwhile survive
There is no server: every rank carries its shard of the parameters to the same rank of the other nodes. Momentum and all
other state of the optimizer stay in the node.

`max_age` bounds how many more steps a node makes before what it exported is in A. With `max_age=0` (period 1, no
compression) all nodes add to every round and wait for it: then it is BSP, to rounding, for every optimizer that is
linear in g (SGD, momentum, Nesterov, weight decay). With one node it is BSP to the bit.

Differs from the paper: of its text the abstract alone was at hand, which fixes the two levels, quantization and
decentralisation. The rule for merging is Bagua's asynchronous model average (Gan et al., VLDB 2021), with its residual;
the bound on age is ours.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, final

from hiercomm import compress
from hiercomm.allreduce import Exchange
from hiercomm.bucket import Bucket
from hiercomm.compress import Compressor, ErrorFeedback, PerLayer, PowerSGD
from hiercomm.errors import ConfigError
from hiercomm.modes.base import Context, Mode, Reach
from hiercomm.replica import Crossing, Replica, flush_all
from hiercomm.rounds import Lag


@final
@dataclass(kw_only=True)
class ASSGD(Mode):
    """Synchronous inside a node, asynchronous between nodes.

    Args:
        max_age: steps that a node makes at most before what it has done is with the others; 0 is synchronous.
        period: steps between exports. With `period` above `max_age` every export is waited for.
        compression: what progress goes through between nodes, as in DistributedOptimizer: a name ("int8", "topk:0.01",
            "none"), a compressor, ErrorFeedback(...) or PerLayer(...).
        max_lag: rounds in a row that a node may miss because it still computes; None: any number.
        warmup_rounds: so many rounds at the beginning are synchronous.
    """

    max_age: int = 8
    period: int = 1
    compression: str | Compressor | ErrorFeedback | PerLayer = "int8"
    max_lag: int | None = None
    warmup_rounds: int = 0

    reach: ClassVar[Reach] = Reach.NODE

    def __post_init__(self) -> None:
        for name, least in (("max_age", 0), ("period", 1), ("max_lag", 0), ("warmup_rounds", 0)):
            value = getattr(self, name)
            if value is None and name == "max_lag":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"{name}={value!r} cannot be used: it must be a whole number, {least} or more")
        self._crossing()
        self._replica: Replica | None = None

    def _crossing(self) -> Crossing:
        lag = Lag(self.max_lag, sys.maxsize if self.max_age == 0 else self.warmup_rounds)
        return Crossing(_per_layer(self.compression), lag)

    def attach(self, context: Context) -> None:
        self._context = context
        self._exchanges: list[Exchange] = []
        self._replica = context.replicate(self._crossing())

    def on_bucket(self, bucket: Bucket) -> None:
        self._exchanges.append(self._context.start(bucket))

    def synchronize(self) -> None:
        exchanges, self._exchanges = self._exchanges, []
        for exchange in exchanges:
            self._context.finish(exchange)

    def step(self, apply: Callable[[], Any]) -> Any:
        replica = self._replica
        if replica is None:
            return apply()
        if not replica.has_begun:
            replica.begin()
        result = apply()
        replica.steps += 1
        if replica.steps % self.period == 0:
            replica.exchange(self.max_age, self.period)
        return result

    def flush(self) -> None:
        if self._replica is not None:
            flush_all([self._replica])

    def retire(self) -> None:
        if self._replica is not None:
            self._replica.retire()

    def state_dict(self) -> dict[str, Any]:
        return {}  # after flush() the parameters are all there is

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            raise ValueError(f"AS-SGD has no state after flush(), but was given {sorted(state)}")


def _per_layer(given: Any) -> PerLayer | None:
    """A `compression` as rules for parameters; None where nothing is compressed. Raises ConfigError."""
    if isinstance(given, str):
        given = compress.parse(given)
    found = PerLayer(given) if isinstance(given, (Compressor, ErrorFeedback, PowerSGD)) else given
    if not (found is None or isinstance(found, PerLayer)):
        raise ConfigError(
            f"compression={given!r} cannot be used: a name such as 'int8', a compressor, ErrorFeedback(...) or "
            "PerLayer(...) can"
        )
    if found is not None and any(isinstance(c, PowerSGD) for c in (found.default, *found.rules.values())):
        raise ConfigError("PowerSGD cannot be used between the nodes of AS-SGD: it takes means of all nodes at once")
    return found
