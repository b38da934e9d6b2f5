"""What a compressor is: numbers to fewer bytes and back, for what crosses the links between nodes.

A compressor is one file and one name in `compress/__init__.py`. Knows nothing of ranks, buckets or messages: it is
given flat float32 tensors and flat uint8 payloads of one device, and a Site for all that it wants to remember.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

import torch
from torch import Tensor


@final
@dataclass
class Site:
    """One place where numbers are compressed at every step: a piece of a bucket, on one rank.

    `number` counts the steps; `place` is the same for the same piece on every rank; `rank` tells ranks apart. `state`
    holds what a compressor keeps from step to step (tensors, by names of its own); it is saved with the optimizer.
    """

    place: tuple[int, ...]
    rank: int
    number: int = 0
    state: dict[str, Tensor] = field(default_factory=dict)

    def seed(self, *more: int) -> int:
        """64 bits for random choices, others at each step and place; the same on every rank unless `more` tells."""
        found = 0x9E3779B97F4A7C15
        for value in (*self.place, self.number, *more):
            found = ((found ^ (value & _MASK)) * 0xBF58476D1CE4E5B9) & _MASK
            found ^= found >> 29
        return found


_MASK = (1 << 64) - 1


@final
class Sites:
    """The sites of one bucket on one rank, made when first asked for. `number` counts the bucket's exchanges: all ranks
    count alike, whatever sites they have. `inherited` is the whole job's (see merge.py), until an exchange begins.
    """

    def __init__(self, bucket: int, rank: int) -> None:
        self.number = 0
        self.inherited: Mapping[int, Mapping[str, Tensor]] | None = None
        self._bucket = bucket
        self._rank = rank
        self._sites: dict[int, Site] = {}

    def at(self, place: int) -> Site:
        """The site of a place in the bucket."""
        site = self._sites.setdefault(place, Site((self._bucket, place), self._rank))
        site.number = self.number
        return site

    def begin(self) -> None:
        """An exchange begins, on all ranks; those that compress have shared out what they inherited."""
        self.number += 1
        self.inherited = None

    def items(self) -> list[tuple[int, Site]]:
        """All sites, with their places in the bucket."""
        return list(self._sites.items())

    def state_dict(self) -> dict[str, Any]:
        """What is remembered: `number`, and `sites`, the tensors by place and name; `inherited` where it still is."""
        sites = {place: _copy(site.state) for place, site in self._sites.items()}
        found = {"number": self.number, "sites": sites}
        if self.inherited is None:
            return found
        return {**found, "inherited": {place: _copy(tensors) for place, tensors in self.inherited.items()}}

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Take up `state_dict()`'s result."""
        self.forget()
        self.number = state["number"]
        for place, tensors in state["sites"].items():
            self.at(place).state = {name: t.detach().clone().to(device) for name, t in tensors.items()}
        self.inherited = state.get("inherited")  # nobody writes to it

    def forget(self) -> None:
        """As at the beginning, but the number goes on."""
        self._sites = {}
        self.inherited = None


def _copy(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in tensors.items()}


class Compressor(ABC):
    """Numbers to bytes and back. Objects are shared by all sites and threads: what changes belongs to a Site."""

    # Whether a sum of decoded payloads may be compressed again: then an exchange takes two phases, and the owner of
    # each piece sends the sum on. Else every payload goes to every node.
    recompressible: ClassVar[bool] = False
    # Whether training without error feedback is known not to converge.
    needs_feedback: ClassVar[bool] = False

    @abstractmethod
    def nbytes(self, numel: int) -> int:
        """Bytes of the payload of `numel` numbers: sender and receiver must know it alike."""

    @abstractmethod
    def compress(self, x: Tensor, payload: Tensor, site: Site) -> None:
        """Write the payload of `x` (float32, not changed)."""

    @abstractmethod
    def decompress(self, payload: Tensor, out: Tensor, accumulate: bool) -> None:
        """Write what the payload stands for to `out`, or add it. Raises PayloadError where it is none."""


class FeedbackCompressor(Compressor):
    """One that can do error feedback in the pass in which it compresses."""

    @abstractmethod
    def compress_with_feedback(self, x: Tensor, residual: Tensor, payload: Tensor, site: Site) -> None:
        """Compress x + residual; afterwards `residual` is what the payload leaves out of it."""
