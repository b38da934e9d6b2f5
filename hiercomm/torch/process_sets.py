"""Process sets: the global one. Others are not in this version yet."""

from __future__ import annotations

from typing import Any, final

from hiercomm import runtime
from hiercomm.errors import UsageError


@final
class ProcessSet:
    """A set of ranks; `global_process_set` is all of them."""

    def __init__(self, ranks_or_comm: Any = None) -> None:
        if ranks_or_comm is not None:
            raise UsageError(f"ProcessSet({ranks_or_comm!r}): process sets are not in this version of hiercomm yet")
        self.process_set_id = 0

    @property
    def ranks(self) -> list[int]:
        """The ranks of the set."""
        return list(range(self.size()))

    def size(self) -> int:
        """Number of ranks in the set."""
        return runtime.current().topology.size

    def rank(self) -> int:
        """This process's rank in the set."""
        return runtime.current().topology.rank

    def included(self) -> bool:
        """Whether this process is in the set."""
        return True


global_process_set = ProcessSet()


def require_global(process_set: object) -> None:
    """Raise UsageError for any set but the global one."""
    if process_set is not global_process_set:
        raise UsageError(f"process_set={process_set!r}: only hvd.global_process_set is in this version of hiercomm yet")
