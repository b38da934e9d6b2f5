"""Finding lost hosts: what counts as silence, who sends words to whom, and what the launcher asks hosts beforehand."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hiercomm import links
from hiercomm.cli import guard
from hiercomm.cli.hosts import check_hosts
from hiercomm.comm import tcp
from hiercomm.comm.tcp import Connection, Silence
from hiercomm.errors import ConfigError
from hiercomm.links import Links, owners

# ---- silence ------------------------------------------------------------------------------------------------


def looks(silence: Silence, seen: list[Connection], seconds: float, begin: float, every_s: float = 0.5) -> set[str]:
    """Look every half second; the last answer."""
    found = set[str]()
    for step in range(int(seconds / every_s) + 1):
        found = silence.look(begin + step * every_s)
    return found


def test_an_address_is_silent_after_the_whole_time_and_no_longer_once_it_answers():
    seen = [Connection(1, "10.0.0.2", True, 20.0), Connection(2, "10.0.0.3", False, 20.0)]
    silence = Silence(4.0, lambda: seen)
    assert looks(silence, seen, 3.5, 100.0) == set()
    assert looks(silence, seen, 1.0, 104.0) == {"10.0.0.2"}
    seen[0] = Connection(1, "10.0.0.2", False, 0.1)
    assert silence.look(105.5) == set()
    seen[0] = Connection(1, "10.0.0.2", True, 20.0)
    assert looks(silence, seen, 3.5, 106.0) == set(), "it begins anew"


@pytest.mark.parametrize("sign", [Connection(1, "a", True, 1.0), Connection(9, "a", False, 1.0)], ids=["same", "other"])
def test_whatever_comes_from_an_address_shows_that_it_is_there(sign):
    """A link that loses much, a firewall that drops what goes to one port."""
    silence = Silence(4.0, lambda: [Connection(1, "a", True, 30.0), sign])
    assert looks(silence, [], 30.0, 0.0) == set()


def test_a_process_that_was_stopped_blames_nobody():
    silence = Silence(4.0, lambda: [Connection(1, "a", True, 30.0)])
    assert silence.look(0.0) == silence.look(0.5) == silence.look(1000.0) == set()
    assert looks(silence, [], 3.0, 1000.5) == set()
    assert looks(silence, [], 1.0, 1004.0) == {"a"}


def test_connections_that_were_there_before_may_be_ignored():
    seen = [Connection(1, "a", True, 30.0)]
    silence = Silence(4.0, lambda: seen, ignore_present=True)
    seen.append(Connection(2, "b", True, 30.0))
    assert looks(silence, seen, 5.0, 0.0) == {"b"}


# ---- the kernel's word ----------------------------------------------------------------------------------------


def test_connections_of_this_host_with_itself_do_not_count():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        assert list(tcp.connections()) == []
        assert list(tcp.connections_of(os.getpid())) == []


@pytest.fixture
def two_addresses(monkeypatch):
    """As if loopback were another host."""
    monkeypatch.setattr(tcp, "_is_elsewhere", lambda address: True)


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6], ids=lambda f: f.name)
def test_a_connection_that_answers_is_seen_so(two_addresses, family):
    own = {"127.0.0.1", "::1"}
    try:
        server = socket.create_server(("127.0.0.1" if family == socket.AF_INET else "::1", 0), family=family)
    except OSError:
        pytest.skip("no such addresses here")
    with server, socket.create_connection(server.getsockname()[:2]) as client:
        client.sendall(b"x")
        time.sleep(0.1)
        (mine,) = (c for c in tcp.connections() if c.inode == os.fstat(client.fileno()).st_ino)
        assert mine.address in own
        assert not mine.unanswered
        assert mine.heard_s < 60.0
        (same,) = (c for c in tcp.connections_of(os.getpid()) if c.inode == mine.inode)
        assert (same.address, same.unanswered) == (mine.address, False)


def test_a_receiver_that_does_not_read_answers_all_the_same(two_addresses):
    """Its kernel does: it may compute, or be stopped."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        client.setblocking(False)
        try:
            while True:
                client.send(bytes(1 << 20))
        except BlockingIOError:
            pass
        silence = Silence(0.8)
        for _ in range(20):
            time.sleep(0.1)
            assert silence.look(time.monotonic()) == set()


def test_own_addresses():
    assert all(not address.startswith("127.") and address != "::1" for address in tcp.addresses())


# ---- words between ranks ----------------------------------------------------------------------------------------

HOSTS = ("a", "a", "b", "c")
OWNERS = {"10.0.0.2": "b"}


def test_nothing_is_sent_while_nobody_waits():
    for rank in range(4):
        quiet = Links(rank, HOSTS, OWNERS, 8.0)
        assert all(quiet.turn((), now / 10) == ((), None) for now in range(1000))
        assert all(quiet.turn((now / 10 - 1.0,), now / 10) == ((), None) for now in range(1000)), "short waits"


def test_who_waits_speaks_to_rank_0_and_rank_0_to_the_other_hosts():
    times = [now / 10 for now in range(100)]
    for rank, audience in ((1, [0]), (3, [0]), (0, [2, 3])):
        waiting = Links(rank, HOSTS, OWNERS, 8.0)
        words = [(now, waiting.turn((0.0,), now)[0]) for now in times]
        spoken = [(now, list(to)) for now, to in words if to]
        assert [to for _, to in spoken] == [audience] * 4
        assert spoken[0][0] == 2.0
    asked = Links(0, HOSTS, OWNERS, 8.0)
    asked.heard(0.0)
    assert [list(to) for to in (asked.turn((), now)[0] for now in times) if to] == [[2, 3]] * 2, "then nobody asked"


def test_no_limit_no_words():
    never = Links(0, HOSTS, OWNERS, 0.0)
    assert all(never.turn((0.0,), now / 10) == ((), None) for now in range(1000))


def test_what_is_lost_is_named(monkeypatch):
    monkeypatch.setattr(links, "Silence", lambda limit: Silence(limit, lambda: [
        Connection(1, "10.0.0.2", True), Connection(2, "192.0.2.7", True),
    ]))  # fmt: skip
    waiting = Links(3, HOSTS, OWNERS, 8.0)
    (lost,) = {lost for lost in (waiting.turn((0.0,), now / 10)[1] for now in range(130)) if lost}
    assert lost.startswith("b (10.0.0.2) has not answered rank 3 on c for 8 s: ")
    assert "192.0.2.7" not in lost, "no address of the job: somebody else's connection"


def test_addresses_that_several_hosts_have_belong_to_none():
    found = owners(
        [{"10.0.0.1", "172.17.0.1"}, {"10.0.0.1", "172.17.0.1"}, {"10.0.0.2", "172.17.0.1"}], ["a", "a", "b"]
    )
    assert found == {"10.0.0.1": "a", "10.0.0.2": "b"}


# ---- the launcher -----------------------------------------------------------------------------------------------


@pytest.fixture
def shell(tmp_path: Path) -> list[str]:
    """A remote shell: host 'down' cannot be reached, the others say their name, 'twin' and 'other' the same."""
    path = tmp_path / "rsh"
    path.write_text(
        '#!/bin/sh\n[ "$1" != down ] || { echo "rsh: no route to $1" >&2; exit 255; }\n'
        'echo "Welcome!"\n[ "$2" = "uname -n" ] && case $1 in twin | other) echo twin ;; *) echo "$1" ;; esac\n'
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return [str(path)]


def test_hosts_that_answer_are_fine(shell):
    check_hosts(["n1", "n2", "localhost"], shell, os.environ)


@pytest.mark.parametrize(
    ("hosts", "sentence"),
    [
        (["n1", "down"], r"cannot start anything by \S+/rsh on down \(rsh: no route to down\)"),
        (["n1", "twin", "other"], "twin and other both have the host name 'twin'"),
    ],
)
def test_hosts_that_do_not_are_named(shell, hosts, sentence):
    with pytest.raises(ConfigError, match=sentence):
        check_hosts(hosts, shell, os.environ)


def test_this_host_is_not_asked_and_a_missing_shell_is_named():
    check_hosts(["localhost", "127.0.0.1"], ["/nowhere/rsh"], os.environ)
    with pytest.raises(ConfigError, match=r"by /nowhere/rsh on n1 \(No such file"):
        check_hosts(["n1"], ["/nowhere/rsh"], os.environ)


def test_the_guard_ends_with_what_it_watches_and_lets_its_status_alone():
    program = (
        "import os, sys; from hiercomm.cli import guard; guard.start(8.0, []); os.execvp('sh', ['sh', '-c', 'exit 7'])"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    # The guard has the pipes, too: that they were closed shows that it has ended.
    assert (ended.returncode, ended.stdout, ended.stderr) == (7, "", "")


def test_settings_for_mpiruns_own_connections():
    assert dict(guard.variables(8.0, "PRTE_MCA_")) == {
        "PRTE_MCA_oob_tcp_keepalive_time": "2",
        "PRTE_MCA_oob_tcp_keepalive_intvl": "1",
        "PRTE_MCA_oob_tcp_keepalive_probes": "14",
    }
    assert dict(guard.variables(0.0, "PRTE_MCA_")) == {}
