"""Packaging: pure Python, no compiler and no torch at build time. The version is the one in hiercomm/__init__.py."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
VERSION = re.search(r'^__version__ = "([^"]+)"', (ROOT / "hiercomm/__init__.py").read_text(encoding="utf-8"), re.M)
assert VERSION is not None, "hiercomm/__init__.py has no __version__"
README = ROOT / "README.md"

setup(
    name="hiercomm",
    version=VERSION[1],
    description="PyTorch training over many nodes whose network is slow or whose speeds differ; "
    "a successor of Horovod's torch interface",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=find_packages(include=["hiercomm", "hiercomm.*"]),
    package_data={"hiercomm": ["py.typed"]},
    # mpi4py from 4.1 on comes as a wheel that looks for an MPI library when MPI is first used: it installs without
    # a compiler and imports without MPI, so whoever has a cluster's mpirun needs no extra.
    install_requires=["torch>=2.4", "numpy", "mpi4py>=4.0"],
    extras_require={
        # An MPI of one's own, with its mpirun, where the machine has none.
        "mpi": ["openmpi>=5.0"],
        "gpu": ['cupy-cuda13x; sys_platform == "linux"'],
        "dev": ["pytest", "hypothesis", "ruff", "mypy", "scikit-learn", "tqdm"],
    },
    entry_points={"console_scripts": ["hiercommrun = hiercomm.cli.run:main", "hiercomm = hiercomm.cli.main:main"]},
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
)
