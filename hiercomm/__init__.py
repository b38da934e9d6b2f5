"""hiercomm: PyTorch training over many nodes whose network is slow or whose speeds differ.

Horovod's names are in `hiercomm.torch`; what is hiercomm's own is here.
"""

from hiercomm.config import Config
from hiercomm.modes import BSP, Mode
from hiercomm.runtime import init, is_initialized, shutdown

__all__ = ["BSP", "Config", "Mode", "init", "is_initialized", "shutdown"]
__version__ = "0.1.0"
