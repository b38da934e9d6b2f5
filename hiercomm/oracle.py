"""The codes for gradients in NumPy: the second, independent statement of what `kernels/` computes, byte for byte.

Tests compare the kernels with it, and it takes their place, far slower, where no compiler is. Everything is in place on
flat arrays: float32 numbers, uint8 codes. Knows nothing of torch, or of how kernels are compiled.
"""

# NumPy says Any of what operators make of its arrays.
# mypy: disable-error-code="no-any-return"
from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
_Words = NDArray[np.uint32]
_Array = NDArray[Any]

BLOCK = 512  # elements that share a scale
SPAN = 65536  # elements that a top-k index is counted in

_MOST = {"int8": 127, "int4": 7, "fp8": 448}
_INF = 0x7F800000
# What the 127 finite magnitudes of e4m3 stand for; the last one is its NaN, which no encoder here writes.
_E4M3 = np.array([(m % 8 + (8 if m >= 8 else 0)) * 2.0 ** (max(m // 8, 1) - 10) for m in range(128)], np.float32)


def quantize(code: str, x: Floats, residual: Floats | None, codes: Bytes, scales: Bytes, seed: int | None) -> None:
    """See `native.quantize`; `code` may be "sign", too."""
    n = x.size
    blocks = -(-n // BLOCK)
    with np.errstate(all="ignore"):
        v = _padded(_sum(x, residual), blocks)
        largest = _magnitude(v).max(1)
        poisoned = largest >= 0x7F000000
        dead = poisoned | (largest < 0x1F800000)
        wire = _mean(v, largest, n) if code == "sign" else _rounded_up(_floats(largest) / np.float32(_MOST[code]))
        step = np.where(dead, np.float32(0), _floats(wire << 16))
        inverse = np.where(dead, np.float32(0), np.float32(1) / step)
        scales.view("<u2")[:] = np.where(poisoned, 0x7FC0, np.where(dead, 0, wire))
        y = v * inverse[:, None]
        dither = np.zeros((1, 1), np.float32) if seed is None else _dither(blocks, seed)
        c = np.where(dead[:, None], 0, _encode(code, y, dither))
        _pack(code, c, codes)
        if residual is not None:
            left = np.where(poisoned[:, None], np.float32(0), v) - _decode(code, c) * step[:, None]
            residual[:] = left.reshape(-1)[:n]


def dequantize(code: str, codes: Bytes, scales: Bytes, out: Floats, accumulate: bool) -> None:
    """See `native.dequantize`."""
    step = _floats(scales.view("<u2").astype(np.uint32) << 16)
    step = np.where(_magnitude(step) < 0x17800000, np.float32(0), step)
    with np.errstate(all="ignore"):
        value = _decode(code, _unpack(code, codes, step.size)) * step[:, None]
        flat = value.reshape(-1)[: out.size]
        out[:] = _flushed(_flushed(out) + flat) if accumulate else flat


def top_k(x: Floats, residual: Floats | None, counts: Bytes, indices: Bytes, values: Bytes) -> None:
    """See `native.top_k`."""
    v = _sum(x, residual)
    k = indices.size // 2
    rank = np.minimum(_magnitude(v), _INF + 1)
    least = np.partition(rank, v.size - k)[v.size - k]
    above = rank > least
    equal = np.flatnonzero(rank == least)[: k - np.count_nonzero(above)]
    chosen = np.union1d(np.flatnonzero(above), equal)
    wire = _to_bf16(v[chosen])
    counts.view("<u4")[:] = np.bincount(chosen // SPAN, minlength=counts.size // 4)
    indices.view("<u2")[:] = chosen % SPAN
    values.view("<u2")[:] = wire
    if residual is not None:
        residual[:] = v
        with np.errstate(all="ignore"):
            left = _flushed(v[chosen] - _floats(wire << 16))
        residual[chosen] = np.where(_magnitude(v[chosen]) < _INF, left, np.float32(0))


def scatter(counts: Bytes, indices: Bytes, values: Bytes, out: Floats, accumulate: bool) -> None:
    """See `native.scatter`."""
    k = indices.size // 2
    each = np.minimum(counts.view("<u4"), k)
    span = np.repeat(np.arange(each.size), each)[:k]
    place = span * SPAN + indices.view("<u2")[: span.size]
    inside = place < out.size
    place, value = place[inside], _floats(values.view("<u2")[: span.size][inside].astype(np.uint32) << 16)
    if not accumulate:
        out[:] = 0
        out[place] = value
        return
    with np.errstate(all="ignore"):
        out[place] = _flushed(_flushed(out[place]) + _flushed(value))


# ---- numbers and their bits -----------------------------------------------------------------------------


def _bits(f: _Array) -> _Words:
    return np.ascontiguousarray(f, np.float32).view(np.uint32)


def _floats(bits: _Array) -> Floats:
    return np.ascontiguousarray(bits, np.uint32).view(np.float32)


def _magnitude(f: _Array) -> _Words:
    return _bits(f) & np.uint32(0x7FFFFFFF)


def _flushed(f: _Array) -> Floats:
    bits = _bits(f)
    return _floats(np.where(bits & np.uint32(0x7F800000), bits, bits & np.uint32(0x80000000)))


def _sum(x: Floats, residual: Floats | None) -> Floats:
    if residual is None:
        return _flushed(x)
    with np.errstate(all="ignore"):
        return _flushed(_flushed(x) + _flushed(residual))


def _padded(v: Floats, blocks: int) -> Floats:
    return np.concatenate([v, np.zeros(blocks * BLOCK - v.size, np.float32)]).reshape(blocks, BLOCK)


def _rounded_up(f: Floats) -> _Words:
    return (_bits(f) + np.uint32(0xFFFF)) >> np.uint32(16)


def _rounded(bits: _Words) -> _Words:
    return (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)


def _to_bf16(f: Floats) -> _Words:
    sign = _bits(f) >> np.uint32(31) << np.uint32(15)
    size = _magnitude(f)
    finite = np.minimum(_rounded(size), 0x7F7F) | sign
    return np.where(size < _INF, finite, np.where(size == _INF, 0x7F80 | sign, 0x7FC0)).astype(np.uint32)


def _mean(v: Floats, largest: _Words, n: int) -> _Words:
    """bf16 bits of each block's mean magnitude, added in 128 accumulators and a tree."""
    down = np.where(largest >= 0x5F800000, np.uint32(16 << 23), np.uint32(0))
    size = _magnitude(v)
    size = np.where(size >= down[:, None] + np.uint32(0x00800000), size - down[:, None], np.uint32(0))
    a = np.zeros((len(v), 128), np.float32)
    for part in np.split(_floats(size), BLOCK // 128, axis=1):
        a = a + part
    quad = a.reshape(-1, 32, 4)
    s = (quad[..., 0] + quad[..., 1]) + (quad[..., 2] + quad[..., 3])
    while s.shape[1] > 1:
        s = s[:, : s.shape[1] // 2] + s[:, s.shape[1] // 2 :]
    count = np.minimum(n - BLOCK * np.arange(len(v)), BLOCK).astype(np.float32)
    return _rounded(_bits(s[:, 0] / count) + down)


# ---- random bits ----------------------------------------------------------------------------------------


def philox(counter: NDArray[np.uint64], key: int) -> tuple[_Words, _Words]:
    """The first half of Philox4x32-10's output, for the counters (low, high, 0, 0)."""
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    x, y = counter & low, counter >> shift
    z = w = np.zeros_like(counter)
    k0, k1 = key & 0xFFFFFFFF, key >> 32
    for _ in range(10):
        p0, p1 = np.uint64(0xD2511F53) * x, np.uint64(0xCD9E8D57) * z
        x, y, z, w = (p1 >> shift) ^ y ^ np.uint64(k0), p1 & low, (p0 >> shift) ^ w ^ np.uint64(k1), p0 & low
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return x.astype(np.uint32), y.astype(np.uint32)


def _dither(blocks: int, seed: int) -> Floats:
    """In (-1/2, 1/2), one for each element."""
    add, xor = philox(np.arange(blocks, dtype=np.uint64), seed)
    pair = np.arange(BLOCK // 2, dtype=np.uint32)
    h = pair[None] * np.uint32(0x9E3779B9) + add[:, None]
    h ^= h >> np.uint32(16)
    h *= np.uint32(0x7FEB352D)
    h ^= h >> np.uint32(15)
    h += xor[:, None]
    h *= np.uint32(0x846CA68B)
    h ^= h >> np.uint32(16)
    halves = np.stack([h & np.uint32(0xFFFF), h >> np.uint32(16)], 1)  # block, half, pair
    tiles = halves.reshape(blocks, 2, BLOCK // 256, 128).swapaxes(1, 2)
    return ((tiles.reshape(blocks, BLOCK) + 0.5) / 65536 - 0.5).astype(np.float32)


# ---- codes ----------------------------------------------------------------------------------------------


def _encode(code: str, y: Floats, dither: Floats) -> _Array:
    if code == "sign":
        return _bits(y) >> np.uint32(31)
    if code == "fp8":
        return _encode_e4m3(y, dither)
    most = _MOST[code]
    return np.clip(np.rint(np.nan_to_num(y + dither)), -most, most).astype(np.int32)


def _encode_e4m3(y: Floats, dither: Floats) -> _Array:
    """Rounds in doubles on the grid of the number's binade; below 2^-6 in floats, as the kernels do."""
    size = np.minimum(np.nan_to_num(np.abs(y)), np.float32(448))
    exponent = np.frexp(size)[1] - 1
    step = np.ldexp(1.0, np.maximum(exponent, -6) - 3)
    fine = np.rint(size * np.float32(512) + dither)
    coarse = np.rint(size.astype(np.float64) / step + dither)
    value = np.where(exponent < -6, fine / 512, np.minimum(coarse * step, 448.0))
    found = np.searchsorted(_E4M3[:127], value.astype(np.float32))
    return found | (_bits(y) >> np.uint32(31) << np.uint32(7)).astype(np.int64)


def _decode(code: str, c: _Array) -> Floats:
    if code == "sign":
        return np.where(c != 0, np.float32(-1), np.float32(1))
    if code == "fp8":
        return np.copysign(_E4M3[c & 0x7F], np.where(c & 0x80, np.float32(-1), np.float32(1)))
    return c.astype(np.float32)


def _pack(code: str, c: _Array, codes: Bytes) -> None:
    if code == "sign":
        codes[:] = np.packbits(c.astype(np.uint8), bitorder="little")
    elif code == "int4":
        half = (c & 15).astype(np.uint8).reshape(-1, 2, 128)
        codes[:] = (half[:, 0] | half[:, 1] << 4).reshape(-1)
    else:
        codes[:] = (c.reshape(-1) & 255).astype(np.uint8)[: codes.size]


def _unpack(code: str, codes: Bytes, blocks: int) -> _Array:
    if code == "sign":
        return np.unpackbits(codes, bitorder="little").reshape(blocks, BLOCK)
    if code == "int4":
        tile = codes.reshape(-1, 128).astype(np.int32)
        halves = np.stack([tile & 15, tile >> 4], 1).reshape(blocks, BLOCK)
        return (halves ^ 8) - 8
    c: _Array = np.zeros(blocks * BLOCK, np.int32)
    c[: codes.size] = codes
    c = c.reshape(blocks, BLOCK)
    return (c ^ 128) - 128 if code == "int8" else c
