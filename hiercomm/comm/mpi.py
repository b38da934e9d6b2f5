"""MPI: the cross level and the control plane. The only module that imports mpi4py.

`connect` is called by the thread that initializes; after that every call here is made by the progress
thread alone, so MPI_THREAD_SERIALIZED is enough. Only point-to-point messages are used once running:
they never need all ranks at the same place.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, final

import numpy as np
import torch
from torch import Tensor

from hiercomm import config
from hiercomm.comm.base import Communicator, Mailbox, Work, as_bytes
from hiercomm.errors import CommError, ConfigError

# Larger messages make Open MPI's TCP half duplex: they go in segments that its eager limit admits.
_SEGMENT_BYTES = 1 << 20
_MAIL_TAG = 1

F = TypeVar("F", bound=Callable[..., Any])


def available() -> str | None:
    """None where MPI can be used, else why not."""
    try:
        _mpi()
    except (ImportError, RuntimeError) as error:
        return str(error).splitlines()[0]
    return None


def place() -> tuple[int, int]:
    """This process's rank among all and their number, where MPI runs already; else (0, 1)."""
    if "mpi4py.MPI" not in sys.modules or not _mpi().Is_initialized() or _mpi().Is_finalized():
        return 0, 1
    world = _mpi().COMM_WORLD
    return world.Get_rank(), world.Get_size()


def abort_all(code: int) -> None:
    """End all processes of the job now."""
    _mpi().COMM_WORLD.Abort(code)


# Loads the library without starting MPI: some end the process where the launcher is another MPI's.
_FIND = """
import json, re
import mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
maps = [line.split(None, 5)[-1].strip() for line in open("/proc/self/maps")]
found = [path for path in maps if re.search(r"/libmpi(_cray|_ibm|_abi|ch)?[.]so[^/]*$", path)]
print(json.dumps([MPI.Get_library_version(), found[0] if found else None]))
"""


def find_library() -> tuple[str | None, str | None, str | None]:
    """Name and path of the MPI library that this process would load, or (None, None, why there is none).

    Found out by a child, so nothing that the library does can end this process.
    """
    child = subprocess.run([sys.executable, "-c", _FIND], capture_output=True, text=True, errors="replace", check=False)
    if child.returncode != 0:
        lines = child.stderr.strip().splitlines()
        return None, None, lines[-1] if lines else f"loading it ends with status {child.returncode}"
    name, path = json.loads(child.stdout)
    return _short(name), path, None


def binding_version() -> str | None:
    """The version of mpi4py; None where it is not installed."""
    try:
        return importlib.metadata.version("mpi4py")
    except importlib.metadata.PackageNotFoundError:
        return None


def thread_level() -> str:
    """Which threads of this process may call MPI, in MPI's word: single, funneled, serialized or multiple."""
    MPI = _mpi()
    levels = ("single", "funneled", "serialized", "multiple")
    return {getattr(MPI, f"THREAD_{level.upper()}"): level for level in levels}[MPI.Query_thread()]


def direct() -> tuple[Mailbox, Communicator]:
    """All ranks, reached without any collective call: for those who ask why messages do not arrive.

    The Communicator's tags begin at 2. Both belong to the thread that started MPI, and to nobody while a Runtime lives.
    """
    world = _mpi().COMM_WORLD
    world.Set_errhandler(_mpi().ERRORS_RETURN)
    return _MpiMailbox(world), _MpiCommunicator(world)


def _short(version: str) -> str:
    return " ".join(version.split("\x00")[0].splitlines()[0].split(",")[0].split())


@functools.cache
def _mpi() -> Any:
    config.set_mpi_defaults()  # read by MPI_Init, which the import runs
    from mpi4py import MPI

    return MPI


def _translated(function: F) -> F:
    """MPI's errors as CommError."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except _mpi().Exception as error:
            raise CommError(f"MPI: {error.Get_error_string()}") from error

    return call  # type: ignore[return-value]


@final
class MpiWorld:
    """All ranks of the job, before the progress thread starts. Its collective calls are for set-up."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self._owned: list[Any] = []
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()

    def all_gather(self, item: object) -> list[Any]:
        """Every rank's object, by rank."""
        return list(self._comm.allgather(item))

    def host(self) -> str:
        """A name that is the same on exactly the ranks with which this one can share memory."""
        shared = self._comm.Split_type(_mpi().COMM_TYPE_SHARED)
        first = shared.bcast(self.rank)
        shared.Free()
        # The rank makes it unique where two nodes have one host name.
        names = self._comm.allgather((socket.gethostname(), first))
        ambiguous = {name for name, r in names if len({f for n, f in names if n == name}) > 1}
        name = socket.gethostname()
        return f"{name}#{first}" if name in ambiguous else name

    def communicator(self, ranks: Sequence[int]) -> Communicator:
        """A new Communicator of these world ranks, which call this together; the caller is one of them."""
        group = self._comm.Get_group().Incl(list(ranks))
        comm = self._comm.Create_group(group, tag=len(self._owned))
        group.Free()
        self._owned.append(comm)
        return _MpiCommunicator(comm)

    def barrier(self) -> None:
        """Wait for every rank. Set-up and benchmarks only."""
        self._comm.Barrier()

    def library_all_reduce(self, buf: Tensor) -> None:
        """The library's own MPI_Allreduce (sum), for comparison; bf16 through fp32, as MPI has no such type."""
        if buf.dtype == torch.bfloat16:
            wide = buf.float()
            self._comm.Allreduce(_mpi().IN_PLACE, wide.numpy())
            buf.copy_(wide)
        else:
            self._comm.Allreduce(_mpi().IN_PLACE, buf.numpy())

    def library_send(self, buf: Tensor, dest: int) -> None:
        """The library's own MPI_Send, for comparison."""
        self._comm.Send(buf.numpy(), dest)

    def library_recv(self, buf: Tensor, source: int) -> None:
        """The library's own MPI_Recv, for comparison."""
        self._comm.Recv(buf.numpy(), source)

    def mailbox(self) -> Mailbox:
        """The control plane of the job. Collective."""
        comm = self._comm.Dup()
        self._owned.append(comm)
        return _MpiMailbox(comm)

    def abort(self, code: int) -> None:
        """End all ranks of the job now."""
        self._comm.Abort(code)

    @staticmethod
    def library() -> str:
        """Name and version of the MPI library."""
        return _short(str(_mpi().Get_library_version()))


def connect(comm: Any = None) -> MpiWorld:
    """The world of `comm`: None (all ranks), a list of world ranks, or an mpi4py communicator.

    Raises ConfigError for anything else, and where MPI cannot be called from a second thread.
    """
    MPI = _mpi()
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise ConfigError("MPI was initialized without thread support: MPI_THREAD_SERIALIZED or MULTIPLE is needed")
    if comm is None:
        base = MPI.COMM_WORLD
    elif isinstance(comm, MPI.Intracomm):
        base = comm
    elif isinstance(comm, Sequence) and all(isinstance(r, int) for r in comm):
        base = _sub_world(list(comm))
    else:
        raise ConfigError(f"invalid comm {comm!r}: expected None, a list of rank integers or an mpi4py.MPI.Comm object")
    own = base.Dup()
    own.Set_errhandler(MPI.ERRORS_RETURN)
    return MpiWorld(own)


def _sub_world(ranks: list[int]) -> Any:
    MPI = _mpi()
    size, me = MPI.COMM_WORLD.Get_size(), MPI.COMM_WORLD.Get_rank()
    if len(set(ranks)) != len(ranks) or any(not 0 <= r < size for r in ranks) or me not in ranks:
        raise ConfigError(f"comm={ranks} on rank {me}: expected distinct ranks below {size}, this one among them")
    group = MPI.COMM_WORLD.Get_group().Incl(ranks)
    return MPI.COMM_WORLD.Create_group(group)


@final
class _MpiCommunicator(Communicator):
    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()

    @_translated
    def send(self, buf: Tensor, dest: int, *, tag: int) -> Work:
        data = as_bytes(buf).numpy()
        what = f"send of {data.nbytes} bytes to rank {dest} of the group, tag {tag}"
        return _Requests([self._comm.Isend(part, dest, tag) for part in _segments(data)], data, what)

    @_translated
    def recv(self, buf: Tensor, source: int, *, tag: int) -> Work:
        data = as_bytes(buf).numpy()
        what = f"receive of {data.nbytes} bytes from rank {source} of the group, tag {tag}"
        return _Requests([self._comm.Irecv(part, source, tag) for part in _segments(data)], data, what)


def _segments(data: np.ndarray[Any, np.dtype[np.uint8]]) -> list[np.ndarray[Any, np.dtype[np.uint8]]]:
    return [data[i : i + _SEGMENT_BYTES] for i in range(0, data.nbytes, _SEGMENT_BYTES)]


# Of operations that were dropped while under way, after an error or at the end: MPI may yet write into their buffers.
_dropped: list[tuple[list[Any], object]] = []


@final
class _Requests(Work):
    """MPI requests; keeps their buffer alive."""

    def __init__(self, requests: list[Any], data: object, what: str) -> None:
        self._requests = requests
        self._data = data
        self._what = what

    @_translated
    def is_completed(self) -> bool:
        if self._requests and _mpi().Request.Testall(self._requests):
            self._requests = []
            self._data = None
        return not self._requests

    def __del__(self) -> None:
        if self._requests:
            _dropped.append((self._requests, self._data))

    def __str__(self) -> str:
        return self._what


@final
class _MpiMailbox(Mailbox):
    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self._outgoing: list[tuple[Any, bytes]] = []

    @_translated
    def post(self, dest: int, message: bytes) -> None:
        self._outgoing.append((self._comm.Isend([message, _mpi().BYTE], dest, _MAIL_TAG), message))

    @_translated
    def poll(self) -> list[tuple[int, bytes]]:
        MPI = _mpi()
        if self._outgoing:
            self._outgoing = [item for item in self._outgoing if not item[0].Test()]
        found = []
        status = MPI.Status()
        while (message := self._comm.Improbe(MPI.ANY_SOURCE, _MAIL_TAG, status)) is not None:
            data = bytearray(status.Get_count(MPI.BYTE))
            message.Recv([data, MPI.BYTE])
            found.append((status.Get_source(), bytes(data)))
        return found

    @_translated
    def close(self) -> None:
        for request, _ in self._outgoing:
            request.Wait()
        self._outgoing = []
