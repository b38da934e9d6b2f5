"""What a GPU would do, on a machine without one: the GPU's kernels on fibers and as PTX write the bytes of the CPU's
library, and so do builds of that for other processors.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from samples import SEED, choose, decode, encode, sample, spread, written

from hiercomm import native

CASES = [(code, seed) for code in native.CODES for seed in (None, SEED) if code != "sign" or seed is None]
KINDS = ("mixed", "bits", "midway", "huge", "ties")
# Whole blocks of elements, whole blocks of threads, neither.
SIZES = (9 * 512, 16 * 512, 9 * 512 + 37)


def unaligned(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, 4 bytes behind a multiple of 16."""
    return torch.cat([x[:1], x])[1:]


def compare(run: Callable[..., Any], call: Callable[..., Any], *arguments: Any) -> Any:
    expected = call(*arguments)
    assert written(*run(call, *arguments)) == written(*expected), (call, arguments)
    return expected


def compare_codes(run: Callable[..., Any], kinds: tuple[str, ...], sizes: tuple[int, ...]) -> None:
    for kind in kinds:
        for n in sizes:
            x, residual = sample(kind, n), sample(kind, n, 1)
            for code, seed in CASES:
                codes, scales, _ = compare(run, encode, code, x, None, seed)
                compare(run, decode, code, codes, scales, residual)
                codes, scales, _ = compare(run, encode, code, unaligned(x), unaligned(residual), seed, 1)
                compare(run, decode, code, codes, scales, unaligned(residual))
                compare(run, encode, code, x, residual, seed)


def compare_sparse(run: Callable[..., Any], kinds: tuple[str, ...], sizes: tuple[int, ...]) -> None:
    for kind in kinds:
        for n in sizes:
            x, residual = sample(kind, n), sample(kind, n, 1)
            for left, k in ((residual, n // 100 + 1), (None, n // 3), (residual, n)):
                wire = compare(run, choose, x, left, k)[:3]
                compare(run, spread, wire, residual)


# ---- builds for other processors ------------------------------------------------------------------------


@pytest.mark.parametrize("flags", ["-O3 -march=x86-64-v3", "-O3", "-O0"])
def test_builds(compiled: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, flags: str) -> None:
    """The library picks the widest instructions that the processor has; narrower ones give the same."""
    if "march" in flags and " avx2 " not in Path("/proc/cpuinfo").read_text():
        pytest.skip("the processor has no AVX2")
    library = compiled("cpu_twin.cpp", "-DHIERCOMM_ONE_LEVEL", "-fPIC", "-shared", *flags.split())
    other = native._twin(native._opened(library))

    def run(call: Callable[..., Any], *arguments: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(native, "_cpu", lambda: other)
            return call(*arguments)

    compare_codes(run, ("denormal", "tiny", *KINDS), (*SIZES, 7))
    compare_sparse(run, ("denormal", "tiny", *KINDS), (70001,))


# ---- the GPU's kernels ----------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [0, 1, 7])
def test_codes_on_fibers(shim: Any, as_gpu: Any, order: int) -> None:
    compare_codes(lambda *call: as_gpu(shim(order), *call), KINDS[:4], SIZES if order == 0 else SIZES[2:])


@pytest.mark.parametrize("order", [0, 1, 7])
def test_top_k_on_fibers(shim: Any, as_gpu: Any, order: int) -> None:
    sizes = (70001, 3 * 4096, 37) if order == 0 else (2 * 4096 + 300,)
    compare_sparse(lambda *call: as_gpu(shim(order), *call), KINDS, sizes)


@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_90", "sm_100"])
def test_compiles(ptx: str, architecture: str) -> None:
    assert native.compile_for_gpu(architecture)[:4] == b"\x7fELF"


def test_ptx_has_no_arithmetic_of_its_own(ptx: str) -> None:
    """No contraction, no approximation, no flushing of denormals; nothing in local memory."""
    assert not re.findall(r"\bfma\.\S*|\S*\.approx\S*|\S*\.ftz\S*|\.local\b", ptx)
    assert len(re.findall(r"\.visible \.entry", ptx)) == 16


def test_codes_in_ptx(interpreted: Any, as_gpu: Any) -> None:
    compare_codes(lambda *call: as_gpu(interpreted, *call), KINDS[:3], SIZES[2:])


def test_top_k_in_ptx(interpreted: Any, as_gpu: Any) -> None:
    compare_sparse(lambda *call: as_gpu(interpreted, *call), ("bits", "ties"), (2 * 4096 + 300,))
    compare_sparse(lambda *call: as_gpu(interpreted, *call), KINDS[:1], (66001,))


# ---- bad bytes ------------------------------------------------------------------------------------------


def test_bad_bytes_touch_nothing_else(compiled: Callable[..., Path]) -> None:
    """100,000 payloads for each decoder, under AddressSanitizer."""
    sanitizers = ("-fsanitize=address,undefined", "-fno-sanitize=float-divide-by-zero", "-fno-sanitize-recover=all")
    program = compiled("fuzz.cpp", "-O1", "-g", "-DHIERCOMM_ONE_LEVEL", *sanitizers)
    ended = subprocess.run([program, "100000"], capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stdout) == (0, "100000\n"), ended.stderr


def test_bad_bytes_do_no_harm_to_a_gpu(shim: Any, as_gpu: Any) -> None:
    n, k = 70000, 300
    generator = torch.Generator().manual_seed(1)
    for most in (256, 2):
        sizes = (8, 2 * k, 2 * k)
        wire = [torch.randint(0, most, (size,), generator=generator).to(torch.uint8) for size in sizes]
        wire[1] = torch.randperm(65536, generator=generator)[:k].to(torch.int16).view(torch.uint8)  # no place twice
        compare(lambda *call: as_gpu(shim(0), *call), spread, wire, sample("normal", n))
