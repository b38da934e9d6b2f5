"""What a training mode is: what becomes of full buckets, and what a step waits for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

from hiercomm.allreduce import Exchange
from hiercomm.bucket import Bucket
from hiercomm.replica import Crossing, Replica


class Reach(Enum):
    """Over which ranks gradients are reduced."""

    JOB = "all ranks"
    NODE = "the ranks of a node"


def _alone(crossing: Crossing) -> Replica | None:
    return None


@dataclass(frozen=True)
class Context:
    """What a mode may use. `start` begins the all-reduce of a bucket over the mode's reach, `finish` ends it;
    both are called by the training thread, in the same order on every rank of the reach.

    `replicate` makes this node's replica of the parameters, whose progress crosses to the other nodes; None where there
    is one node. Collective over all ranks, in `attach`.
    """

    start: Callable[[Bucket], Exchange]
    finish: Callable[[Exchange], None]
    replicate: Callable[[Crossing], Replica | None] = _alone


class Mode(ABC):
    """One way to train. One object serves one optimizer."""

    reach: ClassVar[Reach] = Reach.JOB

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
    def retire(self) -> None:
        """The parameters belong to another optimizer from now on: leave them alone."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs besides the model and the optimizer."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up `state_dict()`'s result."""
