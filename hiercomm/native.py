"""Kernels on tensors: numbers to codes and back, the same bytes on a CPU and a GPU. Alone to import ctypes and CuPy.

Everything is in place, on contiguous flat tensors of one device; on a GPU it is queued on torch's current stream.
Numbers are float32; denormals count as zeros. Codes go over the wire, little-endian: their tensors may be uint8 or
a type of the codes' own width, and start at any byte.

- `quantize`, `sign`: blocks of BLOCK elements, each with a scale in bf16 (2 bytes). A block that holds NaN, inf or
  a magnitude from 2^127 on is poisoned: its scale is NaN (0x7fc0), its codes and its residual are 0, and it decodes
  to NaN.
- `top_k`: for each span of SPAN elements how many are chosen (4 bytes), for each element chosen its place in the span
  (2 bytes) and its value in bf16.

A residual holds what earlier codes left out: it is added to the numbers and becomes what this code leaves out.
Knows nothing of messages, headers, or of what the numbers are.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hiercomm import kernel_cache, launcher, oracle
from hiercomm.config import process_environment
from hiercomm.errors import KernelError
from hiercomm.kernel_arguments import CODES, code_bytes, require, require_coded, require_numbers, require_sparse
from hiercomm.oracle import BLOCK, SPAN

__all__ = [
    "BLOCK", "CODES", "SPAN", "backend", "code_bytes", "compile_for_gpu", "dequantize", "numpy_only", "quantize",
    "scatter", "sign", "top_k",
]  # fmt: skip


def quantize(
    code: str, x: Tensor, residual: Tensor | None, codes: Tensor, scales: Tensor, seed: int | None = None
) -> None:
    """x, plus the residual, as "int8", "int4" or "fp8" (e4m3).

    codes: code_bytes(code, n) bytes; scales: 2 bytes a block. Rounds to the nearest, or, given a seed of 64 bits, at
    random and unbiased: by bits that are a function of the seed and the element's index. Raises KernelError.
    """
    require(code in CODES[:3], "code", repr(code), f"one of {', '.join(CODES[:3])}")
    require(seed is None or 0 <= seed < 2**64, "seed", seed, "from 0 to 2^64 - 1")
    _encode(code, x, residual, codes, scales, seed)


def sign(x: Tensor, residual: Tensor | None, codes: Tensor, scales: Tensor) -> None:
    """x, plus the residual, as one bit (set: negative) and the block's mean magnitude; `dequantize` decodes "sign".

    codes: code_bytes("sign", n) bytes; scales: 2 bytes a block. Raises KernelError.
    """
    _encode("sign", x, residual, codes, scales, None)


def _encode(code: str, x: Tensor, residual: Tensor | None, codes: Tensor, scales: Tensor, seed: int | None) -> None:
    require_numbers(x.numel(), x.device, x=x, residual=residual)
    require_coded(code, x.numel(), x.device, codes, scales)
    if x.numel():
        _kernels(x.device).quantize(code, x, residual, codes, scales, seed)


def dequantize(code: str, codes: Tensor, scales: Tensor, out: Tensor, accumulate: bool) -> None:
    """What was coded, written to `out` or added to it. Raises KernelError."""
    require_numbers(out.numel(), out.device, out=out)
    require_coded(code, out.numel(), out.device, codes, scales)
    if out.numel():
        _kernels(out.device).dequantize(code, codes, scales, out, accumulate)


def top_k(x: Tensor, residual: Tensor | None, counts: Tensor, indices: Tensor, values: Tensor) -> None:
    """The k elements of x, plus the residual, of the largest magnitudes; of equal ones those of the lowest index.

    k is the number of indices. counts: 4 bytes a span; indices, ascending, and values: 2 bytes an element chosen. NaN
    counts as the largest. Raises KernelError.
    """
    require_numbers(x.numel(), x.device, x=x, residual=residual)
    require_sparse(x.numel(), x.device, counts, indices, values)
    if x.numel():
        require(indices.numel() > 0, "the number of indices", 0, "at least 1")
        _kernels(x.device).top_k(x, residual, counts, indices, values)


def scatter(counts: Tensor, indices: Tensor, values: Tensor, out: Tensor, accumulate: bool) -> None:
    """What `top_k` chose, added to `out`, or written to it with zeros elsewhere. Raises KernelError.

    Bad bytes do no harm: counts beyond k are cut short, places beyond the end left out.
    """
    require_numbers(out.numel(), out.device, out=out)
    require_sparse(out.numel(), out.device, counts, indices, values)
    if out.numel():
        _kernels(out.device).scatter(counts, indices, values, out, accumulate)


def backend(device: torch.device) -> str:
    """What computes on a device: "twin" (compiled for the CPU), "numpy" or "cuda". Compiles what has to be compiled.

    Without CuPy a GPU's tensors go to the CPU and back.
    """
    name = _kernels(device).name
    if name == "cuda":
        _module(device.index)
    return name


@contextlib.contextmanager
def numpy_only() -> Iterator[None]:
    """For tests: NumPy on the CPU, as where there is no compiler."""
    global _forced
    _forced = True
    try:
        yield
    finally:
        _forced = False


_forced = False


# ---- what computes --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Kernels:
    """One way to compute: functions of the public ones' arguments, which are checked already, and not empty."""

    name: str
    quantize: Callable[[str, Tensor, Tensor | None, Tensor, Tensor, int | None], None]
    dequantize: Callable[[str, Tensor, Tensor, Tensor, bool], None]
    top_k: Callable[[Tensor, Tensor | None, Tensor, Tensor, Tensor], None]
    scatter: Callable[[Tensor, Tensor, Tensor, Tensor, bool], None]


def _kernels(device: torch.device) -> _Kernels:
    require(device.type in ("cpu", "cuda"), "device", device, "a CPU or an NVIDIA GPU")
    if device.type == "cuda":
        return _gpu()
    return _numpy() if _forced else _cpu()


@functools.cache
def _cpu() -> _Kernels:
    try:
        return _twin(_library())
    except KernelError as error:
        _say(f"compression uses NumPy, some 50 times slower than compiled code: {error}. Install g++ to put it right.")
        return _numpy()


@functools.cache
def _gpu() -> _Kernels:
    try:
        from cupy.cuda import nvrtc

        nvrtc.getVersion()
    except (ImportError, OSError, RuntimeError) as error:
        _say(f"GPU tensors are compressed on the CPU, slowly: {error}. pip install 'hiercomm[gpu]' puts it right.")
        return _staged(_cpu())
    return _cuda()


def _say(sentence: str) -> None:
    """One line a node; a line a process where no launcher numbers them."""
    claim = launcher.claim(process_environment())
    if claim is None or not claim.local_rank:
        print(f"hiercomm: {sentence}", file=sys.stderr, flush=True)


# ---- CPU ------------------------------------------------------------------------------------------------


def _library() -> ctypes.CDLL:
    """The one built at install; where that is missing or of other sources, the cache's."""
    with contextlib.suppress(OSError, AttributeError):
        return _opened(kernel_cache.INSTALLED)
    path = kernel_cache.compiled()
    try:
        return _opened(path)
    except (OSError, AttributeError) as error:
        raise KernelError(f"{path} cannot be loaded: {error}") from None


def _opened(path: Path) -> ctypes.CDLL:
    """Raises OSError or AttributeError where it is not the library of these sources."""
    library = ctypes.CDLL(str(path))
    library.hiercomm_digest.restype = ctypes.c_uint64
    if library.hiercomm_digest() != kernel_cache.digest():
        raise OSError("it was compiled from other sources")
    pointer, number, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    signatures = {
        "quantize": [flag, flag, pointer, pointer, pointer, pointer, number, ctypes.c_uint64],
        "dequantize": [flag, flag, pointer, pointer, pointer, number],
        "top_k": [pointer, pointer, pointer, pointer, pointer, number, number],
        "scatter": [pointer, pointer, pointer, number, pointer, number, flag],
    }
    for name, types in signatures.items():
        function = getattr(library, f"hiercomm_{name}")
        function.argtypes, function.restype = types, None
    return library


def _twin(library: ctypes.CDLL) -> _Kernels:
    """cpu_twin.cpp, compiled. Calls let go of the GIL."""

    def quantize(
        code: str, x: Tensor, residual: Tensor | None, codes: Tensor, scales: Tensor, seed: int | None
    ) -> None:
        pointers = _pointers(x, residual, codes, scales)
        library.hiercomm_quantize(CODES.index(code), seed is not None, *pointers, x.numel(), seed or 0)

    def dequantize(code: str, codes: Tensor, scales: Tensor, out: Tensor, accumulate: bool) -> None:
        library.hiercomm_dequantize(CODES.index(code), accumulate, *_pointers(codes, scales, out), out.numel())

    def top_k(x: Tensor, residual: Tensor | None, counts: Tensor, indices: Tensor, values: Tensor) -> None:
        library.hiercomm_top_k(*_pointers(x, residual, counts, indices, values), x.numel(), indices.nbytes // 2)

    def scatter(counts: Tensor, indices: Tensor, values: Tensor, out: Tensor, accumulate: bool) -> None:
        pointers = _pointers(counts, indices, values)
        library.hiercomm_scatter(*pointers, indices.nbytes // 2, out.data_ptr(), out.numel(), accumulate)

    return _Kernels("twin", quantize, dequantize, top_k, scatter)


def _pointers(*tensors: Tensor | None) -> list[int | None]:
    return [None if t is None else t.data_ptr() for t in tensors]


def _numpy() -> _Kernels:
    def on_arrays(function: Callable[..., None]) -> Callable[..., None]:
        return lambda *arguments: function(*(_array(a) if isinstance(a, Tensor) else a for a in arguments))

    functions: tuple[Callable[..., None], ...] = (oracle.quantize, oracle.dequantize, oracle.top_k, oracle.scatter)
    return _Kernels("numpy", *map(on_arrays, functions))


def _array(t: Tensor) -> Any:
    t = t.detach()
    return t.numpy() if t.dtype == torch.float32 else t.view(torch.uint8).numpy()


def _staged(kernels: _Kernels) -> _Kernels:
    """The CPU's kernels for tensors of a GPU."""

    def on_host(function: Callable[..., None]) -> Callable[..., None]:
        def run(*arguments: Any) -> None:
            copies = [a.detach().to("cpu", copy=True) if isinstance(a, Tensor) else a for a in arguments]
            function(*copies)
            for argument, copy in zip(arguments, copies, strict=True):
                if isinstance(argument, Tensor):
                    argument.data.copy_(copy)  # all: what was only read gets what it has

        return run

    functions: tuple[Callable[..., None], ...] = (kernels.quantize, kernels.dequantize, kernels.top_k, kernels.scatter)
    return _Kernels(kernels.name, *map(on_host, functions))


# ---- GPU ------------------------------------------------------------------------------------------------

_THREADS = 256
_TILE = 4096  # elements of a block of threads, in top-k
_OPTIONS = ("-std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true")


def compile_for_gpu(architecture: str) -> bytes:
    """The GPU's kernels as a cubin ("sm_90") or as PTX ("compute_90"). Needs CuPy and NVRTC, but no GPU.

    Raises KernelError. CuPy's own compiler is not used: it always flushes denormals, and its cache does not see that
    an included file has changed.
    """
    from cupy.cuda import nvrtc

    header = kernel_cache.source("blockquant.cuh")
    program = nvrtc.createProgram(
        kernel_cache.source("kernels.cu").decode(), "kernels.cu", (header,), (b"blockquant.cuh",)
    )
    try:
        nvrtc.compileProgram(program, (*_OPTIONS, f"-arch={architecture}"))
        code = nvrtc.getCUBIN(program) if architecture.startswith("sm_") else nvrtc.getPTX(program)
    except nvrtc.NVRTCError as error:
        raise KernelError(f"the kernels do not compile for {architecture}: {nvrtc.getProgramLog(program)}") from error
    finally:
        nvrtc.destroyProgram(program)
    return code if isinstance(code, bytes) else str(code).encode()


@functools.cache
def _function(device: int, name: str) -> Any:
    return _module(device).get_function(name)


@functools.cache
def _module(device: int) -> Any:
    import cupy
    from cupy.cuda import nvrtc

    architecture = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    content = hashlib.sha256(repr((_OPTIONS, nvrtc.getVersion())).encode())
    for name in ("kernels.cu", "blockquant.cuh"):
        content.update(kernel_cache.source(name))
    file = f"kernels-{architecture}-{content.hexdigest()[:16]}.cubin"
    path = kernel_cache.cached(file, lambda fresh: fresh.write_bytes(compile_for_gpu(architecture)))
    with cupy.cuda.Device(device):
        return cupy.RawModule(path=str(path))


def _cuda() -> _Kernels:
    return _Kernels("cuda", _cuda_quantize, _cuda_dequantize, _cuda_top_k, _cuda_scatter)


def _launch(device: torch.device, name: str, blocks: int, *arguments: Any) -> None:
    """Queue a kernel on torch's current stream. Tensors go as pointers, None as the null pointer; NumPy's scalars as
    what they are: a plain int would always go as 64 bits.
    """
    import cupy

    stream = torch.cuda.current_stream(device)
    # CuPy 14 has the former, and calls the latter deprecated.
    from_external = getattr(cupy.cuda.Stream, "from_external", None)
    with cupy.cuda.Device(device.index):
        queue = from_external(stream) if from_external else cupy.cuda.ExternalStream(stream.cuda_stream, device.index)
        with queue:
            _function(device.index, name)(
                (blocks,),
                (_THREADS,),
                tuple(np.uint64(_pointers(a)[0] or 0) if a is None or isinstance(a, Tensor) else a for a in arguments),
            )


def _warps(n: int) -> int:
    """Blocks of threads where each warp works on a block of elements."""
    return -(-n // (BLOCK * _THREADS // 32))


def _cuda_quantize(
    code: str, x: Tensor, residual: Tensor | None, codes: Tensor, scales: Tensor, seed: int | None
) -> None:
    n, name = x.numel(), f"quantize_{code}" + ("" if seed is None else "_stochastic")
    _launch(x.device, name, _warps(n), x, residual, codes, scales, np.int64(n), np.uint64(seed or 0))


def _cuda_dequantize(code: str, codes: Tensor, scales: Tensor, out: Tensor, accumulate: bool) -> None:
    n = out.numel()
    _launch(out.device, f"dequantize_{code}", _warps(n), codes, scales, out, np.int64(n), np.int32(accumulate))


def _cuda_top_k(x: Tensor, residual: Tensor | None, counts: Tensor, indices: Tensor, values: Tensor) -> None:
    """No step waits for the CPU: what is found stays on the GPU."""
    device, n, tiles = x.device, np.int64(x.numel()), -(-x.numel() // _TILE)
    selection = torch.zeros(2, dtype=torch.int64, device=device)
    histogram = torch.zeros(2048, dtype=torch.int32, device=device)
    per_tile = torch.empty((tiles, 2), dtype=torch.int32, device=device)
    source, sums, need = x, residual, indices.nbytes // 2
    for shift, width in ((20, 11), (10, 10), (0, 10)):
        bits = np.int32(shift), np.int32(width)
        _launch(device, "top_k_histogram", min(tiles, 1024), source, sums, n, selection, histogram, *bits)
        _launch(device, "top_k_pick", 1, selection, histogram, np.int64(need), bits[1])
        source, sums, need = x if residual is None else residual, None, 0
    _launch(device, "top_k_count", tiles, source, n, selection, per_tile)
    running = per_tile.cumsum(0)
    _launch(device, "top_k_write", tiles, source, residual, n, selection, running, counts, indices, values)


def _cuda_scatter(counts: Tensor, indices: Tensor, values: Tensor, out: Tensor, accumulate: bool) -> None:
    n, k = np.int64(out.numel()), np.int64(indices.nbytes // 2)
    spans = -(-out.numel() // SPAN)
    _launch(out.device, "scatter", spans, counts, indices, values, k, out, n, np.int32(accumulate))
