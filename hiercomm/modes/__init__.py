"""Training modes: one file, one paper each."""

from __future__ import annotations

import ast
import dataclasses

from hiercomm.errors import ConfigError
from hiercomm.modes.as_sgd import ASSGD
from hiercomm.modes.base import Mode
from hiercomm.modes.bsp import BSP

__all__ = ["ASSGD", "BSP", "Mode", "parse"]

_MODES: dict[str, type[Mode]] = {"as_sgd": ASSGD, "bsp": BSP}


def parse(text: str) -> Mode:
    """The mode that `text` describes: a name, or `name:option=value,option=value`.

    Raises ConfigError naming the part that cannot be used.
    """
    name, _, options = text.partition(":")
    if name not in _MODES:
        raise ConfigError(f"unknown mode {name!r}; known modes: {', '.join(sorted(_MODES))}")
    known = {f.name for f in dataclasses.fields(_MODES[name])}  # type: ignore[arg-type]
    values = {}
    for item in filter(None, options.split(",")):
        option, equals, value = item.partition("=")
        if not equals or option not in known:
            raise ConfigError(
                f"mode {name!r} has no option {item!r}; its options: {', '.join(sorted(known)) or 'none'}"
            )
        try:
            values[option] = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            values[option] = value
    return _MODES[name](**values)
