"""The command `hiercommrun`: starts a job by the mpirun that fits, then is that mpirun.

`build_command` is pure and decides everything: what to call and in which environment. Around it are the reading
of the command line and one exec, so that signals and exit status are mpirun's own. A default is set only where
the user has said nothing. Knows nothing of ranks, torch or mpi4py.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hiercomm import __version__
from hiercomm.cli import guard
from hiercomm.cli.hosts import Host, check_hosts, parse_hosts
from hiercomm.cli.mpirun import Kind, find_mpirun, in_container, recognise
from hiercomm.config import MPI_DEFAULTS, Config, process_environment
from hiercomm.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line of hiercommrun, checked. `variables` are those set by flags: they beat the environment."""

    num_proc: int
    command: tuple[str, ...]
    hosts: tuple[Host, ...] = ()
    ranks_per_node: int | None = None
    network_interface: str | None = None
    ssh: tuple[str, ...] = ()
    output_filename: str | None = None
    mpi_args: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    dry_run: bool = False
    verbose: bool = False

    def __post_init__(self) -> None:
        limit = self.ranks_per_node if len(self.hosts) > 1 else None
        room = sum(min(host.slots, limit or host.slots) for host in self.hosts)
        if self.hosts and room < self.num_proc:
            at_most = f" at {limit} ranks a node" if limit else ""
            raise ConfigError(f"-np {self.num_proc} does not fit: {_host_list(self)} has {room} slots{at_most}")


@dataclass(frozen=True)
class _Place:
    """Where the ranks go. Nodes or slots are None where only mpirun will know."""

    nodes: int | None
    slots: int | None
    local_ranks: int


def build_command(
    options: Options,
    mpirun: str,
    kind: Kind,
    environ: Mapping[str, str],
    cores: int,
    is_root: bool,
    *,
    in_container: bool = False,
) -> tuple[list[str], dict[str, str]]:
    """The command line that starts the job, and the environment to start it in."""
    place = _place(options, environ, cores)
    env = {**environ, **options.variables}
    if options.ranks_per_node is not None and place.nodes == 1:
        env["HIERCOMM_RANKS_PER_NODE"] = str(options.ranks_per_node)
    for name, value in _default_variables(options, kind, environ, max(1, cores // place.local_ranks), in_container):
        env.setdefault(name, value)
    if place.nodes != 1 and kind is not Kind.HYDRA:
        prefix = "OMPI_MCA_" if kind is Kind.OPEN_MPI_4 else "PRTE_MCA_"
        env = {**dict(guard.variables(_link_timeout(env), prefix)), **env}
    words = _hydra(options, place) if kind is Kind.HYDRA else _open_mpi(options, kind, place, env, is_root)
    return [mpirun, *words, *options.mpi_args, *options.command], env


def notices(options: Options, environ: Mapping[str, str], cores: int) -> list[str]:
    """What the user should hear before the job starts, a line each."""
    place = _place(options, environ, cores)
    if place.slots is None or options.num_proc <= place.slots:
        return []
    where = "slots of this allocation" if _in_allocation(environ) else "cores"
    return [f"{options.num_proc} ranks on {place.slots} {where}: oversubscription allowed, ranks will take turns"]


def _place(options: Options, environ: Mapping[str, str], cores: int) -> _Place:
    ranks, limit = options.num_proc, options.ranks_per_node
    if options.hosts:
        most = max(host.slots for host in options.hosts)
        return _Place(len(options.hosts), None, min(ranks, limit or most) if len(options.hosts) > 1 else ranks)
    if _given(options.mpi_args) & _HOST_FLAGS:
        return _Place(None, None, limit or ranks)
    if not _in_allocation(environ):
        return _Place(1, cores, ranks)
    nodes = _count(environ, "SLURM_JOB_NUM_NODES")
    spread = -(-ranks // (nodes or 1))
    return _Place(nodes, _count(environ, "SLURM_NTASKS"), min(ranks, limit or spread) if nodes != 1 else ranks)


def _default_variables(
    options: Options, kind: Kind, environ: Mapping[str, str], threads: int, in_container: bool
) -> Iterator[tuple[str, str]]:
    """Variables that are set unless the user did; Open MPI hands its OMPI_MCA_* on to the ranks by itself."""
    yield "HIERCOMM_PLACEMENT", "1"
    yield "OMP_NUM_THREADS", str(threads)
    if kind is Kind.HYDRA:
        if options.ssh:
            yield "HYDRA_LAUNCHER_EXTRA_ARGS", shlex.join(options.ssh)
        return
    yield from MPI_DEFAULTS.items()
    if in_container:
        # Ranks may not read each other's memory there: every large message would log "Read -1, errno = 1".
        old, new = ("OMPI_MCA_btl_vader_single_copy_mechanism", "none"), ("OMPI_MCA_smsc", "^cma")
        yield old if kind is Kind.OPEN_MPI_4 else new
    if "SLURM_JOB_ID" in environ:
        # Slurm's PMIx server offers munge, which not every PMIx client has, and each rank would print so.
        yield "PMIX_MCA_psec", "native"
    if options.ssh:
        name = "OMPI_MCA_plm_rsh_args" if kind is Kind.OPEN_MPI_4 else "PRTE_MCA_plm_ssh_args"
        yield name, shlex.join(options.ssh)


def _open_mpi(options: Options, kind: Kind, place: _Place, env: Mapping[str, str], is_root: bool) -> Iterator[str]:
    given = _given(options.mpi_args)
    if is_root and "allow-run-as-root" not in given:
        yield "--allow-run-as-root"
    yield from ("-np", str(options.num_proc))
    if options.hosts:
        yield from ("--host", _host_list(options))
    elif place.nodes == 1 and not _in_allocation(env):
        yield from ("--host", f"localhost:{options.num_proc}")
    if "map-by" not in given:
        yield from _map_by(options, kind, place, _in_allocation(env))
    if "bind-to" not in given:
        # By default each rank is bound to one core, its OpenMP threads and its progress thread with it.
        yield from ("--bind-to", "none")
    if options.network_interface:
        yield from ("--mca", "btl_tcp_if_include", options.network_interface)
    if options.output_filename:
        name = options.output_filename
        yield from ("--output-filename", name) if kind is Kind.OPEN_MPI_4 else ("--output", f"dir={name}")
    # Ranks on this machine inherit everything; those on others get what is named here, as under horovodrun.
    for name in sorted(env) if place.nodes != 1 else ():
        if re.fullmatch(r"[A-Za-z_]\w*", name) and name not in _KEPT and not name.startswith(_KEPT_PREFIXES):
            yield from ("-x", name)


def _map_by(options: Options, kind: Kind, place: _Place, in_allocation: bool) -> Iterator[str]:
    policy = "slot" if options.ranks_per_node is None or place.nodes == 1 else f"ppr:{options.ranks_per_node}:node"
    # Where the slots were counted above. Open MPI 5 can take fewer cores for the limit than the slots it was given.
    counted = place.nodes is not None and (place.slots is not None or not in_allocation)
    yield from ("--map-by", f"{policy}:oversubscribe" if counted and kind is Kind.OPEN_MPI_5 else policy)
    if counted and kind is Kind.OPEN_MPI_4:
        yield "--oversubscribe"


def _hydra(options: Options, place: _Place) -> Iterator[str]:
    yield from ("-n", str(options.num_proc))
    if options.hosts:
        yield from ("-hosts", _host_list(options))
    if options.ranks_per_node is not None and place.nodes != 1:
        yield from ("-ppn", str(options.ranks_per_node))
    if options.network_interface:
        yield from ("-iface", options.network_interface)
    if options.output_filename:
        yield from ("-outfile-pattern", f"{options.output_filename}/rank.%r.stdout")
        yield from ("-errfile-pattern", f"{options.output_filename}/rank.%r.stderr")


_HOST_FLAGS = {"host", "H", "hosts", "hostfile", "machinefile", "f"}
_ALLOCATIONS = ("SLURM_JOB_ID", "PBS_NODEFILE", "LSB_JOBID", "PE_HOSTFILE")
# What belongs to one machine, one shell or one launcher.
_KEPT = (
    "_", "DISPLAY", "HOME", "HOSTNAME", "LOGNAME", "LS_COLORS", "MAIL", "OLDPWD", "PWD", "SHELL", "SHLVL", "TERM",
    "TMPDIR", "USER",
)  # fmt: skip
_KEPT_PREFIXES = ("BASH", "DBUS_", "HYDRA_", "OMPI_", "PMI", "PRTE_", "SLURM_", "SSH_", "XDG_")


def _given(mpi_args: Sequence[str]) -> set[str]:
    """The names of the options among the user's own arguments for mpirun."""
    return {word.lstrip("-").partition("=")[0] for word in mpi_args if word.startswith("-")}


def _link_timeout(env: Mapping[str, str]) -> float:
    return Config.from_environment({k: v for k, v in env.items() if k == "HIERCOMM_LINK_TIMEOUT"}).link_timeout


def _in_allocation(environ: Mapping[str, str]) -> bool:
    return any(name in environ for name in _ALLOCATIONS)


def _host_list(options: Options) -> str:
    return ",".join(f"{host.name}:{host.slots}" for host in options.hosts)


def _count(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    return int(text) if re.fullmatch(r"[1-9][0-9]{0,8}", text) else None


def parse(argv: Sequence[str]) -> Options:
    """The options in a command line of hiercommrun. Raises ConfigError naming what cannot be used."""
    given = _parser().parse_args(argv)
    if given.hosts and given.hostfile:
        raise ConfigError("give either --hosts or --hostfile, not both")
    hosts = parse_hosts(given.hosts.split(",")) if given.hosts else ()
    if given.hostfile:
        try:
            lines = Path(given.hostfile).read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--hostfile {given.hostfile} cannot be read: {error}") from None
        hosts = parse_hosts([line for line in (line.partition("#")[0].strip() for line in lines) if line])
    return Options(
        num_proc=_positive(given.num_proc, "-np"),
        command=_command(given.command),
        hosts=hosts,
        ranks_per_node=None if given.ranks_per_node is None else _positive(given.ranks_per_node, "--ranks-per-node"),
        network_interface=given.network_interface,
        ssh=_ssh(given),
        output_filename=given.output_filename,
        mpi_args=_words(given.mpi_args),
        variables=_variables(given),
        dry_run=given.dry_run,
        verbose=given.verbose,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "hiercommrun",
        usage="hiercommrun -np N [options] script.py [arguments]",
        description="Start N ranks of a training script over MPI.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-np", "-n", "--num-proc", required=True, metavar="N", help="number of ranks")
    add("-H", "--hosts", metavar="HOST:SLOTS,...", help="where to start them; default: the allocation, or here")
    add("-hostfile", "--hostfile", metavar="FILE", help="the same from a file: 'host slots=N' or 'host:N' a line")
    add("--ranks-per-node", metavar="K", help="ranks on each node; on a single host, splits it into nodes of K ranks")
    add("--network-interface", "--network-interfaces", metavar="NAME,...", help="use only these between nodes")
    add("-p", "--ssh-port", metavar="PORT", help="port of ssh on the hosts")
    add("-i", "--ssh-identity-file", metavar="FILE", help="key for ssh to the hosts")
    add("--output-filename", metavar="DIR", help="write the output of each rank into a file of its own there")
    add("--mpi-args", default="", metavar="ARGS", help="more arguments for mpirun, in one word: --mpi-args='--mca a b'")
    add("--fusion-threshold-mb", metavar="MB", help="size of the buckets (HIERCOMM_BUCKET_BYTES)")
    add("--stall-check-warning-time-seconds", metavar="S", help="when to name who is late (HIERCOMM_STALL_WARN)")
    add("--no-stall-check", dest="stall_check_warning_time_seconds", action="store_const", const="0", help="never do")
    add("--stall-check-shutdown-time-seconds", metavar="S", help="when to give up (HIERCOMM_STALL_ABORT)")
    add("--report", action="store_true", help="print where the time went, at the end (HIERCOMM_REPORT=1)")
    add("--dry-run", action="store_true", help="print the command and the variables it sets; start nothing")
    add("--verbose", action="store_true", help="print them, then start")
    # Horovod's flags for what is always so here.
    add("--mpi", "--hierarchical-allreduce", action="store_true", help=argparse.SUPPRESS)
    add("-v", "--version", action="version", version=f"hiercomm {__version__}")
    add("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _positive(text: str, flag: str) -> int:
    if not re.fullmatch(r"0*[1-9][0-9]{0,8}", text):
        raise ConfigError(f"{flag} {text} cannot be used: it must be a whole number of at least 1")
    return int(text)


def _variables(given: argparse.Namespace) -> dict[str, str]:
    variables = {}
    if given.report:
        variables["HIERCOMM_REPORT"] = "1"
    if given.fusion_threshold_mb is not None:
        variables["HIERCOMM_BUCKET_BYTES"] = str(_positive(given.fusion_threshold_mb, "--fusion-threshold-mb") * 2**20)
    for name, part in (("WARN", "warning"), ("ABORT", "shutdown")):
        seconds, flag = getattr(given, f"stall_check_{part}_time_seconds"), f"--stall-check-{part}-time-seconds"
        if seconds is not None:  # 0: never
            variables[f"HIERCOMM_STALL_{name}"] = seconds if seconds == "0" else str(_positive(seconds, flag))
    return variables


def _ssh(given: argparse.Namespace) -> tuple[str, ...]:
    port = () if given.ssh_port is None else ("-p", str(_positive(given.ssh_port, "--ssh-port")))
    return port + (() if given.ssh_identity_file is None else ("-i", given.ssh_identity_file))


def _words(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigError(f"--mpi-args {text!r} cannot be split into words: {error}") from None


def _command(words: Sequence[str]) -> tuple[str, ...]:
    """The program to run. Raises ConfigError where there is no such file."""
    words = words[1:] if words[:1] == ["--"] else words
    if not words:
        raise ConfigError("nothing to run: give a script, as in hiercommrun -np 2 train.py")
    python = re.fullmatch(r"python[0-9.]*", os.path.basename(words[0])) is not None
    script = words[1] if python and len(words) > 1 else words[0]
    if script.endswith(".py") and not os.path.isfile(script):
        raise ConfigError(f"there is no script {script!r} in {os.getcwd()}")
    if words[0].endswith(".py"):
        return (sys.executable, *words)
    if words[0] in ("python", "python3"):
        # The one on PATH need not be the one that has hiercomm: a virtual environment works without activation.
        return (sys.executable, *words[1:])
    if shutil.which(words[0], path=process_environment().get("PATH")) is None:
        raise ConfigError(f"there is no program {words[0]!r}")
    return tuple(words)


def remote_shell(options: Options, kind: Kind, env: Mapping[str, str]) -> list[str] | None:
    """The command by which mpirun will start something on the hosts, where that is known: ssh or the user's own."""
    own = "HYDRA_LAUNCHER" in env or any(re.search("launcher|plm_", word) for word in options.mpi_args)
    if not options.hosts or own or _in_allocation(env):
        return None
    agent = {Kind.OPEN_MPI_4: "OMPI_MCA_plm_rsh_agent", Kind.OPEN_MPI_5: "PRTE_MCA_plm_ssh_agent"}.get(kind, "")
    if agent in env:
        return shlex.split(env[agent])
    return ["ssh", "-o", "BatchMode=yes", *options.ssh]


def shell_line(argv: Sequence[str], env: Mapping[str, str], environ: Mapping[str, str]) -> str:
    """The command as one would type it, with the variables that differ from `environ` in front."""
    changed = (f"{name}={shlex.quote(value)}" for name, value in sorted(env.items()) if environ.get(name) != value)
    return " \\\n  ".join((*changed, shlex.join(argv)))


def main(argv: Sequence[str] | None = None) -> int:
    """Start the job; returns only when there is none to start, with the exit status."""
    try:
        options = parse(sys.argv[1:] if argv is None else argv)
        return _start(options, process_environment())
    except ConfigError as error:
        print(f"hiercommrun: {error}", file=sys.stderr)
        return 2


def _start(options: Options, environ: dict[str, str]) -> int:
    mpirun = find_mpirun(environ, Path(sys.executable).parent)
    if mpirun is None:
        print("hiercommrun: no mpirun here or on PATH; `pip install 'hiercomm[mpi]'` brings one", file=sys.stderr)
        return 127
    answer = subprocess.run([mpirun, "--version"], capture_output=True, text=True, errors="replace", check=False)
    kind = recognise(answer.stdout + answer.stderr, mpirun)
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    is_root, boxed = os.geteuid() == 0, in_container(environ)
    command, env = build_command(options, mpirun, kind, environ, cores, is_root, in_container=boxed)
    for line in notices(options, environ, cores):
        print(f"hiercommrun: {line}", file=sys.stderr, flush=True)
    if options.dry_run or options.verbose:
        print(shell_line(command, env, environ), file=sys.stdout if options.dry_run else sys.stderr, flush=True)
    if options.dry_run:
        return 0
    shell = remote_shell(options, kind, env)
    if shell is not None:
        check_hosts([host.name for host in options.hosts], shell, env)
    if options.output_filename:
        os.makedirs(options.output_filename, exist_ok=True)  # Hydra does not
    if _place(options, environ, cores).nodes != 1:
        guard.start(_link_timeout(env), [host.name for host in options.hosts])
    os.execvpe(mpirun, command, env)
