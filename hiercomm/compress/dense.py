"""Casts: FP16 and BF16, 2 bytes a number, by torch's own conversion; NoCompression, 4 bytes, for comparisons."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from hiercomm.compress import wire
from hiercomm.compress.base import Compressor, Site


class _Cast(Compressor):
    recompressible: ClassVar[bool] = True
    _code: ClassVar[str]
    _dtype: ClassVar[torch.dtype]

    def nbytes(self, numel: int) -> int:
        """Bytes of a payload."""
        return wire.HEADER_BYTES + numel * self._dtype.itemsize

    def compress(self, x: Tensor, payload: Tensor, site: Site) -> None:
        """As Compressor says."""
        wire.write_header(payload, self._code, x.numel()).view(self._dtype).copy_(x)

    def decompress(self, payload: Tensor, out: Tensor, accumulate: bool) -> None:
        """As Compressor says."""
        body, _ = wire.read_header(payload, self._code, out.numel(), self.nbytes(out.numel()))
        values = body.view(self._dtype)
        if accumulate:
            out.add_(values)
        else:
            out.copy_(values)


@final
@dataclass(frozen=True)
class NoCompression(_Cast):
    """float32 as it is."""

    _code: ClassVar[str] = "float32"
    _dtype: ClassVar[torch.dtype] = torch.float32


@final
@dataclass(frozen=True)
class FP16(_Cast):
    """fp16, to the nearest: magnitudes from 65520 on become inf."""

    _code: ClassVar[str] = "fp16"
    _dtype: ClassVar[torch.dtype] = torch.float16


@final
@dataclass(frozen=True)
class BF16(_Cast):
    """bf16, to the nearest: float32's range, 8 bits of precision."""

    _code: ClassVar[str] = "bf16"
    _dtype: ClassVar[torch.dtype] = torch.bfloat16
