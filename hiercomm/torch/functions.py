"""Parameters, optimizer state and objects from one rank to all."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hiercomm import runtime
from hiercomm.errors import CommError, ConfigError
from hiercomm.torch import ops
from hiercomm.torch.process_sets import ProcessSet, global_process_set, require_global


def flush() -> None:
    """Bring the parameters of all nodes to the same state, to the bit: before evaluation, or saving a model that was
    trained with an asynchronous mode. Collective; `shutdown()` does it, too. With BSP there is nothing to do.
    """
    runtime.current().flush()


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Overwrite tensors with the root's, in place: a `state_dict()`, `named_parameters()`, or any dict or
    iterable of tensors or (name, tensor).

    Raises ValueError for anything else, HorovodInternalError on all ranks where shapes or dtypes differ.
    """
    handles = [ops.broadcast_async_(tensor, root_rank, name, process_set) for name, tensor in _named_tensors(params)]
    for handle in handles:
        ops.synchronize(handle)


def _named_tensors(params: Any) -> list[tuple[str, Tensor]]:
    if isinstance(params, Mapping):
        items = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, Tensor):
        items = [p if isinstance(p, tuple) else (f"parameter.{i}", p) for i, p in enumerate(params)]
    else:
        raise ConfigError(f"invalid params of type: {type(params)}: expected a dict or an iterable of tensors")
    for name, value in items:
        if value is not None and not isinstance(value, Tensor):
            raise ConfigError(f"broadcast_parameters: {name!r} is a {type(value).__name__}, not a tensor")
    return [(name, value) for name, value in items if value is not None]


@dataclass(frozen=True)
class _Place:
    """Where tensor `index` stood in a broadcast structure."""

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    on_cpu: bool


def _take_out(item: Any, tensors: list[Tensor]) -> Any:
    """`item` with its tensors, at any depth, replaced by places and appended to `tensors`."""
    if isinstance(item, Tensor):
        tensors.append(item)
        return _Place(len(tensors) - 1, tuple(item.shape), item.dtype, item.device.type == "cpu")
    if isinstance(item, dict):
        return {key: _take_out(value, tensors) for key, value in item.items()}
    if type(item) in (list, tuple):
        return type(item)(_take_out(value, tensors) for value in item)
    return item


def _put_back(item: Any, tensors: dict[int, Tensor], device: torch.device) -> Any:
    """The reverse; tensors that were not on a CPU go to `device`."""
    if isinstance(item, _Place):
        tensor = tensors[item.index]
        return tensor if item.on_cpu else tensor.to(device)
    if isinstance(item, dict):
        return {key: _put_back(value, tensors, device) for key, value in item.items()}
    if type(item) in (list, tuple):
        return type(item)(_put_back(value, tensors, device) for value in item)
    return item


def _places(item: Any) -> list[_Place]:
    if isinstance(item, _Place):
        return [item]
    values = item.values() if isinstance(item, dict) else item if type(item) in (list, tuple) else ()
    return [place for value in values for place in _places(value)]


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Give every rank the root's optimizer state and options (lr, momentum, ...), for any torch optimizer.

    The root's optimizer does not change, and no step is taken. `model` is not needed; Horovod has it.
    Raises ConfigMismatch on all ranks where their parameter groups differ.
    """
    context = runtime.current()
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"broadcast_optimizer_state takes an optimizer, not {type(optimizer).__name__}")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    name = context.unnamed("optimizer_state")
    shapes = [[list(p.shape) for p in group["params"]] for group in optimizer.param_groups]
    context.agree({"parameter shapes by group": shapes}, name, "the optimizer")
    is_root = context.topology.rank == root_rank
    tensors: list[Tensor] = []
    structure = None
    if is_root:
        groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        state = {i: optimizer.state[p] for i, p in enumerate(parameters) if p in optimizer.state}
        structure = _take_out({"groups": groups, "state": state}, tensors)
    structure = broadcast_object(structure, root_rank, f"{name}.structure")
    places = _places(structure)
    data = tensors if is_root else [torch.empty(p.shape, dtype=p.dtype) for p in places]
    handles = [ops.broadcast_async_(t, root_rank, f"{name}.{p.index}") for p, t in zip(places, data, strict=True)]
    for handle in handles:
        ops.synchronize(handle)
    if not is_root:
        _restore(optimizer, parameters, structure, {p.index: t for p, t in zip(places, data, strict=True)})


def _restore(
    optimizer: torch.optim.Optimizer, parameters: list[Tensor], structure: Any, tensors: dict[int, Tensor]
) -> None:
    for group, options in zip(optimizer.param_groups, structure["groups"], strict=True):
        device = group["params"][0].device if group["params"] else torch.device("cpu")
        for key, value in _put_back(options, tensors, device).items():
            held = group.get(key)
            if isinstance(held, Tensor) and isinstance(value, Tensor) and held.shape == value.shape:
                held.copy_(value)  # a tensor lr may be captured elsewhere
            else:
                group[key] = value
    optimizer.state.clear()
    for index, state in structure["state"].items():
        parameter = parameters[index]
        optimizer.state[parameter] = _put_back(state, tensors, parameter.device)


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The root's (picklable) object on every rank; what the others pass does not matter.

    Raises HorovodInternalError on all ranks where it cannot be pickled.
    """
    context = runtime.current()
    require_global(process_set)
    name = context.unnamed("object") if name is None else name
    payload, error = b"", None
    if context.topology.rank == root_rank:
        try:
            payload = pickle.dumps((True, obj))
        except Exception as e:  # whatever pickling this object raises
            error = e
            payload = pickle.dumps((False, f"rank {root_rank} cannot pickle its object: {e}"))
    length = ops.broadcast(torch.tensor([len(payload)]), root_rank, f"{name}.sz").item()
    data = np.frombuffer(payload, np.uint8).copy() if payload else np.empty(int(length), np.uint8)
    received = ops.broadcast_(torch.from_numpy(data), root_rank, f"{name}.t")
    if error is None and context.topology.rank == root_rank:
        return obj
    good, value = pickle.loads(received.numpy().tobytes())
    if not good:
        raise CommError(f"broadcast_object: {value}") from error
    return value


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Every rank's (picklable) object, by rank."""
    context = runtime.current()
    return context.all_gather_object(obj, context.unnamed("object") if name is None else name)
