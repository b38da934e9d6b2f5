"""Error feedback: what a payload leaves out is added to the numbers of the next step (Seide et al., 2014; Stich et
al., 2018; Karimireddy et al., 2019).

    v = x + e        send C(v)        e = v - decoded(C(v))

so everything that was compressed arrives, late: also gradients that are then thrown away, by zero_grad() or by a
GradScaler that skips the step. Where v is not finite e is 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from hiercomm.compress.base import Compressor, FeedbackCompressor, Site
from hiercomm.errors import ConfigError

RESIDUAL = "residual"


@final
@dataclass(frozen=True)
class ErrorFeedback:
    """Any compressor, with error feedback: one float32 residual for each number that a rank compresses."""

    inner: Compressor

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Compressor):
            raise ConfigError(f"ErrorFeedback({self.inner!r}) cannot be used: it takes a compressor, such as Int8()")

    def compress(self, x: Tensor, payload: Tensor, site: Site) -> None:
        """Compress x + residual, and keep what is left out in `site.state`."""
        residual = site.state.get(RESIDUAL)
        if residual is None:
            residual = site.state[RESIDUAL] = torch.zeros_like(x)  # a name that compressors must leave alone
        if isinstance(self.inner, FeedbackCompressor):
            self.inner.compress_with_feedback(x, residual, payload, site)
            return
        residual.add_(x)
        self.inner.compress(residual, payload, site)
        decoded = torch.empty_like(x)
        self.inner.decompress(payload, decoded, False)
        residual.sub_(decoded).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
