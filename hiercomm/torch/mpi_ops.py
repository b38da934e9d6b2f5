"""The module in which Horovod keeps its operations: the same names as `hiercomm.torch`."""

from hiercomm.runtime import init, is_initialized, shutdown
from hiercomm.torch.basics import *  # noqa: F403
from hiercomm.torch.ops import *  # noqa: F403

__all__ = ["init", "is_initialized", "shutdown"]
