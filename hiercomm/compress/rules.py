"""Which compressor a parameter gets, and what people write for it: `int8`, `topk:0.01`. Pure."""

from __future__ import annotations

import ast
import fnmatch
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch

from hiercomm.compress.base import Compressor
from hiercomm.compress.block import FP8, Int4, Int8, Sign
from hiercomm.compress.dense import BF16, FP16
from hiercomm.compress.feedback import ErrorFeedback
from hiercomm.compress.low_rank import PowerSGD
from hiercomm.compress.sparse import RandomK, TopK
from hiercomm.errors import ConfigError

Choice = Compressor | ErrorFeedback | PowerSGD
_COMPRESSIBLE = (torch.float32, torch.float16, torch.bfloat16)


@final
@dataclass(frozen=True)
class PerLayer:
    """`default` for matrices and larger, nothing for tensors of one dimension or of fewer than `min_numel` numbers.

    `rules` come first: patterns of parameter names (as for files, `fc?.*`), each with a compressor or None. Of several
    that match the first counts.
    """

    default: Choice | None
    min_numel: int = 1024
    rules: Mapping[str, Choice | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for where, choice in (("default", self.default), *self.rules.items()):
            if choice is not None:
                _require_choice(choice, where)
        if not (isinstance(self.min_numel, int) and self.min_numel >= 0):
            raise ConfigError(f"min_numel={self.min_numel!r} cannot be used: a number of elements, 0 or more")

    def require_matches(self, names: Iterable[str]) -> None:
        """Raise ConfigError where a rule is for none of these parameters."""
        names = list(names)
        for pattern in self.rules:
            if not fnmatch.filter(names, pattern):
                raise ConfigError(
                    f"the rule {pattern!r} of PerLayer matches no parameter: they are {', '.join(names[:3])}, ... "
                    "(names come by named_parameters=model.named_parameters())"
                )

    def choose(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Choice | None:
        """What the parameter's gradient goes through between nodes; None: it goes as it is (float64 always does)."""
        if dtype not in _COMPRESSIBLE or 0 in shape:
            return None
        for pattern, choice in self.rules.items():
            if fnmatch.fnmatchcase(name, pattern):
                return choice
        return self.default if len(shape) > 1 and torch.Size(shape).numel() >= self.min_numel else None


@final
@dataclass(frozen=True)
class Auto:
    """The fastest of bf16, int8, int4, sign and top-k 1 % on the job's own links, or none where none pays.

    `max_error` is what one step may leave out, as a share of the gradients' norm (error feedback adds it to the next).
    Of normally distributed numbers bf16 leaves out 0.2 %, int8 0.7 %, int4 14 %, sign 60 %, top-k 96 %. `min_numel` as
    in PerLayer.
    """

    min_numel: int = 1024
    max_error: float = 0.05

    def __post_init__(self) -> None:
        PerLayer(None, self.min_numel)
        if not (isinstance(self.max_error, (int, float)) and 0 < self.max_error <= 1):
            raise ConfigError(f"max_error={self.max_error!r} cannot be used: a share of the norm, above 0, at most 1")

    def rules(self, choice: Choice | None) -> PerLayer:
        """What a choice means for a model."""
        return PerLayer(choice, self.min_numel)


def _auto(max_error: float = 0.05) -> Auto:
    return Auto(max_error=max_error)


def _require_choice(choice: object, where: str) -> None:
    """Raise ConfigError unless `choice` can compress gradients."""
    if isinstance(choice, (ErrorFeedback, PowerSGD)):
        return
    if not isinstance(choice, Compressor):
        raise ConfigError(f"compression {where}={choice!r} cannot be used: it takes a compressor, such as Int8()")
    if choice.needs_feedback:
        raise ConfigError(f"{choice!r} loses gradients without error feedback: ErrorFeedback({choice!r})")


def kind(choice: Choice | None) -> Hashable:
    """Equal for tensors that may share a bucket; a user's compressor may have no hash."""
    return choice if isinstance(choice, Hashable) else id(choice)


_NAMED: dict[str, Callable[..., Compressor | PowerSGD | Auto]] = {
    "auto": _auto, "bf16": BF16, "fp16": FP16, "fp8": FP8, "int4": Int4, "int8": Int8, "powersgd": PowerSGD,
    "randomk": RandomK, "sign": Sign, "topk": TopK,
}  # fmt: skip


def parse(text: str) -> PerLayer | Auto | None:
    """What `text` says: `none`, or a name, with its argument behind a colon: `topk:0.01`, `int8:stochastic`.

    With error feedback. `auto` takes its max_error. Raises ConfigError.
    """
    name, colon, argument = text.strip().partition(":")
    if name == "none" and not colon:
        return None
    if name not in _NAMED:
        raise ConfigError(f"unknown compression {name!r}; known: none, {', '.join(_NAMED)}")
    arguments: tuple[Any, ...] = ()
    if colon:
        try:
            arguments = (ast.literal_eval(argument),)
        except (SyntaxError, ValueError):
            arguments = (argument,)
    try:
        found = _NAMED[name](*arguments)
    except TypeError:
        raise ConfigError(f"compression {name!r} takes no argument {argument!r}") from None
    if isinstance(found, Auto):
        return found
    return PerLayer(found if isinstance(found, PowerSGD) else ErrorFeedback(found))
