"""`Compression`: `none`, `fp16`, `bf16` as in Horovod, a cast on the wire; `int8` and others: codes between nodes.

Horovod's interface, static `compress` and `decompress`, so that users' own Compressor classes work.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from hiercomm import compress
from hiercomm.compress import Auto, ErrorFeedback, PerLayer, PowerSGD
from hiercomm.errors import ConfigError


class Compressor(ABC):
    """Base of users' compressors: `compress` gives (code, context), `decompress` undoes it."""

    @staticmethod
    @abstractmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """The tensor to send, of the same shape on all ranks, and what `decompress` needs."""

    @staticmethod
    @abstractmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """The tensor that `tensor` stands for."""


class NoneCompressor(Compressor):
    """Sends gradients as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor


def _cast(tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Any]:
    return (tensor.to(dtype), tensor.dtype) if tensor.dtype.is_floating_point else (tensor, None)


class FP16Compressor(Compressor):
    """Casts floating-point gradients to fp16; magnitudes above 65504 become inf."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return _cast(tensor, torch.float16)

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor if ctx is None else tensor.to(ctx)


class BF16Compressor(Compressor):
    """Casts floating-point gradients to bf16: fp32's range, 8 bits of precision."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return _cast(tensor, torch.bfloat16)

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor if ctx is None else tensor.to(ctx)


class Compression:
    """The choices, by Horovod's names."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor

    # Between the nodes only, with error feedback.
    int8 = ErrorFeedback(compress.Int8())
    int4 = ErrorFeedback(compress.Int4())
    fp8 = ErrorFeedback(compress.FP8())
    sign = ErrorFeedback(compress.Sign())

    @staticmethod
    def auto(min_numel: int = 1024, max_error: float = 0.05) -> Auto:
        """What is fastest on the job's own links, measured at wrap, of what loses no more than `max_error`; or none."""
        return Auto(min_numel, max_error)

    @staticmethod
    def topk(ratio: float = 0.01) -> ErrorFeedback:
        """The part `ratio` of the numbers with the largest magnitudes."""
        return ErrorFeedback(compress.TopK(ratio))

    @staticmethod
    def randomk(ratio: float = 0.01) -> ErrorFeedback:
        """The part `ratio` of the numbers, any."""
        return ErrorFeedback(compress.RandomK(ratio))

    @staticmethod
    def powersgd(rank: int = 4) -> PowerSGD:
        """Matrices as products of thin ones, of rank `rank`."""
        return PowerSGD(rank)


_OWN = (compress.Compressor, ErrorFeedback, PowerSGD, PerLayer, Auto)


def settle(given: Any, default: str) -> Any:
    """A `compression=` argument as PerLayer or Auto, or as Horovod's kind of compressor; `default` where it is none.

    Raises ConfigError where it is neither.
    """
    given = default if given is NoneCompressor else given
    if isinstance(given, str):
        return compress.parse(given) or NoneCompressor
    if isinstance(given, (PerLayer, Auto)):
        return given
    if isinstance(given, (compress.Compressor, ErrorFeedback, PowerSGD)):
        return PerLayer(given)
    if isinstance(given, type) and issubclass(given, _OWN):
        raise ConfigError(f"compression={given.__name__} is a class: an object of it is needed, {given.__name__}(...)")
    if hasattr(given, "compress") and hasattr(given, "decompress"):
        return given
    raise ConfigError(
        f"compression={given!r} cannot be used: hvd.Compression.none, .fp16, .int8, ..., a name like 'topk:0.01', "
        "'auto', a hiercomm.Compressor, or a class with compress and decompress can"
    )


def require_cast(given: Any) -> Any:
    """`given`, where it can be used on a tensor of the user's own. Raises ConfigError."""
    if isinstance(given, _OWN) or (isinstance(given, type) and issubclass(given, _OWN)):
        raise ConfigError(
            f"compression={given!r} is for gradients in DistributedOptimizer: other tensors are reduced exactly, or "
            "with hvd.Compression.fp16 or .bf16"
        )
    return given
