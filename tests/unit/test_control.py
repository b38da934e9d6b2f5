"""The control plane between ranks as threads: any order of submission, a sentence instead of a hang, an end for all."""

from __future__ import annotations

import contextlib
import functools
import random
import threading
import time
from collections.abc import Callable
from typing import Any, final

import pytest

from hiercomm import control as module
from hiercomm.comm.base import Mailbox
from hiercomm.comm.loopback import Loopback
from hiercomm.control import Control
from hiercomm.errors import CommError, CommTimeout, HierCommError, PeerLost, RankMismatch
from hiercomm.negotiate import Negotiator, Request, Response, Waiting
from hiercomm.progress import Pending, Progress

WAIT_S = 20.0


@pytest.fixture
def quick(monkeypatch):
    """A job counts as stuck after 0.2 s instead of 2.5 s."""
    monkeypatch.setattr(module, "_BLOCKED_AFTER_S", 0.1)
    monkeypatch.setattr(module, "_SLICE_S", 0.02)
    monkeypatch.setattr(module, "Negotiator", functools.partial(Negotiator, grace_s=0.1))


@final
class Operation:
    """Ends with the response, or with the error."""

    def __init__(self, log: list[Response] | None = None) -> None:
        self.pending = Pending("operation")
        self._log = log

    def run(self, response: Response) -> None:
        if self._log is not None:
            self._log.append(response)
        self.pending.finish(response)

    def fail(self, error: HierCommError) -> None:
        self.pending.finish(error=error)


@final
class Rank:
    """One rank: its control plane and the thread that polls it."""

    def __init__(self, mailbox: Mailbox, rank: int, size: int) -> None:
        self.rank = rank
        self.control = Control(mailbox, rank, size, lambda: self.progress.wake(), bystanders=set)
        self.progress = Progress(self.control.poll)
        self.log: list[Response] = []

    def submit(self, name: str, kind: str = "allreduce", **fields: Any) -> Callable[[], Response]:
        """Begin an operation; the function returned waits for it."""
        request, operation = Request(kind, name, **fields), Operation(self.log)
        self.control.submit(request, operation)

        def wait() -> Response:
            self.control.wait(operation.pending, Waiting(str(request), key=request.key), WAIT_S)
            return operation.pending.result  # type: ignore[no-any-return]

        return wait

    def begin_exchange(self) -> int:
        """This rank begins its next exchange on channel 0; its number, from 1."""
        return self.control.count(0)

    def wait_exchange(self, number: int, pending: Pending | None = None, timeout_s: float = WAIT_S) -> None:
        """Wait for an exchange of channel 0; it never ends where there is no `pending` that does."""
        waiting = Waiting(f"exchange {number}", channel=0, number=number)
        self.control.wait(pending or Pending("bucket 7"), waiting, timeout_s)


def run(size: int, body: Callable[[Rank], Any], *, leave: bool = True, max_delay_s: float = 0.002) -> list[Any]:
    """`body` on every rank; then all leave, unless they have."""
    world = Loopback(size, max_delay_s=max_delay_s)

    def start(number: int) -> Any:
        rank = Rank(world.mailbox(number), number, size)
        try:
            return body(rank)
        finally:
            if leave:
                rank.control.leave()
            rank.progress.close()

    return world.run(start)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_any_order_of_submission(size):
    """Everything is answered once, in one order that is the same on all ranks."""
    names = [str(i) for i in range(30)]

    def body(rank: Rank) -> list[Response]:
        order = random.Random(rank.rank)
        for _ in range(2):  # names can be used again
            waits = [rank.submit(name, "allgather", shape=(rank.rank, 1)) for name in order.sample(names, len(names))]
            for wait in order.sample(waits, len(waits)):
                assert wait().rows == tuple(range(size))
        return rank.log

    logs = run(size, body)
    assert all(log == logs[0] for log in logs)
    assert [response.sequence for response in logs[0]] == list(range(1, 61))
    assert sorted(response.key[1] for response in logs[0]) == sorted(names * 2)


def test_several_threads_of_a_rank_submit():
    def body(rank: Rank) -> None:
        errors: list[BaseException] = []

        def submit(thread: int) -> None:
            try:
                for i in range(20):
                    rank.submit(f"{thread}.{i}")()
            except BaseException as error:  # looked at below
                errors.append(error)

        threads = [threading.Thread(target=submit, args=(i,)) for i in range(3)]
        random.Random(rank.rank).shuffle(threads)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert not errors

    run(2, body)


def test_a_name_in_use_is_refused_and_free_again_afterwards():
    def body(rank: Rank) -> None:
        if rank.rank == 0:
            wait = rank.submit("x")
            with pytest.raises(ValueError, match=r"same name as another tensor.*'x'"):
                rank.submit("x")
            rank.submit("go")()  # only now rank 1 submits its part
            wait()
        else:
            rank.submit("go")()
            rank.submit("x")()
        rank.submit("x")()

    run(2, body)


def test_a_mismatch_is_an_error_on_all_ranks_and_the_job_goes_on():
    def body(rank: Rank) -> str:
        with pytest.raises(RankMismatch) as caught:
            rank.submit("x", dtype="float32" if rank.rank else "int64")()
        rank.submit("y")()
        return str(caught.value)

    messages = run(3, body)
    assert len(set(messages)) == 1
    assert all(part in messages[0] for part in ("'x'", "rank 0", "rank 1", "int64", "float32"))


# ---- nobody can go on ---------------------------------------------------------------------------------


def test_ranks_in_different_operations_get_a_sentence():
    """With the real patience; BUGREPORTS item 2 allows 5 s."""

    def body(rank: Rank) -> str:
        with pytest.raises(RankMismatch) as caught:
            rank.submit("ab"[rank.rank], shape=(4 + rank.rank,), dtype="float32")()
        rank.submit("afterwards")()
        return str(caught.value)

    begin = time.monotonic()
    messages = run(2, body)
    assert time.monotonic() - begin < 15
    assert messages[0] == messages[1]
    for part in ("no rank can go on", "rank 0", "'a'", "[4]", "rank 1", "'b'", "[5]"):
        assert part in messages[0]


@pytest.mark.usefixtures("quick")
def test_a_step_on_one_rank_and_an_operation_on_the_other_get_a_sentence():
    def body(rank: Rank) -> str:
        number = rank.begin_exchange() if rank.rank == 0 else 0
        wait = rank.submit("loss") if rank.rank == 1 else functools.partial(rank.wait_exchange, number)
        with pytest.raises(RankMismatch) as caught:
            wait()
        return str(caught.value)

    messages = run(2, body)
    assert messages[0] == messages[1]
    assert "rank 0 waits in exchange 1; rank 1 waits in allreduce 'loss'" in messages[0]


@pytest.mark.usefixtures("quick")
def test_a_rank_that_computes_is_not_stuck():
    """However long the others wait for it."""

    def body(rank: Rank) -> None:
        rank.submit("first")()
        if rank.rank == 1:
            time.sleep(0.6)
        rank.submit("second")()

    run(2, body)


@pytest.mark.usefixtures("quick")
def test_a_rank_of_which_one_thread_computes_is_not_stuck():
    """Rank 0's main thread and rank 1 wait for each other's operations; rank 0's second thread can help."""

    def body(rank: Rank) -> None:
        if rank.rank == 1:
            rank.submit("second thread")()
            rank.submit("main")()
            return
        is_known, may_end = threading.Event(), threading.Event()

        def compute() -> None:
            rank.submit("known")
            is_known.set()
            may_end.wait(WAIT_S)
            rank.submit("second thread")()

        thread = threading.Thread(target=compute)
        thread.start()
        is_known.wait(WAIT_S)
        timer = threading.Timer(0.6, may_end.set)
        timer.start()
        rank.submit("main")()
        thread.join(WAIT_S)
        timer.join()

    run(2, body)


@pytest.mark.usefixtures("quick")
def test_an_exchange_that_all_have_started_is_waited_for():
    """It may take its time: the network is slow."""

    def body(rank: Rank) -> None:
        rank.begin_exchange()
        pending = Pending("bucket 7")
        timer = threading.Timer(0.8, pending.finish)
        timer.start()
        rank.wait_exchange(1, pending)
        timer.join()

    run(2, body)


@pytest.mark.usefixtures("quick")
def test_a_wait_has_its_time_limit():
    def body(rank: Rank) -> None:
        rank.begin_exchange()
        with pytest.raises(CommTimeout, match=r"exchange 1 did not complete within 0\.4 s: bucket 7"):
            rank.wait_exchange(1, timeout_s=0.4)

    run(2, body)


# ---- leaving ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("quick")
def test_leave_waits_for_all():
    has_left = [threading.Event() for _ in range(3)]

    def body(rank: Rank) -> None:
        if rank.rank == 1:
            while True:  # the error says who has left: wait until it is both others
                with pytest.raises(PeerLost, match="has shut down") as caught:
                    rank.submit("x")()
                if "rank 0, 2" in str(caught.value):
                    break
            assert not has_left[0].wait(0.2)
            assert not has_left[2].is_set()
        rank.control.leave()
        has_left[rank.rank].set()

    run(3, body, leave=False)
    assert all(event.is_set() for event in has_left)


def test_a_rank_that_leaves_fails_what_waits_for_it():
    def body(rank: Rank) -> None:
        if rank.rank != 1:
            with pytest.raises(PeerLost, match="rank 1 has shut down"):
                rank.submit("x")()

    run(3, body)


@pytest.mark.usefixtures("quick")
def test_exchanges_that_a_rank_has_left_behind_end_and_later_ones_fail():
    def body(rank: Rank) -> None:
        first = rank.begin_exchange()
        if rank.rank == 1:
            return
        pending = Pending("bucket 0")
        timer = threading.Timer(0.3, pending.finish)
        timer.start()
        rank.wait_exchange(first, pending)
        timer.join()
        with pytest.raises(PeerLost, match="exchange 2 cannot complete: rank 1 has shut down"):
            rank.wait_exchange(rank.begin_exchange())

    run(2, body)


@final
class Broken(Mailbox):
    """A mailbox whose network goes away."""

    def __init__(self) -> None:
        self.is_broken = threading.Event()

    def post(self, dest: int, message: bytes) -> None:
        pass

    def poll(self) -> list[tuple[int, bytes]]:
        if self.is_broken.is_set():
            raise ConnectionResetError("the network is gone")
        return []

    def close(self) -> None:
        pass


def test_leave_ends_though_the_network_is_gone():
    """Nobody can say any more that all have left: a script that caught the error must end all the same."""
    mailbox = Broken()
    rank = Rank(mailbox, 1, 2)
    held = rank.progress.submit("k", iter([Pending("never")]), Pending("held"))  # type: ignore[arg-type]
    mailbox.is_broken.set()
    with pytest.raises(ConnectionResetError):
        held.wait(WAIT_S)
    thread = threading.Thread(target=_leave, args=(rank.control,), daemon=True)
    thread.start()
    thread.join(5)
    assert not thread.is_alive(), "leave() waits for ever"


def test_operations_fail_once_the_network_is_gone():
    """What is under way, and what is submitted after the error was caught."""
    mailbox = Broken()
    rank = Rank(mailbox, 1, 2)
    wait = rank.submit("before")
    mailbox.is_broken.set()
    with pytest.raises(CommError, match="network is gone"):
        wait()
    late = Operation()
    with contextlib.suppress(CommError):  # at once, or from its wait
        rank.control.submit(Request("allreduce", "after"), late)
        with pytest.raises(CommError):
            late.pending.wait(2)
        assert late.pending.has_ended(), "an operation that never ends"
    rank.progress.close()


def _leave(control: Control) -> None:
    try:
        control.leave()
    except Exception:  # a sentence is as good as a return
        return


@final
class Counting(Mailbox):
    """Counts what is sent."""

    def __init__(self, inner: Mailbox) -> None:
        self._inner = inner
        self.posts = 0

    def post(self, dest: int, message: bytes) -> None:
        self.posts += 1
        self._inner.post(dest, message)

    def poll(self) -> list[tuple[int, bytes]]:
        return self._inner.poll()

    def close(self) -> None:
        self._inner.close()


def test_nothing_is_sent_while_nothing_is_submitted():
    world = Loopback(2)
    mailboxes = [Counting(world.mailbox(rank)) for rank in range(2)]
    ranks = [Rank(mailbox, number, 2) for number, mailbox in enumerate(mailboxes)]
    for wait in [rank.submit("x") for rank in ranks]:
        wait()
    assert sum(mailbox.posts for mailbox in mailboxes) == 2  # a request and an answer
    time.sleep(0.2)
    assert sum(mailbox.posts for mailbox in mailboxes) == 2
    leaving = [threading.Thread(target=rank.control.leave) for rank in ranks]
    for thread in leaving:
        thread.start()
    for thread in leaving:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    for rank in ranks:
        rank.progress.close()
