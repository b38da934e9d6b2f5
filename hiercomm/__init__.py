"""hiercomm: PyTorch training over many nodes whose network is slow or whose speeds differ.

Horovod's names are in `hiercomm.torch`; what is hiercomm's own is here. Names are loaded when first used, so
that the commands start without loading torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hiercomm.config import Config
    from hiercomm.modes import BSP, Mode
    from hiercomm.runtime import init, is_initialized, shutdown

__all__ = ["BSP", "Config", "Mode", "init", "is_initialized", "shutdown"]
__version__ = "0.1.0"

_HOMES = {
    "BSP": "modes", "Config": "config", "Mode": "modes", "init": "runtime", "is_initialized": "runtime",
    "shutdown": "runtime",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hiercomm' has no attribute {name!r}")
    return getattr(import_module(f"hiercomm.{_HOMES[name]}"), name)
