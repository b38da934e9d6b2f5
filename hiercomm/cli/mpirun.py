"""Which mpirun there is, of which MPI, and whether it will run in a container.

Knows nothing of jobs and their options.
"""

from __future__ import annotations

import enum
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from hiercomm.errors import ConfigError


class Kind(enum.Enum):
    """The families of mpirun, as far as their command lines differ."""

    OPEN_MPI_4 = "Open MPI 4"
    OPEN_MPI_5 = "Open MPI 5"
    HYDRA = "Hydra"  # MPICH, Intel MPI, MVAPICH


def find_mpirun(environ: Mapping[str, str], beside: Path) -> str | None:
    """The mpirun installed with this Python, whose library mpi4py finds first too; else the one on PATH."""
    folders = (str(beside), environ.get("PATH", os.defpath))
    found = (shutil.which(name, path=folder) for folder in folders for name in ("mpirun", "mpiexec"))
    return next((path for path in found if path is not None), None)


def recognise(version: str, mpirun: str = "mpirun") -> Kind:
    """The family of mpirun from what `mpirun --version` prints. Raises ConfigError for an unknown one."""
    match = re.search(r"\((?:Open MPI|OpenRTE)\) (\d+)", version)
    if match is not None:
        return Kind.OPEN_MPI_4 if int(match[1]) < 5 else Kind.OPEN_MPI_5
    if re.search(r"HYDRA|Intel\(R\) MPI", version):
        return Kind.HYDRA
    first = version.strip().partition("\n")[0]
    raise ConfigError(f"{mpirun} is of no known MPI: --version prints {first!r}")


def in_container(environ: Mapping[str, str]) -> bool:
    """Whether this process sees the marks that Docker, Podman, Kubernetes or Apptainer leave."""
    marks = ("container", "KUBERNETES_SERVICE_HOST", "APPTAINER_CONTAINER", "SINGULARITY_CONTAINER")
    files = ("/.dockerenv", "/run/.containerenv")
    return any(name in environ for name in marks) or any(os.path.exists(path) for path in files)
