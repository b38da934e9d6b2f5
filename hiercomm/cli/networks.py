"""Network interfaces: which ones a host has, which ones lead to other hosts, which one to name to MPI and NCCL.

`interfaces` reads them from the kernel; all else is pure. Knows nothing of MPI, ranks or torch.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

_CLASS_NET = Path("/sys/class/net")
_SIOCGIFFLAGS, _SIOCGIFADDR, _SIOCGIFNETMASK = 0x8913, 0x8915, 0x891B
_IFF_UP, _IFF_LOOPBACK = 0x1, 0x8
_ARPHRD_INFINIBAND = 32

LOOPBACK, BRIDGE, PORT = "loopback", "bridge", "bridge port"
INFINIBAND, VIRTUAL, ETHERNET = "infiniband", "virtual", "ethernet"
# From the best to the worst for traffic between hosts; the others lead nowhere.
_BETTER = (INFINIBAND, ETHERNET, BRIDGE, VIRTUAL)


@dataclass(frozen=True)
class Interface:
    """One interface. `address` is IPv4 with its prefix, like '10.0.0.1/24'. `uplinks`: physical ports of a bridge."""

    name: str
    kind: str
    up: bool = True
    address: str | None = None
    speed_mbit: int | None = None
    uplinks: tuple[str, ...] = ()

    @property
    def stays_inside(self) -> bool:
        """Whether nothing that is sent here can leave the host: loopback, or a bridge of containers or guests."""
        return self.kind == LOOPBACK or (self.kind == BRIDGE and not self.uplinks)

    @property
    def is_usable(self) -> bool:
        """Whether MPI would take it for a way to other hosts, rightly or not."""
        return self.up and self.address is not None

    @property
    def network(self) -> str | None:
        """The network of the address, like '10.0.0.0/24'."""
        return None if self.address is None else str(ipaddress.ip_interface(self.address).network)

    def __str__(self) -> str:
        kind = "" if self.kind in (ETHERNET, VIRTUAL, LOOPBACK) else f" {self.kind}"
        return f"{self.name}{kind} {self.address or 'no address'}{'' if self.up else ' down'}"


def interfaces(class_net: Path = _CLASS_NET) -> tuple[Interface, ...]:
    """The interfaces of this host (of this network namespace), in the kernel's order."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return tuple(_interface(probe, name, class_net / name) for _, name in socket.if_nameindex())


def _interface(probe: socket.socket, name: str, folder: Path) -> Interface:
    answer = _ask(probe, name, _SIOCGIFFLAGS)
    flags = 0 if answer is None else struct.unpack_from("H", answer)[0]
    address, mask = (_ask(probe, name, what) for what in (_SIOCGIFADDR, _SIOCGIFNETMASK))
    cidr = None
    if address is not None and mask is not None:
        cidr = f"{socket.inet_ntoa(address[4:8])}/{bin(int.from_bytes(mask[4:8], 'big')).count('1')}"
    ports = [port.name for port in folder.glob("brif/*")]
    return Interface(
        name=name,
        kind=LOOPBACK if flags & _IFF_LOOPBACK else _kind(folder),
        up=bool(flags & _IFF_UP),
        address=cidr,
        speed_mbit=_speed(folder),
        uplinks=tuple(sorted(port for port in ports if (folder.parent / port / "device").exists())),
    )


def _ask(probe: socket.socket, name: str, what: int) -> bytes | None:
    """What the kernel answers behind the name: a union of flags and a socket address."""
    try:
        return fcntl.ioctl(probe.fileno(), what, struct.pack("16s24x", name.encode()))[16:]
    except OSError:
        return None  # it has no address, or has gone


def _kind(folder: Path) -> str:
    if (folder / "bridge").exists():
        return BRIDGE
    if (folder / "brport").exists():
        return PORT
    if _number(folder / "type") == _ARPHRD_INFINIBAND:
        return INFINIBAND
    return ETHERNET if (folder / "device").exists() else VIRTUAL


def _speed(folder: Path) -> int | None:
    # A virtual interface names a speed that means nothing.
    speed = _number(folder / "speed") if (folder / "device").exists() else None
    return speed if speed is not None and speed > 0 else None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


# ---- choosing -------------------------------------------------------------------------------------------


def named(values: Sequence[str], found: Iterable[Interface]) -> list[Interface]:
    """The interfaces that a list of names and networks, as btl_tcp_if_include takes it, means on this host."""
    return [i for i in found if any(_matches(value, i) for value in values)]


def _matches(value: str, interface: Interface) -> bool:
    if "/" not in value:
        return value == interface.name
    try:
        network = ipaddress.ip_network(value, strict=False)
    except ValueError:
        return False
    return interface.address is not None and ipaddress.ip_interface(interface.address).ip in network


# What Open MPI leaves out where nobody says otherwise; who names others has to name loopback, too.
_LEFT_OUT = ("127.0.0.0/8",)


def open_mpi_ways(found: Sequence[Interface], include: str | None, exclude: str | None) -> list[Interface]:
    """The interfaces over which Open MPI's TCP would go, given its btl_tcp_if_include and _exclude."""
    usable = [i for i in found if i.is_usable]
    if include:
        return named(_values(include), usable)
    left_out = named(_values(exclude) if exclude else _LEFT_OUT, usable)
    return [i for i in usable if i not in left_out]


def _values(text: str) -> list[str]:
    return [value.strip() for value in text.split(",")]


def detour(found: Sequence[Interface], include: str | None, exclude: str | None) -> dict[str, str | None]:
    """The variables of Open MPI to change so that messages avoid what leads to no other host; empty where none do."""
    ways = open_mpi_ways(found, include, exclude)
    if include and any(not i.stays_inside for i in ways):
        return {}
    if not include and not any(i.stays_inside for i in ways):
        return {}
    names = {i.name for i in found if i.is_usable and i.stays_inside}
    return {
        "OMPI_MCA_btl_tcp_if_include": None,
        "OMPI_MCA_btl_tcp_if_exclude": ",".join(sorted({*names, *(_values(exclude) if exclude else _LEFT_OUT)})),
    }


def inside_only(hosts: Iterable[Sequence[Interface]]) -> list[str]:
    """Names of the usable interfaces of any host that lead to no other host, loopback last."""
    names = {(i.kind == LOOPBACK, i.name) for host in hosts for i in host if i.is_usable and i.stays_inside}
    return [name for _, name in sorted(names)]


def suggestion(hosts: Sequence[Sequence[Interface]]) -> str | None:
    """What to name to MPI so that all hosts meet: an interface's name, else a network; None where none is common."""
    ways = [[i for i in host if i.is_usable and not i.stays_inside and i.kind != PORT] for host in hosts]
    if not ways or not all(ways):
        return None
    best = sorted(ways[0], key=lambda i: (_BETTER.index(i.kind), -(i.speed_mbit or 0)))
    for one in best:
        if all(any((i.name, i.network) == (one.name, one.network) for i in host) for host in ways):
            return one.name
        if all(any(i.network == one.network for i in host) for host in ways):
            return one.network
    # Networks that differ from host to host may be joined by routers.
    return next((one.name for one in best if all(any(i.name == one.name for i in host) for host in ways)), None)
