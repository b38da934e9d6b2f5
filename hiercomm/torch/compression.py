"""`Compression.none`, `Compression.fp16`, `Compression.bf16`: what gradients are cast to on the wire.

Horovod's interface, static `compress` and `decompress`, so that users' own Compressor classes work.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor


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
