"""Packaging: Python, and a small C++ library of kernels where there is a compiler. No torch at build time.

The library has a plain C interface and needs no Python headers, so one wheel serves every Python 3. Without a compiler
the installation goes on: the kernels are compiled at their first use, or done without. The version is the one in
hiercomm/__init__.py.
"""

import os
import re
import runpy
import subprocess
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # before setuptools 70
    try:
        from wheel.bdist_wheel import bdist_wheel
    except ImportError:  # then no wheel can be asked for either
        bdist_wheel = object

ROOT = Path(__file__).resolve().parent
VERSION = re.search(r'^__version__ = "([^"]+)"', (ROOT / "hiercomm/__init__.py").read_text(encoding="utf-8"), re.M)
assert VERSION is not None, "hiercomm/__init__.py has no __version__"
README = ROOT / "README.md"


class BuildKernels(build_ext):
    """Compiles hiercomm/_twin.so; a failure is a warning."""

    def get_ext_filename(self, fullname):
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext):
        library = Path(self.get_ext_fullpath(ext.name))
        library.parent.mkdir(parents=True, exist_ok=True)
        library.unlink(missing_ok=True)
        command = runpy.run_path(str(ROOT / "kernels/__init__.py"))["compile_command"]
        try:
            subprocess.run(command(os.environ.get("CXX", "g++"), library), check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            self.warn(f"the CPU's kernels were not compiled ({error}): hiercomm tries again at their first use")

    def copy_extensions_to_source(self):
        for output in map(Path, self.get_outputs()):
            self.copy_file(str(output), str(ROOT / "hiercomm" / output.name))

    def get_outputs(self):
        return [output for output in super().get_outputs() if os.path.exists(output)]


class Wheel(bdist_wheel):
    """For any Python 3; for any platform, too, where nothing was compiled."""

    def get_tag(self):
        built = self.get_finalized_command("build_ext").get_outputs()
        return "py3", "none", super().get_tag()[2] if built else "any"


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
    packages=[*find_packages(include=["hiercomm", "hiercomm.*"]), "hiercomm.kernels"],
    package_dir={"hiercomm.kernels": "kernels"},
    package_data={"hiercomm": ["py.typed"], "hiercomm.kernels": ["*.cuh", "*.cu", "*.cpp"]},
    ext_modules=[Extension("hiercomm._twin", ["kernels/cpu_twin.cpp"], depends=["kernels/blockquant.cuh"])],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": Wheel},
    zip_safe=False,
    # mpi4py from 4.1 on comes as a wheel that looks for an MPI library when MPI is first used: it installs without
    # a compiler and imports without MPI, so whoever has a cluster's mpirun needs no extra.
    install_requires=["torch>=2.4", "numpy", "mpi4py>=4.0"],
    extras_require={
        # An MPI of one's own, with its mpirun, where the machine has none.
        "mpi": ["openmpi>=5.0"],
        # CuPy compiles with NVRTC, but does not bring it.
        "gpu": ['cupy-cuda13x; sys_platform == "linux"', 'nvidia-cuda-nvrtc; sys_platform == "linux"'],
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
