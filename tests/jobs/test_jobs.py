"""Jobs that go well: launched in every way, one after another, beside each other, with data workers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from job import BIN, ROOT, Start


def test_placement_table_and_report(start: Start) -> None:
    ended = start(
        4,
        """
        hvd.init()
        model, optimizer = model_and_optimizer()
        train(model, optimizer, 5)
        """,
        ranks_per_node=2,
        env={"HIERCOMM_REPORT": "1"},
    ).end()
    assert ended.status == 0, ended.output
    for line in ("4 ranks on 2 nodes", "node0  0-1 (2)", "node1  2-3 (2)", "cross: 2 groups of 2 nodes"):
        assert ended.output.count(line) == 1, ended.output
    rows = [line.split() for line in ended.output.splitlines() if line.strip().startswith("rank ")]
    assert [row[1] for row in rows] == ["0", "1", "2", "3"]
    for row in rows:
        compute, _, cross, wait = (float(cell.rstrip("%")) for cell in row[2:])
        assert compute + wait == pytest.approx(100.0, abs=0.2)
        assert cross > 0


def test_nodes_by_name_unequal(start: Start) -> None:
    ended = start(
        5,
        """
        os.environ["HIERCOMM_NODE"] = "AAABB"[int(os.environ["OMPI_COMM_WORLD_RANK"])]
        hvd.init()
        torch.manual_seed(hvd.rank())
        mine = torch.randn(1001)
        flat = torch.stack([t for t in hvd.allgather(mine[None])]).mean(0)
        assert torch.allclose(hvd.allreduce(mine), flat, atol=1e-6)
        parameter = torch.nn.Parameter(torch.zeros(1001))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0))
        (parameter * mine).sum().backward()
        optimizer.step()
        assert torch.allclose(-parameter, flat, atol=1e-6)
        shape = (hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous())
        print("shape", *hvd.allgather_object(shape), flush=True)
        """,
    ).end()
    assert ended.status == 0, ended.output
    expected = [(0, 3, 0, 2, False), (1, 3, 0, 2, False), (2, 3, 0, 1, False), (0, 2, 1, 2, False), (1, 2, 1, 2, False)]
    assert "shape " + " ".join(map(str, expected)) in ended.output


@pytest.mark.parametrize("local", ["gloo", "shm"])
def test_local_transports_give_the_same_result(start: Start, local: str) -> None:
    ended = start(
        4,
        """
        hvd.init()
        torch.manual_seed(hvd.rank())
        parameter = torch.nn.Parameter(torch.zeros(5000))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0))
        values = torch.randint(-50, 50, (5000,)).float()
        expected = hvd.allreduce(values, op=hvd.Sum) / hvd.size()
        for _ in range(3):
            optimizer.zero_grad()
            (parameter * values).sum().backward()
            optimizer.step()
        assert torch.equal(-parameter, 3 * expected)
        """,
        ranks_per_node=2,
        env={"HIERCOMM_LOCAL": local},
    ).end()
    assert ended.status == 0, ended.output


def test_a_slow_link_is_slow(start: Start) -> None:
    """2 x 0.5 MB over 8 Mbit/s take a second; without the setting they take milliseconds."""
    source = """
        hvd.init()
        hvd.barrier()
        begin = time.monotonic()
        hvd.allreduce(torch.ones(2**18))
        print("seconds", time.monotonic() - begin, flush=True)
        """
    slow = start(2, source, ranks_per_node=1, env={"HIERCOMM_CROSS_RATE": "8mbit", "HIERCOMM_CROSS_DELAY": "5ms"}).end()
    assert slow.status == 0, slow.output
    times = [float(line.split()[1]) for line in slow.output.splitlines() if line.startswith("seconds")]
    assert min(times) > 1.0


def test_two_jobs_at_once_on_one_host(start: Start) -> None:
    source = """
        hvd.init()
        model, optimizer = model_and_optimizer()
        train(model, optimizer, 20)
        """
    env = {"HIERCOMM_LOCAL": "gloo"}  # the transport that needs a port
    jobs = [start(2, source, env=env) for _ in range(2)]
    for job in jobs:
        ended = job.end()
        assert ended.status == 0, ended.output


def test_short_jobs_in_a_row_all_end(start: Start) -> None:
    for number in range(8):
        ended = start(
            2,
            f"""
            import random
            hvd.init()
            model, optimizer = model_and_optimizer()
            rng = random.Random({number} + hvd.rank())
            for _ in range(5):
                time.sleep(rng.random() * 0.02)
                train(model, optimizer, 1)
            hvd.allreduce_async(torch.ones(10), name="never waited for")
            if {number} % 2:
                hvd.shutdown()
            """,
            ranks_per_node=1 + number % 2,
        ).end(60.0)
        assert ended.status == 0, ended.output


def test_data_loading_workers_do_not_disturb(start: Start) -> None:
    ended = start(
        2,
        """
        hvd.init()
        model, optimizer = model_and_optimizer()
        data = torch.utils.data.TensorDataset(torch.randn(64, 8))
        for _ in range(2):
            for (x,) in torch.utils.data.DataLoader(data, batch_size=8, num_workers=2):
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
        print("well", flush=True)
        """,
        env={"PYTHONWARNINGS": "ignore"},
    ).end()
    assert ended.status == 0, ended.output
    assert ended.output.count("well") == 2


@pytest.mark.parametrize("ranks_per_node", [1, 2], ids=["over MPI", "in shared memory"])
def test_large_messages_in_a_container_leave_no_warnings(start: Start, ranks_per_node: int) -> None:
    """Open MPI logs 'Read -1, expected N, errno = 1' for each where ranks may not read each other's memory."""
    ended = start(
        2,
        """
        hvd.init()
        assert hvd.allreduce(torch.ones(10 * 2**18)).sum() == 10 * 2**18
        """,
        ranks_per_node=ranks_per_node,
        env={"container": "docker", "HIERCOMM_PLACEMENT": "0"},
    ).end()
    assert ended.status == 0
    assert [line for line in ended.output.splitlines() if "oversubscription" not in line] == []


def test_more_ranks_than_cores_start_as_root_too(start: Start) -> None:
    cores = len(os.sched_getaffinity(0))
    ended = start(cores + 2, "hvd.init(); print('rank', hvd.rank(), flush=True)").end()
    assert ended.status == 0, ended.output
    assert ended.output.count("rank ") >= cores + 2
    assert f"hiercommrun: {cores + 2} ranks on {cores} cores: oversubscription allowed" in ended.output


def test_plain_mpirun_needs_no_settings(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text(
        "import torch, hiercomm.torch as hvd\nhvd.init()\n"
        "print('threads', torch.get_num_threads(), hvd.allreduce(torch.ones(1), op=hvd.Sum).item(), flush=True)\n"
    )
    env = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    words = [str(BIN / "mpirun"), "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", "2"]
    ended = subprocess.run(
        [*words, sys.executable, str(script)], env=env, capture_output=True, text=True, errors="replace", timeout=120
    )
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert ended.stdout.count(f"threads {threads} 2.0") == 2, ended.stdout + ended.stderr


# ---- a world of one --------------------------------------------------------------------------------------

ALONE = "import hiercomm.torch as hvd; hvd.init(); print(hvd.rank(), hvd.size(), hvd.cross_size())"


def alone(**env: str) -> subprocess.CompletedProcess[str]:
    clean = {"HOME": os.environ.get("HOME", "/"), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", ALONE],
        env={**clean, **env},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=120,
        cwd="/",
    )


@pytest.mark.parametrize("mpi", ["there", "missing"])
def test_a_world_of_one_needs_no_launcher_and_no_mpi(mpi: str) -> None:
    ended = alone(**({"MPI4PY_LIBMPI": "/nowhere/libmpi.so"} if mpi == "missing" else {}))
    assert ended.stdout.split() == ["0", "1", "1"], ended.stderr


@pytest.mark.parametrize(
    ("env", "launcher"),
    [
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}, "Open MPI"),
        ({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "x"}, "torchrun"),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1"}, "srun"),
    ],
    ids=["Open MPI", "torchrun", "srun"],
)
@pytest.mark.parametrize("mpi", ["there", "missing"])
def test_many_processes_that_mpi_does_not_join_are_an_error(env: dict[str, str], launcher: str, mpi: str) -> None:
    ended = alone(**env, **({"MPI4PY_LIBMPI": "/nowhere/libmpi.so"} if mpi == "missing" else {}))
    assert ended.returncode != 0
    for text in ("ConfigError", launcher, "4", "1"):
        assert text in ended.stderr


# ---- packaging -------------------------------------------------------------------------------------------


def test_the_wheel_needs_no_torch_and_no_compiler_to_build_and_to_import(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True, timeout=120)
    pip = [str(tmp_path / "venv/bin/python"), "-m", "pip", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", str(tmp_path), str(ROOT)], check=True, timeout=300,
                   env={**os.environ, "PATH": str(tmp_path / "venv/bin"), "CC": "/bin/false"})  # fmt: skip
    (wheel,) = tmp_path.glob("hiercomm-*.whl")
    assert wheel.name.endswith("py3-none-any.whl")
    target = tmp_path / "target"
    subprocess.run([*pip, "install", "--no-deps", "--target", str(target), str(wheel)], check=True, timeout=120)
    ended = alone(PYTHONPATH=str(target), PATH="/nowhere")
    assert ended.stdout.split() == ["0", "1", "1"], ended.stderr


def test_an_exchange_needs_no_more_than_one_bucket_of_scratch(start: Start) -> None:
    ended = start(
        2,
        """
        from pathlib import Path
        def kilobytes(field):
            lines = Path("/proc/self/status").read_text().splitlines()
            return int(next(line for line in lines if line.startswith(field)).split()[1])

        bucket = 64 * 2**20
        hvd.init(bucket_bytes=bucket)
        parameter = torch.nn.Parameter(torch.zeros(bucket // 4))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.1))
        parameter.sum().backward()
        optimizer.step()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = kilobytes("VmRSS")
        optimizer.step()  # exchanges the gradients that are there
        grown = (kilobytes("VmHWM") - before) * 1024
        print("scratch", grown / bucket, flush=True)
        """,
        ranks_per_node=1,
    ).end()
    assert ended.status == 0, ended.output
    scratch = [float(line.split()[1]) for line in ended.output.splitlines() if line.startswith("scratch")]
    assert len(scratch) == 2
    assert max(scratch) < 1.1, ended.output
