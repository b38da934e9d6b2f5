"""Which code pays: the fastest of those that stay within an error budget, or none. Pure; others measure."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hiercomm.compress.base import Site
from hiercomm.compress.block import Int4, Int8, Sign
from hiercomm.compress.dense import BF16
from hiercomm.compress.feedback import ErrorFeedback
from hiercomm.compress.rules import Auto
from hiercomm.compress.sparse import TopK

# By what people call them: the more a code saves the more it loses.
CANDIDATES = {
    "bf16": ErrorFeedback(BF16()), "int8": ErrorFeedback(Int8()), "int4": ErrorFeedback(Int4()),
    "sign": ErrorFeedback(Sign()), "topk:0.01": ErrorFeedback(TopK(0.01)),
}  # fmt: skip
# An exchange that takes more of a plain one's time is not worth its rounding.
_WORTH = 0.9
_SAMPLE = 1 << 16


def allowed(auto: Auto) -> list[str]:
    """The candidates within the error budget."""
    return [name for name, choice in CANDIDATES.items() if relative_error(choice) <= auto.max_error]


def relative_error(choice: ErrorFeedback) -> float:
    """|x - decoded(C(x))| / |x| for normally distributed x."""
    x = torch.randn(_SAMPLE, generator=torch.Generator().manual_seed(0))
    payload = torch.empty(choice.inner.nbytes(x.numel()), dtype=torch.uint8)
    choice.inner.compress(x, payload, Site((0,), 0))
    decoded = torch.empty_like(x)
    choice.inner.decompress(payload, decoded, False)
    return float((x - decoded).norm() / x.norm())


def pick(plain_s: float, coded_s: Mapping[str, float]) -> str | None:
    """The candidate whose exchange takes least time, None where it is not a tenth faster than a plain one."""
    best = min(coded_s, key=lambda name: coded_s[name], default=None)
    return best if best is not None and coded_s[best] <= _WORTH * plain_s else None
