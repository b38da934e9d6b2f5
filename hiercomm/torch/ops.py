"""Eager operations and handles, with Horovod's names, arguments and defaults.

Tensors are matched over the ranks by kind and name, so ranks may submit in different orders. Any layout
and every dtype that torch can add is taken; results are contiguous and on the device of the input.
"""

from __future__ import annotations

import itertools
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from hiercomm import reduction, runtime
from hiercomm.errors import ConfigError, UsageError
from hiercomm.negotiate import Request
from hiercomm.progress import Pending
from hiercomm.torch.compression import Compression, require_cast
from hiercomm.torch.process_sets import ProcessSet, global_process_set, require_global


class ReduceOp(IntEnum):
    """What an allreduce does with the ranks' tensors; Horovod's numbers."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


Average, Sum, Adasum, Min, Max, Product = ReduceOp


@dataclass(frozen=True)
class _Call:
    """An operation under way: how to turn what it yields into what the user gets."""

    pending: Pending
    request: Request
    deliver: Callable[[Tensor], Any]


_calls: dict[int, _Call] = {}
_numbers = itertools.count()
_lock = threading.Lock()


def reduction_name(op: int) -> str:
    """The reduction that an op constant stands for. Raises ConfigError for others, UsageError for Adasum."""
    if op == Adasum:
        raise UsageError("op=Adasum is not in this version of hiercomm yet: use Average or Sum")
    try:
        return ReduceOp(op).name
    except ValueError:
        raise ConfigError(f"op={op!r} is not one of Average, Sum, Min, Max, Product") from None


def _choose_op(op: int | None, average: bool | None) -> int:
    if average is None:
        return Average if op is None else op
    if op is not None:
        raise ConfigError("The op parameter supersedes average. Please provide only one of them.")
    warnings.warn("average= is deprecated: use op=hvd.Average or op=hvd.Sum", DeprecationWarning, stacklevel=4)
    return Average if average else Sum


def _require_dense(tensor: object, kind: str) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{kind} needs a torch.Tensor, not {type(tensor).__name__}")
    if tensor.layout != torch.strided:
        raise ConfigError(f"{kind} of a {tensor.layout} tensor is not possible: use to_dense()")
    if tensor.device.type not in ("cpu", "cuda"):
        raise ConfigError(f"{kind} of a tensor on {tensor.device} is not possible: move it to the CPU or a GPU")
    return tensor


def _data(tensor: Tensor, *, in_place: bool) -> Tensor:
    """A contiguous CPU tensor to work on: `tensor` itself where that can be, else a copy."""
    # Not an inference tensor, whatever the caller's mode is: the progress thread writes to it.
    with torch.inference_mode(False):
        if in_place and tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_inference():
            return tensor.detach()
        return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format).contiguous()


def _delivery(tensor: Tensor, *, in_place: bool) -> Callable[[Tensor], Tensor]:
    """How the result gets to the user: in `tensor` itself, or as a new tensor on its device."""

    def deliver(result: Tensor) -> Tensor:
        if not in_place:
            return result.to(tensor.device)
        if result.data_ptr() != tensor.data_ptr() or tensor.device.type != "cpu":
            with torch.no_grad():
                tensor.copy_(result)
        return tensor

    return deliver


def _request(kind: str, name: str | None, tensor: Tensor, **options: Any) -> Request:
    context = runtime.current()
    return Request(
        kind,
        name if name is not None else context.unnamed(kind),
        str(tensor.dtype).removeprefix("torch."),
        tuple(tensor.shape),
        "GPU" if tensor.device.type == "cuda" else "CPU",
        **options,
    )


def _start(request: Request, data: Tensor, deliver: Callable[[Tensor], Any], divisor: int = 1) -> int:
    pending = runtime.current().submit(request, data, divisor)
    with _lock:
        handle = next(_numbers)
        _calls[handle] = _Call(pending, request, deliver)
    return handle


def synchronize(handle: int) -> Any:
    """Wait for an asynchronous operation and return its result; None for a handle that is not open."""
    with _lock:
        call = _calls.pop(handle, None)
    return None if call is None else call.deliver(runtime.current().wait(call.pending, call.request))


def poll(handle: int) -> bool:
    """Whether an asynchronous operation has completed. Raises ValueError for a handle that is not open."""
    with _lock:
        call = _calls.get(handle)
    if call is None:
        raise ConfigError(f"Handle {handle} was not created or has been cleared.")
    return call.pending.has_ended()


# ---- allreduce ----------------------------------------------------------------------------------------


def _start_allreduce(
    tensor: Tensor, average: bool | None, name: str | None, op: int | None, prescale: float, postscale: float,
    process_set: ProcessSet, *, in_place: bool,
) -> int:  # fmt: skip
    size = runtime.current().topology.size
    require_global(process_set)
    tensor = _require_dense(tensor, "allreduce")
    how = reduction_name(_choose_op(op, average))
    reason = reduction.reason_against(how, tensor.dtype)
    if reason is not None:
        raise ConfigError(reason)
    request = _request("allreduce", name, tensor, op=how, prescale=float(prescale), postscale=float(postscale))
    data = _data(tensor, in_place=in_place)

    return _start(request, data, _delivery(tensor, in_place=in_place), size if how == reduction.AVERAGE else 1)


def allreduce_async(
    tensor: Tensor, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> int:  # fmt: skip
    """Begin to reduce `tensor` over all ranks (default: Average). Returns a handle for `synchronize`."""
    return _start_allreduce(tensor, average, name, op, prescale_factor, postscale_factor, process_set, in_place=False)


def allreduce_async_(
    tensor: Tensor, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> int:  # fmt: skip
    """As `allreduce_async`, in place: do not touch `tensor` until `synchronize` returned it."""
    return _start_allreduce(tensor, average, name, op, prescale_factor, postscale_factor, process_set, in_place=True)


def allreduce_(
    tensor: Tensor, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> Tensor:  # fmt: skip
    """Reduce `tensor` over all ranks, in place (default: Average)."""
    handle = allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    return synchronize(handle)  # type: ignore[no-any-return]


class _AllReduce(torch.autograd.Function):
    """y = op_r(x_r): for Sum and Average the gradient is the same reduction of the gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, name: str | None, op: int, pre: float, post: float) -> Tensor:
        ctx.arguments = (name, op, pre, post)
        return synchronize(allreduce_async(tensor, None, name, op, pre, post))  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        name, op, pre, post = ctx.arguments
        if op not in (Sum, Average):
            raise UsageError(f"allreduce with op={ReduceOp(op).name} has no gradient here: use Sum or Average")
        name = None if name is None else f"{name}.gradient"
        return synchronize(allreduce_async(grads[0], None, name, op, pre, post)), None, None, None, None


def allreduce(
    tensor: Tensor, average: bool | None = None, name: str | None = None, compression: Any = Compression.none,
    op: int | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:  # fmt: skip
    """Reduce `tensor` over all ranks (default: Average); returns a new tensor. Differentiable.

    Raises ValueError where the reduction is not defined for the dtype, HorovodInternalError on all ranks
    where they do not agree on shape, dtype or op.
    """
    require_global(process_set)
    code, context = require_cast(compression).compress(_require_dense(tensor, "allreduce"))
    chosen = _choose_op(op, average)
    if code.requires_grad and torch.is_grad_enabled():
        reduced: Tensor = _AllReduce.apply(code, name, chosen, prescale_factor, postscale_factor)  # type: ignore
    else:
        reduced = synchronize(allreduce_async(code, None, name, chosen, prescale_factor, postscale_factor))
    result = compression.decompress(reduced, context)
    assert isinstance(result, Tensor)
    return result


# ---- allgather ----------------------------------------------------------------------------------------


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Begin to concatenate the ranks' tensors along their first dimension, which may differ between ranks."""
    runtime.current()
    require_global(process_set)
    tensor = _require_dense(tensor, "allgather")
    data = _data(tensor, in_place=False)
    return _start(_request("allgather", name, tensor), data, lambda result: result.to(tensor.device))


class _AllGather(torch.autograd.Function):
    """Every rank sees x_r, so its gradient is the sum of what all ranks have for it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, name: str | None) -> Tensor:
        ctx.name, ctx.shape = name, tensor.shape
        ctx.rows = tensor.shape[0] if tensor.dim() else 1
        return synchronize(allgather_async(tensor, name))  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        name = None if ctx.name is None else f"{ctx.name}.gradient"
        summed = synchronize(allreduce_async(grads[0], None, name, Sum))
        rows = synchronize(allgather_async(torch.tensor([ctx.rows]), name)).tolist()
        begin = sum(rows[: runtime.current().topology.rank])
        return summed[begin : begin + ctx.rows].reshape(ctx.shape), None


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """The ranks' tensors, concatenated along their first dimension (a 0-dim tensor counts as one row).

    Differentiable. Raises HorovodInternalError on all ranks where dtypes or other dimensions differ.
    """
    require_global(process_set)
    if isinstance(tensor, Tensor) and tensor.requires_grad and torch.is_grad_enabled():
        return _AllGather.apply(tensor, name)  # type: ignore[no-any-return, no-untyped-call]
    return synchronize(allgather_async(tensor, name))  # type: ignore[no-any-return]


# ---- broadcast ----------------------------------------------------------------------------------------


def _start_broadcast(
    tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet, *, in_place: bool
) -> int:
    size = runtime.current().topology.size
    require_global(process_set)
    tensor = _require_dense(tensor, "broadcast")
    if not 0 <= root_rank < size:
        raise ConfigError(
            f"broadcast received invalid root rank {root_rank} for provided process set: ranks are 0 to {size - 1}"
        )
    data = _data(tensor, in_place=in_place)

    request = _request("broadcast", name, tensor, root=root_rank)
    return _start(request, data, _delivery(tensor, in_place=in_place))


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin to copy the root's tensor to all ranks."""
    return _start_broadcast(tensor, root_rank, name, process_set, in_place=False)


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """As `broadcast_async`, in place."""
    return _start_broadcast(tensor, root_rank, name, process_set, in_place=True)


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Copy the root's tensor to all ranks, in place."""
    return synchronize(broadcast_async_(tensor, root_rank, name, process_set))  # type: ignore[no-any-return]


class _Broadcast(torch.autograd.Function):
    """All ranks see the root's tensor, so its gradient is the sum of theirs; nobody else's matters."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int, name: str | None) -> Tensor:
        ctx.root_rank, ctx.name = root_rank, name
        return synchronize(broadcast_async(tensor, root_rank, name))  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        name = None if ctx.name is None else f"{ctx.name}.gradient"
        summed = synchronize(allreduce_async(grads[0], None, name, Sum))
        is_root = runtime.current().topology.rank == ctx.root_rank
        return (summed if is_root else torch.zeros_like(summed)), None, None


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """The root's tensor, as a new tensor on every rank. Differentiable.

    Raises ValueError for a root that is no rank, HorovodInternalError on all ranks where shapes, dtypes or
    roots differ.
    """
    require_global(process_set)
    if isinstance(tensor, Tensor) and tensor.requires_grad and torch.is_grad_enabled():
        return _Broadcast.apply(tensor, root_rank, name)  # type: ignore[no-any-return, no-untyped-call]
    return synchronize(broadcast_async(tensor, root_rank, name))  # type: ignore[no-any-return]


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank is here."""
    context = runtime.current()
    require_global(process_set)
    synchronize(_start(Request("barrier", context.unnamed("barrier")), torch.empty(0), lambda _: None))
