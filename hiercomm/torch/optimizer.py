"""DistributedOptimizer: the user's optimizer, re-classed so that `step` uses all ranks' gradients.

The object given is the object returned: its state, options, hooks, schedulers and `isinstance` stay.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hiercomm import modes, runtime
from hiercomm.compress import Auto, PerLayer
from hiercomm.errors import ConfigError, UsageError
from hiercomm.modes import Mode
from hiercomm.modes.base import Reach
from hiercomm.torch import ops
from hiercomm.torch.compression import Compression, settle
from hiercomm.torch.distribution import Distribution, Options, require_passes
from hiercomm.torch.process_sets import ProcessSet, global_process_set, require_global


class _Distributed(torch.optim.Optimizer):
    """What DistributedOptimizer mixes into the user's optimizer class.

    `step`, `synchronize`, `zero_grad` and (for GradScaler) reading `_step_supports_amp_scaling` exchange gradients
    that have not been: all ranks make these calls alike.
    """

    _hiercomm: Distribution

    def step(self, closure: Callable[[], Any] | None = None, **arguments: Any) -> Any:
        """Use all ranks' gradients, then the optimizer's own step. Returns what that returns."""
        return self._hiercomm.step(closure, **arguments)

    # The plain step, which this one calls, runs the user's hooks; without the mark torch would add another round.
    step.hooked = True  # type: ignore[attr-defined]

    def synchronize(self) -> None:
        """Wait until `p.grad` holds all ranks' gradients. A later `step()` does not exchange them again."""
        self._hiercomm.synchronize()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Horovod's way to step after `synchronize()`; not needed here, where nothing is exchanged twice."""
        yield

    def zero_grad(self, *arguments: Any, **options: Any) -> None:
        """As the optimizer's own; gradients that were not used are seen through first."""
        self._hiercomm.before_zero_grad()
        super().zero_grad(*arguments, **options)

    def state_dict(self) -> dict[str, Any]:
        """As the optimizer's own, and, under "hiercomm", what compressors remember on this rank: save every rank's."""
        state: dict[str, Any] = super().state_dict()
        own = self._hiercomm.state_dict()
        return {**state, "hiercomm": own} if own else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the optimizer's own; what compressors remember is used on the rank that saved it, or where it was merged
        (`hvd.merge_optimizer_states`), else dropped with a word.
        """
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "hiercomm"})
        self._hiercomm.load_state_dict(state_dict.get("hiercomm"))

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many backward passes are accumulated; not between backward and step."""
        self._hiercomm.set_passes(passes)

    @property
    def backward_passes_per_step(self) -> int:
        """Backward passes that are accumulated before gradients are exchanged."""
        return self._hiercomm.options.passes

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # GradScaler.step reads this just before it unscales gradients and looks for inf in them, which
        # must be all ranks' gradients, so that all ranks skip a step or none does.
        self._hiercomm.synchronize()
        return bool(self.__dict__.get("_step_supports_amp_scaling", False))

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        self.__dict__["_step_supports_amp_scaling"] = value

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A copy is the plain optimizer: hooks and exchanges belong to this process.
        return _plain, (type(self).__mro__[2], self.__getstate__())

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise UsageError("a DistributedOptimizer cannot be copied: copy the optimizer before wrapping it")


def _plain(kind: type[torch.optim.Optimizer], state: dict[str, Any]) -> torch.optim.Optimizer:
    optimizer = kind.__new__(kind)
    optimizer.__setstate__(state)
    return optimizer


def DistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = ops.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    mode: Mode | None = None,
) -> Any:
    """Make `optimizer` train on all ranks; returns the same object.

    Args:
        optimizer: any torch optimizer; its state and options stay.
        named_parameters: names for errors; parameters without one get one.
        compression: what gradients are cast to on the wire: `hvd.Compression.none`, `.fp16`, `.bf16` or a
            class with static `compress` and `decompress`. Or what they go through between nodes alone:
            `hvd.Compression.int8`, `.topk(0.01)`, ..., `.auto()`, a `hiercomm.Compressor`, a `hiercomm.PerLayer`;
            tensors of one dimension or fewer than 1024 numbers then go as they are. Default: what
            HIERCOMM_COMPRESSION says.
        backward_passes_per_step: gradients of so many backward passes are summed before the exchange.
        op: Average, Sum, Min, Max or Product.
        gradient_predivide_factor: Horovod's; the mean is divided before it is added, so it changes nothing.
        num_groups, groups: Horovod's hints for fusing; buckets (HIERCOMM_BUCKET_BYTES) serve that end.
        sparse_as_dense: exchange sparse gradients as dense ones.
        process_set: the global one.
        mode: how to train; default: what HIERCOMM_MODE says, else BSP().
    Raises ConfigError (a ValueError) where an argument cannot be used, ConfigMismatch on all ranks where
    their parameters or arguments differ, NotInitialized before `init()`.
    """
    context = runtime.current()
    require_global(process_set)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"DistributedOptimizer wraps a torch.optim.Optimizer, not {type(optimizer).__name__}")
    if isinstance(optimizer, _Distributed):
        raise UsageError("the optimizer is a DistributedOptimizer already: wrap it once")
    require_passes(backward_passes_per_step)
    ops.reduction_name(op)
    # What the environment asks for applies where it can.
    default = context.config.compression if op in (ops.Average, ops.Sum) else "none"
    compression = settle(compression, default)
    if isinstance(compression, (PerLayer, Auto)) and op not in (ops.Average, ops.Sum):
        raise ConfigError(f"op={ops.reduction_name(op)} cannot be compressed between nodes: op=Average and op=Sum can")
    mode = modes.parse(context.config.mode) if mode is None else mode
    _require_fit(mode, compression, op)
    if gradient_predivide_factor != 1.0 and op != ops.Average:
        raise ConfigError("gradient_predivide_factor not supported with op != Average")
    _require_groups(groups if groups is not None else num_groups)
    names = _names(optimizer, named_parameters)
    if isinstance(compression, PerLayer):
        compression.require_matches(names.values())
    kind = type(optimizer)
    options = Options(kind.__name__, compression, backward_passes_per_step, op, sparse_as_dense)
    inner = optimizer.__dict__.get("step")  # an LR scheduler made earlier has put its own step there
    distribution = Distribution(optimizer, options, names, mode, kind.step if inner is None else _unbound(inner))
    supports_amp = optimizer.__dict__.get("_step_supports_amp_scaling", False)
    optimizer.__class__ = type(kind.__name__, (_Distributed, kind), {"__module__": _Distributed.__module__})
    optimizer.__dict__["_step_supports_amp_scaling"] = supports_amp
    optimizer.__dict__.update(
        _hiercomm=distribution, op=op, gradient_predivide_factor=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense, process_set=process_set,
    )  # fmt: skip
    if inner is not None:
        _keep_tracked(optimizer)  # replaces it
    return optimizer


def _require_fit(mode: Mode, compression: Any, op: int) -> None:
    if mode.reach is Reach.JOB:
        return
    name = type(mode).__name__
    if op != ops.Average:
        raise ConfigError(f"op={ops.reduction_name(op)} cannot be used with {name}: op=Average can")
    if isinstance(compression, PerLayer):
        raise ConfigError(
            f"compression={compression!r} (or HIERCOMM_COMPRESSION) is for gradients between nodes, and {name} sends "
            f"none: say {name}(compression=...)"
        )


def _unbound(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step that is bound already, called as if it were not."""
    return lambda _, *arguments, **options: step(*arguments, **options)


def _keep_tracked(optimizer: Any) -> None:
    """What an LR scheduler made before the wrap expects: a step on the instance, marked as its own."""
    weak = weakref.ref(optimizer)

    def step(closure: Callable[[], Any] | None = None, **arguments: Any) -> Any:
        alive = weak()
        return type(alive).step(alive, closure, **arguments)  # type: ignore[union-attr]

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = step


def _require_groups(groups: Any) -> None:
    """Horovod's checks, in its words."""
    if isinstance(groups, int) and groups >= 0:
        return
    if not isinstance(groups, (list, tuple)):
        raise ConfigError("groups should be a non-negative integer or a list of list of torch.Tensor.")
    members = [p for group in groups for p in (group if isinstance(group, (list, tuple)) else [None])]
    if not all(isinstance(p, Tensor) for p in members):
        raise ConfigError("groups must consist of torch.Tensor.")
    if len(set(members)) != len(members):
        raise ConfigError("A parameter can only appear once in groups.")


def _names(optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, Tensor]] | None) -> dict[Tensor, str]:
    """A name for every parameter: the given ones, made up where there is none; tied weights count once."""
    pairs = list(named) if named is not None else []
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise ConfigError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    seen: dict[str, Tensor] = {}
    for name, parameter in pairs:
        if seen.setdefault(name, parameter) is not parameter:
            raise ConfigError(f"Parameter names in named_parameters must be unique. Found duplicates: {name}")
    names: dict[Tensor, str] = {}
    for name, parameter in pairs:
        names.setdefault(parameter, name)
    for g, group in enumerate(optimizer.param_groups):
        for i, parameter in enumerate(group["params"]):
            names.setdefault(parameter, f"parameter.{g}.{i}")
    return names
