"""What a wrapped optimizer knows beyond the plain one: its parameters in buckets, and when to exchange them.

Parameters that were planned together are a part: all at wrap, and any that are added or unfrozen later.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import weakref
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from hiercomm import devices, native, runtime
from hiercomm.bucket import Bucket, Spec, layout, plan
from hiercomm.coded import CompressorCoding
from hiercomm.compress import Auto, Choice, PerLayer, PowerSGD
from hiercomm.compress.rules import kind
from hiercomm.errors import ConfigError, UsageError
from hiercomm.exchange import Coding
from hiercomm.factored import FactoredCoding
from hiercomm.modes import Mode
from hiercomm.modes.base import Context, Reach
from hiercomm.reducer import PRESENCE_OP, Reducer, presence_spec
from hiercomm.torch import auto, checkpoint, ops, replication
from hiercomm.torch.compression import NoneCompressor
from hiercomm.torch.exchanges import Exchanges


@final
class _Part:
    """Parameters that were planned together, with their buckets and their own mode object."""

    def __init__(self, options: Options, parameters: Sequence[Tensor], names: Sequence[str], mode: Mode) -> None:
        context = runtime.current()
        name = context.unnamed("optimizer")
        # Backward reaches the last parameters first.
        self.parameters = list(reversed(parameters))
        names = list(reversed(names))
        specs = [options.spec(p) for p in self.parameters]
        context.agree(options.facts(mode) | self._facts(names, specs), name, "the optimizer")
        device = self.parameters[0].device if self.parameters else torch.device("cpu")
        self._require_one_device(names, device)
        choices = options.choices(names, specs, device)
        groups = plan(specs, context.config.bucket_bytes, [kind(choice) for choice in choices])
        presence = presence_spec(len(specs))
        sizes = [(layout([specs[i] for i in g])[1], specs[g[0]].dtype) for g in groups]
        self.device, self._sizes = device, sizes
        level, buffers = context.allocate([*sizes, (presence.numel, presence.dtype)], device, name)
        reach = context.topology if _ranks(mode) is None else context.topology.inside_node()
        divisor = reach.size if options.op == ops.Average else 1
        op = ops.reduction_name(options.op)
        buckets = [
            Bucket(i, g, [specs[k] for k in g], b, op, divisor)
            for i, (g, b) in enumerate(zip(groups, buffers, strict=False))
        ]
        last = Bucket(len(buckets), [], [], buffers[-1], PRESENCE_OP, 1)
        self.codings = _codings(buckets, choices) if len(context.topology.nodes) > 1 else {}
        if self.codings:
            native.backend(device)  # compiles what has to be compiled
        owner = f"{options.label} (optimizer {next(context.optimizers)})"
        engine = context.all_reduce_engine(level, reach)
        exchanges = Exchanges(engine, len(buckets) + 1, owner, self.codings, _ranks(mode))
        replicate = functools.partial(replication.replicate, self.parameters, names, name)
        mode.attach(Context(exchanges.start, exchanges.finish, replicate))
        self.mode = mode
        self.reducer = Reducer(
            self.parameters, names, buckets, last, mode.on_bucket, options.passes, options.wire_compression(),
            options.sparse_as_dense,
        )  # fmt: skip

    def _facts(self, names: Sequence[str], specs: Sequence[Spec]) -> dict[str, Any]:
        """What must be the same on all ranks about the parameters."""
        each = {
            f"parameter {n!r}": (p.device.type, str(s.dtype), s.shape, s.stride)
            for n, p, s in zip(reversed(names), reversed(self.parameters), reversed(specs), strict=True)
        }
        return {"number of parameters": len(specs), **each, "order of parameters": tuple(reversed(names))}

    def _require_one_device(self, names: Sequence[str], device: torch.device) -> None:
        for name, parameter in zip(names, self.parameters, strict=True):
            if device.type not in ("cpu", "cuda"):
                raise ConfigError(f"parameter {name!r} is on {device}: move the model to the CPU or a GPU first")
            if parameter.device != device:
                raise ConfigError(
                    f"parameter {name!r} is on {parameter.device}, others are on {device}: use one device"
                )
        if device.type == "cuda":
            context = runtime.current()
            devices.warn_of_sharing(device, context.topology.rank, context.all_gather_object)

    def identity(self) -> dict[int, Any]:
        """What a saved coding must have in common with this one's."""
        return {index: (coding.describe(), coding.keeps, self._sizes[index]) for index, coding in self.codings.items()}

    def exchange(self, *, discard: bool) -> None:
        """See the exchange of this part's gradients through."""
        self.reducer.finish(discard=discard)
        self.mode.synchronize()


def _ranks(mode: Mode) -> tuple[int, ...] | None:
    """Over whom gradients are reduced; None: all ranks."""
    return None if mode.reach is Reach.JOB else runtime.current().topology.local_ranks


def _codings(buckets: Sequence[Bucket], choices: Sequence[Choice | None]) -> dict[int, Coding]:
    """By bucket, of which all members have the same choice."""
    rank, found = runtime.current().topology.rank, dict[int, Coding]()
    for bucket in buckets:
        choice = choices[bucket.members[0]]
        if isinstance(choice, PowerSGD):
            found[bucket.index] = FactoredCoding(choice, bucket, rank)
        elif choice is not None:
            found[bucket.index] = CompressorCoding(choice, bucket.index, rank)
    return found


class Options:
    """The arguments of one DistributedOptimizer."""

    def __init__(self, label: str, compression: Any, passes: int, op: int, sparse_as_dense: bool) -> None:
        self.label = label
        self.compression = compression  # PerLayer, Auto until it is known what that is, or Horovod's kind
        self.forecast: auto.Forecast | None = None
        self.passes = passes
        self.op = op
        self.sparse_as_dense = sparse_as_dense

    def wire_compression(self) -> Any:
        """None where gradients travel as they are."""
        own = self.compression is NoneCompressor or isinstance(self.compression, (PerLayer, Auto))
        return None if own else self.compression

    def choices(self, names: Sequence[str], specs: Sequence[Spec], device: torch.device) -> list[Choice | None]:
        """What each gradient goes through between nodes. Collective over all ranks."""
        if isinstance(self.compression, Auto):
            found, self.forecast = auto.resolve(self.compression, names, specs, device)
            # Where there was nothing to measure, parameters that come later may have something.
            self.compression = self.compression if self.forecast is None else found
        if not isinstance(self.compression, PerLayer):
            return [None] * len(specs)
        return [self.compression.choose(n, s.shape, s.dtype) for n, s in zip(names, specs, strict=True)]

    def spec(self, parameter: Tensor) -> Spec:
        """What this parameter's gradient looks like in its bucket."""
        if self.wire_compression() is None:
            return Spec.of(parameter)
        code, _ = self.compression.compress(torch.zeros_like(parameter))
        return Spec.of(code.contiguous())

    def facts(self, mode: Mode) -> dict[str, Any]:
        """What must be the same on all ranks."""
        # A user's compressor may have no repr of its own: then its address is in it.
        compression = getattr(self.compression, "__name__", re.sub(" at 0x[0-9a-f]+", "", repr(self.compression)))
        return {
            "class": self.label, "mode": repr(mode), "op": int(self.op), "compression": compression,
            "backward_passes_per_step": self.passes, "sparse_as_dense": self.sparse_as_dense,
        }  # fmt: skip


@final
class Distribution:
    """What a wrapped optimizer knows beyond the plain one."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, options: Options, names: dict[Tensor, str], mode: Mode,
        plain_step: Callable[..., Any],
    ) -> None:  # fmt: skip
        self.options = options
        self.mode = mode
        self._plain_step = plain_step
        self.alone = runtime.current().topology.size == 1
        # Weakly, so that an optimizer that is wrapped and dropped goes at once, and its hooks with it.
        self._optimizer = weakref.ref(optimizer)
        self._runtime = runtime.current()
        self._failure: BaseException | None = None
        self._names = names
        self._known: set[Tensor] = set()
        self._parts: list[_Part] = []
        self.synchronized = False
        if not self.alone:
            self._take_in(self._new_parameters(), mode)

    def _new_parameters(self) -> list[Tensor]:
        """Parameters that need gradients and are not in any part: added or unfrozen since the last look."""
        groups = self.optimizer.param_groups
        new = {p: None for g in groups for p in g["params"] if p.requires_grad and p not in self._known}
        # In the order of their names: the optimizer's own may differ between ranks (a set of parameters).
        return [p for p in self._names if p in new] + [p for p in new if p not in self._names]

    def _take_in(self, parameters: list[Tensor], mode: Mode) -> None:
        self._known.update(parameters)
        for parameter in parameters:
            before = _owners.get(parameter)
            owner = before() if before is not None else None
            if owner is not None and owner is not self:
                owner.retire()
            _owners[parameter] = weakref.ref(self)
        names = [self._names.get(p) or f"parameter.{len(self._known)}.{i}" for i, p in enumerate(parameters)]
        self._parts.append(_Part(self.options, parameters, names, mode))

    def retire(self) -> None:
        """Another optimizer has been wrapped over parameters of this one: two cannot exchange one gradient."""
        for part in self._parts:
            part.reducer.close()
            part.mode.retire()
        self._failure = UsageError("its parameters were wrapped in another DistributedOptimizer later")

    @property
    def has_fired(self) -> bool:
        """Whether a gradient was computed that has not been exchanged."""
        return any(part.reducer.has_fired for part in self._parts)

    def synchronize(self, *, discard: bool = False) -> None:
        """Exchange the gradients, once for a step."""
        if self.alone or (self.synchronized and not self.has_fired):
            return
        if runtime.current() is not self._runtime:
            raise UsageError("the optimizer was wrapped before shutdown(): make and wrap it again after init()")
        if self._failure is not None:
            raise UsageError(
                f"this optimizer cannot exchange gradients any more ({self._failure}): make and wrap it again"
            ) from self._failure
        try:
            new = self._new_parameters()
            if new:
                # One mode object for each part: it holds what is under way of that part.
                self._take_in(new, type(self.mode)(**_options_of(self.mode)))
            for part in self._parts:
                part.exchange(discard=discard)
        except BaseException as error:
            # Some ranks may have begun exchanges that others have not: the next ones would not match.
            self._failure = error
            raise
        for part in self._parts:
            part.reducer.publish(discard=discard)
        if self.options.forecast is not None:
            self.options.forecast.step()
        self.synchronized = True

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer whose distribution this is."""
        optimizer = self._optimizer()
        assert optimizer is not None  # it owns this object
        return optimizer

    def _identity(self) -> dict[str, Any]:
        topology = self._runtime.topology
        return {"rank": topology.rank, "nodes": topology.nodes, "parts": [part.identity() for part in self._parts]}

    def state_dict(self) -> dict[str, Any]:
        """What compressors remember on this rank; empty where nothing is compressed."""
        if not any(part.codings for part in self._parts):
            return {}
        self._require_between_steps("state_dict")
        codings = [{index: coding.sites.state_dict() for index, coding in part.codings.items()} for part in self._parts]
        return {**self._identity(), "codings": codings}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Take up `state_dict()`'s result where it is this rank's own, or merged; else begin with nothing."""
        self._require_between_steps("load_state_dict")
        checkpoint.load(self._identity(), state or {}, [(part.codings, part.device) for part in self._parts])

    def _require_between_steps(self, what: str) -> None:
        if self.has_fired and any(part.codings for part in self._parts):
            raise UsageError(
                f"{what}() between backward() and step(), while gradients are being compressed: after step()"
            )

    def set_passes(self, passes: int) -> None:
        """Backward passes per step from now on."""
        require_passes(passes)
        self.options.passes = passes
        for part in self._parts:
            part.reducer.set_passes(passes)

    def step(self, closure: Callable[[], Any] | None, **arguments: Any) -> Any:
        """Exchange what has not been, then step as the mode says. Returns what the plain step returns."""
        joint: tuple[Callable[[], Any], ...] = ()
        if closure is None:
            self.synchronize()
        elif self.mode.reach is Reach.JOB:
            joint = (self._joint(closure),)
        else:
            raise UsageError("step(closure) needs the losses of all ranks: train with mode=hiercomm.BSP()")
        step: Callable[[], Any] = functools.partial(self._plain_step, self.optimizer, *joint, **arguments)
        for mode in [part.mode for part in self._parts] or [self.mode]:
            step = functools.partial(mode.step, step)
        result = step()
        self.synchronized = False
        return result

    def _joint(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure with all ranks' gradients and the mean of their losses: line searches must agree."""

        def joint() -> Any:
            with torch.enable_grad():
                loss = closure()
            self.synchronize()
            if self.alone or loss is None:
                return loss
            mean = ops.allreduce(torch.as_tensor(loss).detach().double(), op=ops.Average)
            return mean.to(loss.dtype) if isinstance(loss, Tensor) else mean.item()

        return joint

    def before_zero_grad(self) -> None:
        """Gradients that were computed and not used: see their exchange through, then they can go."""
        if self.has_fired:
            self.synchronize(discard=True)
        self.synchronized = False


# Who exchanges the gradient of a parameter.
_owners: MutableMapping[Tensor, weakref.ref[Distribution]] = WeakTensorKeyDictionary()


def _options_of(mode: Mode) -> dict[str, Any]:
    """A mode's options by name."""
    return {f.name: getattr(mode, f.name) for f in dataclasses.fields(mode)} if dataclasses.is_dataclass(mode) else {}


def require_passes(passes: int) -> None:
    """Raise ConfigError unless `passes` backward passes can be accumulated."""
    if passes <= 0:
        raise ConfigError(f"backward_passes_per_step must be > 0, not {passes}")
