"""The command `hiercomm`: finds the sub-command's module and hands over; imports nothing before it is asked for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence

# What each sub-command is for, and the module whose main(argv) -> int it is; None where it is still to come.
_COMMANDS: dict[str, tuple[str, str | None]] = {
    "bench": ("measure the exchange between ranks", "hiercomm.cli.bench"),
    "doctor": ("check nodes, links and libraries", "hiercomm.cli.doctor"),
    "plan": ("forecast what a mode will cost on a network", None),
    "trace": ("merge and show the traces of all ranks", None),
    "report": ("show where the time of a job went", None),
    "version": ("print the version", "hiercomm.cli.main"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sub-command named first in `argv`; the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(_usage())
        return 0 if words else 2
    name, *rest = words
    if name in ("version", "--version"):
        return _version()
    if name not in _COMMANDS:
        print(f"hiercomm: there is no command {name!r}; there are {', '.join(_COMMANDS)}", file=sys.stderr)
        return 2
    module = _COMMANDS[name][1]
    if module is None:
        print(f"hiercomm: the command {name!r} is not there yet in this version", file=sys.stderr)
        return 2
    run: Callable[[Sequence[str]], int] = importlib.import_module(module).main
    return run(rest)


def _version() -> int:
    from hiercomm import __version__

    print(f"hiercomm {__version__}")
    return 0


def _usage() -> str:
    rows = [
        f"  {name:<9} {purpose}{'' if module else ' (not there yet)'}" for name, (purpose, module) in _COMMANDS.items()
    ]
    return "\n".join(["usage: hiercomm COMMAND [ARGUMENTS]", "", *rows, "", "To start a job: hiercommrun --help"])
