"""Which operation every rank is ready for, which ones do not fit together, and when nobody can go on.

The coordinator's decisions, pure: it is told what the ranks submit and wait for, and says what to run.
Ranks may submit in different orders; operations are matched by kind and name. Knows nothing of
threads, messages or tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import final

Key = tuple[str, str]  # kind, name


@dataclass(frozen=True)
class Request:
    """What one rank asks for. `shape` and `dtype` are its tensor's."""

    kind: str
    name: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    device: str = "CPU"
    op: str = ""
    root: int = -1
    prescale: float = 1.0
    postscale: float = 1.0

    @property
    def key(self) -> Key:
        """By which the ranks' requests are matched."""
        return self.kind, self.name

    def __str__(self) -> str:
        tensor = f" (shape {list(self.shape)}, {self.dtype})" if self.dtype else ""
        return f"{self.kind} {self.name!r}{tensor}"


@dataclass(frozen=True)
class Response:
    """Run (or fail) one operation. `sequence` is the same on all ranks; `rows` are their first dimensions."""

    key: Key
    sequence: int
    rows: tuple[int, ...] = ()
    error: str = ""
    peer_lost: bool = False


@dataclass(frozen=True)
class Waiting:
    """What a thread waits for: an operation by key, or that `ranks` (None: all) begin event `number` of a channel."""

    what: str
    key: Key | None = None
    channel: int = -1
    number: int = 0
    ranks: tuple[int, ...] | None = None

    def missing(self, begun: Callable[[int], float], size: int) -> set[int]:
        """Who has not begun that event yet; `begun(rank)` is how many of the channel a rank has, of `size` ranks."""
        return {rank for rank in self.ranks or range(size) if begun(rank) < self.number}


@dataclass(frozen=True)
class Blocked:
    """All threads of a rank that communicate are waiting; `started` counts its events by channel."""

    waiting: tuple[Waiting, ...]
    started: Mapping[int, int]


@dataclass
class _Rank:
    blocked: Blocked | None = None
    gone: Mapping[int, int] | None = None  # events that it had begun when it shut down

    def begun(self, channel: int) -> int:
        """Events of a channel that it had begun when it last said so."""
        if self.gone is not None:
            return self.gone.get(channel, 0)
        return self.blocked.started.get(channel, 0) if self.blocked is not None else 0


@dataclass
class _Pending:
    requests: dict[int, Request] = field(default_factory=dict)


@final
class Negotiator:
    """The coordinator. `grace_s`: how long everybody must be stuck before that is an error."""

    def __init__(self, size: int, grace_s: float = 2.0) -> None:
        self._size = size
        self._grace_s = grace_s
        self._pending: dict[Key, _Pending] = {}
        self._ranks = [_Rank() for _ in range(size)]
        self._sequence = 0
        self._stuck_since: float | None = None

    def submit(self, rank: int, request: Request) -> Response | None:
        """`rank` is ready for an operation. Returns what to send to all ranks, if anything."""
        self.running(rank)
        pending = self._pending.setdefault(request.key, _Pending())
        pending.requests[rank] = request
        gone = [q for q, s in enumerate(self._ranks) if s.gone is not None and q not in pending.requests]
        if gone:
            return self._respond(request.key, error=_lost(request, gone), peer_lost=True)
        if len(pending.requests) < self._size:
            return None
        rows = tuple(r.shape[0] if r.shape else 1 for _, r in sorted(pending.requests.items()))
        return self._respond(request.key, rows=rows, error=mismatch(pending.requests) or "")

    def blocked(self, rank: int, state: Blocked) -> None:
        """Every thread of `rank` waits."""
        self._ranks[rank].blocked = state
        self._stuck_since = None

    def running(self, rank: int) -> None:
        """`rank` has gone on."""
        self._ranks[rank].blocked = None
        self._stuck_since = None

    def leave(self, rank: int, started: Mapping[int, int]) -> list[Response]:
        """`rank` has shut down. Returns the failures of what waits for it."""
        self._ranks[rank].gone = started
        self._stuck_since = None
        # What it has submitted itself can still be carried out: it stays until all have left.
        missing = [next(iter(p.requests.values())) for p in self._pending.values() if rank not in p.requests]
        return [self._respond(r.key, error=_lost(r, [rank]), peer_lost=True) for r in missing]

    def missing(self, key: Key) -> Collection[int]:
        """Who has not submitted the operation that others have; nobody where none is pending."""
        pending = self._pending.get(key)
        return () if pending is None else set(range(self._size)) - pending.requests.keys()

    @property
    def all_gone(self) -> bool:
        """Whether every rank has shut down."""
        return all(state.gone is not None for state in self._ranks)

    def stuck(self, now: float) -> str | None:
        """Why no rank can ever go on, once that has been so for `grace_s` seconds; None otherwise."""
        if not self._is_stuck():
            self._stuck_since = None
            return None
        if self._stuck_since is None:
            self._stuck_since = now
        if now - self._stuck_since < self._grace_s:
            return None
        return "no rank can go on: " + "; ".join(
            f"rank {q} waits in {self._name(q, w)}"
            for q, state in enumerate(self._ranks)
            if state.blocked is not None and state.gone is None
            for w in state.blocked.waiting
        ) + ". Every rank must submit the same operations and take the same steps."  # fmt: skip

    def abandon(self, error: str) -> list[Response]:
        """Fail everything that is pending."""
        for rank in range(self._size):
            self.running(rank)
        return [self._respond(key, error=error) for key in list(self._pending)]

    def _name(self, rank: int, waiting: Waiting) -> str:
        request = self._pending[waiting.key].requests.get(rank) if waiting.key in self._pending else None
        return str(request) if request is not None else waiting.what

    def _is_stuck(self) -> bool:
        alive = [s for s in self._ranks if s.gone is None]
        if not alive or any(s.blocked is None for s in alive):
            return False
        return all(not self._can_end(w) for s in alive if s.blocked is not None for w in s.blocked.waiting)

    def _can_end(self, waiting: Waiting) -> bool:
        if waiting.key is not None:
            return waiting.key not in self._pending  # answered: it is being carried out
        # Only called when every rank is gone or blocked, so each has said what it started.
        return not waiting.missing(lambda rank: self._ranks[rank].begun(waiting.channel), self._size)

    def _respond(self, key: Key, rows: tuple[int, ...] = (), error: str = "", peer_lost: bool = False) -> Response:
        del self._pending[key]
        self._sequence += 1
        return Response(key, self._sequence, rows, error, peer_lost)


def _lost(request: Request, gone: list[int]) -> str:
    ranks = ", ".join(map(str, gone))
    return (
        f"{request.kind} {request.name!r} cannot complete: rank {ranks} has shut down hiercomm "
        "(its script ended or raised an exception; if so, the exception is in its output)"
    )


def _tail(request: Request) -> tuple[int, ...]:
    return request.shape[1:]


# (field as a sentence names it, value, right) compared for each kind of operation, in this order.
_Check = tuple[str, Callable[[Request], object], str]
_DTYPE: _Check = ("data types", lambda r: r.dtype, "type")
_DEVICE: _Check = ("CPU/GPU device selection", lambda r: r.device, "device")
_SHAPE: _Check = ("tensor shapes", lambda r: list(r.shape), "shape")
_CHECKS: dict[str, tuple[_Check, ...]] = {
    "allreduce": (
        _DTYPE, _DEVICE, ("reduction operation", lambda r: r.op, "op"), _SHAPE,
        ("prescale and/or postscale factors", lambda r: (r.prescale, r.postscale), "factors"),
    ),
    "allgather": (
        _DTYPE, _DEVICE, ("tensor ranks", lambda r: len(r.shape), "number of dimensions"),
        ("tensor shapes", lambda r: list(_tail(r)), "dimensions after the first"),
    ),
    "broadcast": (_DTYPE, _DEVICE, ("root ranks", lambda r: r.root, "root rank"), _SHAPE),
    "barrier": (),
}  # fmt: skip


def mismatch(requests: Mapping[int, Request]) -> str | None:
    """How the requests of the ranks for one operation differ, as a sentence; None where they agree."""
    (first, reference), *others = sorted(requests.items())
    for what, value, right in _CHECKS[reference.kind]:
        for rank, request in others:
            if value(request) != value(reference):
                return (
                    f"Mismatched {reference.kind.upper()} {what}: rank {rank} has {value(request)}, but rank {first} "
                    f"has {value(reference)}, in {reference.kind} {reference.name!r}. All ranks need the same {right}."
                )
    return None
