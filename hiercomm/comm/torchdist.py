"""The local level over torch.distributed: NCCL on GPUs, Gloo on CPUs where memory cannot be shared.

Process groups of its own, beside any that the user has made. Adds as they do: halves in half precision. A
reduce-scatter is an all-reduce here, since shards need not be equal. The only module that imports torch.distributed.
"""

from __future__ import annotations

import datetime
import socket
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from hiercomm import reduction
from hiercomm.comm.base import LocalBuffer, ReducingCommunicator, Work, pieces
from hiercomm.errors import CommError

_RENDEZVOUS = datetime.timedelta(seconds=30)

_OPS: dict[str, Any] = {
    reduction.SUM: dist.ReduceOp.SUM,
    reduction.AVERAGE: dist.ReduceOp.SUM,
    reduction.MIN: dist.ReduceOp.MIN,
    reduction.MAX: dist.ReduceOp.MAX,
    reduction.PRODUCT: dist.ReduceOp.PRODUCT,
}


@final
class TorchDistributed(ReducingCommunicator):
    """ReducingCommunicator over one process group of this node. `backend` is `nccl` or `gloo`.

    `exchange` is called by the constructor only: it hands local rank 0's address to the others.
    """

    needs_polling = False

    def __init__(
        self, backend: str, rank: int, size: int, exchange: Callable[[Any], Sequence[Any]], timeout_s: float
    ) -> None:
        self.rank = rank
        self.size = size
        if backend == "nccl" and not (dist.is_nccl_available() and torch.cuda.is_available()):
            raise CommError("local=nccl needs a GPU and a torch that was built with NCCL")
        timeout = datetime.timedelta(seconds=timeout_s)
        # All ranks are on one machine: local rank 0 takes any free port of the loopback interface and says which.
        store = _master(size) if rank == 0 else None
        port = exchange(store.port if store is not None else 0)[0]
        if store is None:
            store = TCPStore("127.0.0.1", port, size, is_master=False, timeout=_RENDEZVOUS)
        self._store: TCPStore | None = store
        self._group: Any = _gloo(store, rank, size, timeout) if backend == "gloo" else _nccl(store, rank, size, timeout)
        self._uses_gloo = backend == "gloo"

    def allocate(self, specs: Sequence[tuple[int, torch.dtype]], device: torch.device) -> list[LocalBuffer]:
        return [LocalBuffer(torch.zeros(numel, dtype=dtype, device=device)) for numel, dtype in specs]

    def reduce_scatter(
        self, buffer: LocalBuffer, op: str, divisor: int = 1, cuts: Sequence[slice] = (slice(None),)
    ) -> list[Work]:
        # Gloo's reduce-scatter needs equal pieces; the whole sum holds the shard as well.
        return [self.all_reduce(buffer, op, divisor)] * len(cuts)

    def spread(self, buffer: LocalBuffer, cut: slice) -> None:
        """Nothing is sent before all is there: collectives are called in the same order on every rank."""

    def all_gather(self, buffer: LocalBuffer) -> Work:
        if self._uses_gloo:
            # After the all-reduce the other shards are stale only where shards went on to other nodes.
            return self._broadcast_shards(buffer)
        shards = pieces(buffer.data, self.size)
        return _TorchWork(self._group.allgather([shards], [shards[self.rank]]), "local all-gather")

    def _broadcast_shards(self, buffer: LocalBuffer) -> Work:
        options = [dist.BroadcastOptions() for _ in range(self.size)]
        works = []
        for root, shard in enumerate(pieces(buffer.data, self.size)):
            if shard.numel():
                options[root].rootRank = root
                works.append(self._group.broadcast([_movable(shard)], options[root]))
        return _TorchWork(works, "local all-gather")

    def all_reduce(self, buffer: LocalBuffer, op: str, divisor: int = 1) -> Work:
        if divisor != 1:
            reduction.combine([buffer.data], [buffer.data], op, divisor)
        options = dist.AllreduceOptions()
        options.reduceOp = _OPS[op]
        return _TorchWork([self._group.allreduce([buffer.data], options)], "local all-reduce")

    def broadcast(self, buffer: LocalBuffer, root: int) -> Work:
        options = dist.BroadcastOptions()
        options.rootRank = root
        return _TorchWork([self._group.broadcast([_movable(buffer.data)], options)], "local broadcast")


def _master(size: int) -> TCPStore:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        # The store takes over the socket: one that it opens itself listens on every interface.
        return TCPStore(
            "127.0.0.1", port, size, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )


def _movable(flat: Tensor) -> Tensor:
    """Bytes, which every backend can move, whatever the dtype."""
    return flat.view(torch.uint8)


def _gloo(store: Any, rank: int, size: int, timeout: datetime.timedelta) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    # The loopback address: no lookup of the host's name, no port that others can reach.
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int, timeout: datetime.timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


@final
class _TorchWork(Work):
    def __init__(self, works: Any, what: str) -> None:
        self._works: list[Any] = works if isinstance(works, list) else [works]
        self._what = what

    def is_completed(self) -> bool:
        if not all(work.is_completed() for work in self._works):
            return False
        self._end()  # raises what failed; for NCCL it orders the current stream behind the operation
        return True

    def _end(self) -> None:
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            raise CommError(f"{self._what}: {error}") from error

    def __str__(self) -> str:
        return self._what
