"""What ranks can do with each other's numbers: the operations, and adding in a fixed order.

Sums of bf16 and fp16 are made in fp32 and rounded once per level. Pure; knows nothing of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

SUM, AVERAGE, MIN, MAX, PRODUCT = "Sum", "Average", "Min", "Max", "Product"

_Binary = Callable[..., Tensor]
_BINARY: dict[str, _Binary] = {
    SUM: torch.add, AVERAGE: torch.add, MIN: torch.minimum, MAX: torch.maximum, PRODUCT: torch.mul,
}  # fmt: skip
_HALF = (torch.float16, torch.bfloat16)
# Bytes of an operand combined at a time: several operands of this size stay in the second-level cache.
_BLOCK_BYTES = 1 << 18


def reason_against(op: str, dtype: torch.dtype) -> str | None:
    """Why `op` has no right result for `dtype`, as a sentence; None where it has."""
    name = str(dtype).removeprefix("torch.")
    if dtype.itemsize == 1 and dtype.is_floating_point:
        return f"{op} of {name} tensors is not defined: convert to float32 first"
    if dtype == torch.bool and op in (SUM, AVERAGE):
        return f"{op} of bool tensors is not defined: use op=Max (any) or op=Min (all), or convert to int64 and use Sum"
    if op == AVERAGE and not (dtype.is_floating_point or dtype.is_complex):
        return f"Average of {name} tensors would be rounded: use op=Sum, or convert to a floating-point type"
    if op in (MIN, MAX) and dtype.is_complex:
        return f"{op} of {name} tensors is not defined: complex numbers have no order"
    return None


def combine(parts: Sequence[Tensor], outs: Sequence[Tensor], op: str, divisor: int = 1) -> None:
    """Every out = op(parts[0], parts[1], ...) in that order, then divided by `divisor`.

    All are flat, of one dtype and length; an out may be one of the parts.
    """
    numel, dtype = outs[0].numel(), outs[0].dtype
    block = _BLOCK_BYTES // dtype.itemsize
    # Two operands can be combined in place: halves in fp32 and rounded once, too, unless then divided.
    if len(parts) == 2 and (divisor == 1 or dtype not in _HALF):
        total, in_place = outs[0], True
        rest = outs[1:]
    else:
        wide = torch.float32 if dtype in _HALF else dtype
        total, in_place = torch.empty(min(block, numel), dtype=wide, device=outs[0].device), False
        rest = outs  # written last, since they may be among the parts
    if numel <= block:
        _combine_block(parts, total, rest, op, divisor)
        return
    for begin in range(0, numel, block):
        cut = slice(begin, min(begin + block, numel))
        here = total[cut] if in_place else total[: cut.stop - begin]
        _combine_block([part[cut] for part in parts], here, [out[cut] for out in rest], op, divisor)


def _combine_block(parts: Sequence[Tensor], total: Tensor, outs: Sequence[Tensor], op: str, divisor: int) -> None:
    _fold(parts, total, op)
    if divisor != 1:
        total.div_(divisor)
    for out in outs:
        out.copy_(total)


def _fold(parts: Sequence[Tensor], total: Tensor, op: str) -> None:
    binary = _BINARY[op]
    if len(parts) == 1 or total.dtype != parts[0].dtype:
        total.copy_(parts[0])
        rest = parts[1:]
    else:
        binary(parts[0], parts[1], out=total)
        rest = parts[2:]
    for part in rest:
        binary(total, part, out=total)
