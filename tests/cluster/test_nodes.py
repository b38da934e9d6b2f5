"""scripts/cluster itself: nodes, links, faults, and that nothing stays behind however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from nodes import NAME, SCRIPT, Cluster, started

SERVE = "import socket\nwith socket.create_server(('', 5000)) as s:\n    while True:\n        c = s.accept()[0]\n" \
    "        while c.recv(1 << 20): pass\n        c.sendall(b'x')\n"  # fmt: skip
SEND = "import socket, sys, time\nwith socket.create_connection((sys.argv[1], 5000), timeout=2) as c:\n" \
    "    begin = time.monotonic()\n    c.settimeout(60)\n    c.sendall(bytes(int(sys.argv[2])))\n" \
    "    c.shutdown(socket.SHUT_WR)\n    assert c.recv(1) == b'x'\n    print(time.monotonic() - begin)\n"  # fmt: skip


def serve(cluster: Cluster) -> None:
    """A server on every node; `seconds` sends to it."""
    for node in cluster.nodes:
        subprocess.Popen(
            [SCRIPT, "exec", node, "setsid", "-f", "python3", "-c", SERVE], stderr=subprocess.DEVNULL
        ).wait()
    deadline = time.monotonic() + 20
    while any(seconds(cluster, "head", node) is None for node in cluster.nodes):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def seconds(cluster: Cluster, source: str, dest: str, size: int = 1) -> float | None:
    """How long it takes to send so many bytes; None where the destination is not reached."""
    ended = cluster.attempt("exec", source, "python3", "-c", SEND, dest, size)
    return float(ended.stdout) if ended.returncode == 0 else None


def stop_servers(cluster: Cluster) -> None:
    for node in cluster.nodes:
        cluster("kill", node)


def test_nodes_are_machines_of_their_own(cluster: Cluster) -> None:
    cluster.up(2)
    look = "hostname; cd $TMPDIR; touch $(hostname) /dev/shm/$(hostname); ls . /dev/shm; ls -d /proc/[0-9]* | wc -l"
    seen = [cluster("exec", node, "sh", "-c", look).split() for node in cluster.nodes]
    for node, (name, *files) in zip(cluster.nodes, seen, strict=True):
        assert name == node
        assert files.count(node) == 2
        assert not {"n1", "n2"} - {node} & set(files)
        assert int(files[-1]) < 10  # processes
        assert cluster("exec", node, "pwd").strip() == os.getcwd()
        cluster("exec", node, "sh", "-c", "rm /dev/shm/*")
    assert cluster("exec", "head", "hostname") == "head\n"
    # The machine's own network stays as it is.
    assert "10.78.0" not in subprocess.run(["ip", "-4", "addr"], capture_output=True, text=True, check=True).stdout


def test_rates(cluster: Cluster) -> None:
    cluster.up(3, "--rate", "80mbit", "--node-rates", "n3=8mbit")
    serve(cluster)
    megabyte = 1_000_000
    # 0.1 s and 1 s on the line; the machine may be slow as well, but not fast.
    times = [seconds(cluster, *path, megabyte) for path in (("n1", "n2"), ("n2", "n1"), ("n1", "n3"), ("n3", "n1"))]
    assert min(times[:2]) > 0.08, times
    assert max(times[:2]) < 0.5, times
    assert min(times[2:]) > 0.8, times
    before = dict(line.split(maxsplit=1) for line in cluster("stat").splitlines())
    cluster("rate", "n3", "none")
    cluster("rate", "n2", "8mbit")
    assert seconds(cluster, "n1", "n3", megabyte) < 0.6
    assert seconds(cluster, "n1", "n2", megabyte) > 0.8
    after = dict(line.split(maxsplit=1) for line in cluster("stat").splitlines())
    sent = {node: int(after[node].split()[1]) - int(before[node].split()[1]) for node in cluster.nodes}
    assert 2 * megabyte < sent["n1"] < 3 * megabyte  # some is lost where a queue is full, and sent again
    assert sent["n2"] < 0.1 * megabyte
    stop_servers(cluster)


def test_cut_kill_and_heal(cluster: Cluster) -> None:
    cluster.up(3)
    serve(cluster)
    cluster("cut", "n1", "n2")
    assert seconds(cluster, "n1", "n2") is None
    assert seconds(cluster, "n2", "n1") is None
    assert seconds(cluster, "n1", "n3") is not None
    assert seconds(cluster, "head", "n2") is not None
    cluster("heal", "n2", "n1")
    assert seconds(cluster, "n1", "n2") is not None
    cluster("cut", "n1", "n2")
    cluster("cut", "n3")
    assert seconds(cluster, "n3", "n2") is None
    assert seconds(cluster, "head", "n3") is None
    cluster("heal")
    assert seconds(cluster, "n1", "n2") is not None
    assert seconds(cluster, "n3", "n2") is not None
    cluster("kill", "n2")
    assert seconds(cluster, "n1", "n2") is None
    assert cluster.attempt("exec", "n2", "true").stderr == "cluster: n2 is dead\n"
    cluster("heal", "n2")
    assert cluster("exec", "n2", "hostname") == "n2\n"
    stop_servers(cluster)


def test_two_clusters_do_not_see_each_other(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.up(2)
    serve(cluster)
    monkeypatch.setenv("CLUSTER_NAME", f"{NAME}2")
    try:
        cluster("up", 2)
        assert seconds(cluster, "n1", "n2") is None  # no server there
    finally:
        cluster("down")
    monkeypatch.undo()
    assert seconds(cluster, "n1", "n2") is not None
    stop_servers(cluster)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda n: n.name)
def test_up_that_is_interrupted_leaves_nothing_or_what_the_next_removes(
    cluster: Cluster, number: signal.Signals
) -> None:
    up = subprocess.Popen([SCRIPT, "up", "100"], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while not (Path("/run/netns") / f"{NAME}.n20").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    up.send_signal(number)
    assert up.wait(60) != 0
    if number != signal.SIGKILL:
        assert not list(Path("/run/netns").glob(f"{NAME}.*"))
    cluster.up(1)
    assert cluster("exec", "n1", "hostname") == "n1\n"
    assert len(list(Path("/run/netns").glob(f"{NAME}.*"))) == 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda n: n.name)
def test_run_that_is_interrupted_leaves_no_rank(cluster: Cluster, number: signal.Signals) -> None:
    cluster.up(2)
    script = cluster.write("").with_name("sleeper.py")
    script.write_text("import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
                      "print('asleep', flush=True)\ntime.sleep(1000)\n")  # fmt: skip
    job = started([SCRIPT, "run", "-n", "2", str(script)])
    job.read("asleep", 4)
    job.process.send_signal(number)
    assert job.end(40.0).status != 0
    cluster.assert_clean()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("up",), "give a number of nodes"),
        (("up", "0"), "'0'"),
        (("up", "254"), "'254'"),
        (("up", "2", "--rate", "fast"), "rate 'fast' cannot be used"),
        (("up", "2", "--rate"), "--rate needs a value"),
        (("up", "2", "--nodes", "3"), "no option '--nodes'"),
        (("up", "2", "--node-rates", "n3=1mbit"), "'n3=1mbit' names no node"),
        (("exec", "n1", "true"), "there is no node 'n1'"),
        (("run", "train.py"), "begin with 'cluster up N'"),
        (("run", "-n", "x", "train.py"), "run -n x"),
        (("cut",), "'cut ' cannot be understood"),
        (("rate", "n7", "1mbit"), "there is no node 'n7'"),
    ],
)
def test_a_mistake_is_one_sentence(cluster: Cluster, words: tuple[str, ...], sentence: str) -> None:
    ended = cluster.attempt(*words)
    assert ended.returncode == 2
    assert ended.stderr.startswith("cluster: ")
    assert sentence in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_without_root_or_tools_it_says_so(tmp_path: Path) -> None:
    for name in ("bash", "realpath", "id", "nsenter", "unshare", "setpriv", "ip"):
        (tmp_path / name).symlink_to(subprocess.check_output(["which", name], text=True).strip())
    for words, env, sentence in (
        (["setpriv", "--reuid", "65534", "--clear-groups", SCRIPT], dict(os.environ), "needs root"),
        ([SCRIPT], {"PATH": str(tmp_path)}, "needs tc (Debian: apt-get install iproute2 util-linux)"),
    ):
        ended = subprocess.run([*words, "up", "2"], env=env, capture_output=True, text=True, check=False, timeout=60)
        assert (ended.returncode, ended.stderr.count("\n")) == (2, 1), ended.stderr
        assert sentence in ended.stderr
