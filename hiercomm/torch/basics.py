"""Who am I, how many are we, and what is built in: Horovod's questions."""

from __future__ import annotations

import torch

from hiercomm import devices, runtime
from hiercomm.comm import mpi


def rank() -> int:
    """This process's number among all, from 0. Raises NotInitialized, as do all below that need other ranks."""
    return runtime.current().topology.rank


def size() -> int:
    """Number of processes."""
    return runtime.current().topology.size


def local_rank() -> int:
    """This process's number among those of its node."""
    return runtime.current().topology.local_rank


def local_size() -> int:
    """Number of processes on this node."""
    return runtime.current().topology.local_size


def device() -> torch.device:
    """This rank's device: the GPU of its local rank, counted round those it sees; the CPU where it sees none."""
    return devices.choose(local_rank(), devices.visible().count)


def cross_rank() -> int:
    """The number of this node among those that have this local rank."""
    return runtime.current().topology.cross_rank


def cross_size() -> int:
    """Number of nodes that have this local rank."""
    return runtime.current().topology.cross_size


def is_homogeneous() -> bool:
    """Whether every node has the same number of processes."""
    return runtime.current().topology.is_homogeneous


def topology() -> str:
    """A table of nodes and ranks, and of what is synchronous where."""
    return runtime.current().topology.describe()


def mpi_threads_supported() -> bool:
    """Whether several threads may call MPI; `init()` refuses an MPI in which none but the first may."""
    runtime.current()
    return mpi_built()


def mpi_built() -> bool:
    """Whether an MPI library can be used."""
    return mpi.available() is None


def mpi_enabled() -> bool:
    """Whether messages go over MPI."""
    return mpi_built()


def gloo_built() -> bool:
    """Whether torch has Gloo, which the level inside a node can use."""
    return torch.distributed.is_available() and torch.distributed.is_gloo_available()


def gloo_enabled() -> bool:
    """Whether the control plane is Gloo, as in Horovod without MPI: never."""
    return False


def nccl_built() -> int:
    """torch's NCCL version as one number, 0 where there is none."""
    if not (torch.cuda.is_available() and torch.distributed.is_nccl_available()):
        return 0
    major, minor, patch = torch.cuda.nccl.version()
    return int(major * 10000 + minor * 100 + patch)


def cuda_built() -> bool:
    """Whether torch was built with CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether torch was built with ROCm."""
    return torch.version.hip is not None


def ddl_built() -> bool:
    """Whether IBM's DDL is used: never."""
    return False


def ccl_built() -> bool:
    """Whether Intel's oneCCL is used: never."""
    return False
