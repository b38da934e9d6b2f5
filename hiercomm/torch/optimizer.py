"""DistributedOptimizer: the user's optimizer, re-classed so that `step` uses all ranks' gradients.

The object given is the object returned: its state, options, hooks, schedulers and `isinstance` stay.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, final

import torch
from torch import Tensor

from hiercomm import modes, runtime
from hiercomm.allreduce import Exchange, HierarchicalAllReduce
from hiercomm.bucket import Bucket, Spec, layout, plan
from hiercomm.errors import ConfigError, UsageError
from hiercomm.modes import Mode
from hiercomm.modes.base import Context
from hiercomm.reducer import PRESENCE_OP, Reducer, presence_spec
from hiercomm.torch import ops
from hiercomm.torch.compression import Compression, NoneCompressor
from hiercomm.torch.process_sets import ProcessSet, global_process_set, require_global


@final
class _Exchanges:
    """A mode's context: bucket exchanges of one set of parameters, counted so that ranks can be compared.

    Every rank starts and later distributes the same exchanges in the same order; each is counted on a channel.
    """

    def __init__(self, engine: HierarchicalAllReduce, buckets: Sequence[Bucket], owner: str) -> None:
        self._runtime = runtime.current()
        self._engine = engine
        self._starts = self._runtime.new_channel()
        self._distributions = self._runtime.new_channel()
        self._tags = {bucket.index: self._runtime.new_tag() for bucket in buckets}
        self._owner = owner
        self._numbers: dict[int, int] = {}

    def start(self, bucket: Bucket) -> Exchange:
        self._numbers[id(bucket.buffer)] = self._runtime.count(self._starts)
        what = f"the exchange of bucket {bucket.index} of {self._owner}"
        return self._engine.start(bucket.buffer, bucket.op, bucket.divisor, self._tags[bucket.index], what)

    def finish(self, exchange: Exchange) -> None:
        number = self._numbers[id(exchange.buffer)]
        timing = self._runtime.timing
        with timing.span("wait"):
            for work in (exchange.cross, exchange.local):
                if work is not None:
                    self._runtime.wait_counted(work, self._starts, number, exchange.what)
            number = self._runtime.count(self._distributions)
            with timing.span("local"):
                work = self._engine.distribute(exchange)
                self._runtime.wait_counted(work, self._distributions, number, exchange.what)


@final
class _Part:
    """Parameters that were planned together: all at wrap, and any that are added or unfrozen later."""

    def __init__(self, options: _Options, parameters: Sequence[Tensor], names: Sequence[str], mode: Mode) -> None:
        context = runtime.current()
        name = context.unnamed("optimizer")
        # Backward reaches the last parameters first.
        self.parameters = list(reversed(parameters))
        names = list(reversed(names))
        specs = [options.spec(p) for p in self.parameters]
        facts = {
            f"parameter {n!r}": (str(s.dtype), s.shape, s.stride)
            for n, s in reversed([*zip(names, specs, strict=True)])
        }
        context.agree({**options.facts(mode), "number of parameters": len(specs), **facts}, name, "the optimizer")
        device = self.parameters[0].device if self.parameters else torch.device("cpu")
        self._require_one_device(names, device)
        groups = plan(specs, context.config.bucket_bytes)
        presence = presence_spec(len(specs))
        sizes = [(layout([specs[i] for i in g])[1], specs[g[0]].dtype) for g in groups]
        level = context.local_level(device, name)
        assert level is not None
        level, buffers = context.allocate(level, [*sizes, (presence.numel, presence.dtype)], device, name)
        divisor = context.topology.size if options.op == ops.Average else 1
        op = ops.reduction_name(options.op)
        buckets = [
            Bucket(i, g, [specs[k] for k in g], b, op, divisor)
            for i, (g, b) in enumerate(zip(groups, buffers, strict=False))
        ]
        last = Bucket(len(buckets), [], [], buffers[-1], PRESENCE_OP, 1)
        exchanges = _Exchanges(context.all_reduce_engine(level), [*buckets, last], options.label)
        mode.attach(Context(exchanges.start, exchanges.finish))
        self.mode = mode
        self.reducer = Reducer(
            self.parameters, names, buckets, last, mode.on_bucket, options.passes, options.wire_compression(),
            options.sparse_as_dense,
        )  # fmt: skip

    def _require_one_device(self, names: Sequence[str], device: torch.device) -> None:
        for name, parameter in zip(names, self.parameters, strict=True):
            if parameter.device != device:
                raise ConfigError(
                    f"parameter {name!r} is on {parameter.device}, others are on {device}: use one device"
                )

    def synchronize(self, *, discard: bool = False) -> None:
        self.reducer.finish(discard=discard)
        self.mode.synchronize()
        self.reducer.publish(discard=discard)


class _Options:
    """The arguments of one DistributedOptimizer."""

    def __init__(self, label: str, compression: Any, passes: int, op: int, sparse_as_dense: bool) -> None:
        self.label = label
        self.compression = compression
        self.passes = passes
        self.op = op
        self.sparse_as_dense = sparse_as_dense

    def wire_compression(self) -> Any:
        """None where gradients travel as they are."""
        return None if self.compression is NoneCompressor else self.compression

    def spec(self, parameter: Tensor) -> Spec:
        """What this parameter's gradient looks like in its bucket."""
        if self.wire_compression() is None:
            return Spec.of(parameter)
        code, _ = self.compression.compress(torch.zeros_like(parameter))
        return Spec.of(code.contiguous())

    def facts(self, mode: Mode) -> dict[str, Any]:
        """What must be the same on all ranks."""
        compression = getattr(self.compression, "__name__", repr(self.compression))
        return {
            "mode": repr(mode), "op": int(self.op), "compression": compression,
            "backward_passes_per_step": self.passes, "sparse_as_dense": self.sparse_as_dense,
        }  # fmt: skip


@final
class _Distribution:
    """What a wrapped optimizer knows beyond the plain one."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, options: _Options, names: dict[Tensor, str], mode: Mode,
        plain_step: Callable[..., Any],
    ) -> None:  # fmt: skip
        self.options = options
        self.mode = mode
        self.plain_step = plain_step
        self.alone = runtime.current().topology.size == 1
        self._optimizer = optimizer
        self._names = names
        self._known: set[Tensor] = set()
        self._parts: list[_Part] = []
        self.synchronized = False
        if not self.alone:
            self._take_in(self._new_parameters(), mode)

    def _new_parameters(self) -> list[Tensor]:
        """Parameters that need gradients and are not in any part: added or unfrozen since the last look."""
        groups = self._optimizer.param_groups
        return [p for g in groups for p in g["params"] if p.requires_grad and p not in self._known]

    def _take_in(self, parameters: list[Tensor], mode: Mode) -> None:
        self._known.update(parameters)
        names = [self._names.get(p) or f"parameter.{len(self._known)}.{i}" for i, p in enumerate(parameters)]
        self._parts.append(_Part(self.options, parameters, names, mode))

    @property
    def has_fired(self) -> bool:
        """Whether a gradient was computed that has not been exchanged."""
        return any(part.reducer.has_fired for part in self._parts)

    def synchronize(self, *, discard: bool = False) -> None:
        """Exchange the gradients, once for a step."""
        if self.alone or (self.synchronized and not self.has_fired):
            return
        runtime.current()
        new = self._new_parameters()
        if new:
            # One mode object for each part: it holds what is under way of that part.
            self._take_in(new, type(self.mode)(**vars_of(self.mode)))
        for part in self._parts:
            part.synchronize(discard=discard)
        self.synchronized = True

    def set_passes(self, passes: int) -> None:
        _require_passes(passes)
        self.options.passes = passes
        for part in self._parts:
            part.reducer.set_passes(passes)

    def step(self, closure: Callable[[], Any] | None) -> Any:
        if closure is None:
            self.synchronize()
            result = self.mode.step(self.plain_step)
        else:
            result = self.mode.step(lambda: self.plain_step(self._joint(closure)))
        self.synchronized = False
        return result

    def _joint(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure with all ranks' gradients and the mean of their losses: line searches must agree."""

        def joint() -> Any:
            with torch.enable_grad():
                loss = closure()
            self.synchronize()
            if not self.alone and isinstance(loss, Tensor) and loss.dtype.is_floating_point:
                return ops.allreduce(loss.detach(), op=ops.Average)
            return loss

        return joint

    def before_zero_grad(self) -> None:
        """Gradients that were computed and not used: see their exchange through, then they can go."""
        if self.has_fired:
            self.synchronize(discard=True)
        self.synchronized = False


def vars_of(mode: Mode) -> dict[str, Any]:
    """A mode's options by name."""
    return {name: getattr(mode, name) for name in getattr(mode, "__dataclass_fields__", {})}


class _Distributed(torch.optim.Optimizer):
    """What DistributedOptimizer mixes into the user's optimizer class."""

    _hiercomm: _Distribution

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Use all ranks' gradients, then the optimizer's own step. Returns what that returns."""
        return self._hiercomm.step(closure)

    def synchronize(self) -> None:
        """Wait until `p.grad` holds all ranks' gradients. A later `step()` does not exchange them again."""
        self._hiercomm.synchronize()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Horovod's way to step after `synchronize()`; not needed here, where nothing is exchanged twice."""
        yield

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; gradients that were not used are seen through first."""
        self._hiercomm.before_zero_grad()
        super().zero_grad(set_to_none)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many backward passes are accumulated; not between backward and step."""
        self._hiercomm.set_passes(passes)

    @property
    def backward_passes_per_step(self) -> int:
        """Backward passes that are accumulated before gradients are exchanged."""
        return self._hiercomm.options.passes

    @property
    def op(self) -> int:
        """How gradients are reduced."""
        return self._hiercomm.options.op

    @property
    def mode(self) -> Mode:
        """The training mode."""
        return self._hiercomm.mode

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
            class with static `compress` and `decompress`.
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
    _require_passes(backward_passes_per_step)
    ops.reduction_name(op)
    if gradient_predivide_factor != 1.0 and op != ops.Average:
        raise ConfigError("gradient_predivide_factor not supported with op != Average")
    _require_groups(groups if groups is not None else num_groups)
    names = _names(optimizer, named_parameters)
    mode = modes.parse(context.config.mode) if mode is None else mode
    kind = type(optimizer)
    options = _Options(kind.__name__, compression, backward_passes_per_step, op, sparse_as_dense)
    inner = optimizer.__dict__.get("step")  # an LR scheduler made earlier has put its own step there
    plain_step = inner if inner is not None else functools.partial(kind.step, optimizer)
    distribution = _Distribution(optimizer, options, names, mode, plain_step)
    supports_amp = optimizer.__dict__.get("_step_supports_amp_scaling", False)
    optimizer.__class__ = type(kind.__name__, (_Distributed, kind), {"__module__": _Distributed.__module__})
    optimizer.__dict__["_step_supports_amp_scaling"] = supports_amp
    optimizer._hiercomm = distribution  # type: ignore[attr-defined]
    if inner is not None:
        _keep_tracked(optimizer)  # replaces it
    return optimizer


def _keep_tracked(optimizer: Any) -> None:
    """What an LR scheduler made before the wrap expects: a step on the instance, marked as its own."""

    def step(closure: Callable[[], Any] | None = None) -> Any:
        return type(optimizer).step(optimizer, closure)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = step


def _require_passes(passes: int) -> None:
    if passes <= 0:
        raise ConfigError(f"backward_passes_per_step must be > 0, not {passes}")


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
