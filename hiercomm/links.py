"""Links that are gone: a rank that waits sends a word to rank 0, rank 0 to all, and the kernel says who answers.

While somebody waits, these words see to it that a link which is needed carries something; `comm.tcp` then sees
what is not acknowledged. Nothing is sent while nobody waits. Knows nothing of operations; Control carries the words.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import final

from hiercomm.comm.tcp import Silence

_COORDINATOR = 0
_LOOK_EVERY_S = 0.5
_SPEAK_AFTER_S = 2.0
_WORDS_PER_S = 200  # that may come to rank 0, at most


@final
class Links:
    """One rank's part. `owners` names the host of every address, `hosts` that of every rank.

    `patience_s`: for how long a host may leave everything unanswered; 0 means for ever.
    """

    def __init__(self, rank: int, hosts: Sequence[str], owners: Mapping[str, str], patience_s: float) -> None:
        self._rank = rank
        self._owners = owners
        self._patience_s = patience_s
        self._silence = Silence(patience_s)
        self._audience = [r for r, host in enumerate(hosts) if host != hosts[rank]] if rank == _COORDINATOR else [0]
        self._speak_every_s = max(_SPEAK_AFTER_S, len(hosts) / _WORDS_PER_S)
        self._next_look = self._next_words = 0.0
        self._heard = -2 * self._speak_every_s
        self._name = f"rank {rank} on {hosts[rank]}"

    def heard(self, now: float) -> None:
        """A word has come: another rank waits."""
        self._heard = now

    def turn(self, since: Sequence[float], now: float) -> tuple[Sequence[int], str | None]:
        """Look, where a thread waits (`since` when each does). Returns to whom to send a word, and what is lost."""
        waits = bool(since) and now - min(since) >= _SPEAK_AFTER_S
        asked = self._rank == _COORDINATOR and now - self._heard < 2 * self._speak_every_s
        if not self._patience_s or now < self._next_look or not (waits or asked):
            return (), None
        self._next_look = now + _LOOK_EVERY_S
        lost = sorted(self._silence.look(now) & self._owners.keys())
        words: Sequence[int] = ()
        if now >= self._next_words:
            self._next_words, words = now + self._speak_every_s, self._audience
        return words, self._sentence(lost) if lost else None

    def _sentence(self, lost: Sequence[str]) -> str:
        who = ", ".join(f"{self._owners[address]} ({address})" for address in lost)
        return (
            f"{who} has not answered {self._name} for {self._patience_s:g} s: that node is down or the link to it is "
            "cut (HIERCOMM_LINK_TIMEOUT sets for how long to try)"
        )


def owners(addresses: Sequence[set[str]], hosts: Sequence[str]) -> dict[str, str]:
    """The host of every address, given those of every rank; addresses that several hosts have are left out."""
    found: dict[str, set[str]] = {}
    for own, host in zip(addresses, hosts, strict=True):
        for address in own:
            found.setdefault(address, set()).add(host)
    return {address: names.pop() for address, names in found.items() if len(names) == 1}


@contextlib.contextmanager
def guarded(patience_s: float) -> Iterator[None]:
    """While ranks find each other, by calls of MPI that wait for ever: end this process, in a sentence, where a
    connection it makes is not answered. The launcher then ends the others.
    """
    stop = threading.Event()
    silence = Silence(patience_s, ignore_present=True)

    def watch() -> None:
        while not stop.wait(_LOOK_EVERY_S):
            if lost := silence.look(time.monotonic()):
                sys.stderr.write(
                    f"hiercomm: {', '.join(sorted(lost))} has not answered {socket.gethostname()} for {patience_s:g} "
                    "s, so the ranks cannot be joined: that node is down, the link to it is cut, or it is no address "
                    "to use between nodes (hiercommrun --network-interface NAME)\n"
                )
                sys.stderr.flush()
                os._exit(1)

    if patience_s:
        threading.Thread(target=watch, name="hiercomm-links", daemon=True).start()
    try:
        yield
    finally:
        stop.set()
