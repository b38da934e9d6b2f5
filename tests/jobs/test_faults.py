"""Whatever goes wrong on one rank ends the whole job soon, with a sentence, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from job import Ended, Start


def fails(ended: Ended, *texts: str, within_s: float = 60.0) -> None:
    assert ended.status != 0, ended.output
    for text in texts:
        assert text in ended.output, ended.output
    assert ended.seconds < within_s, ended.output


@pytest.mark.parametrize("where", ["in the loop", "before init", "in an exchange"])
def test_an_uncaught_exception_on_one_rank_ends_the_job(start: Start, where: str) -> None:
    ended = start(
        3,
        f"""
        where = {where!r}
        rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
        if where == "before init" and rank == 1:
            raise ValueError("broken at the start")
        hvd.init()
        model, optimizer = model_and_optimizer()
        try:
            for step in range(1000000):
                train(model, optimizer, 1)
                if step == 3 and rank == 1:
                    if where == "in an exchange":
                        model(torch.ones(2, 8)).sum().backward()
                    raise ValueError("broken in the loop")
        finally:
            print(f"finally on rank {{rank}}", flush=True)
        """,
        ranks_per_node=2,
    ).end()
    fails(ended, "Traceback (most recent call last)", "ValueError: broken")
    if where != "before init":
        assert "uncaught exception on rank 1 on" in ended.output
        assert "finally on rank 1" in ended.output


@pytest.mark.parametrize("status", [0, 3])
def test_a_rank_that_leaves_early_is_named_to_those_who_need_it(start: Start, status: int) -> None:
    for what in ("hvd.allreduce(torch.ones(2), name='loss')", "train(model, optimizer, 2)"):
        ended = start(
            2,
            f"""
            hvd.init()
            model, optimizer = model_and_optimizer()
            train(model, optimizer, 2)
            if hvd.rank() == 1:
                sys.exit({status})
            time.sleep(1.0)
            {what}
            """,
            ranks_per_node=1,
        ).end()
        if status == 0:  # with another status Open MPI may end the job before rank 0 looks
            fails(ended, "PeerLost", "rank 1 has shut down hiercomm")
        assert ended.status != 0


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSEGV], ids=lambda s: s.name)
def test_a_killed_rank_ends_the_job(start: Start, signal_number: int) -> None:
    ended = start(
        3,
        f"""
        hvd.init()
        model, optimizer = model_and_optimizer()
        for step in range(1000000):
            train(model, optimizer, 1)
            if step == 5 and hvd.rank() == 2:
                os.kill(os.getpid(), {int(signal_number)})
        """,
    ).end()
    fails(ended)


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM], ids=lambda s: s.name)
@pytest.mark.parametrize("busy", ["computing", "waiting"])
def test_interrupting_the_launcher_ends_every_rank(start: Start, signal_number: int, busy: str) -> None:
    job = start(
        2,
        f"""
        hvd.init()
        print("ready", flush=True)
        if {busy == "waiting"} and hvd.rank() == 0:
            hvd.barrier()
        while True:
            torch.ones(100, 100) @ torch.ones(100, 100)
        """,
    )
    assert job.process.stdout is not None
    seen = b""
    while seen.count(b"ready") < 2:
        chunk = os.read(job.process.stdout.fileno(), 4096)
        assert chunk, seen
        seen += chunk
    job.process.send_signal(signal_number)
    begin = time.monotonic()
    ended = job.end(30.0)
    assert ended.status != 0
    assert time.monotonic() - begin < 25.0


def test_ranks_with_different_work_each_say_what_all_were_doing(start: Start) -> None:
    ended = start(
        2,
        """
        hvd.init()
        if hvd.rank() == 0:
            hvd.allreduce(torch.ones(4), name="a")
        else:
            hvd.allreduce(torch.ones(5), name="b")
        """,
    ).end()
    fails(ended)
    for rank in (0, 1):
        assert f"uncaught exception on rank {rank}" in ended.output
    assert ended.output.count("rank 0 waits in allreduce 'a' (shape [4], float32)") >= 2
    assert ended.output.count("rank 1 waits in allreduce 'b' (shape [5], float32)") >= 2


@pytest.mark.parametrize(
    ("env", "texts"),
    [
        ("HIERCOMM_BUCKET_BYTES={}", ("in bucket_bytes", "1 on rank 0", "2 on rank 1")),
        ("HIERCOMM_MODE=bsp{}", ("in mode", "'bsp1' on rank 0", "'bsp2' on rank 1")),
    ],
)
def test_ranks_with_different_options_are_told_which(start: Start, env: str, texts: tuple[str, ...]) -> None:
    name, value = env.split("=")
    ended = start(
        2,
        f"""
        rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
        os.environ[{name!r}] = {value!r}.format(rank + 1)
        hvd.init()
        """,
    ).end()
    fails(ended, "ConfigMismatch", *texts)
    assert ended.output.count("ConfigMismatch") >= 2


def test_a_node_name_on_some_ranks_only(start: Start) -> None:
    ended = start(
        2,
        """
        if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
            os.environ["HIERCOMM_NODE"] = "left"
        hvd.init()
        """,
    ).end()
    fails(ended, "HIERCOMM_NODE is set on some ranks but not on rank 0")


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ({"HIERCOMM_BUKET_BYTES": "1"}, "the nearest known one is HIERCOMM_BUCKET_BYTES"),
        ({"HIERCOMM_BUCKET_BYTES": "many"}, "HIERCOMM_BUCKET_BYTES=many"),
        ({"HIERCOMM_LOCAL": "ipc"}, "local='ipc' (HIERCOMM_LOCAL) cannot be used"),
        ({"HIERCOMM_LOCAL": "nccl"}, "local=nccl needs"),
        ({"HIERCOMM_MODE": "async"}, "unknown mode 'async'; known modes: as_sgd, bsp"),
        ({"HIERCOMM_MODE": "bsp:x=1"}, "mode 'bsp' has no option 'x=1'"),
    ],
    ids=str,
)
def test_bad_options(start: Start, env: dict[str, str], text: str) -> None:
    fails(start(2, "hvd.init(); model_and_optimizer()", env=env).end(), text)


def test_a_rank_that_never_comes_is_an_error_after_the_timeout(start: Start) -> None:
    ended = start(
        2,
        """
        hvd.init()
        if hvd.rank() == 1:
            time.sleep(60)
        hvd.allreduce(torch.ones(2), name="late")
        """,
        env={"HIERCOMM_STALL_ABORT": "2"},
    ).end()
    fails(ended, "CommTimeout: gave up waiting for rank 1", "allreduce 'late' (shape [2], float32)", within_s=45.0)


def test_calls_at_the_wrong_time_raise_and_do_not_hang(start: Start) -> None:
    ended = start(
        2,
        """
        def refused(call, error=Exception):
            try:
                call()
            except error as e:
                assert "use hvd.init()" in str(e), e
                return
            raise AssertionError("no error")

        x = torch.ones(2)
        model = torch.nn.Linear(2, 2)
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        calls = [hvd.rank, hvd.size, hvd.local_rank, hvd.cross_size, hvd.barrier, lambda: hvd.allreduce(x),
                 lambda: hvd.allgather(x), lambda: hvd.broadcast(x, 0), lambda: hvd.broadcast_object(1),
                 lambda: hvd.allgather_object(1), lambda: hvd.broadcast_parameters(model.state_dict(), 0),
                 lambda: hvd.broadcast_optimizer_state(plain, 0), lambda: hvd.DistributedOptimizer(plain)]
        assert not hvd.is_initialized()
        for call in calls:
            refused(call, ValueError)
        hvd.shutdown()
        for _ in range(10):
            hvd.init()
            hvd.init()
            model, optimizer = model_and_optimizer()
            train(model, optimizer, 2)
            model(torch.ones(2, 8)).sum().backward()
            hvd.shutdown()
            hvd.shutdown()
        for call in [*calls, optimizer.step]:
            refused(call, ValueError)
        print("well", flush=True)
        """,
        ranks_per_node=1,
    ).end()
    assert ended.status == 0, ended.output
    assert ended.output.count("well") == 2, ended.output


def test_nothing_stays_in_shared_memory(start: Start) -> None:
    """Even where a rank is killed while it trains."""
    ended = start(
        2,
        """
        hvd.init()
        model, optimizer = model_and_optimizer()
        train(model, optimizer, 3)
        print("pid", os.getpid(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
    ).end()
    pids = [line.split()[1] for line in ended.output.splitlines() if line.startswith("pid ")]
    assert pids
    assert not [path for pid in pids for path in Path("/dev/shm").glob(f"hiercomm-{pid}-*")]


def test_an_error_in_init_on_one_rank_ends_the_job(start: Start) -> None:
    """Also where the script has started MPI itself, whose end would wait for all ranks."""
    ended = start(
        2,
        """
        from mpi4py import MPI
        if MPI.COMM_WORLD.rank == 1:
            os.environ["HIERCOMM_BUCKET_BYTES"] = "many"
        hvd.init()
        """,
    ).end()
    fails(ended, "uncaught exception on rank 1", "HIERCOMM_BUCKET_BYTES=many")


def test_a_forked_child_cannot_communicate(start: Start) -> None:
    ended = start(
        2,
        """
        hvd.init()
        child = os.fork()
        if child == 0:
            try:
                hvd.allreduce(torch.ones(1))
            except RuntimeError as error:
                os._exit(7 if "was forked from a rank" in str(error) else 8)
            os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert hvd.allreduce(torch.ones(1)).item() == 1.0
        """,
    ).end()
    assert ended.status == 0, ended.output


@pytest.mark.parametrize("idle", ["main thread joins", "pool thread idles"])
def test_threads_that_idle_hide_no_hang(start: Start, idle: str) -> None:
    ended = start(
        2,
        f"""
        import threading
        from concurrent.futures import ThreadPoolExecutor
        hvd.init()
        model, optimizer = model_and_optimizer()

        def body():
            if hvd.rank() == 0:
                train(model, optimizer, 1)
            else:
                hvd.allreduce(torch.ones(3), name="loss")

        hvd.barrier()
        if {idle!r} == "main thread joins":
            failed = []
            threading.excepthook = lambda args: failed.append(args.exc_value)
            thread = threading.Thread(target=body)
            thread.start()
            thread.join()
            raise failed[0]
        pool = ThreadPoolExecutor(1)
        pool.submit(hvd.allreduce, torch.ones(1), name="once").result()
        body()
        """,
    ).end()
    fails(ended, "no rank can go on", "rank 1 waits in allreduce 'loss'")


def test_a_receive_that_is_dropped_while_under_way_keeps_its_buffer(start: Start) -> None:
    """MPI writes into it when the message comes, however long the one who posted it is gone."""
    ended = start(
        1,
        """
        import gc
        from hiercomm.comm import mpi
        comm = mpi.connect().communicator([0])
        for tag in range(20):
            comm.recv(torch.zeros(1 << 16), 0, tag=tag)
        gc.collect()
        others = [torch.zeros(1 << 16) for _ in range(20)]
        for tag in range(20):
            comm.send(torch.ones(1 << 16), 0, tag=tag).wait(20.0)
        assert not any(other.any() for other in others)
        for requests, data in mpi._dropped:
            while not all(request.Test() for request in requests):
                pass
            assert (data.view("float32") == 1.0).all()
        print("kept", len(mpi._dropped))
        """,
    ).end()
    assert ended.status == 0, ended.output
    assert "kept 20" in ended.output
