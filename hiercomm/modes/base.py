"""What a training mode is: what becomes of full buckets, and what a step waits for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hiercomm.allreduce import Exchange
from hiercomm.bucket import Bucket


@dataclass(frozen=True)
class Context:
    """What a mode may use. `start` begins the hierarchical all-reduce of a bucket, `finish` ends it;
    both are called by the training thread, in the same order on every rank.
    """

    start: Callable[[Bucket], Exchange]
    finish: Callable[[Exchange], None]


class Mode(ABC):
    """One way to train. One object serves one optimizer."""

    @abstractmethod
    def attach(self, context: Context) -> None:
        """Called once, before anything else."""

    @abstractmethod
    def on_bucket(self, bucket: Bucket) -> None:
        """The bucket's gradients are final for this step; called in the same order on every rank."""

    @abstractmethod
    def synchronize(self) -> None:
        """Afterwards the buckets hold what the update shall use."""

    @abstractmethod
    def step(self, apply: Callable[[], Any]) -> Any:
        """Take a step; `apply` is the wrapped optimizer's own. Returns what `apply` returned."""

    @abstractmethod
    def flush(self) -> None:
        """Drain what is under way; afterwards all replicas are equal, to the bit."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs besides the model and the optimizer."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up `state_dict()`'s result."""
