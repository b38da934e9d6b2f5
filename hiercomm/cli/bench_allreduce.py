"""`hiercomm bench allreduce`: the exchange between nodes, beside its peers, as a share of what the link carries;
`hiercomm bench overlap`: beside computation.

A call moves at least 2 (N-1)/N of the buffer through each of N nodes' links (Patarasu and Yuan, 2009):
    link_share = 2 (N-1)/N * bytes * 8 / (rate_bps * seconds)
with the rate that --rate says the links have, or else the one at which one message of plain MPI goes through.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor

import hiercomm.torch as hvd
from hiercomm import compress, reduction, runtime
from hiercomm.allreduce import Exchange
from hiercomm.cli import peers
from hiercomm.coded import CompressorCoding
from hiercomm.comm import mpi
from hiercomm.config import parse_bytes, parse_rate
from hiercomm.errors import ConfigError

Record = dict[str, Any]
Reduce = Callable[[], None]

_BATCH_BYTES = 8 << 20  # a sample is as many calls as move this: shaped links let the first 256 KB through unshaped
_CELL_S = 6.0  # seconds after which a cell has enough samples, though never fewer than three


@final
class _Table:
    """Times one peer after the other, prints a row for each size, keeps the records."""

    def __init__(self, world: mpi.MpiWorld, options: argparse.Namespace) -> None:
        self._world = world
        self._repeat = options.repeat
        self._rate = parse_rate(options.rate) if options.rate else None
        self._nodes = len(runtime.current().topology.nodes)
        self.records: list[Record] = []

    def cell(
        self, peer: str, dtype: torch.dtype, nbytes: int, data: Tensor | None, reduce: Reduce, compression: str = "none"
    ) -> None:
        """Time one peer at one size; the first call's sum is checked."""
        if data is not None:
            data.fill_(1)
            reduce()
            # A code rounds, and may leave out all but the first.
            last = data[-1] if compression == "none" else data[0]
            if not all(abs(each - self._world.size) <= (compression != "none") / 8 for each in (data[0], last)):
                raise RuntimeError(f"{peer}: wrong sum {data[0].item()} of {self._world.size} ones")
            data.zero_()
        median, least = self._time(reduce, max(1, min(20, _BATCH_BYTES // max(1, nbytes))))
        link_bytes = 2 * (self._nodes - 1) / self._nodes * nbytes
        self.records.append({
            "op": "send" if data is None else "allreduce", "peer": peer, "dtype": str(dtype).removeprefix("torch."),
            "compression": compression, "bytes": nbytes, "nodes": self._nodes, "ranks_per_node": hvd.local_size(),
            "seconds": median, "seconds_min": least, "rate_limit_bps": self._rate,
            "link_share": link_bytes * 8 / (self._rate * median) if self._rate else None,
        })  # fmt: skip

    def _time(self, reduce: Reduce, calls: int) -> tuple[float, float]:
        """Median and least of the slowest rank's seconds a call."""
        reduce()
        times: list[float] = []
        while len(times) < self._repeat and (len(times) < 3 or sum(times) * calls < _CELL_S):
            self._world.barrier()
            begin = time.perf_counter()
            for _ in range(calls):
                reduce()
            times.append(max(self._world.all_gather(time.perf_counter() - begin)) / calls)
        return statistics.median(times), min(times)

    def fill_shares(self) -> None:
        """Without a given rate: shares of what one message of plain MPI reached at the same size."""
        for record in self.records:
            sent = next(r for r in self.records if r["op"] == "send" and r["bytes"] == record["bytes"])
            record["share_of_send"] = sent["seconds"] / record["seconds"]

    def print(self) -> None:
        """One line a size, one column a peer."""
        peers_seen = list(dict.fromkeys(r["peer"] for r in self.records))
        kind = "of the link" if self._rate else "of MPI_Send's rate"
        print(f"{hvd.size()} ranks, {self._nodes} nodes, {self._world.library()}; milliseconds (share {kind})")
        print(f"{'dtype':>9} {'bytes':>10} " + " ".join(f"{peer:>20}" for peer in peers_seen))
        for dtype, nbytes in dict.fromkeys((r["dtype"], r["bytes"]) for r in self.records):
            row = {r["peer"]: r for r in self.records if (r["dtype"], r["bytes"]) == (dtype, nbytes)}
            print(f"{dtype:>9} {nbytes:>10} " + " ".join(_cell(row.get(peer)) for peer in peers_seen), flush=True)


def _cell(record: Record | None) -> str:
    if record is None:
        return f"{'-':>20}"
    share = record["link_share"] or record["share_of_send"]
    return f"{record['seconds'] * 1e3:>12.3f} ({share:.3f})"


def run(options: argparse.Namespace) -> tuple[int, list[Record]]:
    """All peers at all sizes. Returns the rank and the records."""
    world = mpi.connect()
    hvd.init()
    table = _Table(world, options)
    if len(runtime.current().topology.nodes) == 1:
        raise SystemExit("hiercomm bench allreduce needs two nodes: HIERCOMM_RANKS_PER_NODE splits one machine")
    all_reduces = {"MPI_Allreduce": peers.mpi(world), "Gloo": peers.gloo(world)}
    sizes = [parse_bytes(size) for size in (options.sizes or "1MB,16MB,64MB").split(",")]
    dtypes = [getattr(torch, name) for name in options.dtypes.split(",")]
    for dtype in dtypes:
        for nbytes in sizes:
            table.cell("MPI_Send", dtype, nbytes, None, _send(world, nbytes))
            data, reduce = _bucket(dtype, nbytes)
            table.cell("hiercomm", dtype, nbytes, data, reduce)
            for name in filter(None, options.compression.split(",")):
                data, reduce = _bucket(dtype, nbytes, _coding(name))
                table.cell(name, dtype, nbytes, data, reduce, name)
            data = torch.empty(nbytes // dtype.itemsize, dtype=dtype)
            table.cell("allreduce_", dtype, nbytes, data, _eager(data))
            for peer, all_reduce in all_reduces.items():
                if peer == "Gloo" or dtype != torch.float16:
                    table.cell(peer, dtype, nbytes, data, _bind(all_reduce, data))
    rank = hvd.rank()
    _horovod(table, dtypes, sizes)
    table.fill_shares()
    if rank == 0:
        table.print()
    return rank, table.records


def run_overlap(options: argparse.Namespace) -> tuple[int, list[Record]]:
    """How much of an exchange vanishes behind computation that calls nothing of hiercomm, with every rank computing,
    and what the computation loses where it leaves the other cores free (rank 0 alone computes). Rank and records.
    """
    world = mpi.connect()
    hvd.init()
    records: list[Record] = []
    for nbytes in map(parse_bytes, (options.sizes or "64MB").split(",")):
        _, begin, end = _bucket_parts(torch.float32, nbytes)
        overlap = _Overlap(world, begin, end, nbytes * 20e-9)
        medians = overlap.measure(max(3, options.repeat // 3))
        shorter = min(medians["exchange"], medians["compute"])
        hidden = (medians["exchange"] + medians["compute"] - medians["both"]) / shorter
        slowdown = medians["alone_beside"] / medians["alone"] - 1
        records.append({"op": "overlap", "bytes": nbytes, "hidden": hidden, "compute_slowdown": slowdown, **medians})
        if world.rank == 0:
            print(
                f"{nbytes} bytes: exchange {medians['exchange']:.3f} s, computation {medians['compute']:.3f} s, both "
                f"{medians['both']:.3f} s: {hidden:.1%} of the shorter is hidden; a computation with free cores beside "
                f"it is slower by {slowdown:.1%}",
                flush=True,
            )
    return world.rank, records


@final
class _Overlap:
    """An exchange and a somewhat longer computation, of `least_s` at least, each alone and both at once."""

    def __init__(
        self, world: mpi.MpiWorld, begin: Callable[[], Exchange], end: Callable[[Exchange], None], least_s: float
    ) -> None:
        self._world = world
        self._begin, self._end = begin, end
        self._count = 1
        wanted = max(least_s, 1.2 * min(self._slowest(lambda: end(begin())) for _ in range(2)))
        while (seconds := self._slowest(self._compute)) < wanted:
            self._count = max(self._count + 1, int(self._count * 1.1 * wanted / max(seconds, wanted / 20)))

    def measure(self, repeat: int) -> dict[str, float]:
        """Median seconds of the slowest rank; `alone` and `alone_beside` are rank 0's computation."""
        times: dict[str, list[float]] = {}
        for _ in range(repeat):
            for name, work in (
                ("exchange", lambda: self._end(self._begin())),
                ("compute", self._compute),
                ("both", lambda: self._both(True)),
            ):
                times.setdefault(name, []).append(self._slowest(work))
            alone = self._world.rank == 0
            times.setdefault("alone", []).append(self._slowest(self._compute if alone else lambda: 0.0))
            self._world.barrier()
            times.setdefault("alone_beside", []).append(max(self._world.all_gather(self._both(alone))))
        return {name: statistics.median(t) for name, t in times.items()}

    def _slowest(self, work: Callable[[], object]) -> float:
        self._world.barrier()
        begin = time.perf_counter()
        work()
        return float(max(self._world.all_gather(time.perf_counter() - begin)))

    def _compute(self) -> float:
        begin = time.perf_counter()
        a = torch.full((384, 384), 1e-3)
        for _ in range(10 * self._count):
            a = torch.tanh(a @ a)
        return time.perf_counter() - begin

    def _both(self, computes: bool) -> float:
        """Seconds of the computation beside the exchange."""
        exchange = self._begin()
        seconds = self._compute() if computes else 0.0
        self._end(exchange)
        return seconds


def _bind(all_reduce: peers.AllReduce, data: Tensor) -> Reduce:
    return lambda: all_reduce(data)


def _eager(data: Tensor) -> Reduce:
    def reduce() -> None:
        hvd.allreduce_(data, op=hvd.Sum, name="bench")

    return reduce


def _coding(name: str) -> CompressorCoding:
    layers = compress.parse(name)
    if not isinstance(layers, compress.PerLayer) or not isinstance(layers.default, compress.ErrorFeedback):
        raise ConfigError(f"--compression {name} cannot be measured on a buffer: int8, sign, topk:0.01, ... can")
    return CompressorCoding(layers.default, 0, hvd.rank())


def _bucket(dtype: torch.dtype, nbytes: int, coding: CompressorCoding | None = None) -> tuple[Tensor, Reduce]:
    """What an optimizer's bucket goes through."""
    data, begin, end = _bucket_parts(dtype, nbytes, coding)
    return data, lambda: end(begin())


def _bucket_parts(
    dtype: torch.dtype, nbytes: int, coding: CompressorCoding | None = None
) -> tuple[Tensor, Callable[[], Exchange], Callable[[Exchange], None]]:
    context = runtime.current()
    name = context.unnamed("bench")
    level, buffers = context.allocate([(nbytes // dtype.itemsize, dtype)], torch.device("cpu"), name)
    engine = context.all_reduce_engine(level, context.topology)

    def end(exchange: Exchange) -> None:
        for work in (exchange.cross, exchange.local):
            if work is not None:
                work.wait()
        engine.distribute(exchange).wait()

    return buffers[0].data, lambda: engine.start(buffers[0], reduction.SUM, 1, name, coding), end


def _send(world: mpi.MpiWorld, nbytes: int) -> Reduce:
    """Nodes in pairs: every local rank of the first sends its part of what an all-reduce moves at least."""
    topology = runtime.current().topology
    nodes = topology.nodes
    pair = topology.node ^ 1
    partner = world.rank
    if pair < len(nodes) and topology.local_rank < len(nodes[pair]):
        partner = nodes[pair][topology.local_rank]
    sharers = min(len(nodes[0]), len(nodes[1]))
    return peers.send(world, partner, topology.node % 2 == 0, int(2 * (len(nodes) - 1) / len(nodes) * nbytes / sharers))


def _horovod(table: _Table, dtypes: Sequence[torch.dtype], sizes: Sequence[int]) -> None:
    """Last, since its thread sends messages all the time."""
    module = peers.horovod()
    if module is None:
        return
    for dtype in dtypes:
        for nbytes in sizes if dtype != torch.bfloat16 else ():
            data = torch.empty(nbytes // dtype.itemsize, dtype=dtype)
            table.cell("Horovod", dtype, nbytes, data, _bind(peers.horovod_all_reduce(module), data))
    module.shutdown()
