"""Names of horovod.torch that are not in this version yet: they can be imported, and say so when used."""

from __future__ import annotations

from typing import Any, NoReturn, final

from hiercomm.errors import UsageError

NAMES = (
    "add_process_set", "alltoall", "alltoall_async", "grouped_allgather",
    "grouped_allgather_async", "grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async",
    "grouped_allreduce_async_", "grouped_reducescatter", "grouped_reducescatter_async", "join", "reducescatter",
    "reducescatter_async", "remove_process_set", "sparse_allreduce_async", "start_timeline", "stop_timeline",
)  # fmt: skip


@final
class Later:
    """Stands for a name; calling it or reading from it raises UsageError with a sentence."""

    def __init__(self, name: str) -> None:
        self.__dict__["_name"] = name

    def _refuse(self) -> NoReturn:
        raise UsageError(f"hvd.{self._name} is not in this version of hiercomm yet")

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse()

    def __getattr__(self, attribute: str) -> NoReturn:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        self._refuse()


class SyncBatchNorm:
    """A class, so that scripts can ask whether a module is one; there are none yet."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise UsageError("hvd.SyncBatchNorm is not in this version of hiercomm yet")
