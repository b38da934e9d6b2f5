"""On a GPU: the kernels write the bytes that they write on the CPU, on whatever stream torch is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))
from samples import KINDS, SEED, choose, decode, encode, sample, some_k, spread, written

from hiercomm import native

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
SIZES = (0, 1, 7, 511, 512, 513, 65535, 65537, 1000003)
CASES = [(code, seed) for code in native.CODES for seed in (None, SEED) if code != "sign" or seed is None]


def on_gpu(argument: Any) -> Any:
    if isinstance(argument, list):
        return [on_gpu(a) for a in argument]
    return argument.cuda() if isinstance(argument, torch.Tensor) else argument


def compare(call: Callable[..., Any], *arguments: Any) -> Any:
    expected = call(*arguments)
    assert written(*call(*map(on_gpu, arguments))) == written(*expected), (call, arguments)
    return expected


def test_cupy_is_used() -> None:
    assert native.backend(torch.device("cuda")) == "cuda"


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(("code", "seed"), CASES)
def test_codes(code: str, seed: int | None, n: int) -> None:
    for kind in KINDS:
        x, residual = sample(kind, n), sample(kind, n, 1)
        codes, scales, _ = compare(encode, code, x, residual, seed)
        compare(decode, code, codes, scales, residual)
        compare(encode, code, x, None, seed, 1)


@pytest.mark.parametrize("n", SIZES)
def test_top_k(n: int) -> None:
    for kind in KINDS:
        x, residual = sample(kind, n), sample(kind, n, 1)
        for k in some_k(n):
            wire = compare(choose, x, residual, k)[:3]
            compare(spread, wire, residual)
            compare(choose, x, None, k)


def test_on_a_side_stream() -> None:
    """Numbers that the stream has yet to write, behind something slow: a kernel elsewhere would not see them."""
    x, residual = sample("normal", 100000), sample("normal", 100000, 1)
    expected = written(*encode("int8", x, residual, None)), written(*choose(x, residual, 1000))
    stream, source, left = torch.cuda.Stream(), x.cuda(), residual.cuda()
    slow = torch.randn(2048, 2048, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(1000):
            late = torch.zeros_like(source)
            slow @ slow
            late.copy_(source)
            assert written(*encode("int8", late, left, None)) == expected[0]
        late = torch.zeros_like(source)
        slow @ slow
        late.copy_(source)
        assert written(*choose(late, left, 1000)) == expected[1]


def test_tensors_of_two_devices() -> None:
    with pytest.raises(
        native.KernelError, match=r"codes is uint8\[7\] on cpu: it must be contiguous uint8\[7\] on cuda:0"
    ):
        native.quantize(
            "int8", torch.zeros(7, device="cuda"), None, *(torch.zeros(n, dtype=torch.uint8) for n in (7, 2))
        )
