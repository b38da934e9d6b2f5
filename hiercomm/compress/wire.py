"""Payloads: a header of 16 bytes, then the code. All numbers are little-endian.

    0  2  magic "HC"
    2  1  version of the format, 1
    3  1  code (see CODES)
    4  4  elements, unsigned
    8  8  for the code itself: the seed of "random_k", else 0

A decoder takes nothing on trust: the header is compared with what is expected, and codes check what would lead
outside of the tensor. DESIGN.md has the layout of each code, tests/unit/test_wire.py golden vectors.
"""

from __future__ import annotations

import struct

import numpy as np
import torch
from torch import Tensor

from hiercomm.errors import PayloadError

HEADER_BYTES = 16
VERSION = 1
_MAGIC = b"HC"
_FORMAT = "<2sBBIQ"
CODES = ("float32", "fp16", "bf16", "int8", "int4", "fp8", "sign", "top_k", "random_k")


def write_header(payload: Tensor, code: str, numel: int, extra: int = 0) -> Tensor:
    """Begin a payload. Returns the part behind the header."""
    header = struct.pack(_FORMAT, _MAGIC, VERSION, CODES.index(code), numel, extra)
    payload[:HEADER_BYTES].copy_(torch.frombuffer(bytearray(header), dtype=torch.uint8))
    return payload[HEADER_BYTES:]


def read_header(payload: Tensor, code: str, numel: int, nbytes: int) -> tuple[Tensor, int]:
    """The part behind the header, and the code's own 8 bytes. Raises PayloadError unless it is as expected."""
    if payload.numel() != nbytes:
        raise PayloadError(f"a payload of {payload.numel()} bytes for {numel} elements of {code}: {nbytes} are right")
    magic, version, found, length, extra = struct.unpack(_FORMAT, payload[:HEADER_BYTES].cpu().numpy().tobytes())
    if magic != _MAGIC:
        raise PayloadError(f"a payload begins with {magic!r} instead of {_MAGIC!r}: it comes from something else")
    if version != VERSION:
        raise PayloadError(
            f"a payload of version {version}, this is {VERSION}: use one version of hiercomm on all nodes"
        )
    if found >= len(CODES) or CODES[found] != code:
        name = CODES[found] if found < len(CODES) else f"number {found}"
        raise PayloadError(f"a payload of code {name} where {code} is expected")
    if length != numel:
        raise PayloadError(f"a payload of {length} elements where {numel} are expected")
    return payload[HEADER_BYTES:], extra


def require_scales(scales: Tensor) -> None:
    """Raise PayloadError unless all scales (bf16) are finite and not negative, or mark poisoned blocks."""
    bits = scales.cpu().numpy().view("<u2")
    bad = np.flatnonzero((bits >= 0x7F80) & (bits != POISON))
    if bad.size:
        raise PayloadError(f"block {bad[0]} of a payload has the scale {bits[bad[0]]:#06x}: not finite, or negative")


POISON = 0x7FC0  # the scale of a block that held NaN or inf
