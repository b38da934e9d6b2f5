"""Compiled variants of the kernels, and GPUs that are emulated: in each, the package's own code does the launching."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hiercomm import kernel_cache, native

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "unit"))
pytest.register_assert_rewrite("ptx")
from ptx import Kernel, Memory  # noqa: E402

EXACT = ("-std=c++17", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-Wno-unknown-pragmas")
Launch = Callable[..., None]


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Compiles a source of the kernels or of this folder with g++, for `compiled(source, *flags)`."""
    if shutil.which("g++") is None:
        pytest.skip("there is no g++ here")
    folder = tmp_path_factory.mktemp("compiled")

    def build(source: str, *flags: str) -> Path:
        kernels = kernel_cache._sources().root()
        path = next(f / source for f in (HERE, kernels) if (f / source).exists())
        output = folder / f"{len(list(folder.iterdir()))}"
        digest = f"-DHIERCOMM_DIGEST={kernel_cache.digest()}ull"
        command = ["g++", *EXACT, digest, *flags, f"-I{kernels}", f"-I{HERE}", str(path), "-o", str(output)]
        subprocess.run(command, check=True)
        return output

    return build


@pytest.fixture(scope="session")
def shim(compiled: Callable[..., Path]) -> Callable[[int], Launch]:
    """kernels.cu on fibers of the CPU, for an order of the threads."""
    library = ctypes.CDLL(str(compiled("shim_entries.cpp", "-O1", "-fPIC", "-shared")))

    def ordered(order: int) -> Launch:
        def launch(device: torch.device, name: str, blocks: int, *arguments: Any) -> None:
            raw = (ctypes.c_uint64 * len(arguments))(*map(_word, arguments))
            assert library.shim_launch(name.encode(), order, blocks, raw) == 0, name

        return launch

    return ordered


def _word(argument: Any) -> int:
    if argument is None:
        return 0
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else int(argument) & (2**64 - 1)


@pytest.fixture(scope="session")
def ptx() -> str:
    """The kernels' PTX. Skips where there is no NVRTC."""
    try:
        from cupy.cuda import nvrtc

        nvrtc.getVersion()
    except (ImportError, OSError, RuntimeError) as error:
        pytest.skip(f"needs cupy-cuda13x and nvidia-cuda-nvrtc: {error}")
    return native.compile_for_gpu("compute_80").decode()


@pytest.fixture(scope="session")
def interpreted(ptx: str) -> Launch:
    """The PTX in the interpreter, on copies of the tensors at the same alignment."""
    kernels: dict[str, Kernel] = {}

    def launch(device: torch.device, name: str, blocks: int, *arguments: Any) -> None:
        if name not in kernels:
            kernels[name] = Kernel(ptx, name)
        tensors = {a.data_ptr(): a for a in arguments if isinstance(a, torch.Tensor) and a.numel()}
        memory = Memory(sum(t.nbytes + 1024 for t in tensors.values()) + 1024)
        placed = {at: memory.place(_content(t), at) for at, t in tensors.items()}
        words = [placed.get(_word(a), 0) if isinstance(a, torch.Tensor) else _word(a) for a in arguments]
        kernels[name].launch(blocks, words, memory)
        for at, t in tensors.items():
            _content(t)[:] = memory.bytes[placed[at] : placed[at] + t.nbytes]

    return launch


def _content(t: torch.Tensor) -> np.ndarray[Any, Any]:
    return t.view(-1).view(torch.uint8).numpy()


@pytest.fixture
def as_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`as_gpu(launch, call, *arguments)`: what a call gives where CPU tensors take the GPU's way, by that launch."""

    def run(launch: Launch, call: Callable[..., Any], *arguments: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(native, "_launch", launch)
            patch.setattr(native, "_cpu", native._cuda)
            return call(*arguments)

    return run
