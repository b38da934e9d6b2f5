"""A process beside mpirun that ends it where a node is lost: mpirun would wait for that node's daemon for ever.

It is forked before this process becomes mpirun, whose signals and exit status stay its own, and ends with it. It
looks at mpirun's connections; the kernel's keepalive probes, which `variables` make frequent, keep them speaking.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from hiercomm.comm.tcp import Silence, connections_of

_LOOK_EVERY_S = 0.5
_IDLE_S = 2  # a connection that is silent for so long is probed, every second
_GRACE_S = 2.0


def variables(patience_s: float, prefix: str) -> Iterator[tuple[str, str]]:
    """Open MPI's settings for the connections between mpirun and its daemons: those on a lost node end themselves."""
    if patience_s:
        yield f"{prefix}oob_tcp_keepalive_time", str(_IDLE_S)
        yield f"{prefix}oob_tcp_keepalive_intvl", "1"
        yield f"{prefix}oob_tcp_keepalive_probes", str(int(patience_s) + 6)  # later than this process looks


def start(patience_s: float, hosts: Sequence[str]) -> None:
    """Watch over what the calling process is about to become. `hosts` are the names to call addresses by."""
    if not patience_s or not hasattr(os, "pidfd_open"):
        return
    watched = os.pidfd_open(os.getpid())
    pid = os.getpid()
    child = os.fork()
    if child != 0:
        os.waitpid(child, 0)
        os.close(watched)
        return
    try:
        if os.fork() == 0:  # no child of mpirun's, which has its own to wait for
            # Signals to all of the group are for mpirun.
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            _watch(watched, pid, patience_s, hosts)
    finally:
        os._exit(0)


def _watch(watched: int, pid: int, patience_s: float, hosts: Sequence[str]) -> None:
    """Until the process behind the descriptor `watched`, which is `pid`, has ended."""
    end = select.poll()
    end.register(watched, select.POLLIN)
    silence = Silence(patience_s, lambda: connections_of(pid))
    while not end.poll(_LOOK_EVERY_S * 1e3):
        if lost := silence.look(time.monotonic()):
            who = ", ".join(_named(address, hosts) for address in sorted(lost))
            sys.stderr.write(
                f"hiercommrun: {who} has not answered {socket.gethostname()} for {patience_s:g} s: that node is down "
                "or the link to it is cut; ending the job\n"
            )
            sys.stderr.flush()
            _end(watched, pid, end)
            return


def _end(watched: int, pid: int, end: select.poll) -> None:
    """End mpirun; then what it has started here: ranks, and the shells to other hosts, of which one hears nothing."""
    children = list(_children(pid))
    signal.pidfd_send_signal(watched, signal.SIGTERM)
    if not end.poll(_GRACE_S * 1e3):
        signal.pidfd_send_signal(watched, signal.SIGKILL)
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(child, signal.SIGKILL)


def _children(pid: int) -> Iterator[int]:
    """Descriptors of a process's children."""
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it may end
            child = os.pidfd_open(int(name))
            if Path(f"/proc/{name}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1] == str(pid):
                yield child
            else:
                os.close(child)


def _named(address: str, hosts: Sequence[str]) -> str:
    for host in hosts:
        with contextlib.suppress(OSError):
            if address in {str(info[4][0]) for info in socket.getaddrinfo(host, None)}:
                return f"{host} ({address})"
    return address
