"""`hiercomm bench`: what hiercomm costs, beside its peers, in one run.

    hiercomm bench kernels                               one process: what compression costs, beside a copy
    hiercomm bench wrap                                  one rank: DistributedOptimizer against the plain optimizer
    hiercommrun -np 2 hiercomm bench idle                the progress thread while nothing is submitted
    hiercommrun -np 2 hiercomm bench local               inside a node: shared memory, Gloo, MPI_Allreduce
    hiercommrun -np 4 -H a:2,b:2 hiercomm bench allreduce   between nodes: beside MPI, Gloo and Horovod
    hiercommrun -np 2 -H a,b hiercomm bench overlap         an exchange while torch computes
    hiercommrun -np 4 -H a:2,b:2 hiercomm bench train       a model bound by its exchange: beside DDP and Horovod

Times are medians; quote ratios from one run, not single times. `--json FILE` writes the records.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import hiercomm.torch as hvd
from hiercomm import reduction, runtime
from hiercomm.cli import bench_allreduce, bench_kernels, bench_train
from hiercomm.comm import mpi
from hiercomm.comm.base import ReducingCommunicator
from hiercomm.comm.shm import SharedMemory
from hiercomm.comm.torchdist import TorchDistributed
from hiercomm.config import parse_bytes

Record = dict[str, Any]


def main(argv: Sequence[str]) -> int:
    """Run one benchmark. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="hiercomm bench", description="What hiercomm costs, beside its peers.")
    parser.add_argument("what", choices=sorted(_BENCHMARKS))
    parser.add_argument("--json", metavar="FILE", help="write the records here (rank 0)")
    parser.add_argument("--sizes", help="allreduce, kernels, local, overlap: sizes of the buffer, like 1MB,16MB")
    parser.add_argument("--dtypes", default="float32", help="allreduce: torch's names (default: %(default)s)")
    parser.add_argument("--rate", help="allreduce: what the links between the nodes carry, like 200mbit")
    parser.add_argument("--compression", default="", help="allreduce, train: also these, like int8,topk:0.01")
    parser.add_argument("--repeat", type=int, default=15, help="counted repetitions (default: %(default)s)")
    options = parser.parse_args(argv)
    rank, records = _BENCHMARKS[options.what](options)
    if options.json and rank == 0:
        Path(options.json).write_text(json.dumps(records, indent=1) + "\n")
    return 0


# ---- wrap: one rank, the plain optimizer and the wrapped one, in turns ----------------------------------


def _cnn() -> torch.nn.Module:
    nn = torch.nn
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 49, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def _trainer(wrap: bool) -> Callable[[], None]:
    torch.manual_seed(0)
    model = _cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if wrap:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    images, labels = torch.randn(64, 1, 28, 28), torch.randint(0, 10, (64,))

    def steps() -> None:
        for _ in range(5):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()

    return steps


def _wrap(options: argparse.Namespace) -> tuple[int, list[Record]]:
    hvd.init()
    if hvd.size() != 1:
        raise SystemExit(f"hiercomm bench wrap is for one rank, not {hvd.size()}")
    plain, wrapped = _trainer(False), _trainer(True)
    times: dict[str, list[float]] = {"plain": [], "wrapped": []}
    for repetition in range(2 * options.repeat + 2):
        for name, steps in (("plain", plain), ("wrapped", wrapped)):
            begin = time.perf_counter()
            steps()
            if repetition >= 2:
                times[name].append(time.perf_counter() - begin)
    # Pair by pair, since the machine's speed drifts.
    ratio = statistics.median(b / a for a, b in zip(times["plain"], times["wrapped"], strict=True))
    print(f"wrapped / plain step time, one rank, small CNN: {ratio:.4f}")
    return 0, [{"op": "step", "ratio": ratio, **{name: statistics.median(t) for name, t in times.items()}}]


def _idle(options: argparse.Namespace) -> tuple[int, list[Record]]:
    """CPU time of the progress thread while nothing is submitted."""
    hvd.init()
    thread = runtime.current().progress_thread
    shares = []
    if thread is not None:
        for _ in range(max(1, options.repeat // 5)):
            before = _cpu_seconds(thread)
            time.sleep(2.0)
            shares.append((_cpu_seconds(thread) - before) / 2.0)
    share = statistics.median(shares) if shares else 0.0
    worst = max(hvd.allgather_object(share))
    if hvd.rank() == 0:
        print(f"idle progress thread: {worst:.2%} of a core ({'no thread' if thread is None else hvd.size()} ranks)")
    return hvd.rank(), [{"op": "idle", "core_share": worst, "ranks": hvd.size()}]


def _cpu_seconds(native_id: int) -> float:
    """User and system time of one thread, from its schedstat (nanoseconds on a core)."""
    return int(Path(f"/proc/self/task/{native_id}/schedstat").read_text().split()[0]) * 1e-9


# ---- local: the level inside a node ---------------------------------------------------------------------


def _local(options: argparse.Namespace) -> tuple[int, list[Record]]:
    world = mpi.connect()
    shm = SharedMemory(world.rank, world.size, world.all_gather)
    gloo = TorchDistributed("gloo", world.rank, world.size, world.all_gather, 60.0)
    records: list[Record] = []
    if world.rank == 0:
        print(f"{world.size} ranks, one node, {world.library()}; milliseconds (times shared memory)")
        print(f"{'dtype':>9} {'bytes':>10} {'shared memory':>14} {'gloo':>18} {'MPI_Allreduce':>18}")
    for dtype in (torch.float32, torch.bfloat16):
        for nbytes in map(parse_bytes, (options.sizes or "4KB,64KB,1MB,8MB,64MB").split(",")):
            seconds = {
                "shm": _time_level(world, shm, nbytes, dtype, options.repeat),
                "gloo": _time_level(world, gloo, nbytes, dtype, options.repeat),
                "MPI_Allreduce": _time_mpi(world, nbytes, dtype, options.repeat),
            }
            name = str(dtype).removeprefix("torch.")
            records += [
                {"op": "allreduce", "peer": peer, "dtype": name, "bytes": nbytes, "nodes": 1,
                 "ranks_per_node": world.size, "seconds": median, "seconds_min": least}
                for peer, (median, least) in seconds.items()
            ]  # fmt: skip
            if world.rank == 0:
                print(_row(name, nbytes, {peer: median for peer, (median, _) in seconds.items()}), flush=True)
    return world.rank, records


def _row(dtype: str, nbytes: int, seconds: dict[str, float]) -> str:
    shm = seconds["shm"]
    cells = [f"{t * 1e3:>9.3f} ({t / shm:>5.1f}x)" for peer, t in seconds.items() if peer != "shm"]
    return f"{dtype:>9} {nbytes:>10} {shm * 1e3:>14.3f} " + " ".join(cells)


def _time_level(
    world: mpi.MpiWorld, level: ReducingCommunicator, nbytes: int, dtype: torch.dtype, repeat: int
) -> tuple[float, float]:
    buffer = level.allocate([(nbytes // dtype.itemsize, dtype)], torch.device("cpu"))[0]
    return _time(world, buffer.data, lambda: level.all_reduce(buffer, reduction.SUM).wait(), repeat)


def _time_mpi(world: mpi.MpiWorld, nbytes: int, dtype: torch.dtype, repeat: int) -> tuple[float, float]:
    data = torch.empty(nbytes // dtype.itemsize, dtype=dtype)
    return _time(world, data, lambda: world.library_all_reduce(data), repeat)


def _time(world: mpi.MpiWorld, data: Tensor, reduce: Callable[[], None], repeat: int) -> tuple[float, float]:
    """Median and least of the slowest rank's time; the result is checked each time."""
    times = []
    for _ in range(repeat + 3):
        data.fill_(1)
        world.barrier()
        begin = time.perf_counter()
        reduce()
        times.append(max(world.all_gather(time.perf_counter() - begin)))
        if data.numel() and not (data[0] == world.size and data[-1] == world.size):
            raise RuntimeError(f"wrong sum: {data[0].item()} instead of {world.size}")
    return statistics.median(times[3:]), min(times[3:])


_BENCHMARKS: dict[str, Callable[[argparse.Namespace], tuple[int, list[Record]]]] = {
    "allreduce": bench_allreduce.run,
    "idle": _idle,
    "kernels": bench_kernels.run,
    "local": _local,
    "overlap": bench_allreduce.run_overlap,
    "train": bench_train.run,
    "wrap": _wrap,
}
