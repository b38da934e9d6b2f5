"""What benchmarks run beside hiercomm: plain MPI, Gloo through torch.distributed, and Horovod where it is installed.

Calls MPI from the training thread while hiercomm's progress thread is idle: for benchmarks only.
"""

from __future__ import annotations

import importlib
import importlib.util
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hiercomm.comm.mpi import MpiWorld

AllReduce = Callable[[Tensor], None]


def gloo(world: MpiWorld) -> AllReduce:
    """Sum over all ranks by Gloo; begins torch.distributed's default process group."""
    begin_torch_distributed(world)

    def all_reduce(data: Tensor) -> None:
        dist.all_reduce(data)

    return all_reduce


def begin_torch_distributed(world: MpiWorld) -> None:
    """The default process group over all ranks, on Gloo; a second call does nothing."""
    if dist.is_initialized():
        return
    address = socket.gethostbyname(socket.gethostname())
    host = world.all_gather(address)[0]
    if len(set(world.all_gather(socket.gethostname()))) == 1:
        host = "127.0.0.1"
    store = _store(host, 0, world.size, True) if world.rank == 0 else None
    port = world.all_gather(store.port if store is not None else 0)[0]
    store = store or _store(host, port, world.size, False)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)


def _store(host: str, port: int, size: int, is_master: bool) -> Any:
    return dist.TCPStore(host, port, size, is_master, wait_for_workers=False)  # type: ignore[attr-defined]


def mpi(world: MpiWorld) -> AllReduce:
    """Sum over all ranks by MPI_Allreduce."""
    return world.library_all_reduce


def horovod() -> Any:
    """The module horovod.torch, initialized; None where it is not installed."""
    if importlib.util.find_spec("horovod") is None:
        return None
    module = importlib.import_module("horovod.torch")
    module.init()
    return module


def horovod_all_reduce(module: Any) -> AllReduce:
    """Sum over all ranks by Horovod."""

    def all_reduce(data: Tensor) -> None:
        module.allreduce_(data, name="bench", op=module.Sum)

    return all_reduce


def send(world: MpiWorld, partner: int, sends: bool, nbytes: int) -> Callable[[], None]:
    """One message of `nbytes` to or from `partner`: what plain MPI reaches on the link."""
    data = torch.zeros(nbytes, dtype=torch.uint8)

    def move() -> None:
        if partner == world.rank:
            return
        world.library_send(data, partner) if sends else world.library_recv(data, partner)

    return move


def data_parallel(model: torch.nn.Module) -> torch.nn.Module:
    """The model in torch's DistributedDataParallel, over Gloo."""
    return torch.nn.parallel.DistributedDataParallel(model)
