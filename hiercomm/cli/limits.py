"""Ends for what may hang for ever inside MPI: this process says so in a sentence and ends."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hiercomm.cli.facts import Facts

START_S = 60.0  # until MPI has started on all ranks


@contextmanager
def starting(facts: Facts) -> Iterator[None]:
    """End this process where MPI does not start in time. A child does it: no thread runs while mpi4py starts MPI."""
    first = facts.claimed_rank in (None, 0)
    seconds = START_S if first else START_S + 5.0  # one such line is enough
    why = f"MPI has not started within {seconds:g} s: some rank has not come so far ({facts.library})"
    words = [sys.executable, "-S", "-c", _WATCH, str(seconds), str(os.getpid()), sentence(facts, why)]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as child:  # ends with its input
        yield
        assert child.stdin is not None
        child.stdin.close()


_WATCH = """
import os, select, signal, sys
seconds, pid, sentence = float(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
if not select.select([0], [], [], seconds)[0]:
    print(sentence, file=sys.stderr, flush=True)
    os.kill(pid, signal.SIGKILL)
"""


@contextmanager
def limit(seconds: float, otherwise: Callable[[], None]) -> Iterator[None]:
    """Call `otherwise`, which ends the process, where the block takes longer: it may be inside MPI for ever."""
    timer = threading.Timer(seconds, otherwise)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def sentence(facts: Facts, why: str) -> str:
    """What a rank other than the first says: who it is, and why it ends."""
    rank = "a rank" if facts.claimed_rank is None else f"rank {facts.claimed_rank}"
    return f"hiercomm doctor: {rank} on {facts.host}: {why}"


def leave(facts: Facts, why: str, grace_s: float = 0.0) -> None:
    """Say why, and end this process after `grace_s` seconds."""
    print(sentence(facts, why), file=sys.stderr, flush=True)
    time.sleep(grace_s)
    os._exit(1)
