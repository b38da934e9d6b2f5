"""`hiercomm bench kernels`: what compression costs on this machine's CPU, and on its GPU where it has one, before
anything is sent. Each kernel's time beside that of a copy of the same numbers, measured in turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from hiercomm import native
from hiercomm.config import parse_bytes

Record = dict[str, Any]
_Call = Callable[[], object]


def run(options: argparse.Namespace) -> tuple[int, list[Record]]:
    """All kernels on all devices, one thread on the CPU. Returns the rank, which is 0, and the records."""
    torch.set_num_threads(1)
    records: list[Record] = []
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    for device in map(torch.device, devices):
        for nbytes in map(parse_bytes, (options.sizes or "64MB").split(",")):
            backend = native.backend(device)
            print(f"{device} ({backend}), {nbytes} bytes of float32; GB/s of these; times the time of a copy")
            for name, wire_bytes, kernel in _kernels(nbytes // 4, device):
                seconds, copy = _time(kernel, nbytes // 4, device, options.repeat)
                records.append({
                    "op": name, "device": str(device), "backend": backend, "bytes": nbytes, "wire_bytes": wire_bytes,
                    "seconds": seconds, "copy_seconds": copy, "ratio": seconds / copy, "rate": nbytes / seconds,
                })  # fmt: skip
                print(
                    f"{name:>32} {seconds * 1e3:>9.3f} ms {nbytes / seconds / 1e9:>8.2f} GB/s {seconds / copy:>7.2f}x"
                )
    return 0, records


def _kernels(n: int, device: torch.device) -> Iterator[tuple[str, int, _Call]]:
    """Name, bytes on the wire, and a call that may be repeated: what it changes stays of the same kind."""
    torch.manual_seed(0)
    x = torch.randn(n, device=device) * 1e-3
    residual, out = torch.zeros_like(x), torch.zeros_like(x)
    scales = _bytes(2 * -(-n // native.BLOCK), device)
    for code in native.CODES:
        codes = _bytes(native.code_bytes(code, n), device)
        wire = codes.numel() + scales.numel()
        for name, left, seed in _ways(code, residual):
            yield name, wire, _encoder(code, x, left, codes, scales, seed)
        yield f"{code} decode", wire, _bound(native.dequantize, code, codes, scales, out, False)
        yield f"{code} decode and add", wire, _bound(native.dequantize, code, codes, scales, out, True)
    for share in (0.01, 0.001):
        k = max(1, int(n * share))
        sparse = _bytes(4 * -(-n // native.SPAN), device), _bytes(2 * k, device), _bytes(2 * k, device)
        wire = sum(part.numel() for part in sparse)
        yield f"top-k {share:.1%}", wire, _bound(native.top_k, x, None, *sparse)
        yield f"top-k {share:.1%} + residual", wire, _top_k(x, residual, sparse)
        yield f"top-k {share:.1%} decode and add", wire, _bound(native.scatter, *sparse, out, True)


def _ways(code: str, residual: Tensor) -> list[tuple[str, Tensor | None, int | None]]:
    ways: list[tuple[str, Tensor | None, int | None]] = [(code, None, None), (f"{code} + residual", residual, None)]
    return ways if code == "sign" else [*ways, (f"{code} + residual, stochastic", residual, 1)]


def _encoder(code: str, x: Tensor, residual: Tensor | None, codes: Tensor, scales: Tensor, seed: int | None) -> _Call:
    if code == "sign":
        return _bound(native.sign, x, residual, codes, scales)
    return _bound(native.quantize, code, x, residual, codes, scales, seed)


def _top_k(x: Tensor, residual: Tensor, sparse: tuple[Tensor, Tensor, Tensor]) -> _Call:
    # From call to call more of what is not chosen waits just under what is, as in training.
    residual.zero_()
    return _bound(native.top_k, x, residual, *sparse)


def _bound(function: Callable[..., object], *arguments: object) -> _Call:
    return lambda: function(*arguments)


def _bytes(n: int, device: torch.device) -> Tensor:
    return torch.zeros(n, dtype=torch.uint8, device=device)


def _time(kernel: _Call, n: int, device: torch.device, repeat: int) -> tuple[float, float]:
    """Seconds of the kernel and of a copy: medians, taken in turns, since the machine's speed drifts."""
    source, target = torch.ones(n, device=device), torch.zeros(n, device=device)
    pairs = []
    for _ in range(repeat + 2):
        copied = _once(lambda: target.copy_(source), device)
        pairs.append((_once(kernel, device), copied))
    seconds, copies = zip(*pairs[2:], strict=True)
    return statistics.median(seconds), statistics.median(copies)


def _once(call: _Call, device: torch.device) -> float:
    if device.type == "cpu":
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    call()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) * 1e-3
