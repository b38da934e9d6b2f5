"""Kernels on the CPU: compiled code and NumPy write the same bytes, and what they promise holds."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from samples import KINDS, SEED, SIZES, choose, decode, encode, sample, some_k, spread, written

import hiercomm
from hiercomm import kernel_cache, native, oracle
from hiercomm.errors import HierCommError, KernelError

CASES = [(code, seed) for code in native.CODES for seed in (None, SEED) if code != "sign" or seed is None]
CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ here")


@pytest.fixture
def flushing() -> Iterator[None]:
    """Denormals are flushed to zero by the processor, as some libraries have it."""
    assert torch.set_flush_denormal(True)
    yield
    torch.set_flush_denormal(False)


def in_numpy(call, *arguments):  # type: ignore[no-untyped-def]
    with native.numpy_only():
        return call(*arguments)


# ---- the same bytes -------------------------------------------------------------------------------------


@needs_compiler
def test_the_library_is_compiled() -> None:
    assert native.backend(CPU) == "twin"
    with native.numpy_only():
        assert native.backend(CPU) == "numpy"


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(("code", "seed"), CASES)
def test_codes(code: str, seed: int | None, n: int) -> None:
    for kind in KINDS:
        x = sample(kind, n)
        for residual in (None, sample(kind, n, 1)):
            found = encode(code, x, residual, seed)
            assert written(*found) == written(*in_numpy(encode, code, x, residual, seed)), kind
        codes, scales, left = found
        out = decode(code, codes, scales, left)
        assert written(*out) == written(*in_numpy(decode, code, codes, scales, left)), kind


@pytest.mark.parametrize("n", SIZES)
def test_top_k(n: int) -> None:
    for kind in KINDS:
        x = sample(kind, n)
        for residual in (None, sample(kind, n, 1)):
            for k in some_k(n):
                found = choose(x, residual, k)
                assert written(*found) == written(*in_numpy(choose, x, residual, k)), (kind, k)
                assert written(*spread(found[:3], x)) == written(*in_numpy(spread, found[:3], x)), (kind, k)


def test_denormals_do_not_matter_to_the_processor(flushing: None) -> None:
    for kind in KINDS:
        x, residual = sample(kind, 5000), sample(kind, 5000, 1)
        for run, arguments in [(encode, (code, x, residual, seed)) for code, seed in CASES] + [
            (choose, (x, residual, 77))
        ]:
            flushed = [run(*arguments), in_numpy(run, *arguments)]
            torch.set_flush_denormal(False)
            plain = run(*arguments)
            torch.set_flush_denormal(True)
            assert written(*flushed[0]) == written(*flushed[1]) == written(*plain), (kind, arguments[0])
            if run is encode:
                assert written(*decode(arguments[0], *plain)) == written(*in_numpy(decode, arguments[0], *plain)), kind


def test_codes_may_start_at_any_byte() -> None:
    x = sample("normal", 1500)
    for code in native.CODES:
        aligned = encode(code, x, None, None)
        nbytes = [part.numel() for part in aligned[:2]]
        codes, scales = torch.zeros(sum(nbytes) + 1, dtype=torch.uint8)[1:].split(nbytes)
        native.sign(x, None, codes, scales) if code == "sign" else native.quantize(code, x, None, codes, scales)
        assert written(codes, scales) == written(*aligned)
        assert written(*decode(code, codes, scales, x)) == written(*decode(code, aligned[0], aligned[1], x))


def test_wire_types_of_their_own_width() -> None:
    x = sample("normal", 70000)
    aligned = choose(x, None, 100)
    own = [
        torch.zeros(2, dtype=torch.int32),
        torch.zeros(100, dtype=torch.int16),
        torch.zeros(100, dtype=torch.bfloat16),
    ]
    for run in (lambda: native.top_k(x, None, *own), lambda: in_numpy(native.top_k, x, None, *own)):
        run()
        assert written(*(t.view(torch.uint8) for t in own)) == written(*aligned)


def test_a_gpu_without_cupy_goes_by_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    x, residual = sample("normal", 1500), sample("normal", 1500, 1)
    expected = [encode("int4", x, residual, SEED), choose(x, residual, 20)]
    expected += [decode("int4", *expected[0][:2], x), spread(expected[1][:3], x)]
    staged = native._staged(native._cpu())
    monkeypatch.setattr(native, "_cpu", lambda: staged)
    found = [encode("int4", x, residual, SEED), choose(x, residual, 20)]
    found += [decode("int4", *expected[0][:2], x), spread(expected[1][:3], x)]
    assert [written(*f) for f in found] == [written(*e) for e in expected]


# ---- what is promised -----------------------------------------------------------------------------------


@pytest.mark.parametrize("code", native.CODES)
def test_what_was_sent_and_what_is_left_make_the_whole(code: str) -> None:
    x, residual = sample("normal", 5000), sample("normal", 5000, 1)
    codes, scales, left = encode(code, x, residual, None)
    sent = decode(code, codes, scales, x)[0].double()
    whole = x + residual
    error = (sent + left.double() - whole.double()).abs()
    assert bool((error <= (whole.abs() + sent.abs()) * 2.0**-23).all())  # the subtraction's own rounding
    if code in ("int8", "int4"):
        step = torch.frombuffer(scales.numpy(), dtype=torch.bfloat16).double().repeat_interleave(512)[:5000]
        assert bool((left.double().abs() <= step * 0.5001).all())


def test_top_k_leaves_exactly_what_it_did_not_send() -> None:
    x, residual = sample("mixed", 5000), sample("mixed", 5000, 1)
    *wire, left = choose(x, residual, 50)
    sent = spread(wire, x)[0].double()
    assert torch.equal(sent + left.double(), (x + residual).double())
    assert int((sent != 0).sum()) == 50


@pytest.mark.parametrize("code", ["int8", "int4", "fp8"])
def test_stochastic_rounding_is_unbiased(code: str) -> None:
    x = sample("normal", 512)
    mean = torch.zeros(512, dtype=torch.float64)
    for seed in range(400):
        mean += decode(code, *encode(code, x, None, seed)[:2], x)[0]
    step = float(x.abs().max()) / {"int8": 127, "int4": 7, "fp8": 14}[code]
    assert float((mean / 400 - x).abs().max()) < 5 * step / 400**0.5 / 2
    assert written(*encode(code, x, None, 5)[:2]) != written(*encode(code, x, None, 6)[:2])


def test_philox_is_philox() -> None:
    """The known answer for counter 0 and key 0; all others follow the same path."""
    x, y = oracle.philox(np.zeros(1, np.uint64), 0)
    assert (int(x[0]), int(y[0])) == (0x6627E8D5, 0xE169C58D)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1.8e38])
@pytest.mark.parametrize("code", native.CODES)
def test_a_bad_number_poisons_its_block_alone(code: str, bad: float) -> None:
    x, residual = sample("normal", 2000), sample("normal", 2000, 1)
    x[700] = bad
    codes, scales, left = encode(code, x, residual, None)
    assert scales.numpy().view("<u2")[1] == 0x7FC0
    assert float(left[512:1024].abs().sum()) == 0
    sent = decode(code, codes, scales, x)[0]
    assert bool(sent[512:1024].isnan().all())
    assert bool(sent[:512].isfinite().all() and sent[1024:].isfinite().all() and left.isfinite().all())


def test_zeros_stay_zeros() -> None:
    for kind in ("zeros", "denormal"):
        x, residual = sample(kind, 1000), torch.zeros(1000)
        for code in native.CODES:
            for _ in range(3):
                codes, scales, residual = encode(code, x, residual, None)
            assert float(decode(code, codes, scales, x)[0].abs().sum()) == float(residual.abs().sum()) == 0


# ---- bad arguments --------------------------------------------------------------------------------------


def _bytes(n: int) -> torch.Tensor:
    return torch.zeros(n, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda x: native.quantize("int9", x, None, _bytes(7), _bytes(2)), "code is 'int9'"),
        (lambda x: native.quantize("sign", x, None, _bytes(7), _bytes(2)), "code is 'sign'"),
        (lambda x: native.quantize("int8", x, None, _bytes(7), _bytes(2), -1), "seed is -1"),
        (lambda x: native.quantize("int8", x, None, _bytes(7), _bytes(2), 2**64), "seed is 18446744073709551616"),
        (lambda x: native.quantize("int8", x, None, _bytes(8), _bytes(2)), "codes is uint8[8] on cpu: it must be"),
        (lambda x: native.quantize("int8", x, None, _bytes(7), _bytes(4)), "scales is uint8[4] on cpu"),
        (lambda x: native.quantize("int8", x, x[1:], _bytes(7), _bytes(2)), "residual is float32[6] on cpu"),
        (lambda x: native.quantize("int8", x.double(), None, _bytes(7), _bytes(2)), "x is float64[7] on cpu"),
        (lambda x: native.quantize("int8", x, None, _bytes(14)[::2], _bytes(2)), "codes is strided uint8[7] on cpu"),
        (lambda x: native.quantize("int8", x.to("meta"), None, _bytes(7), _bytes(2)), "codes is uint8[7] on cpu"),
        (lambda x: native.sign(x.view(1, 7), None, _bytes(64), _bytes(2)), "x is float32[1, 7] on cpu"),
        (lambda x: native.dequantize("fp8", _bytes(7), _bytes(1), x, True), "scales is uint8[1] on cpu"),
        (lambda x: native.dequantize("int4", _bytes(4), _bytes(2), x, True), "codes is uint8[4] on cpu"),
        (lambda x: native.top_k(x, None, _bytes(4), _bytes(0), _bytes(0)), "the number of indices is 0"),
        (lambda x: native.top_k(x, None, _bytes(4), _bytes(16), _bytes(16)), "the number of indices is 8"),
        (lambda x: native.top_k(x, None, _bytes(4), _bytes(4), _bytes(6)), "values is uint8[6] on cpu"),
        (lambda x: native.top_k(x, None, _bytes(8), _bytes(4), _bytes(4)), "counts is uint8[8] on cpu"),
        (lambda x: native.scatter(_bytes(4), _bytes(3), _bytes(2), x, True), "indices is uint8[3] on cpu"),
        (lambda x: native.backend(torch.device("meta")), "device is meta: it must be a CPU or an NVIDIA GPU"),
        (lambda x: native.code_bytes("int2", 5), "code is 'int2'"),
    ],
)
def test_bad_arguments_are_named(call, said: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(KernelError) as caught:
        call(torch.zeros(7))
    assert said in str(caught.value)
    assert isinstance(caught.value, HierCommError)


def test_bad_bytes_do_no_harm() -> None:
    rng = np.random.default_rng(1)
    for _ in range(300):
        n = int(rng.integers(1, 70000))
        k = int(rng.integers(0, min(n, 500) + 1))
        wire = [
            torch.from_numpy(rng.integers(0, 256, size, dtype=np.uint8)) for size in (4 * -(-n // 65536), 2 * k, 2 * k)
        ]
        if rng.random() < 0.5 and k:  # a plausible count, bad places
            wire[0].numpy().view("<u4")[:] = k
        out = sample("normal", n)
        places = out.numel() - 1, 0
        found, expected = spread(wire, out), in_numpy(spread, wire, out)
        # Of places that come twice NumPy keeps one when it adds.
        if len(np.unique(wire[1].numpy().view("<u2"))) == k:
            assert written(*found) == written(*expected), places


# ---- where the library comes from -----------------------------------------------------------------------


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache and nothing installed; the cache's folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernel_cache, "INSTALLED", tmp_path / "none.so")
    native._cpu.cache_clear()
    yield tmp_path / "hiercomm"
    native._cpu.cache_clear()


@needs_compiler
def test_compiled_once_for_all_who_ask(fresh: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda _: kernel_cache.compiled(), range(4)))
    assert len(set(paths)) == 1
    assert sorted(p.suffix for p in fresh.iterdir()) == [".lock", ".so"]
    made = paths[0].stat()
    assert native.backend(CPU) == "twin"
    assert kernel_cache.compiled().stat() == made
    assert capfd.readouterr().err == ""


def test_a_compiler_that_fails_leaves_numpy_and_a_line(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "false")
    assert native.backend(CPU) == "numpy"
    assert native.backend(CPU) == "numpy"
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 1
    assert "NumPy, some 50 times slower" in said[0]
    assert "false failed with status 1" in said[0]
    x = sample("normal", 600)
    assert written(*decode("int8", *encode("int8", x, None, None)[:2], x))
    assert [p.suffix for p in fresh.iterdir()] == [".lock"]


@pytest.mark.parametrize(("name", "value"), [("PATH", "/nowhere"), ("XDG_CACHE_HOME", "/proc/nowhere")])
def test_no_compiler_or_no_cache(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], name: str, value: str
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv(name, value)
    assert native.backend(CPU) == "numpy"
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert ("there is no C++ compiler" if name == "PATH" else "/proc/nowhere/hiercomm cannot be used") in said


def test_one_line_a_node(fresh: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CXX", "false")
    for name, value in (("RANK", "3"), ("SIZE", "4"), ("LOCAL_RANK", "1"), ("LOCAL_SIZE", "2")):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    assert native.backend(CPU) == "numpy"
    assert capfd.readouterr().err == ""


@needs_compiler
def test_a_library_of_other_sources_is_not_used(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stale = fresh.parent / "stale.so"
    stale.write_bytes(kernel_cache.compiled().read_bytes())
    monkeypatch.setattr(kernel_cache, "INSTALLED", stale)
    assert native._library()._name == str(stale)
    genuine = kernel_cache.compiled()
    monkeypatch.setattr(kernel_cache, "digest", lambda: 1)
    monkeypatch.setattr(kernel_cache, "compiled", lambda: genuine)
    with pytest.raises(KernelError, match="other sources"):
        native._library()


def test_from_a_checkout_that_is_not_installed(tmp_path: Path) -> None:
    """Only the folders, on the path: the sources beside hiercomm/ are found."""
    root = Path(hiercomm.__file__).resolve().parents[1]
    for folder in ("hiercomm", "kernels"):
        (tmp_path / folder).symlink_to(root / folder)
    script = (
        "import sys; sys.meta_path = [f for f in sys.meta_path if 'Editable' not in getattr(f, '__name__', '')]\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "from hiercomm import kernel_cache; print(len(kernel_cache.source('kernels.cu')), kernel_cache.digest())"
    )
    ended = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    size, digest = map(int, ended.stdout.split())
    assert (size, digest) == (len(kernel_cache.source("kernels.cu")), kernel_cache.digest()), ended.stderr
