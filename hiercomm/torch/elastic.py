"""Horovod's elastic training: not in this version yet; its names can be read from here when it is."""

from __future__ import annotations

from typing import NoReturn

from hiercomm.errors import UsageError


def __getattr__(name: str) -> NoReturn:
    if name.startswith("__"):
        raise AttributeError(name)
    raise UsageError(f"hvd.elastic.{name} is not in this version of hiercomm yet")
