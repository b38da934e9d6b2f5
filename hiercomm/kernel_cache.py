"""Compiled kernels: where they are, and how they get there once a machine. Loads none, and knows nothing of torch.

The CPU's library is the one that was built when hiercomm was installed, if its sources are still the same; else it is
compiled into the user's cache folder, where what is compiled for GPUs is kept, too.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hiercomm.config import process_environment
from hiercomm.errors import KernelError

INSTALLED = Path(__file__).resolve().parent / "_twin.so"


@functools.cache
def _sources() -> Any:
    """The package of the sources; from a checkout that nobody has installed, the folder beside this one."""
    try:
        return importlib.import_module("hiercomm.kernels")
    except ModuleNotFoundError:
        path = Path(__file__).resolve().parents[1] / "kernels" / "__init__.py"
        spec = importlib.util.spec_from_file_location("hiercomm.kernels", path)
        if not path.exists() or spec is None or spec.loader is None:
            raise KernelError(f"the kernels' sources are neither hiercomm.kernels nor in {path.parent}") from None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


def source(name: str) -> bytes:
    """A file of the kernels' sources. Raises KernelError where they are missing."""
    content: bytes = (_sources().root() / name).read_bytes()
    return content


def digest() -> int:
    """64 bits that tell the CPU library's sources from others. Raises KernelError where they are missing."""
    number: int = _sources().digest()
    return number


def compiled() -> Path:
    """The CPU's library, compiled now if it is not in the cache. Raises KernelError with the reason it cannot be."""
    return cached(f"twin-{digest():016x}-{os.uname().machine}.so", _compile)


def _compile(library: Path) -> None:
    named = process_environment().get("CXX")
    compiler = named or next((c for c in ("g++", "c++", "clang++") if shutil.which(c)), None)
    if compiler is None:
        raise KernelError("there is no C++ compiler")
    try:
        ended = subprocess.run(
            _sources().compile_command(compiler, library), stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
    except OSError as error:
        raise KernelError(f"{compiler} cannot be started: {error}") from None
    if ended.returncode != 0:
        said = ended.stderr.strip().splitlines() or ["no message"]
        raise KernelError(f"{compiler} failed with status {ended.returncode}: {said[-1]}")


def cached(name: str, make: Callable[[Path], object]) -> Path:
    """The file of that name in the cache folder; `make` writes it where it is missing.

    Many processes may ask at once: one makes it, the others wait, and all find it whole. What `make` raises comes
    through. Raises KernelError where the folder cannot be written.
    """
    folder = _folder()
    path = folder / name
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise PermissionError("it belongs to somebody else")  # who could have put a library there
        if path.exists():
            return path
        with _locked(folder / f"{name}.lock"), tempfile.TemporaryDirectory(dir=folder) as temporary:
            if not path.exists():
                fresh = Path(temporary, name)
                make(fresh)
                os.replace(fresh, path)
        return path
    except OSError as error:
        raise KernelError(f"{folder} cannot be used ({error}); XDG_CACHE_HOME can name another folder") from None


def _folder() -> Path:
    environment = process_environment()
    if environment.get("XDG_CACHE_HOME") or environment.get("HOME"):
        return Path(environment.get("XDG_CACHE_HOME") or os.path.join(environment["HOME"], ".cache"), "hiercomm")
    return Path(tempfile.gettempdir(), f"hiercomm-{os.getuid()}")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Alone with a name. Where the file system has no locks, without: then several may do the same work."""
    with path.open("w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
