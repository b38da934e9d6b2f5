"""Which ends of this process's TCP connections answer nothing any more, as its kernel sees it. Linux.

A process that computes, waits or is stopped still has a kernel that acknowledges what comes; a node that is down
or behind a cut link has not. So this tells a lost link from a slow rank, and needs no answer from anybody's
Python. It only reads: the connections are MPI's. Where the network is no TCP, it sees nothing.
"""

from __future__ import annotations

import contextlib
import ipaddress
import math
import os
import re
import socket
import stat
import struct
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import final

_ESTABLISHED, _SYN_SENT = 1, 2
_INFO = struct.Struct("=8B13I")  # the head of the kernel's struct tcp_info
_LONGEST_TICK_S, _PAUSE_S = 2.0, 5.0


@dataclass(frozen=True)
class Connection:
    """`unanswered`: something was sent again and again; `heard_s`: seconds since anything came, if that is known."""

    inode: int
    address: str
    unanswered: bool
    heard_s: float = math.inf


def connections() -> Iterator[Connection]:
    """The TCP connections of this process to other hosts."""
    numbers = os.listdir("/proc/self/fd") if sys.platform == "linux" else []
    for number in map(int, numbers):
        # What is closed meanwhile is none any more.
        with contextlib.suppress(OSError):
            status = os.fstat(number)
            if stat.S_ISSOCK(status.st_mode) and (found := _connection(number, status.st_ino)) is not None:
                yield found


def _connection(number: int, inode: int) -> Connection | None:
    with socket.socket(fileno=os.dup(number)) as own:
        if own.family not in (socket.AF_INET, socket.AF_INET6) or own.type != socket.SOCK_STREAM:
            return None
        info = _INFO.unpack(own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size))
        state, retransmits, probes, *_ = info
        if state == _SYN_SENT:  # the socket itself does not tell with whom
            return next((c for c in _table() if c.inode == inode), None)
        if state != _ESTABLISHED:
            return None
        address = _plain(own.getpeername()[0])
    heard_s = min(info[-2:]) / 1e3  # data or an acknowledgement
    return Connection(inode, address, retransmits + probes > 0, heard_s) if _is_elsewhere(address) else None


def connections_of(pid: int) -> Iterator[Connection]:
    """Those of another process of this user, in the same network."""
    inodes = set()
    with contextlib.suppress(OSError):  # it may end
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                inodes.add(entry.stat().st_ino)
    return (c for c in _table() if c.inode in inodes)


def _table() -> Iterator[Connection]:
    """All TCP connections to other hosts from this network, as the kernel prints them."""
    for line in (_read("/proc/net/tcp") + _read("/proc/net/tcp6")).splitlines():
        number, _, remote, state, _, _, retransmits, _, probes, inode, *_ = line.split()
        if number.endswith(":") and int(state, 16) in (_ESTABLISHED, _SYN_SENT):
            words = remote.partition(":")[0]  # of 32 bits, in the order of this machine
            raw = b"".join(struct.pack("=I", int(words[i : i + 8], 16)) for i in range(0, len(words), 8))
            address = _plain(str(ipaddress.ip_address(raw)))
            if _is_elsewhere(address):
                yield Connection(int(inode), address, int(retransmits, 16) + int(probes) > 0)


def _plain(address: str) -> str:
    mapped = getattr(ipaddress.ip_address(address.partition("%")[0]), "ipv4_mapped", None)
    return str(mapped or address.partition("%")[0])


def _is_elsewhere(address: str) -> bool:
    return not ipaddress.ip_address(address).is_loopback


def addresses() -> set[str]:
    """Addresses of this host, those of its loopback aside."""
    found = set(re.findall(r"\|-- (\S+)\n\s+/32 host LOCAL", _read("/proc/net/fib_trie")))
    found |= {str(ipaddress.ip_address(bytes.fromhex(line[:32]))) for line in _read("/proc/net/if_inet6").splitlines()}
    return {address for address in found if not ipaddress.ip_address(address).is_loopback}


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii")
    except OSError:
        return ""


@final
class Silence:
    """Finds addresses that leave what is sent to them unanswered for `patience_s`, by looking again and again.

    `present` lists the connections. `ignore_present`: those that are there now are not MPI's.
    """

    def __init__(
        self,
        patience_s: float,
        present: Callable[[], Iterable[Connection]] = connections,
        *,
        ignore_present: bool = False,
    ) -> None:
        self._patience_s = patience_s
        self._present = present
        self._ignored = {c.inode for c in present()} if ignore_present else set()
        self._silent_s: dict[int, float] = {}
        self._last: float | None = None

    def look(self, now: float) -> set[str]:
        """The addresses. To be called every second or so, at time `now`; after a pause it begins anew."""
        elapsed = 0.0 if self._last is None else now - self._last
        self._last = now
        if elapsed > _PAUSE_S:
            self._silent_s = {}
        elapsed = min(elapsed, _LONGEST_TICK_S)  # longer ones are this process's own: it was stopped
        present = [c for c in self._present() if c.inode not in self._ignored]
        self._silent_s = {c.inode: self._silent_s.get(c.inode, -elapsed) + elapsed for c in present if c.unanswered}
        silent = {c.address for c in present if self._silent_s.get(c.inode, 0.0) >= self._patience_s}
        # Where anything comes, the host is there: the link may lose much, or the silent port may be closed.
        return silent - {c.address for c in present if c.heard_s < self._patience_s}
