"""The kernels' sources, and the command that compiles the CPU's. Uses nothing but the standard library: setup.py, too,
runs this, where nothing is installed yet.
"""

from __future__ import annotations

import hashlib
import shlex
from pathlib import Path

# -fno-trapping-math and -fno-math-errno change no value, and let more loops vectorise.
FLAGS = (
    "-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
    "-fvisibility=hidden", "-fPIC", "-shared",
)  # fmt: skip


def root() -> Path:
    """The folder of the sources."""
    return Path(__file__).resolve().parent


def digest() -> int:
    """64 bits of the CPU library's sources and flags; the library tells those that it was compiled from."""
    content = hashlib.sha256(" ".join(FLAGS).encode())
    for name in ("blockquant.cuh", "cpu_twin.cpp"):
        content.update((root() / name).read_bytes())
    return int.from_bytes(content.digest()[:8], "little")


def compile_command(compiler: str, library: Path) -> list[str]:
    """What makes the CPU library; the compiler as in CXX, with words of its own."""
    return [
        *shlex.split(compiler),
        *FLAGS,
        f"-DHIERCOMM_DIGEST={digest()}ull",
        str(root() / "cpu_twin.cpp"),
        "-o",
        str(library),
    ]
