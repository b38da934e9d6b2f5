"""The names of horovod.torch: `import hiercomm.torch as hvd`."""

from hiercomm.errors import CommError as HorovodInternalError
from hiercomm.runtime import init, is_initialized, shutdown
from hiercomm.torch import elastic
from hiercomm.torch.basics import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    device,
    gloo_built,
    gloo_enabled,
    is_homogeneous,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    size,
    topology,
)
from hiercomm.torch.checkpoint import merge_optimizer_states
from hiercomm.torch.compression import Compression
from hiercomm.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
    flush,
)
from hiercomm.torch.later import NAMES as _LATER
from hiercomm.torch.later import Later as _Later
from hiercomm.torch.later import SyncBatchNorm
from hiercomm.torch.ops import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    poll,
    synchronize,
)
from hiercomm.torch.optimizer import DistributedOptimizer
from hiercomm.torch.process_sets import ProcessSet, global_process_set

globals().update({_name: _Later(_name) for _name in _LATER})

__all__ = [
    "Adasum", "Average", "Compression", "DistributedOptimizer", "HorovodInternalError", "Max", "Min", "ProcessSet",
    "Product", "Sum", "SyncBatchNorm", "allgather", "allgather_async", "allgather_object", "allreduce", "allreduce_",
    "allreduce_async", "allreduce_async_", "barrier", "broadcast", "broadcast_", "broadcast_async", "broadcast_async_",
    "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters", "ccl_built", "cross_rank", "cross_size",
    "cuda_built", "ddl_built", "device", "elastic", "flush", "global_process_set", "gloo_built", "gloo_enabled", "init",
    "is_homogeneous", "is_initialized", "local_rank", "local_size", "merge_optimizer_states", "mpi_built",
    "mpi_enabled", "mpi_threads_supported", "nccl_built", "poll", "rank", "rocm_built", "shutdown", "size",
    "synchronize", "topology",
]  # fmt: skip
