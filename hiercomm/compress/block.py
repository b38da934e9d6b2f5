"""Codes of a few bits with a scale for each block of 512 numbers: Int8, Int4, FP8, Sign.

Int8 and Int4: x ~ code * scale, scale = max|x| / 127 or 7 (Alistarh et al., QSGD, 2017, with the maximum in place of
the 2-norm); FP8: the same with e4m3 numbers (OCP, 2023); Sign: the sign and the block's mean magnitude (Seide et al.,
1-bit SGD, 2014; Karimireddy et al., EF-SignSGD, 2019). Scales are bf16, rounded up. A block with NaN, inf or a number
from 2^127 on decodes to NaN, so that it is noticed, and no other block does.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from hiercomm import native
from hiercomm.compress import wire
from hiercomm.compress.base import FeedbackCompressor, Site
from hiercomm.errors import ConfigError

_ROUNDINGS = ("nearest", "stochastic")


def _nbytes(code: str, numel: int) -> int:
    return wire.HEADER_BYTES + 2 * _blocks(numel) + native.code_bytes(code, numel)


def _blocks(numel: int) -> int:
    return -(-numel // native.BLOCK)


def _encode(code: str, x: Tensor, residual: Tensor | None, payload: Tensor, seed: int | None) -> None:
    body = wire.write_header(payload, code, x.numel())
    scales, codes = body.split([2 * _blocks(x.numel()), native.code_bytes(code, x.numel())])
    if code == "sign":
        native.sign(x, residual, codes, scales)
    else:
        native.quantize(code, x, residual, codes, scales, seed)


def _decode(code: str, payload: Tensor, out: Tensor, accumulate: bool) -> None:
    body, _ = wire.read_header(payload, code, out.numel(), _nbytes(code, out.numel()))
    scales, codes = body.split([2 * _blocks(out.numel()), native.code_bytes(code, out.numel())])
    wire.require_scales(scales)
    native.dequantize(code, codes, scales, out, accumulate)


class _BlockCode(FeedbackCompressor):
    recompressible: ClassVar[bool] = True
    _code: ClassVar[str]

    @abstractmethod
    def _seed(self, site: Site) -> int | None:
        """What stochastic rounding depends on; None rounds to the nearest."""

    def nbytes(self, numel: int) -> int:
        """Bytes of a payload."""
        return _nbytes(self._code, numel)

    def compress(self, x: Tensor, payload: Tensor, site: Site) -> None:
        """As Compressor says."""
        _encode(self._code, x, None, payload, self._seed(site))

    def compress_with_feedback(self, x: Tensor, residual: Tensor, payload: Tensor, site: Site) -> None:
        """As FeedbackCompressor says."""
        _encode(self._code, x, residual, payload, self._seed(site))

    def decompress(self, payload: Tensor, out: Tensor, accumulate: bool) -> None:
        """As Compressor says."""
        _decode(self._code, payload, out, accumulate)


class _Quantizer(_BlockCode):
    """With a choice of rounding: "nearest", or "stochastic", which is unbiased and noisier."""

    rounding: str

    def __post_init__(self) -> None:
        if self.rounding not in _ROUNDINGS:
            raise ConfigError(f"rounding={self.rounding!r} cannot be used: {' or '.join(map(repr, _ROUNDINGS))} can")

    def _seed(self, site: Site) -> int | None:
        return None if self.rounding == "nearest" else site.seed(site.rank)


@final
@dataclass(frozen=True)
class Int8(_Quantizer):
    """8 bits a number: 3.98 times fewer bytes than float32."""

    rounding: str = "nearest"
    _code: ClassVar[str] = "int8"


@final
@dataclass(frozen=True)
class Int4(_Quantizer):
    """4 bits a number: 7.9 times fewer bytes than float32."""

    rounding: str = "nearest"
    _code: ClassVar[str] = "int4"


@final
@dataclass(frozen=True)
class FP8(_Quantizer):
    """e4m3 numbers, 8 bits each: small ones are kept better than by Int8, large ones worse."""

    rounding: str = "nearest"
    _code: ClassVar[str] = "fp8"


@final
@dataclass(frozen=True)
class Sign(_BlockCode):
    """1 bit a number: 31 times fewer bytes than float32. Only under ErrorFeedback."""

    needs_feedback: ClassVar[bool] = True
    _code: ClassVar[str] = "sign"

    def _seed(self, site: Site) -> int | None:
        return None
