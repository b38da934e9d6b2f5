"""What the kernels' arguments must be, said before any memory is touched. Pure; knows nothing of how kernels run."""

from __future__ import annotations

import torch
from torch import Tensor

from hiercomm.errors import KernelError
from hiercomm.oracle import BLOCK, SPAN

CODES = ("int8", "int4", "fp8", "sign")


def code_bytes(code: str, n: int) -> int:
    """The size of the codes of `n` elements, without the scales, in bytes. Raises KernelError for an unknown code."""
    require(code in CODES, "code", repr(code), f"one of {', '.join(CODES)}")
    blocks = -(-n // BLOCK)
    return {"int4": blocks * BLOCK // 2, "sign": blocks * BLOCK // 8}.get(code, n)


def require(holds: bool, name: str, value: object, right: str) -> None:
    """Raise KernelError with what an argument is and must be, unless it holds."""
    if not holds:
        raise KernelError(f"{name} is {value}: it must be {right}")


def require_numbers(n: int, device: torch.device, **tensors: Tensor | None) -> None:
    """Each tensor must be `n` numbers on the device, or None. Raises KernelError."""
    for name, t in tensors.items():
        if t is not None:
            fits = t.dtype == torch.float32 and t.shape == (n,) and t.is_contiguous() and t.device == device
            right = f"contiguous float32[{n}] on {device}, at a multiple of 4 bytes"
            require(fits and t.data_ptr() % 4 == 0, name, _described(t), right)


def require_coded(code: str, n: int, device: torch.device, codes: Tensor, scales: Tensor) -> None:
    """The tensors must have the sizes that `n` elements take. Raises KernelError."""
    _require_bytes("codes", codes, code_bytes(code, n), 1, device)
    _require_bytes("scales", scales, 2 * -(-n // BLOCK), 2, device)


def require_sparse(n: int, device: torch.device, counts: Tensor, indices: Tensor, values: Tensor) -> None:
    """The tensors must have the sizes that the number of indices takes, which is n at most. Raises KernelError."""
    k = indices.nbytes // 2
    require(k <= n, "the number of indices", k, f"at most {n}, the number of elements")
    _require_bytes("indices", indices, 2 * k, 2, device)
    _require_bytes("values", values, 2 * k, 2, device)
    _require_bytes("counts", counts, 4 * -(-n // SPAN), 4, device)


def _require_bytes(name: str, t: Tensor, nbytes: int, width: int, device: torch.device) -> None:
    fits = t.itemsize in (1, width) and t.nbytes == nbytes and t.dim() == 1 and t.is_contiguous() and t.device == device
    require(fits, name, _described(t), f"contiguous uint8[{nbytes}] on {device}")


def _described(t: Tensor) -> str:
    shape = ", ".join(map(str, t.shape))
    strided = "" if t.is_contiguous() else "strided "
    return f"{strided}{str(t.dtype).removeprefix('torch.')}[{shape}] on {t.device}"
