"""The hosts that a job is to start on: reading their list, and asking each for its name before anything starts.

mpirun takes long over a host that does not answer, and says little; and two hosts of one name it takes for one.
"""

from __future__ import annotations

import re
import socket
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from hiercomm.errors import ConfigError

_PATIENCE_S = 10.0
_AT_ONCE = 64


@dataclass(frozen=True)
class Host:
    """A machine, and how many ranks it takes."""

    name: str
    slots: int


def parse_hosts(items: Sequence[str]) -> tuple[Host, ...]:
    """Hosts from 'name', 'name:2' or 'name slots=2'; one named again gets the slots of both. Raises ConfigError."""
    slots: dict[str, int] = {}
    for item in items:
        match = re.fullmatch(r"(\w[\w.-]*)(?::(\d{1,6})|\s+slots\s*=\s*(\d{1,6})(?:\s.*)?)?", item.strip(), re.ASCII)
        number = 0 if match is None else int(match[2] or match[3] or 1)
        if match is None or number < 1:
            raise ConfigError(f"host {item.strip()!r} is not of the form name:slots, such as node1:4")
        slots[match[1]] = slots.get(match[1], 0) + number
    if not slots:
        raise ConfigError("the list of hosts names none")
    return tuple(Host(name, number) for name, number in slots.items())


def check_hosts(hosts: Sequence[str], shell: Sequence[str], environ: Mapping[str, str]) -> None:
    """Ask every host for its name. `shell` with a host and a command behind it runs the command there, like ssh.

    Raises ConfigError where one does not answer within 10 s, or two have one name.
    """
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = list(pool.map(lambda host: _name_of(host, shell, environ), hosts))
    silent = [f"{host} ({reason})" for host, (_, reason) in zip(hosts, answers, strict=True) if reason]
    if silent:
        raise ConfigError(f"cannot start anything by {shell[0]} on {', '.join(silent)}")
    known: dict[str, str] = {}
    for host, (name, _) in zip(hosts, answers, strict=True):
        first = known.setdefault(name, host)
        if first != host and not (_is_here(first) and _is_here(host)):  # mpirun knows the names of its own machine
            raise ConfigError(
                f"{first} and {host} both have the host name {name!r}: MPI would take them for one machine. "
                "Give each a host name of its own"
            )


def _name_of(host: str, shell: Sequence[str], environ: Mapping[str, str]) -> tuple[str, str]:
    """The name that a host gives itself, and why it gave none."""
    if _is_here(host):
        return socket.gethostname(), ""
    try:
        answer = subprocess.run(
            [*shell, host, "uname -n"], env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            errors="replace", timeout=_PATIENCE_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "", f"no answer within {_PATIENCE_S:g} s"
    except OSError as error:
        return "", str(error.strerror)
    lines = answer.stdout.split() or [""]  # the last: logins may greet
    return lines[-1], "" if answer.returncode == 0 else (answer.stderr.strip().splitlines() or ["no reason given"])[-1]


def _is_here(host: str) -> bool:
    """Whether a host is this one, where mpirun needs no shell: only an address of one's own can be bound."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except OSError:
        return host == socket.gethostname()
    return True
