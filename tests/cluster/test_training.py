"""Jobs over several nodes that MPI finds by itself, on links with a rate: they compute what one process does."""

from __future__ import annotations

import time

import pytest
from nodes import Cluster

# Parts of tests/ranks/training.py: the same job on all ranks and in one process.
TRAIN = """
    sys.path.insert(0, {ranks!r})
    from training import OPTIMIZERS, assert_same, batch, make_model, part, train, wrap
    hvd.init()
    print("placed", hvd.rank(), os.uname().nodename, hvd.local_rank(), hvd.local_size(), hvd.cross_rank(),
          hvd.cross_size(), flush=True)
    for name in ("momentum", "adam"):
        model, reference = make_model(), make_model()
        train(model, wrap(model, OPTIMIZERS[name](model.parameters())), range(20), part)
        train(reference, OPTIMIZERS[name](reference.parameters()), range(20), batch)
        assert_same(model, reference, {tolerance})
    hvd.barrier()
    print("well", flush=True)
"""


def placed(output: str) -> list[tuple[object, ...]]:
    """What the ranks say of their places, by rank: host, then local and cross rank and size."""
    rows = [line.split()[1:] for line in output.splitlines() if line.startswith("placed")]
    return [(host, *map(int, numbers)) for _, host, *numbers in sorted(rows, key=lambda row: int(row[0]))]


def train(tolerance: float = 1e-6) -> str:
    from nodes import ROOT

    return TRAIN.format(ranks=str(ROOT / "tests" / "ranks"), tolerance=tolerance)


@pytest.mark.parametrize(("nodes", "ranks"), [(4, 1), (2, 2)])
def test_nodes_are_found_and_training_equals_one_process(cluster: Cluster, nodes: int, ranks: int) -> None:
    cluster.up(nodes, "--rate", "200mbit")
    ended = cluster.run(train(), ranks).end()
    assert ended.status == 0, ended.output
    assert ended.output.count("well") == nodes * ranks
    assert placed(ended.output) == [
        (f"n{node + 1}", local, ranks, node, nodes) for node in range(nodes) for local in range(ranks)
    ]
    for line in cluster("stat").splitlines():
        assert int(line.split()[2]) > 100_000, line  # all took part


def test_unequal_nodes(cluster: Cluster) -> None:
    cluster.up(2, "--rate", "200mbit", "--node-rates", "n2=50mbit")
    ended = cluster.run(train(), 2, "-np", "3").end()
    assert ended.status == 0, ended.output
    assert ended.output.count("well") == 3
    assert placed(ended.output) == [("n1", 0, 2, 0, 2), ("n1", 1, 2, 0, 1), ("n2", 0, 1, 1, 2)]


def test_a_node_that_becomes_slow_slows_the_others_down_and_no_more(cluster: Cluster) -> None:
    """A link of 4 Mbit/s is waited for, however long it takes; nobody calls it lost. And an idle job sends nothing."""
    cluster.up(3, "--rate", "200mbit")
    job = cluster.run(
        """
        hvd.init()
        hvd.allreduce(torch.ones(2**20), name="fast")
        print("fast", flush=True)
        time.sleep(8)
        begin = time.monotonic()
        mine = torch.full((2**20,), float(hvd.rank()))
        assert torch.equal(hvd.allreduce(mine, op=hvd.Sum), torch.full((2**20,), 3.0))
        print("seconds", time.monotonic() - begin, flush=True)
        """
    )
    job.read("fast", 3)
    time.sleep(2.0)
    before = cluster("stat")
    time.sleep(4.0)
    idle = [
        int(b.split()[2]) - int(a.split()[2])
        for a, b in zip(before.splitlines(), cluster("stat").splitlines(), strict=True)
    ]
    cluster("rate", "n2", "4mbit")
    ended = job.end()
    assert ended.status == 0, ended.output
    times = [float(line.split()[1]) for line in ended.output.splitlines() if line.startswith("seconds")]
    assert max(times) > 10.0, times  # 5.6 MB at 4 Mbit/s
    assert max(idle) < 2000, idle  # the launcher's probes alone
