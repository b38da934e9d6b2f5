"""Numbers that kernels are tried on, and calls of the kernels that return all they wrote. Also for tests/kernels and
tests/gpu.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hiercomm import native

KINDS = ("normal", "bits", "denormal", "tiny", "mixed", "huge", "ties", "zeros", "midway")
SIZES = (0, 1, 7, 511, 512, 513, 65535, 65537, 200003)
SEED = 0x123456789ABCDEF0


def sample(kind: str, n: int, seed: int = 0) -> torch.Tensor:
    """`n` numbers of a kind, float32."""
    rng = np.random.default_rng([seed, n, KINDS.index(kind)])
    normal = rng.standard_normal(n)
    x = {
        "normal": lambda: normal * 1e-3,
        "bits": lambda: rng.integers(0, 2**32, n, dtype=np.uint32).view(np.float32),  # inf and NaN among them
        "denormal": lambda: rng.integers(0, 2**23, n, dtype=np.uint32).view(np.float32),
        "tiny": lambda: normal * 2.0 ** rng.integers(-130, -60, n),
        "mixed": lambda: normal * 10.0 ** rng.integers(-9, 4, n),
        "huge": lambda: np.clip(normal * 1.5e38, -1.7e38, 1.7e38),  # most blocks under 2^127
        "ties": lambda: rng.integers(-3, 4, n) * 0.25,
        "zeros": lambda: np.where(rng.random(n) < 0.5, 0.0, -0.0),
        "midway": lambda: _midway(normal),
    }[kind]()
    return torch.from_numpy(np.ascontiguousarray(x, np.float32))


def _midway(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Blocks whose mean lies half-way between two numbers of bf16, to half a bit: the order of the sum decides."""
    whole = x[: len(x) // 512 * 512].reshape(-1, 512)
    whole *= (514 + 2.0**-15) / np.abs(whole).sum(1, keepdims=True)
    return x


def written(*tensors: torch.Tensor | None) -> list[bytes]:
    """The tensors' bytes. All NaNs of float32 tensors count as one: their payload is nobody's promise."""
    found = []
    for t in tensors:
        if t is not None:
            t = t.cpu()
            if t.dtype == torch.float32:
                t = torch.where(t.isnan(), torch.nan, t)
            found.append(t.numpy().tobytes())
    return found


def encode(
    code: str, x: torch.Tensor, residual: torch.Tensor | None, seed: int | None, offset: int = 0
) -> list[torch.Tensor | None]:
    """Codes, scales and the new residual; 0xAA is what nobody wrote. The codes begin at an offset, in bytes."""
    residual = None if residual is None else residual.clone()
    nbytes = native.code_bytes(code, x.numel())
    codes = torch.full((nbytes + offset,), 0xAA, dtype=torch.uint8, device=x.device)[offset:]
    scales = torch.full((2 * -(-x.numel() // native.BLOCK),), 0xAA, dtype=torch.uint8, device=x.device)
    if code == "sign":
        native.sign(x, residual, codes, scales)
    else:
        native.quantize(code, x, residual, codes, scales, seed)
    return [codes, scales, residual]


def decode(code: str, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> list[torch.Tensor]:
    """What the codes are, and `out` with it added."""
    plain, added = torch.full_like(out, 7.0), out.clone()
    native.dequantize(code, codes, scales, plain, False)
    native.dequantize(code, codes, scales, added, True)
    return [plain, added]


def choose(x: torch.Tensor, residual: torch.Tensor | None, k: int) -> list[torch.Tensor | None]:
    """Counts, indices, values and the new residual."""
    residual = None if residual is None else residual.clone()
    sizes = (4 * -(-x.numel() // native.SPAN), 2 * k, 2 * k)
    wire = [torch.full((size,), 0xAA, dtype=torch.uint8, device=x.device) for size in sizes]
    native.top_k(x, residual, *wire)
    return [*wire, residual]


def spread(wire: list[torch.Tensor], out: torch.Tensor) -> list[torch.Tensor]:
    """What was chosen, and `out` with it added."""
    plain, added = torch.full_like(out, 7.0), out.clone()
    native.scatter(*wire, plain, False)
    native.scatter(*wire, added, True)
    return [plain, added]


def some_k(n: int) -> list[int]:
    """Numbers of elements to choose among n."""
    return sorted({k for k in (1, n // 100, n // 3, n) if 1 <= k <= n})
