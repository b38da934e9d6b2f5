"""What one rank knows before it has spoken to any other: libraries, launcher, network, memory, cores, GPUs.

Nothing here starts MPI or sends a message. Knows nothing of other ranks.
"""

from __future__ import annotations

import os
import platform
import re
import secrets
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hiercomm import __version__, launcher
from hiercomm.cli import networks
from hiercomm.cli.mpirun import in_container
from hiercomm.cli.networks import Interface
from hiercomm.comm import mpi
from hiercomm.config import Config
from hiercomm.errors import ConfigError

_SHM = Path("/dev/shm")
# Variables that decide which way messages take; others of the environment are nobody's business.
_VARIABLES = re.compile(
    r"(OMPI_MCA_(btl|pml)|MPI4PY_|NCCL_|GLOO_|UCX_NET|FI_|MPIR_CVAR_|HIERCOMM_|HOROVOD_|OMP_NUM_THREADS)"
)
_LAUNCHERS = re.compile(r"mpirun|mpiexec|orterun|orted|prterun|prted|hydra_|pmi_proxy|slurmstepd|palsd|torchrun")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """One rank's own facts. `machine` is the same on exactly the ranks of one host; sizes are in bytes."""

    host: str
    machine: str
    pid: int
    pid_space: str = ""  # process ids mean the same in one space
    versions: dict[str, str]
    library: str | None = None
    library_path: str | None = None
    mpi_error: str | None = None
    launcher: str | None = None
    launcher_path: str | None = None
    launcher_library: str | None = None
    claimed_rank: int | None = None
    claimed_size: int | None = None
    claimed_local_size: int | None = None
    thread_level: str | None = None
    node: str | None = None
    options: dict[str, Any] | None = None
    options_error: str | None = None
    variables: dict[str, str]
    interfaces: tuple[Interface, ...] = ()
    shm_error: str | None = None
    shm_free: int = 0
    cores: tuple[int, ...] = ()
    host_cores: int = 1
    gpus: tuple[str, ...] = ()
    in_container: bool = False

    @property
    def config(self) -> Config:
        """The options as Config. Only where there is no `options_error`."""
        return Config(node=self.node, **(self.options or {}))


def gather(environ: Mapping[str, str]) -> Facts:
    """The facts of this process."""
    claim = launcher.claim(environ)
    library, path, mpi_error = mpi.find_library()
    options, node, options_error = _options(environ)
    shm_error, shm_free = shared_memory()
    path_of_launcher = _launcher_path()
    return Facts(
        host=socket.gethostname(),
        machine=_machine(),
        pid=os.getpid(),
        pid_space=_link("/proc/self/ns/pid"),
        versions=_versions(),
        library=library,
        library_path=path,
        mpi_error=mpi_error,
        launcher=None if claim is None else claim.launcher,
        launcher_path=path_of_launcher,
        launcher_library=_library_beside(path_of_launcher),
        claimed_rank=None if claim is None else claim.rank,
        claimed_size=None if claim is None else claim.size,
        claimed_local_size=None if claim is None else claim.local_size,
        node=node,
        options=options,
        options_error=options_error,
        variables={name: value for name, value in sorted(environ.items()) if _VARIABLES.match(name)},
        interfaces=networks.interfaces(),
        shm_error=shm_error,
        shm_free=shm_free,
        cores=tuple(sorted(os.sched_getaffinity(0))),
        host_cores=os.cpu_count() or 1,
        gpus=_gpus(),
        in_container=in_container(environ),
    )


def _versions() -> dict[str, str]:
    return {
        "hiercomm": __version__,
        "torch": str(torch.__version__),
        "mpi4py": mpi.binding_version() or "none",
        "python": platform.python_version(),
    }


def _options(environ: Mapping[str, str]) -> tuple[dict[str, Any] | None, str | None, str | None]:
    try:
        config = Config.from_environment(environ)
    except ConfigError as error:
        return None, None, str(error)
    return config.shared(), config.node, None


def _machine() -> str:
    """Host name, and what tells hosts of one name apart: the boot of the kernel and the network it shows us."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot} {_link('/proc/self/ns/net')}"


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def shared_memory(folder: Path = _SHM) -> tuple[str | None, int]:
    """Why no memory can be shared through `folder` (None: it can), and how many bytes are free there."""
    path = folder / f"hiercomm-doctor-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(fd, 0, 4096)
        finally:
            os.close(fd)
            path.unlink()
        return None, shutil.disk_usage(folder).free
    except OSError as error:
        return f"{folder}: {os.strerror(error.errno or 0)}", 0


def _gpus() -> tuple[str, ...]:
    """The GPUs that this process may use, told apart by their UUIDs."""
    if not torch.cuda.is_available():
        return ()
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return tuple(f"{d.name} {getattr(d, 'uuid', i)}" for i, d in enumerate(devices))


def _launcher_path() -> str | None:
    """The nearest process above this one that is known to start ranks."""
    pid = os.getppid()
    while pid > 1:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
            path = os.readlink(f"/proc/{pid}/exe")
        except OSError:
            return None
        if _LAUNCHERS.match(os.path.basename(path)):
            return path
        pid = int(stat.rpartition(")")[2].split()[1])
    return None


def _library_beside(path: str | None) -> str | None:
    """The MPI library that was installed with a launcher."""
    prefix = Path(path or "/nowhere/bin/none").parent.parent
    found = [p for folder in ("lib", "lib64") for p in sorted(prefix.glob(f"{folder}/libmpi.so.[0-9]*"))]
    return str(found[0]) if found else None


def may_read_memory(pid: int) -> bool:
    """Whether this process may read that process's memory, as Open MPI does for large messages inside a host."""
    try:
        os.close(os.open(f"/proc/{pid}/mem", os.O_RDONLY))
    except PermissionError:
        return False
    except OSError:
        pass  # it has gone, or /proc does not show it: nothing can be said
    return True
