"""What one rank carries of a bucket of parameters between the nodes: engine R (rounds.py), as numbers and as bytes.

Knows nothing of messages.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from hiercomm.coded import CompressorCoding, decode
from hiercomm.exchange import cuts

# Up to so many nodes every payload goes to every node: one rounding, and nothing from nodes that have nothing to add.
# With more, two phases are fewer bytes.
_GATHER_NODES = 8


def gathers(nodes: int) -> bool:
    """Whether every payload goes to every node."""
    return nodes <= _GATHER_NODES


@final
class Shard:
    """What one rank carries of a bucket of parameters: `numel` elements from element `begin` on.

    float32 (whatever halves the parameters are kept in), or float64. `coding` None: they travel as they are.
    """

    def __init__(self, numel: int, begin: int, dtype: torch.dtype, device: torch.device,
                 coding: CompressorCoding | None) -> None:  # fmt: skip
        self.numel = numel
        self.begin = begin
        self.coding = coding
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.anchor, self.next, self.exported, self.flying = (
            torch.zeros(numel, dtype=wide, device=device) for _ in range(4)
        )

    def chunks(self, nodes: int, piece_bytes: int) -> list[slice]:
        """What crosses at a time; the same on every node."""
        if not self.numel:
            return []
        sharers = 1 if gathers(nodes) else nodes
        if self.coding is not None:
            return cuts(self.numel, self.coding.chunk_elements(sharers))
        return cuts(self.numel, max(1, sharers * piece_bytes // self.anchor.itemsize))

    def nbytes(self, cut: slice) -> int:
        """Bytes of the payload of a chunk."""
        numel = cut.stop - cut.start
        return numel * self.anchor.itemsize if self.coding is None else self.coding.compressor.nbytes(numel)

    def encode(self, cut: slice, weight: float) -> Tensor:
        """The payload of a chunk of `flying`."""
        values = self.flying[cut] * weight
        return values.view(torch.uint8) if self.coding is None else self.coding.compress(values, self.begin + cut.start)

    def add(self, payload: Tensor, cut: slice, source: int) -> None:
        """Add what a payload from `source` stands for to a chunk of `next`."""
        if self.coding is None:
            self.next[cut].add_(payload.view(self.next.dtype))
        else:
            decode(self.coding, payload, self.next[cut], True, source)

    def remainder(self, weight: float, *, flies: bool) -> Tensor:
        """All that is not in the anchor: `flying`, weighted, and what the compressor has kept, which it forgets."""
        values = self.flying * weight if flies else torch.zeros_like(self.flying)
        for begin, residual in self.coding.take_residuals() if self.coding is not None else ():
            values[begin - self.begin :][: residual.numel()].add_(residual)
        return values
