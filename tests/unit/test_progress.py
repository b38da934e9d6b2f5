"""The progress thread: order within a key, errors where they belong, an end for every task, and no burnt core."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, final

import pytest

from hiercomm.comm.base import Done, Work
from hiercomm.errors import CommError, CommTimeout, PeerLost
from hiercomm.progress import Pending, Progress, Task, drive
from hiercomm.runtime import Runtime

WAIT_S = 20.0


@final
class Gate(Work):
    """Completed once opened; raises `error` if there is one."""

    def __init__(self) -> None:
        self.is_open = False
        self.polls = 0
        self.error: BaseException | None = None

    def is_completed(self) -> bool:
        self.polls += 1
        if self.error is not None:
            raise self.error
        return self.is_open


def step(log: list[Any], name: Any, *works: Work) -> Task:
    """A task that writes down when it starts, and ends once its works are done."""
    log.append(name)
    yield from works
    return name


@contextmanager
def running(poll: Any = lambda: False) -> Iterator[Progress]:
    progress = Progress(poll)
    try:
        yield progress
    finally:
        progress.close()


def test_tasks_of_one_key_run_one_after_the_other():
    log: list[Any] = []
    gates = [Gate() for _ in range(5)]
    with running() as progress:
        pending = [progress.submit("k", step(log, i, gate), Pending(f"task {i}")) for i, gate in enumerate(gates)]
        for gate in reversed(gates[1:]):
            gate.is_open = True  # what comes later must wait all the same
        with pytest.raises(CommTimeout, match="task 4"):
            pending[4].wait(0.02)
        assert log == [0]
        gates[0].is_open = True
        pending[4].wait(WAIT_S)
        assert log == [0, 1, 2, 3, 4]
        assert [p.result for p in pending] == log


def test_keys_run_side_by_side():
    log: list[Any] = []
    gate = Gate()
    with running() as progress:
        held = progress.submit("a", step(log, "held", gate), Pending("held"))
        for i in range(3):
            progress.submit(("b", i), step(log, i, Done(), Done()), Pending("free")).wait(WAIT_S)
        assert not held.is_completed()
        assert not held.has_ended()
        gate.is_open = True
        held.wait(WAIT_S)
    assert log == ["held", 0, 1, 2]


def test_a_task_runs_on_the_progress_thread():
    def task() -> Task:
        yield Done()
        return threading.get_native_id()

    with running() as progress:
        pending = progress.submit("k", task(), Pending("task"))
        pending.wait(WAIT_S)
        assert pending.result == progress.native_id != threading.get_native_id()


def test_an_error_is_that_of_its_own_task():
    broken = Gate()
    broken.error = PeerLost("rank 3 has ended")

    def fails() -> Task:
        yield Done()
        raise ZeroDivisionError

    with running() as progress:
        log: list[Any] = []
        first = progress.submit("k", step(log, "first", broken), Pending("first"))
        second = progress.submit("k", fails(), Pending("second"))
        third = progress.submit("k", step(log, "third", Done()), Pending("third"))
        third.wait(WAIT_S)
        for _ in range(2):  # each time one asks
            with pytest.raises(PeerLost, match="rank 3"):
                first.wait(WAIT_S)
            with pytest.raises(PeerLost):
                first.is_completed()
        with pytest.raises(ZeroDivisionError):
            second.wait(WAIT_S)
        assert first.has_ended()
        assert third.result == "third"


def test_close_fails_what_has_not_ended_and_ends_the_thread():
    progress = Progress(lambda: False)
    thread = next(t for t in threading.enumerate() if t.native_id == progress.native_id)
    ended = progress.submit("k", step([], 1, Done()), Pending("ended"))
    ended.wait(WAIT_S)
    pending = [progress.submit(key, step([], i, Gate()), Pending("held")) for i, key in enumerate("kkl")]
    progress.close()
    assert not thread.is_alive()
    pending.append(progress.submit("k", step([], 9, Done()), Pending("too late")))
    for p in pending:
        with pytest.raises(CommError, match="shut down"):
            p.wait(WAIT_S)
    ended.wait(WAIT_S)


def test_an_error_of_poll_fails_everything():
    broken = threading.Event()

    def poll() -> bool:
        if broken.is_set():
            raise ConnectionResetError("the network is gone")
        return False

    with running(poll) as progress:
        pending = [progress.submit(key, step([], i, Gate()), Pending("held")) for i, key in enumerate("aab")]
        broken.set()
        for p in pending:
            with pytest.raises(ConnectionResetError):
                p.wait(WAIT_S)
        with pytest.raises(ConnectionResetError, match="the network is gone"):
            progress.submit("c", step([], 9, Done()), Pending("later")).wait(WAIT_S)


def test_no_task_is_forgotten_when_the_thread_ends_meanwhile():
    """A task that is submitted while the thread ends, for whatever reason, ends as well."""
    for attempt in range(20):
        broken = threading.Event()

        def poll(broken: threading.Event = broken) -> bool:
            if broken.is_set():
                raise ConnectionResetError
            return False

        progress = Progress(poll)
        begun = threading.Event()
        pending: list[Pending] = []

        def submit(progress: Progress = progress, begun: threading.Event = begun, out: Any = pending) -> None:
            for i in range(400):
                out.append(progress.submit(i % 3, step([], i, Gate()), Pending(f"task {i}")))
                begun.set()

        thread = threading.Thread(target=submit)
        thread.start()
        begun.wait(WAIT_S)
        if attempt % 2:
            broken.set()
        else:
            progress.close()
        thread.join(WAIT_S)
        for p in pending:
            with pytest.raises((CommError, ConnectionResetError)):
                p.wait(5)
            assert p.has_ended(), f"attempt {attempt}: {p} never ends"
        progress.close()


def test_poll_comes_soon_after_a_wake():
    """Far sooner than any sleep would bring it, were it not woken: there is none that long."""
    polled = threading.Event()
    with running(lambda: bool(polled.set())) as progress:
        for _ in range(20):
            polled.clear()
            progress.wake()
            assert polled.wait(WAIT_S)


def cpu_share(progress: Progress, seconds: float) -> float:
    """The share of a core that the progress thread takes."""
    thread = next(t for t in threading.enumerate() if t.native_id == progress.native_id)
    clock = time.pthread_getcpuclockid(thread.ident or 0)
    begin = time.clock_gettime(clock)
    time.sleep(seconds)
    return (time.clock_gettime(clock) - begin) / seconds


def test_an_idle_thread_leaves_the_core_alone():
    with running() as progress:
        progress.submit("k", step([], 1, Done()), Pending("task")).wait(WAIT_S)
        assert cpu_share(progress, 1.0) < 0.05


def test_a_waiting_thread_sleeps_between_its_polls():
    with running() as progress:
        gate = Gate()
        progress.submit("k", step([], 1, gate), Pending("held"))
        assert cpu_share(progress, 0.5) < 0.5
        assert gate.polls > 50
        gate.is_open = True


def test_drive_runs_a_task_on_the_calling_thread():
    log: list[Any] = []
    assert drive(step(log, "x", Done(), Done())) == "x"
    broken = Gate()
    broken.error = PeerLost("gone")
    with pytest.raises(PeerLost):
        drive(step(log, "y", broken))


def test_the_first_end_counts():
    pending = Pending("x")
    pending.finish(1)
    pending.finish(error=CommError("late"))
    pending.wait()
    assert pending.result == 1
    assert str(pending) == "x"


# ---- operations of the user, which have a Pending of their own -----------------------------------------


def spawned(progress: Progress, task: Task) -> Pending:
    """As the runtime starts an operation once all ranks are ready for it."""
    pending = Pending("allreduce 'x'")
    Runtime._spawn(SimpleNamespace(_progress=progress), 1, task, pending)  # type: ignore[arg-type]
    return pending


def test_an_operation_fails_with_the_error_of_what_it_waits_for():
    broken = Gate()
    broken.error = PeerLost("rank 3 has ended")
    with running() as progress, pytest.raises(PeerLost, match="rank 3"):
        spawned(progress, step([], "x", broken)).wait(2)


def test_an_operation_fails_when_the_progress_thread_does():
    broken = threading.Event()

    def poll() -> bool:
        if broken.is_set():
            raise ConnectionResetError("the network is gone")
        return False

    with running(poll) as progress:
        pending = spawned(progress, step([], "x", Gate()))
        broken.set()
        with pytest.raises(ConnectionResetError):
            pending.wait(2)


def test_an_operation_fails_when_the_progress_thread_is_closed():
    with running() as progress:
        pending = spawned(progress, step([], "x", Gate()))
    with pytest.raises(CommError, match="shut down"):
        pending.wait(2)


def test_drain_lets_tasks_end_and_gives_up_on_those_that_do_not_move():
    progress = Progress(lambda: False)

    def steps(count):
        for _ in range(count):
            time.sleep(0.01)
            yield Done()
        return count

    @final
    class Never(Work):
        def is_completed(self) -> bool:
            return False

    def stuck():
        yield Never()

    ends = progress.submit("a", steps(40), Pending("many steps"))
    progress.drain(10.0)
    assert ends.has_ended()
    progress.submit("b", stuck(), Pending("stuck"))
    begin = time.monotonic()
    progress.drain(0.2)
    assert time.monotonic() - begin >= 0.2
    progress.close()
