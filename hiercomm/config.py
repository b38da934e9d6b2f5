"""Every run-time option, in one frozen dataclass; the only reader of the environment.

An argument of `Config(...)` beats `HIERCOMM_<FIELD>`, which beats the `HOROVOD_*` variable of the
same meaning, which beats the default. Knows nothing of MPI, torch or ranks.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hiercomm.errors import ConfigError

_RATE_UNITS = {"": 1.0, "bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_TIME_UNITS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6}
_SIZE_UNITS = {"": 1.0, "b": 1.0, "kb": 2.0**10, "mb": 2.0**20, "gb": 2.0**30}


def _quantity(text: str, units: Mapping[str, float], example: str) -> float:
    match = re.fullmatch(r"\s*([0-9.]+(?:[eE][-+]?[0-9]+)?)\s*([a-zA-Z]*)\s*", text)
    try:
        value = float(match[1]) * units[match[2].lower()] if match is not None else math.nan
    except (KeyError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        raise ConfigError(f"{text!r} is not a quantity like {example}")
    return value


def parse_rate(text: str) -> float:
    """Bits per second from '200mbit', '1gbit' or a plain number. Raises ConfigError."""
    return _quantity(text, _RATE_UNITS, "200mbit")


def parse_seconds(text: str) -> float:
    """Seconds from '5ms', '2s' or a plain number. Raises ConfigError."""
    return _quantity(text, _TIME_UNITS, "5ms")


def parse_bytes(text: str) -> int:
    """Bytes from '25MB' (binary units) or a plain number. Raises ConfigError."""
    return int(_quantity(text, _SIZE_UNITS, "25MB"))


def _flag(text: str) -> bool:
    try:
        return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}[text.lower()]
    except KeyError:
        raise ConfigError(f"{text!r} is neither 1 nor 0") from None


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{text!r} is not a whole number") from None


def _option(default: Any, parse: Callable[[str], Any], doc: str, *, per_rank: bool = False) -> Any:
    return field(default=default, metadata={"parse": parse, "doc": doc, "per_rank": per_rank})


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of one job. Fields marked per rank may differ between ranks; all others must agree.

    Raises ConfigError where a value is out of range.
    """

    mode: str = _option(
        "bsp",
        str,
        "Training mode of optimizers wrapped without `mode=`: `bsp`, or `as_sgd` with its options, such as "
        "`as_sgd:max_age=8,compression=int8`.",
    )
    node: str | None = _option(
        None, str, "Name of this process's node, in place of what MPI finds: splits one host into nodes.", per_rank=True
    )
    ranks_per_node: int | None = _option(
        None, _integer, "Consecutive ranks that form a node, in place of what MPI finds."
    )
    local: str = _option(
        "auto", str, "Transport inside a node: `auto`, `shm` (shared memory), `gloo` or `nccl`. `auto` picks."
    )
    compression: str = _option(
        "none", str, "How gradients cross the links between nodes where a script names no compression: `none`, `fp16`, "
        "`bf16`, `fp8`, `int8`, `int4`, `sign`, `topk:0.01`, `randomk:0.01`, `powersgd:4`, with error feedback; "
        "`auto`: whichever is fastest of those that lose little, or none."
    )  # fmt: skip
    bucket_bytes: int = _option(
        25 * 2**20, parse_bytes, "Gradients are exchanged in flat buckets of at most about this size, like `25MB`."
    )
    stall_warn: float = _option(
        60.0, parse_seconds, "Rank 0 names who is late once a rank has waited this long, in seconds; `0`: never."
    )
    stall_abort: float = _option(
        0.0, parse_seconds, "All ranks raise CommTimeout once one has waited this long, in seconds; `0`: never."
    )
    link_timeout: float = _option(
        8.0, parse_seconds, "The job ends where a node leaves all messages unanswered for so many seconds; `0`: never."
    )
    cross_rate: float | None = _option(
        None, parse_rate, "Slow the links between nodes down to this rate, like `200mbit` (a bare number: bit/s)."
    )
    cross_delay: float | None = _option(
        None, parse_seconds, "Add this delay to every message between nodes, like `5ms` (a bare number: seconds)."
    )
    placement: bool = _option(False, _flag, "Rank 0 prints the table of nodes and ranks at `init()`.")
    report: bool = _option(
        False, _flag, "Rank 0 prints the share of time in compute, local, cross and wait at `shutdown()`."
    )

    def __post_init__(self) -> None:
        _require(self.local in ("auto", "shm", "gloo", "nccl"), "local", self.local, "auto, shm, gloo or nccl")
        _require(
            self.ranks_per_node is None or self.ranks_per_node > 0, "ranks_per_node", self.ranks_per_node, "at least 1"
        )
        _require(self.bucket_bytes > 0, "bucket_bytes", self.bucket_bytes, "a positive number of bytes")
        for name in ("stall_warn", "stall_abort", "link_timeout"):
            seconds = getattr(self, name)
            _require(0 <= seconds < math.inf, name, seconds, "a number of seconds, or 0 for never")
        _require(
            self.cross_rate is None or 0 < self.cross_rate < math.inf,
            "cross_rate",
            self.cross_rate,
            "positive, in bit/s",
        )
        _require(
            self.cross_delay is None or 0 <= self.cross_delay < 3600, "cross_delay", self.cross_delay, "0 to 3600 s"
        )
        _require(self.node is None or self.node != "", "node", self.node, "a non-empty name")

    @staticmethod
    def from_environment(environ: Mapping[str, str] | None = None, **arguments: Any) -> Config:
        """The configuration of this process; `arguments` beat the environment.

        Raises ConfigError for an unknown HIERCOMM_* variable, naming the nearest known one.
        """
        environ = os.environ if environ is None else environ
        known = {variable(f.name): f for f in dataclasses.fields(Config)}
        values = _horovod_values(environ)
        for name, text in environ.items():
            if not name.startswith("HIERCOMM_") or name in _LAUNCHER_ONLY:
                continue
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
                raise ConfigError(f"unknown environment variable {name}; the nearest known one is {near[0]}")
            try:
                values[known[name].name] = known[name].metadata["parse"](text)
            except ConfigError as error:
                raise ConfigError(f"{name}={text}: {error}") from None
        unknown = [name for name in arguments if variable(name) not in known]
        if unknown:
            near = difflib.get_close_matches(unknown[0], [f.name for f in known.values()], n=1, cutoff=0.0)
            raise ConfigError(f"unknown option {unknown[0]!r}; the nearest known one is {near[0]!r}")
        values.update(arguments)
        return Config(**values)

    def shared(self) -> dict[str, Any]:
        """The fields that must be the same on every rank, by name."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if not f.metadata["per_rank"]}


# Read by the repository's own scripts, before there is a job.
_LAUNCHER_ONLY = frozenset({"HIERCOMM_TORCH"})

# Horovod's variables that mean something here; HIERCOMM_* ones win.
_HOROVOD: dict[str, tuple[str, Callable[[str], Any]]] = {
    "HOROVOD_FUSION_THRESHOLD": ("bucket_bytes", lambda text: max(1, parse_bytes(text))),
    "HOROVOD_STALL_CHECK_TIME_SECONDS": ("stall_warn", parse_seconds),
    "HOROVOD_STALL_CHECK_DISABLE": ("stall_warn", lambda text: 0.0 if _flag(text) else None),
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": ("stall_abort", parse_seconds),
}


def _horovod_values(environ: Mapping[str, str]) -> dict[str, Any]:
    values = {}
    for name, (target, parse) in _HOROVOD.items():
        if name in environ:
            try:
                value = parse(environ[name])
            except ConfigError as error:
                raise ConfigError(f"{name}={environ[name]}: {error}") from None
            if value is not None:
                values[target] = value
    return values


def _require(holds: bool, name: str, value: object, right: str) -> None:
    if not holds:
        raise ConfigError(f"{name}={value!r} ({variable(name)}) cannot be used: it must be {right}")


def variable(field_name: str) -> str:
    """The environment variable of a Config field."""
    return f"HIERCOMM_{field_name.upper()}"


def process_environment() -> dict[str, str]:
    """A copy of this process's environment, for those who start other processes."""
    return dict(os.environ)


def options_table() -> str:
    """The options as a Markdown table: variable, default, meaning. README carries it; a test compares."""
    rows = ["| variable | default | meaning |", "| --- | --- | --- |"]
    for f in dataclasses.fields(Config):
        default = "" if f.default is None else f"`{int(f.default) if isinstance(f.default, bool) else f.default}`"
        rows.append(f"| `{variable(f.name)}` | {default} | {f.metadata['doc']} |")
    return "\n".join(rows)


# Open MPI reads these at MPI_Init. A rank that waits gives its core away. And TCP sends messages of up to the
# segment size of comm/mpi.py without asking first: the question and its answer would queue up behind the
# message that goes the other way and make large two-way exchanges half duplex.
MPI_DEFAULTS = {
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_btl_tcp_eager_limit": "1100000",
    "OMPI_MCA_btl_tcp_rndv_eager_limit": "1100000",
    "OMPI_MCA_btl_tcp_max_send_size": "1100000",
}


def set_mpi_defaults() -> None:
    """Give MPI the settings that hiercomm needs, where the user has not said otherwise."""
    for name, value in MPI_DEFAULTS.items():
        os.environ.setdefault(name, value)


def override_mpi(variables: Mapping[str, str | None]) -> None:
    """Change what MPI will read when it starts, whatever the user has said; None removes a variable."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
