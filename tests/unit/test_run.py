"""hiercommrun's decisions: what it calls, in which environment, and what it refuses; no mpirun is started."""

from __future__ import annotations

import os
import shlex
import stat
import subprocess
import sys

import pytest

from hiercomm.cli import main as hiercomm_command
from hiercomm.cli import run
from hiercomm.cli.run import (
    Host,
    Kind,
    Options,
    build_command,
    find_mpirun,
    in_container,
    parse,
    parse_hosts,
    recognise,
)
from hiercomm.config import Config
from hiercomm.errors import ConfigError

SLURM = {"SLURM_JOB_ID": "17", "SLURM_NTASKS": "4", "SLURM_JOB_NUM_NODES": "2"}
TWO_HOSTS = (Host("n1", 2), Host("n2", 2))
OPEN_MPI = [Kind.OPEN_MPI_4, Kind.OPEN_MPI_5]
SHARED = {Kind.OPEN_MPI_5: ":oversubscribe"}
COMMAND = ("python", "train.py", "--lr", "0.1")


def build(kind=Kind.OPEN_MPI_5, environ=None, *, cores=8, is_root=False, in_container=False, **options):
    options = Options(**{"num_proc": 4, "command": COMMAND, **options})
    return build_command(options, "/bin/mpirun", kind, environ or {}, cores, is_root, in_container=in_container)


def after(argv, flag):
    return argv[argv.index(flag) + 1]


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    return "train.py"


@pytest.fixture
def mpirun(tmp_path):
    """A folder with an mpirun that says it is Open MPI 5 and otherwise prints its arguments and OMP_NUM_THREADS."""
    path = tmp_path / "bin" / "mpirun"
    path.parent.mkdir()
    path.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo "mpirun (Open MPI) 5.0.11" && exit\n'
        'echo "$*" "threads=$OMP_NUM_THREADS"\nexit 7\n'
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path.parent


@pytest.mark.parametrize("kind", OPEN_MPI)
def test_one_host_with_open_mpi(kind):
    argv, env = build(kind)
    assert argv[0] == "/bin/mpirun"
    assert after(argv, "-np") == "4"
    assert after(argv, "--host") == "localhost:4"
    assert after(argv, "--bind-to") == "none"
    assert after(argv, "--map-by") == "slot" + SHARED.get(kind, "")
    assert tuple(argv[-4:]) == COMMAND
    assert "--allow-run-as-root" not in argv
    assert build(kind, is_root=True)[0].count("--allow-run-as-root") == 1
    assert argv.count("--oversubscribe") == (kind is Kind.OPEN_MPI_4)
    assert env["OMPI_MCA_mpi_yield_when_idle"] == "1"
    for name in ("btl_tcp_eager_limit", "btl_tcp_rndv_eager_limit", "btl_tcp_max_send_size"):
        assert env[f"OMPI_MCA_{name}"] == "1100000"
    assert not {"HIERCOMM_RANKS_PER_NODE", "HIERCOMM_REPORT", "PMIX_MCA_psec"} & set(env)


def test_one_host_with_hydra():
    argv, env = build(Kind.HYDRA, is_root=True, in_container=True)
    assert argv == ["/bin/mpirun", "-n", "4", *COMMAND]
    assert env == {"HIERCOMM_PLACEMENT": "1", "OMP_NUM_THREADS": "2"}


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [(OPEN_MPI[0], "OMPI_MCA_btl_vader_single_copy_mechanism", "none"), (OPEN_MPI[1], "OMPI_MCA_smsc", "^cma")],
)
def test_a_container_turns_single_copy_off(kind, name, value):
    assert build(kind, in_container=True)[1][name] == value
    assert name not in build(kind, in_container=False)[1]
    assert build(kind, {name: "mine"}, in_container=True)[1][name] == "mine"


@pytest.mark.parametrize("kind", Kind)
def test_what_the_user_has_set_stays(kind):
    names = [name for name in build(kind, SLURM, in_container=True, ssh=("-p", "22"))[1] if name not in SLURM]
    environ = {**SLURM, **dict.fromkeys(names, "mine")}
    assert build(kind, environ, in_container=True, ssh=("-p", "22"))[1] == environ


@pytest.mark.parametrize("kind", OPEN_MPI)
def test_what_the_user_says_to_mpirun_is_not_said_twice(kind):
    argv, _ = build(
        kind, is_root=True, mpi_args=tuple(shlex.split("--bind-to core --map-by=node --allow-run-as-root -H a:4"))
    )
    assert [argv.count(flag) for flag in ("--bind-to", "--allow-run-as-root", "--host", "--map-by")] == [1, 1, 0, 0]
    assert argv[-10:] == ["--bind-to", "core", "--map-by=node", "--allow-run-as-root", "-H", "a:4", *COMMAND]


@pytest.mark.parametrize(
    ("cores", "num_proc", "hosts", "threads"),
    [
        (8, 4, (), "2"),
        (8, 3, (), "2"),
        (2, 4, (), "1"),
        (8, 4, TWO_HOSTS, "4"),
        (8, 5, (Host("n1", 4), Host("n2", 1)), "2"),
        (8, 1, TWO_HOSTS, "8"),
    ],
)
def test_threads_share_the_cores(cores, num_proc, hosts, threads):
    assert build(cores=cores, num_proc=num_proc, hosts=hosts)[1]["OMP_NUM_THREADS"] == threads


def test_threads_count_the_ranks_of_an_allocated_node():
    assert build(environ=SLURM)[1]["OMP_NUM_THREADS"] == "4"


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("hosts", [(), (Host("localhost", 4),)])
def test_ranks_per_node_splits_a_single_host(kind, hosts):
    argv, env = build(kind, {"HIERCOMM_RANKS_PER_NODE": "1"}, hosts=hosts, ranks_per_node=2)
    assert env["HIERCOMM_RANKS_PER_NODE"] == "2"
    assert env["OMP_NUM_THREADS"] == "2"
    assert "ppr:2:node" not in argv
    assert "-ppn" not in argv


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize(("environ", "hosts"), [({}, TWO_HOSTS), (SLURM, ()), ({"PBS_NODEFILE": "f"}, ())])
def test_ranks_per_node_maps_several_hosts(kind, environ, hosts):
    argv, env = build(kind, environ, hosts=hosts, ranks_per_node=2)
    assert "HIERCOMM_RANKS_PER_NODE" not in env
    if kind is Kind.HYDRA:
        assert after(argv, "-ppn") == "2"
    else:
        shared = "" if "PBS_NODEFILE" in environ else SHARED.get(kind, "")
        assert after(argv, "--map-by") == f"ppr:2:node{shared}"


def test_ranks_per_node_splits_an_allocation_of_one_node():
    argv, env = build(environ={**SLURM, "SLURM_JOB_NUM_NODES": "1"}, ranks_per_node=2)
    assert env["HIERCOMM_RANKS_PER_NODE"] == "2"
    assert after(argv, "--map-by") == "slot:oversubscribe"


@pytest.mark.parametrize("kind", Kind)
def test_hosts(kind):
    assert after(build(kind, hosts=TWO_HOSTS)[0], "-hosts" if kind is Kind.HYDRA else "--host") == "n1:2,n2:2"


@pytest.mark.parametrize("kind", OPEN_MPI)
def test_in_an_allocation_slurm_names_the_hosts(kind):
    argv, env = build(kind, SLURM)
    assert "--host" not in argv
    assert env["PMIX_MCA_psec"] == "native"


@pytest.mark.parametrize(
    ("environ", "options", "allowed"),
    [
        ({}, {}, True),
        ({}, {"hosts": TWO_HOSTS}, True),
        ({}, {"mpi_args": ("-H", "a:4")}, False),
        (SLURM, {}, True),
        (SLURM, {"num_proc": 5}, True),
        (SLURM, {"num_proc": 6, "ranks_per_node": 3}, True),
        ({"PBS_NODEFILE": "f"}, {}, False),
    ],
)
def test_mpirun_counts_slots_itself_only_where_nothing_else_did(environ, options, allowed):
    """Open MPI 5 has refused 4 ranks on localhost:4 on a machine of two cores ("Out of resource")."""
    policy = "ppr:3:node" if "ranks_per_node" in options else "slot"
    argv = build(Kind.OPEN_MPI_5, environ, **options)[0]
    assert after(argv, "--map-by") == policy + (":oversubscribe" if allowed else "")
    assert "--oversubscribe" not in argv
    argv = build(Kind.OPEN_MPI_4, environ, **options)[0]
    assert after(argv, "--map-by") == policy
    assert ("--oversubscribe" in argv) == allowed


def test_oversubscription_is_said_in_one_line():
    def said(num_proc, environ, **options):
        return run.notices(Options(num_proc=num_proc, command=COMMAND, **options), environ, 2)

    assert said(2, {}) == []
    assert said(4, {}) == ["4 ranks on 2 cores: oversubscription allowed, ranks will take turns"]
    assert said(4, SLURM) == []
    assert said(5, SLURM) == ["5 ranks on 4 slots of this allocation: oversubscription allowed, ranks will take turns"]
    assert said(4, {}, hosts=TWO_HOSTS) == []


@pytest.mark.parametrize("kind", OPEN_MPI)
def test_ranks_elsewhere_see_the_environment(kind):
    """All of it, as under horovodrun, but what belongs to one machine or to a launcher."""
    environ = {"HIERCOMM_MODE": "bsp", "DATA_DIR": "/data", "PYTHONPATH": "/x", "NCCL_DEBUG": "INFO"}
    kept = {"HOME": "/h", "HOSTNAME": "n1", "TMPDIR": "/t", "OMPI_MCA_btl": "tcp", "BASH_FUNC_module%%": "() { :; }"}
    argv, _ = build(kind, environ | kept, hosts=TWO_HOSTS)
    exported = {argv[i + 1] for i, word in enumerate(argv) if word == "-x"}
    assert exported == {*environ, "OMP_NUM_THREADS", "HIERCOMM_PLACEMENT"}
    assert "-x" not in build(kind, environ)[0], "ranks on this machine inherit it"


@pytest.mark.parametrize("kind", OPEN_MPI)
def test_an_interface_is_named_only_when_the_user_does(kind):
    assert "--mca btl_tcp_if_include eth0" in shlex.join(build(kind, network_interface="eth0")[0])
    assert "btl_tcp_if_include" not in build(kind)[0]


def test_interface_and_output_files_with_hydra():
    argv, _ = build(Kind.HYDRA, network_interface="eth0", output_filename="out")
    assert after(argv, "-iface") == "eth0"
    assert after(argv, "-outfile-pattern") == "out/rank.%r.stdout"


def test_ssh_options():
    names = ("OMPI_MCA_plm_rsh_args", "PRTE_MCA_plm_ssh_args", "HYDRA_LAUNCHER_EXTRA_ARGS")
    for kind, name in zip(Kind, names, strict=True):
        assert build(kind, ssh=("-p", "2222"))[1][name] == "-p 2222"


def test_the_library_knows_every_variable_that_is_set():
    _, env = build(ranks_per_node=2, variables={"HIERCOMM_REPORT": "1", "HIERCOMM_BUCKET_BYTES": "1048576"})
    config = Config.from_environment(env)
    assert (config.placement, config.report, config.ranks_per_node, config.bucket_bytes) == (True, True, 2, 2**20)


@pytest.mark.parametrize(
    ("version", "kind"),
    [
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs to ...", Kind.OPEN_MPI_5),
        ("mpirun (Open MPI) 4.1.6", Kind.OPEN_MPI_4),
        ("mpirun.openmpi (OpenRTE) 4.1.4", Kind.OPEN_MPI_4),
        ("HYDRA build details:\n    Version:        5.0.2", Kind.HYDRA),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.11 Build 20231005", Kind.HYDRA),
    ],
)
def test_mpirun_is_recognised(version, kind):
    assert recognise(version) is kind


def test_an_unknown_mpirun_is_named():
    with pytest.raises(ConfigError, match=r"/x/mpirun is of no known MPI: --version prints 'jsrun 10'"):
        recognise("jsrun 10\nmore", "/x/mpirun")


def test_mpirun_beside_python_comes_before_path(mpirun, tmp_path):
    other = tmp_path / "other"
    assert find_mpirun({"PATH": str(mpirun)}, other) == str(mpirun / "mpirun")
    assert find_mpirun({"PATH": "/nowhere"}, mpirun) == str(mpirun / "mpirun")
    assert find_mpirun({"PATH": "/nowhere"}, other) is None


def test_a_container_is_seen_by_its_marks(monkeypatch):
    monkeypatch.setattr(os.path, "exists", lambda path: path == "/.dockerenv")
    assert in_container({})
    monkeypatch.setattr(os.path, "exists", lambda path: False)
    assert not in_container({})
    assert in_container({"APPTAINER_CONTAINER": "/x.sif"})


@pytest.mark.parametrize("spelling", ["-np", "-n", "--num-proc"])
def test_a_command_line_in_horovods_spelling(script, spelling):
    options = parse([spelling, "4", "-H", "n1:2,n2:2", "--network-interfaces", "eth0", "python", script, "-np", "7"])
    assert options.num_proc == 4
    assert options.hosts == TWO_HOSTS
    assert options.network_interface == "eth0"
    assert options.command == (sys.executable, script, "-np", "7")


def test_what_follows_the_script_is_the_scripts(script):
    options = parse(["-np", "2", "--mpi-args=--mca a b", script, "--report", "--dry-run", "-H", "x"])
    assert options.command == (sys.executable, script, "--report", "--dry-run", "-H", "x")
    assert options.mpi_args == ("--mca", "a", "b")
    assert not options.dry_run
    assert options.variables == {}


def test_flags_that_are_variables_beat_the_environment(script):
    flags = ["--report", "--fusion-threshold-mb", "8", "--stall-check-shutdown-time-seconds", "90"]
    options = parse(["-np", "2", *flags, script])
    environ = {"HIERCOMM_REPORT": "0", "HIERCOMM_BUCKET_BYTES": "1"}
    _, env = build_command(options, "mpirun", Kind.OPEN_MPI_5, environ, 2, False)
    assert env["HIERCOMM_REPORT"] == "1"
    assert env["HIERCOMM_BUCKET_BYTES"] == str(8 * 2**20)
    assert env["HIERCOMM_STALL_ABORT"] == "90"
    assert "HIERCOMM_STALL_WARN" not in env


@pytest.mark.parametrize(
    ("flags", "variables"),
    [
        (["--stall-check-warning-time-seconds", "30"], {"HIERCOMM_STALL_WARN": "30"}),
        (["--no-stall-check"], {"HIERCOMM_STALL_WARN": "0"}),
        (["--stall-check-shutdown-time-seconds", "0"], {"HIERCOMM_STALL_ABORT": "0"}),
    ],
)
def test_the_flags_about_stalls(script, flags, variables):
    assert parse(["-np", "2", *flags, script]).variables == variables


def test_a_program_other_than_a_script(script):
    assert parse(["-np", "2", "--", "python3", "-m", "pkg"]).command == (sys.executable, "-m", "pkg")
    assert parse(["-np", "2", sys.executable, script]).command == (sys.executable, script)
    assert parse(["-np", "2", "true"]).command == ("true",)


def test_hostfile(script, tmp_path):
    (tmp_path / "hosts").write_text("# ours\nn1 slots=2 max_slots=4\n\nn2:1  # small\nn2\n")
    assert parse(["-np", "4", "-hostfile", "hosts", script]).hosts == TWO_HOSTS


def test_a_host_named_again_gets_both_slots():
    assert parse_hosts(["n1", "n2:3", "n1"]) == (Host("n1", 2), Host("n2", 3))


@pytest.mark.parametrize("item", ["", "n1:", "n1:0", "n1:two", ":2", "-n1:2", "n1 slots=", "n1 2", "n1:2:3", "n1;rm"])
def test_a_bad_host_is_named(item):
    with pytest.raises(ConfigError, match="name:slots") as caught:
        parse_hosts([item])
    assert repr(item) in str(caught.value)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["-np", "0", "train.py"], "-np 0 cannot be used"),
        (["-np", "-3", "train.py"], "-np -3 cannot be used"),
        (["-np", "two", "train.py"], "-np two cannot be used"),
        (["-np", "2", "--ranks-per-node", "0", "train.py"], "--ranks-per-node 0 cannot be used"),
        (["-np", "2"], "nothing to run"),
        (["-np", "2", "absent.py"], "there is no script 'absent.py'"),
        (["-np", "2", "python", "absent.py"], "there is no script 'absent.py'"),
        (["-np", "2", "no-such-program"], "there is no program 'no-such-program'"),
        (["-np", "4", "-H", "n1:2,n2:1", "train.py"], "-np 4 does not fit: n1:2,n2:1 has 3 slots"),
        (["-np", "4", "-H", "n1", "train.py"], "-np 4 does not fit: n1:1 has 1 slots"),
        (
            ["-np", "4", "-H", "n1:4,n2:4", "--ranks-per-node", "1", "train.py"],
            "-np 4 does not fit: n1:4,n2:4 has 2 slots at 1 ranks a node",
        ),
        (["-np", "2", "-H", "a:2", "--hostfile", "f", "train.py"], "either --hosts or --hostfile"),
        (["-np", "2", "--hostfile", "absent", "train.py"], "--hostfile absent cannot be read"),
        (["-np", "2", "--mpi-args='", "train.py"], "cannot be split into words"),
        (["-np", "2", "-p", "x", "train.py"], "--ssh-port x cannot be used"),
    ],
)
def test_a_mistake_is_one_sentence(script, capsys, argv, sentence):
    assert run.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("hiercommrun: ")
    assert sentence in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "argv", [["train.py"], ["-np", "2", "--gloo", "train.py"], ["-np", "2", "--repor", "train.py"]]
)
def test_unknown_and_missing_flags_are_argparses(script, capsys, argv):
    with pytest.raises(SystemExit) as caught:
        run.main(argv)
    assert caught.value.code == 2
    assert "hiercommrun: error: " in capsys.readouterr().err


def test_dry_run_prints_a_line_for_the_shell_and_starts_nothing(script, mpirun, monkeypatch, capsys):
    monkeypatch.setattr(run, "find_mpirun", lambda environ, beside: str(mpirun / "mpirun"))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert run.main(["-np", "64", "--dry-run", script, "a b", "$HOME"]) == 0
    out, err = capsys.readouterr()
    assert err.count("\n") == 1
    assert "64 ranks on" in err
    answer = subprocess.run(["sh", "-c", out], capture_output=True, text=True, timeout=60, check=False)
    assert answer.returncode == 7
    assert answer.stdout.endswith(" train.py a b $HOME threads=1\n")


def test_it_becomes_mpirun(script, mpirun, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(run, "find_mpirun", lambda environ, beside: str(mpirun / "mpirun"))
    called = []
    monkeypatch.setattr(os, "execvpe", lambda *arguments: called.append(arguments))
    run.main(["-np", "1", "--verbose", "--output-filename", "out", script])
    [(program, argv, env)] = called
    assert program == argv[0] == str(mpirun / "mpirun")
    assert env["HIERCOMM_PLACEMENT"] == "1"
    assert os.path.isdir("out")


def test_without_mpirun_it_says_what_to_install(script, monkeypatch, capsys):
    monkeypatch.setattr(run, "find_mpirun", lambda environ, beside: None)
    assert run.main(["-np", "2", script]) == 127
    assert "pip install 'hiercomm[mpi]'" in capsys.readouterr().err


class TestHiercomm:
    def test_version(self, capsys):
        assert hiercomm_command.main(["version"]) == 0
        assert capsys.readouterr().out.startswith("hiercomm 0.")

    @pytest.mark.parametrize("name", ["plan", "trace", "report", "nonsense"])
    def test_what_is_not_there_is_one_sentence_and_status_2(self, capsys, name):
        assert hiercomm_command.main([name, "--x"]) == 2
        err = capsys.readouterr().err
        assert name in err
        assert err.count("\n") == 1

    def test_usage(self, capsys):
        assert hiercomm_command.main([]) == 2
        assert hiercomm_command.main(["--help"]) == 0
        assert "bench" in capsys.readouterr().out
