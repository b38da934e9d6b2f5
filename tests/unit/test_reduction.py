"""Adding in a fixed order: every dtype, operation, number of parts and block boundary, to the bit."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from hiercomm.reduction import AVERAGE, MAX, MIN, PRODUCT, SUM, combine, reason_against

OPS = (SUM, AVERAGE, MIN, MAX, PRODUCT)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
DTYPES = (*FLOATS, *COMPLEX, *INTEGERS, torch.bool)
PAIRS = [(op, dtype) for op in OPS for dtype in DTYPES if reason_against(op, dtype) is None]


def some(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool or dtype in INTEGERS:
        return torch.randint(0, 2 if dtype == torch.bool else 7, (numel,), generator=generator).to(dtype)
    values = torch.randn(numel, generator=generator, dtype=torch.float64)
    if dtype in COMPLEX:
        values = torch.complex(values, torch.randn(numel, generator=generator, dtype=torch.float64))
    return values.to(dtype)


def expected(parts: Sequence[Tensor], op: str, divisor: int) -> Tensor:
    """((p0 op p1) op p2) ... out of place; halves in fp32, rounded once at the end."""
    wide = [part.float() if part.dtype in (torch.float16, torch.bfloat16) else part for part in parts]
    if op in (SUM, AVERAGE):
        total = functools.reduce(lambda a, b: a + b, wide)
    elif op == PRODUCT:
        total = functools.reduce(lambda a, b: a * b, wide)
    else:
        total = functools.reduce(torch.minimum if op == MIN else torch.maximum, wide)
    return (total / divisor if divisor != 1 else total).to(parts[0].dtype)


@pytest.mark.parametrize(("op", "dtype"), PAIRS, ids=str)
def test_equals_the_sequential_fold_to_the_bit(op, dtype):
    divisors = (1, 3) if dtype in (*FLOATS, *COMPLEX) else (1,)
    for count in range(1, 6):
        for divisor in divisors:
            for outs_among_parts in ((), (0,), (count - 1,), tuple(range(count))):
                parts = [some(37, dtype, seed) for seed in range(count)]
                right = expected(parts, op, divisor)
                outs = [parts[i] for i in outs_among_parts] or [torch.zeros(37, dtype=dtype) for _ in range(2)]
                combine(parts, outs, op, divisor)
                for out in outs:
                    assert torch.equal(out, right), (count, divisor, outs_among_parts)


@pytest.mark.parametrize("numel", [0, 1, 65535, 65536, 65537, 140000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_block_boundaries(numel, dtype):
    for count in (2, 3):
        for divisor in (1, 2) if dtype.is_floating_point else (1,):
            parts = [some(numel, dtype, seed) for seed in range(count)]
            right = expected(parts, SUM, divisor)
            combine(parts, [parts[1], parts[0]], SUM, divisor)
            assert torch.equal(parts[0], right)
            assert torch.equal(parts[1], right)


def test_parts_that_are_not_outs_stay():
    parts = [some(100, torch.bfloat16, seed) for seed in range(4)]
    copies = [part.clone() for part in parts]
    combine(parts, [parts[2]], SUM, 4)
    assert [torch.equal(part, copy) for part, copy in zip(parts, copies, strict=True)] == [True, True, False, True]


def test_the_order_is_that_of_the_parts():
    parts = [torch.tensor([value]) for value in (1e8, -1e8, 1.0)]
    out = torch.zeros(1)
    combine(parts, [out], SUM)
    assert out.item() == 1.0
    combine([parts[2], parts[0], parts[1]], [out], SUM)
    assert out.item() == 0.0  # 1 is lost beside 1e8


@pytest.mark.parametrize(
    ("dtype", "values", "total"),
    [(torch.bfloat16, [256.0, 1.0, 1.0], 258.0), (torch.float16, [2048.0, 1.0, 1.0], 2050.0)],
)
def test_halves_are_summed_in_fp32(dtype, values, total):
    parts = [torch.tensor([value], dtype=dtype) for value in values]
    assert (parts[0] + parts[1]).item() == values[0]  # what rounding at every step does
    combine(parts, parts, SUM)
    assert [part.item() for part in parts] == [total] * 3


def test_a_mean_of_halves_does_not_overflow_on_the_way():
    parts = [torch.tensor([60000.0], dtype=torch.float16) for _ in range(2)]
    combine(parts, [parts[0]], AVERAGE, 2)
    assert parts[0].item() == 60000.0


@pytest.mark.parametrize("op", [MIN, MAX])
def test_nan_is_not_swallowed(op):
    for count in (2, 3):
        parts = [torch.tensor([1.0, 2.0]) for _ in range(count)]
        parts[1][0] = torch.nan
        combine(parts, [parts[0]], op)
        assert parts[0].isnan().tolist() == [True, False]


@pytest.mark.parametrize(
    ("op", "dtype", "word"),
    [
        (SUM, torch.float8_e4m3fn, "float32"),
        (MAX, torch.float8_e5m2, "float32"),
        (SUM, torch.bool, "op=Max"),
        (AVERAGE, torch.bool, "op=Max"),
        *((AVERAGE, dtype, "op=Sum") for dtype in INTEGERS),
        *((op, dtype, "no order") for op in (MIN, MAX) for dtype in COMPLEX),
    ],
)
def test_what_has_no_right_result_is_a_sentence(op, dtype, word):
    reason = reason_against(op, dtype)
    assert reason is not None
    assert reason.startswith(f"{op} of {str(dtype).removeprefix('torch.')} tensors")
    assert word in reason


def test_all_else_is_allowed():
    refused = {(AVERAGE, d) for d in (*INTEGERS, torch.bool)} | {(SUM, torch.bool)}
    refused |= {(op, d) for op in (MIN, MAX) for d in COMPLEX}
    assert {(op, d) for op in OPS for d in DTYPES} - set(PAIRS) == refused
