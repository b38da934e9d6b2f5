"""Ranks that are late, stopped or stuck are named on stderr; those that are only slow are left alone."""

from __future__ import annotations

import re
import socket

import pytest
from job import Start

HOST = socket.gethostname()
AGE = re.compile(r"since \d\d:\d\d:\d\d \((\d+\.\d) s\)")


def warnings(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("hiercomm: waiting ")]


def ages(lines: list[str]) -> list[float]:
    found = [AGE.search(line) for line in lines]
    return [float(match[1]) for match in found if match is not None]


@pytest.mark.parametrize("ranks_per_node", [1, 2, 3])
def test_a_late_rank_is_named_once_each_time_the_wait_has_doubled(start: Start, ranks_per_node: int) -> None:
    ended = start(
        3,
        """
        def evaluate():
            time.sleep(4.5)

        hvd.init()
        model, optimizer = model_and_optimizer()
        for step in range(3):
            if step == 1 and hvd.rank() == 2:
                evaluate()
            train(model, optimizer, 1)
        """,
        ranks_per_node=ranks_per_node,
        env={"HIERCOMM_STALL_WARN": "1"},
    ).end()
    assert ended.status == 0, ended.output
    lines = [line for line in warnings(ended.output) if "in step 1" in line]
    for line in lines:
        assert f"waiting for rank 2 on {HOST} (at job" in line, ended.output
        assert " in evaluate)" in line
        assert "the exchange of bucket 0 in step 1 of SGD" in line
        assert "rank 1" not in line.partition(" wait")[0]
    # One line for each of 1, 2 and 4 seconds; on a loaded machine one may come late, but none comes twice.
    levels = [int(age).bit_length() for age in ages(lines)]
    assert len(levels) >= 2, ended.output
    assert levels == sorted(set(levels)), ended.output
    assert re.search(
        rf"the wait for rank 2 on {HOST} in the exchange of bucket 0 in step 1 .* ended after", ended.output
    )


def test_a_rank_that_evaluates_alone_is_no_error(start: Start) -> None:
    ended = start(
        2,
        """
        hvd.init()
        model, optimizer = model_and_optimizer()
        for step in range(20):
            train(model, optimizer, 1)
            if step % 5 == 4 and hvd.rank() == 0:
                time.sleep(3.0)
        weights = hvd.allgather_object([p.tolist() for p in model.parameters()])
        assert weights[0] == weights[1]
        print("the same", flush=True)
        """,
        ranks_per_node=1,
        env={"HIERCOMM_STALL_WARN": "1"},
    ).end()
    assert ended.status == 0, ended.output
    assert ended.output.count("the same") == 2
    lines = warnings(ended.output)
    assert len(lines) >= 4, ended.output
    assert all(f"waiting for rank 0 on {HOST}" in line for line in lines), ended.output


def test_all_ranks_give_up_with_one_sentence(start: Start) -> None:
    ended = start(
        3,
        """
        hvd.init()
        model, optimizer = model_and_optimizer()
        train(model, optimizer, 2)
        if hvd.rank() == 1:
            time.sleep(600)
        train(model, optimizer, 1)
        """,
        ranks_per_node=2,
        env={"HIERCOMM_STALL_WARN": "1", "HIERCOMM_STALL_ABORT": "3"},
    ).end()
    assert ended.status != 0
    assert ended.seconds < 60.0
    sentences = re.findall(r"CommTimeout: (gave up .*)", ended.output)
    assert len(sentences) == 2, ended.output
    assert len(set(sentences)) == 1
    assert f"waiting for rank 1 on {HOST} (at job" in sentences[0]
    assert "the exchange of bucket 0 in step 2 of SGD" in sentences[0]
    assert "HIERCOMM_STALL_ABORT=3" in sentences[0]


def test_a_caught_end_is_the_same_for_the_late_rank(start: Start) -> None:
    """Whoever catches it may go on alone and leave; every later call says the same."""
    ended = start(
        2,
        """
        hvd.init()
        if hvd.rank() == 1:
            time.sleep(5.0)
        for name in ("first", "second"):
            try:
                hvd.allreduce(torch.ones(1), name=name)
            except hvd.HorovodInternalError as error:
                print(f"rank {hvd.rank()}: {error}", flush=True)
        """,
        env={"HIERCOMM_STALL_WARN": "0", "HIERCOMM_STALL_ABORT": "2"},
    ).end()
    assert ended.status == 0, ended.output
    assert not warnings(ended.output)
    said = re.findall(r"^rank (\d): (gave up waiting for rank 1 .*)$", ended.output, re.MULTILINE)
    assert sorted(rank for rank, _ in said) == ["0", "0", "1", "1"], ended.output
    assert len({sentence for _, sentence in said}) == 1


def test_a_rank_whose_thread_is_stuck_inside_mpi_shows_its_stacks(start: Start) -> None:
    """The progress thread of rank 1 waits in MPI_Recv for a message that comes five seconds later."""
    ended = start(
        2,
        """
        import numpy
        from mpi4py import MPI
        from hiercomm import runtime
        from hiercomm.progress import Pending
        hvd.init()
        model, optimizer = model_and_optimizer()
        train(model, optimizer, 1)
        if hvd.rank() == 1:
            def stuck():
                MPI.COMM_WORLD.Recv(numpy.empty(1), 0, 77)
                yield
            runtime.current()._progress.submit("stuck", stuck(), Pending("stuck"))
        else:
            time.sleep(5.0)
            MPI.COMM_WORLD.Send(numpy.ones(1), 1, 77)
        train(model, optimizer, 3)
        time.sleep(3.0)  # it looks eight times a second
        """,
        env={"HIERCOMM_STALL_WARN": "1"},
    ).end()
    assert ended.status == 0, ended.output
    head = re.search(rf"rank 1 on {HOST} cannot send or receive since \S+ \((\d+\.\d) s\): .*stacks", ended.output)
    assert head is not None, ended.output
    assert float(head[1]) <= 2.5
    assert "thread hiercomm-progress:" in ended.output
    assert "MPI.COMM_WORLD.Recv(numpy.empty(1), 0, 77)" in ended.output
    assert "thread MainThread:" in ended.output
    assert f"rank 1 on {HOST} moves messages again" in ended.output
    assert f"rank 0 on {HOST} cannot" not in ended.output


def test_a_rank_that_is_stuck_for_good_ends_the_job_where_that_is_asked_for(start: Start) -> None:
    """Its own thread can abort nothing any more; nobody waits for it here, so no other rank would."""
    ended = start(
        2,
        """
        import numpy
        from mpi4py import MPI
        from hiercomm import runtime
        from hiercomm.progress import Pending
        hvd.init()
        if hvd.rank() == 1:
            def stuck():
                MPI.COMM_WORLD.Recv(numpy.empty(1), 0, 77)
                yield
            runtime.current()._progress.submit("stuck", stuck(), Pending("stuck"))
        time.sleep(600)
        """,
        env={"HIERCOMM_STALL_WARN": "0", "HIERCOMM_STALL_ABORT": "2"},
    ).end()
    assert ended.status != 0
    assert re.search(rf"gave up: rank 1 on {HOST} cannot send or receive since .*STALL_ABORT=2", ended.output)
    assert ended.seconds < 60.0


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_rank_that_is_stopped_is_named_and_the_job_can_end(start: Start, stopped: int) -> None:
    """Rank 0 as well, which knows who is late: the others wait a little longer before they give up on it."""
    ended = start(
        2,
        f"""
        hvd.init()
        model, optimizer = model_and_optimizer()
        train(model, optimizer, 1)
        if hvd.rank() == {stopped}:
            os.kill(os.getpid(), signal.SIGSTOP)
        train(model, optimizer, 1)
        """,
        ranks_per_node=1,
        env={"HIERCOMM_STALL_WARN": "1", "HIERCOMM_STALL_ABORT": "5"},
    ).end()
    assert ended.status != 0
    assert f"waiting for rank {stopped} on {HOST} (does not answer)" in ended.output, ended.output
    assert "CommTimeout" in ended.output
    assert ended.seconds < 90.0


def test_ranks_that_compute_send_nothing_and_warn_of_nobody(start: Start) -> None:
    """Whatever the limits: messages are counted where they go to MPI."""
    ended = start(
        3,
        """
        from hiercomm.comm import mpi
        sent = []

        def counted(call):
            def count(*args, **kwargs):
                sent.append(call.__qualname__)
                return call(*args, **kwargs)
            return count

        mpi._MpiMailbox.post = counted(mpi._MpiMailbox.post)
        mpi._MpiCommunicator.send = counted(mpi._MpiCommunicator.send)
        hvd.init()
        model, optimizer = model_and_optimizer()
        train(model, optimizer, 3)
        hvd.barrier()
        assert sent
        time.sleep(1.0)
        before = len(sent)
        time.sleep(6.0)
        assert len(sent) == before, sent[before:]
        print("quiet", flush=True)
        time.sleep(1.0)  # the others count, too
        hvd.barrier()
        assert len(sent) > before
        """,
        ranks_per_node=2,
        env={"HIERCOMM_STALL_WARN": "2"},
    ).end()
    assert ended.status == 0, ended.output
    assert ended.output.count("quiet") == 3
    assert not warnings(ended.output), ended.output
