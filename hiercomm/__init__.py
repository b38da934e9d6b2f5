"""hiercomm: PyTorch training over many nodes whose network is slow or whose speeds differ.

Horovod's names are in `hiercomm.torch`; what is hiercomm's own is here. Names are loaded when first used, so
that the commands start without loading torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hiercomm.compress import (
        BF16,
        FP8,
        FP16,
        Compressor,
        ErrorFeedback,
        Int4,
        Int8,
        NoCompression,
        PerLayer,
        PowerSGD,
        RandomK,
        Sign,
        TopK,
    )
    from hiercomm.config import Config
    from hiercomm.modes import ASSGD, BSP, Mode
    from hiercomm.runtime import init, is_initialized, shutdown

__all__ = [
    "ASSGD",
    "BF16",
    "BSP",
    "FP8",
    "FP16",
    "Compressor",
    "Config",
    "ErrorFeedback",
    "Int4",
    "Int8",
    "Mode",
    "NoCompression",
    "PerLayer", "PowerSGD",
    "RandomK",
    "Sign",
    "TopK",
    "init",
    "is_initialized",
    "shutdown",
]  # fmt: skip
__version__ = "0.1.0"

_HOMES = {
    "ASSGD": "modes",
    "BF16": "compress",
    "BSP": "modes",
    "Compressor": "compress",
    "Config": "config",
    "ErrorFeedback": "compress",
    "FP16": "compress",
    "FP8": "compress",
    "Int4": "compress",
    "Int8": "compress",
    "Mode": "modes",
    "NoCompression": "compress",
    "PerLayer": "compress",
    "PowerSGD": "compress",
    "RandomK": "compress",
    "Sign": "compress",
    "TopK": "compress",
    "init": "runtime",
    "is_initialized": "runtime",
    "shutdown": "runtime",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hiercomm' has no attribute {name!r}")
    return getattr(import_module(f"hiercomm.{_HOMES[name]}"), name)
