"""A few of the numbers: TopK, the largest (Aji and Heafield, 2017), and RandomK, any (Stich et al., 2018).

Values go as bf16. What is not sent is lost unless ErrorFeedback keeps it; it is what makes them converge.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
import torch
from torch import Tensor

from hiercomm import native
from hiercomm.compress import wire
from hiercomm.compress.base import Compressor, FeedbackCompressor, Site
from hiercomm.errors import ConfigError, PayloadError


def chosen(ratio: float, numel: int) -> int:
    """How many of `numel` elements are sent: at least one where there is any."""
    return min(numel, max(1, math.ceil(ratio * numel - 1e-9)))


def _require_ratio(ratio: float) -> None:
    if not (isinstance(ratio, (int, float)) and 0 < ratio <= 1):
        raise ConfigError(f"ratio={ratio!r} cannot be used: the part of the numbers that is sent, above 0 and up to 1")


@final
@dataclass(frozen=True)
class TopK(FeedbackCompressor):
    """The part `ratio` of the numbers with the largest magnitudes, exactly; of equal ones those of the lowest index.

    4 bytes for each number sent (its place among 65,536, its value in bf16): 100 times fewer at 1 %.
    """

    ratio: float = 0.01
    needs_feedback: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _require_ratio(self.ratio)

    def nbytes(self, numel: int) -> int:
        """Bytes of a payload."""
        return wire.HEADER_BYTES + sum(self._parts(numel))

    def _parts(self, numel: int) -> tuple[int, int, int]:
        k = chosen(self.ratio, numel)
        return 4 * -(-numel // native.SPAN), 2 * k, 2 * k

    def compress(self, x: Tensor, payload: Tensor, site: Site) -> None:
        """As Compressor says."""
        self._encode(x, None, payload)

    def compress_with_feedback(self, x: Tensor, residual: Tensor, payload: Tensor, site: Site) -> None:
        """As FeedbackCompressor says."""
        self._encode(x, residual, payload)
        residual.nan_to_num_(
            nan=0.0, posinf=0.0, neginf=0.0
        )  # what was not chosen, too, or it would come for many steps

    def _encode(self, x: Tensor, residual: Tensor | None, payload: Tensor) -> None:
        body = wire.write_header(payload, "top_k", x.numel())
        native.top_k(x, residual, *body.split(self._parts(x.numel())))

    def decompress(self, payload: Tensor, out: Tensor, accumulate: bool) -> None:
        """As Compressor says."""
        numel = out.numel()
        body, _ = wire.read_header(payload, "top_k", numel, self.nbytes(numel))
        counts, indices, values = body.split(self._parts(numel))
        _require_places(counts, indices, numel)
        native.scatter(counts, indices, values, out, accumulate)


def _require_places(counts: Tensor, indices: Tensor, numel: int) -> None:
    """Raise PayloadError unless the indices ascend inside each span, and stay inside the tensor."""
    number = counts.cpu().numpy().view("<u4").astype(np.int64)
    local = indices.cpu().numpy().view("<u2")
    if number.sum() != local.size:
        raise PayloadError(f"a payload says that {number.sum()} numbers were chosen, and holds {local.size}")
    place = local + np.repeat(np.arange(number.size) * native.SPAN, number)
    if place.size and place.max() >= numel:
        raise PayloadError(f"a payload has a number for index {place.max()} of {numel} elements")
    if (np.diff(place) <= 0).any():
        raise PayloadError("the indices in a payload do not ascend")


@final
@dataclass(frozen=True)
class RandomK(Compressor):
    """The part `ratio` of the numbers, one from each of as many equal runs, at places that change with every step.

    All ranks choose the same places, so only values are sent, 2 bytes each: 200 times fewer at 1 %.
    """

    ratio: float = 0.01
    recompressible: ClassVar[bool] = True
    needs_feedback: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _require_ratio(self.ratio)

    def nbytes(self, numel: int) -> int:
        """Bytes of a payload."""
        return wire.HEADER_BYTES + 2 * chosen(self.ratio, numel)

    def compress(self, x: Tensor, payload: Tensor, site: Site) -> None:
        """As Compressor says."""
        seed = site.seed()
        values = x[self._places(x.numel(), seed).to(x.device)]
        if not bool(x.isfinite().all()):
            values = torch.full_like(values, math.nan)  # it may not be among those chosen, and must be noticed
        wire.write_header(payload, "random_k", x.numel(), seed).view(torch.bfloat16).copy_(values)

    def decompress(self, payload: Tensor, out: Tensor, accumulate: bool) -> None:
        """As Compressor says."""
        body, seed = wire.read_header(payload, "random_k", out.numel(), self.nbytes(out.numel()))
        places = self._places(out.numel(), seed).to(out.device)
        values = body.view(torch.bfloat16).to(torch.float32)
        if accumulate:
            out[places] += values
        else:
            out.zero_()[places] = values

    def _places(self, numel: int, seed: int) -> Tensor:
        k = chosen(self.ratio, numel)
        bounds = np.arange(k + 1, dtype=np.int64) * numel // max(1, k)
        random = np.random.Generator(np.random.Philox(key=seed)).random(k)
        return torch.from_numpy(bounds[:-1] + (random * np.diff(bounds)).astype(np.int64))
