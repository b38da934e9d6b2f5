"""The one process-wide context: `init` finds the other ranks and starts the progress thread.

Everything that needs other ranks asks `current()` for the Runtime; before `init` and after `shutdown`
that raises NotInitialized.
"""

from __future__ import annotations

import atexit
import hashlib
import itertools
import math
import os
import pickle
import socket
import sys
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from hiercomm import compress, connect, devices, launcher, probe
from hiercomm import config as configuration
from hiercomm.allreduce import PIECE_BYTES, TAGS, HierarchicalAllReduce
from hiercomm.comm import mpi
from hiercomm.comm.base import LocalBuffer, ReducingCommunicator, Work
from hiercomm.comm.shm import SharedMemory
from hiercomm.comm.torchdist import TorchDistributed
from hiercomm.config import Config
from hiercomm.control import Control
from hiercomm.eager import EagerOperation
from hiercomm.errors import CommError, ConfigError, NotInitialized, UsageError
from hiercomm.links import Links, guarded
from hiercomm.negotiate import Request, Waiting
from hiercomm.progress import Pending, Progress, Task, drive
from hiercomm.replica import Replica, flush_all
from hiercomm.rounds import Lag, Rounds
from hiercomm.shard import Shard
from hiercomm.stalls import Limits, StallFinder
from hiercomm.timing import Timing, table
from hiercomm.topology import Topology
from hiercomm.watch import Watch

Ranks = tuple[int, ...] | None  # None: all
_ABORT_GRACE_S = 0.5  # other ranks may be about to say the same: let them
_DRAIN_S = 1.0
_GIVE_UP_GRACE_S = 10.0  # rank 0 decides when all give up; a rank that it cannot tell does so later
_GROUP_TIMEOUT_S = 7 * 86400.0  # torch's own limit inside a node: a slow rank is no error


@final
class Runtime:
    """Everything of one job on one rank. Made by `init`."""

    def __init__(self, config: Config, world: mpi.MpiWorld | None) -> None:
        self.config = config
        self.timing = Timing()
        self._world = world
        self._abort_code: int | None = None
        self._channels = itertools.count()
        self.optimizers = itertools.count(1)  # that have been wrapped, for errors
        self._tags = itertools.count(step=TAGS)
        self._piece_bytes: int | None = None
        self.replicas: list[Replica] = []  # in the order of the wraps, which is the same on all ranks
        self._unnamed: defaultdict[int, Iterator[int]] = defaultdict(itertools.count)
        self._pid = os.getpid()
        self._patience_s = config.stall_abort + _GIVE_UP_GRACE_S if config.stall_abort else math.inf
        self._control: Control | None = None
        self._progress: Progress | None = None
        self.topology, hosts = connect.discover(config, world)
        self._groups = connect.connect(config, world, self.topology)
        if world is not None and world.size > 1:
            mailbox = world.mailbox()
            self._mailbox = mailbox
            stalls = StallFinder(world.rank, hosts.names, Limits(config.stall_warn, config.stall_abort))
            links = Links(world.rank, hosts.names, hosts.owners, config.link_timeout)
            self._control = Control(mailbox, world.rank, world.size, self._wake, stalls=stalls, links=links)
            self._progress = progress = Progress(self._poll, self._control.is_busy)
            name = f"rank {world.rank} on {hosts.names[world.rank]}"
            self._watch = Watch(stalls, lambda: progress.turns, name, lambda: self.abort(1))
            self._watch.start()

    def _require_same_process(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError(
                "this process was forked from a rank, such as a data-loading worker: it cannot communicate"
            )

    def _wake(self) -> None:
        if self._progress is not None:
            self._progress.wake()

    def _poll(self) -> bool:
        if self._abort_code is not None and self._world is not None:
            self._world.abort(self._abort_code)
        assert self._control is not None
        return self._control.poll()

    # ---- the user's own tensors -------------------------------------------------------------------

    def submit(self, request: Request, data: Tensor, divisor: int = 1) -> Pending:
        """Begin an operation on a contiguous CPU tensor; its `result` is there when it completes."""
        self._require_same_process()
        operation = EagerOperation(request, data, divisor, self._groups.eager, self._spawn)
        if self._control is None:
            rows = (data.shape[0] if data.dim() else 1,)
            operation.pending.finish(drive(operation.task(0, rows)))
        else:
            self._control.submit(request, operation)
        return operation.pending

    def _spawn(self, slot: int, task: Task, pending: Pending) -> None:
        assert self._progress is not None
        self._progress.submit(("eager", slot), task, pending)

    def wait(self, pending: Pending, request: Request) -> Any:
        """The result of a submitted operation. Raises what it raised, or CommTimeout."""
        if self._control is None:
            pending.wait()
        else:
            self._control.wait(pending, Waiting(str(request), key=request.key), self._patience_s)
        return pending.result

    def unnamed(self, kind: str) -> str:
        """A name for an operation without one: ranks that call in the same order get the same names.

        Counting begins anew after an error that all ranks got because their calls had come apart.
        """
        epoch = 0 if self._control is None else self._control.epoch
        return f"{kind}.noname.{epoch}.{next(self._unnamed[epoch])}"

    def all_gather_object(self, item: object, name: str) -> list[Any]:
        """Every rank's (picklable) object, by rank."""
        data = torch.from_numpy(np.frombuffer(pickle.dumps(item), dtype=np.uint8).copy())
        length = torch.tensor([data.numel()])
        lengths = self._run(Request("allgather", f"{name}.length", "int64", (1,)), length).tolist()
        whole = self._run(Request("allgather", f"{name}.data", "uint8", tuple(data.shape)), data)
        return [pickle.loads(part.numpy().tobytes()) for part in whole.split(lengths)]

    def _run(self, request: Request, data: Tensor) -> Any:
        return self.wait(self.submit(request, data), request)

    def agree(self, facts: dict[str, Any], name: str, what: str) -> None:
        """Raise ConfigMismatch on every rank, naming the first differing field, unless all have the same facts."""
        if len(set(self.all_gather_object(hashlib.sha256(repr(facts).encode()).digest(), f"{name}.digest"))) > 1:
            connect.compare(self.all_gather_object(facts, f"{name}.facts"), what)

    # ---- optimizers -------------------------------------------------------------------------------

    def _local_exchange(self, name: str) -> Callable[[Any], Sequence[Any]]:
        calls = itertools.count()

        def exchange(item: object) -> Sequence[Any]:
            everybody = self.all_gather_object(item, f"hiercomm.{name}.{next(calls)}")
            return [everybody[rank] for rank in self.topology.local_ranks]

        return exchange

    def allocate(
        self, specs: Sequence[tuple[int, torch.dtype]], device: torch.device, name: str
    ) -> tuple[ReducingCommunicator, list[LocalBuffer]]:
        """Buffers inside the node, with a level of their own: in each the order of operations is its own, too.

        Collective over all ranks. Gloo takes over where memory cannot be shared. Raises CommError on all ranks.
        """
        wanted = self.config.local
        if wanted == "auto":
            wanted = "nccl" if device.type == "cuda" else "shm"
        error, buffers = "", list[LocalBuffer]()
        try:
            level = self._level(wanted, name)
            buffers = level.allocate(specs, device)
        except CommError as e:
            error = str(e)
        errors = [e for e in self.all_gather_object(error, f"{name}.allocated") if e]
        if not errors:
            return level, buffers
        if self.config.local != "auto" or wanted != "shm":
            raise CommError(errors[0])
        if self.topology.rank == 0:
            print(f"hiercomm: {errors[0]}; using Gloo inside the nodes instead, which is slower", file=sys.stderr)
        gloo = self._level("gloo", f"{name}.gloo")
        return gloo, gloo.allocate(specs, device)

    def _level(self, kind: str, name: str) -> ReducingCommunicator:
        t, exchange = self.topology, self._local_exchange(name)
        if kind == "shm":
            return SharedMemory(t.local_rank, t.local_size, exchange)
        return TorchDistributed(kind, t.local_rank, t.local_size, exchange, min(self._patience_s, _GROUP_TIMEOUT_S))

    def new_channel(self) -> int:
        """The number of the next stream of events; the same on all ranks that wrap in the same order."""
        return next(self._channels)

    def all_reduce_engine(self, level: ReducingCommunicator, topology: Topology) -> HierarchicalAllReduce:
        """The all-reduce over `level` and the nodes of `topology`: the job's, or this node's alone."""
        assert self._progress is not None
        local = level if topology.local_size > 1 else None
        cross = self._groups.buckets if len(topology.nodes) > 1 else None
        tag, piece_bytes = next(self._tags), self.piece_bytes
        return HierarchicalAllReduce(topology, local, cross, self._progress, self.timing, tag, piece_bytes)

    def rounds(self, shards: Sequence[Shard], weight: float, lag: Lag) -> Rounds | None:
        """Rounds between the nodes; None where this rank does not cross."""
        comm, tag, size = self._groups.buckets, next(self._tags), self.piece_bytes
        assert self._progress is not None
        assert self._control is not None
        idle, progress = self._control.awaits_others, self._progress
        return Rounds(comm, shards, weight, lag, idle, progress, self.timing, tag, size) if comm else None

    def flush(self, *, leave: bool = False) -> None:
        """Bring the replicas of all nodes to the same state. Collective. `leave`: for the last time."""
        flush_all(self.replicas, leave=leave)

    @property
    def piece_bytes(self) -> int:
        """The size of messages between the nodes; measured when first asked for, by all ranks."""
        if self._piece_bytes is None:
            self._piece_bytes = self._probe(next(self._tags))
        return self._piece_bytes

    def _probe(self, tag: int) -> int:
        if len(self.topology.nodes) == 1:
            return PIECE_BYTES[0]

        def run(task: Task) -> None:
            assert self._progress is not None
            assert self._control is not None
            pending = self._progress.submit(("probe",), task, Pending("the first exchange between the nodes"))
            self._control.wait(pending, Waiting(str(pending)), self._patience_s)

        return probe.measure(
            self._groups.buckets, tag, run, lambda x: max(self.all_gather_object(x, self.unnamed("probe")))
        )

    def count(self, channel: int) -> int:
        """This rank begins the next event of `channel`. Returns its number."""
        self._require_same_process()
        assert self._control is not None
        return self._control.count(channel)

    def wait_counted(self, work: Work, channel: int, number: int, what: str, ranks: Ranks = None) -> None:
        """Block until `work` completes, which needs `ranks` (None: all) to begin event `number` of `channel`."""
        assert self._control is not None
        self._control.wait(work, Waiting(what, channel=channel, number=number, ranks=ranks), self._patience_s)

    @property
    def progress_thread(self) -> int | None:
        """The operating system's id of the progress thread; None where there is one rank."""
        return None if self._progress is None else self._progress.native_id

    # ---- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Drain and stop; waits until every rank has come here."""
        if self._control is None or self._progress is None:
            self._report([self.timing.shares()])
            return
        try:
            self.flush(leave=True)
            if self.config.report:
                self._report(self.all_gather_object(self.timing.shares(), "hiercomm.report"))
        except CommError:
            pass  # another rank ended early: there is nothing to bring together or report on
        self._control.leave()
        if self._control.lost is not None:  # MPI could not be ended in peace
            sys.stderr.write(f"hiercomm: {self._control.lost}; ending the job\n")
            self.abort(1)
        # What all ranks have begun and nobody waited for: messages may still come, into memory that must be there.
        self._progress.drain(_DRAIN_S)
        self._watch.close()
        self._progress.close()
        self._control.close(CommError("hiercomm has been shut down"))
        self._mailbox.close()

    def _report(self, shares: list[dict[str, float]]) -> None:
        if self.config.report and self.topology.rank == 0:
            print(table(shares), flush=True)

    def abort(self, code: int) -> None:
        """End all ranks of the job."""
        if self._progress is not None:
            time.sleep(_ABORT_GRACE_S)
            if self._control is not None and self._control.lost is not None:
                launcher.end_daemon()
            self._abort_code = code
            self._progress.wake()
            time.sleep(5.0)
        os._exit(code)


# ---- the process-wide instance ------------------------------------------------------------------------

_current: Runtime | None = None
_owner_pid = -1
_lock = threading.Lock()
_previous_hook: Callable[..., Any] | None = None


def init(comm: Any = None, process_sets: Any = None, **options: Any) -> None:
    """Find the other ranks and start the progress thread. A second call does nothing.

    Args:
        comm: None for all ranks; a list of ranks or an mpi4py communicator for some of them.
        process_sets: not in this version yet; None.
        options: fields of Config, which beat the environment.
    Raises ConfigError where an option cannot be used, ConfigMismatch where ranks have different ones.
    """
    global _current, _owner_pid
    with _lock:
        if _current is not None:
            return
        _owner_pid = os.getpid()
        _install_hooks()
        if process_sets is not None:
            raise UsageError("process sets are not in this version of hiercomm yet: call init() without process_sets")
        config = Config.from_environment(**options)
        _require_compression(config)
        with guarded(config.link_timeout):
            runtime = Runtime(config, connect.find_world(comm))
        _limit_threads(runtime)
        devices.warn_of_crowding(runtime.topology, runtime.all_gather_object)
        _current = runtime
    if config.placement and runtime.topology.rank == 0:
        print(f"hiercomm: {runtime.topology.describe()}", file=sys.stderr, flush=True)


def _require_compression(config: Config) -> None:
    try:
        compress.parse(config.compression)
    except ConfigError as error:
        raise ConfigError(f"{configuration.variable('compression')}={config.compression}: {error}") from None


def _limit_threads(runtime: Runtime) -> None:
    # Ranks that share cores must not each take all of them: that is many times slower.
    if runtime.topology.size > 1 and "OMP_NUM_THREADS" not in configuration.process_environment():
        mine = (socket.gethostname(), sorted(os.sched_getaffinity(0)))
        everybody = runtime.all_gather_object(mine, "hiercomm.cores")
        sharers = Counter(core for host, cores in everybody if host == mine[0] for core in cores)
        fair = int(sum(1 / sharers[core] for core in mine[1]) + 1e-9)
        torch.set_num_threads(max(1, min(torch.get_num_threads(), fair)))


def _install_hooks() -> None:
    global _previous_hook
    if _previous_hook is None:
        _previous_hook = sys.excepthook
        sys.excepthook = _excepthook
        atexit.register(shutdown)


def _excepthook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
    """An uncaught exception ends the job: the other ranks would wait for this one for ever."""
    runtime = _current
    rank, size = (runtime.topology.rank, runtime.topology.size) if runtime is not None else mpi.place()
    if os.getpid() != _owner_pid or size == 1:
        (_previous_hook or sys.__excepthook__)(kind, value, trace)
        return
    where = f"rank {rank} on {socket.gethostname()}"
    text = "".join(traceback.format_exception(kind, value, trace))
    # One write, so that the ranks' tracebacks do not mix.
    sys.stderr.write(f"hiercomm: uncaught exception on {where}; ending the job\n{text}")
    sys.stderr.flush()
    sys.stdout.flush()
    if runtime is not None:
        runtime.abort(1)
    time.sleep(_ABORT_GRACE_S)  # in init(), or after shutdown(): the others may be about to say the same
    mpi.abort_all(1)


def shutdown() -> None:
    """Leave the job; waits until every rank has called it. Called at exit; a second call does nothing."""
    global _current
    if os.getpid() != _owner_pid:
        return  # a forked child, such as a data-loading worker
    with _lock:
        runtime, _current = _current, None
    if runtime is not None:
        runtime.close()


def is_initialized() -> bool:
    """Whether `init` was called, and `shutdown` was not since."""
    return _current is not None


def current() -> Runtime:
    """The Runtime. Raises NotInitialized before `init` and after `shutdown`."""
    if _current is None:
        raise NotInitialized
    return _current
