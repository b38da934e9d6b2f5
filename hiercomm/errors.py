"""The exceptions of hiercomm.

    HierCommError
    |-- ConfigError (ValueError)            an option, argument or variable cannot be used
    |   `-- ConfigMismatch                  the ranks were configured differently
    |-- UsageError (RuntimeError)           a call at the wrong time or in the wrong order
    |   |-- NotInitialized (ValueError)     before `init()` or after `shutdown()`
    |   `-- GradientOrderError (AssertionError)   backward, synchronize and step do not fit together
    |-- PayloadError (ValueError)           received bytes are not what was expected
    |-- KernelError                         a kernel was given what it cannot work on, or cannot be had
    `-- CommError (RuntimeError)            an operation between ranks failed
        |-- RankMismatch                    the ranks asked for different things
        |-- CommTimeout                     nothing arrived in time
        `-- PeerLost                        a rank has ended

The built-in types in brackets are there because Horovod raises those, and scripts catch them.
`horovod.torch.HorovodInternalError` is `CommError` here.
"""

from __future__ import annotations


class HierCommError(Exception):
    """Root of everything that hiercomm raises on purpose."""


class ConfigError(HierCommError, ValueError):
    """An option, argument or environment variable has a value that cannot be used."""


class ConfigMismatch(ConfigError):
    """The ranks of one job were given different options, modes or models."""


class UsageError(HierCommError, RuntimeError):
    """A call was made at a time or in an order that has no meaning."""


class NotInitialized(UsageError, ValueError):
    """A call that needs `init()` came before it, or after `shutdown()`."""

    def __init__(self) -> None:
        super().__init__("hiercomm has not been initialized; use hvd.init().")


class GradientOrderError(UsageError, AssertionError):
    """The order of backward, synchronize, zero_grad and step makes no sense."""


class PayloadError(HierCommError, ValueError):
    """Bytes that were to be decoded are no payload of the code that is expected."""


class KernelError(HierCommError):
    """A kernel was given tensors that do not fit, or cannot be compiled."""


class CommError(HierCommError, RuntimeError):
    """An operation between ranks failed; the job can go on if every rank caught it."""


class RankMismatch(CommError):
    """The ranks submitted operations that do not fit together."""


class CommTimeout(CommError):
    """An operation did not complete within its time limit."""


class PeerLost(CommError):
    """A rank that takes part in the operation has ended or shut down."""
