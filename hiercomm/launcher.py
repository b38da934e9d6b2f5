"""What the variables of the launcher say about this process, the environment being an argument; and its daemon.

MPI itself is the truth about ranks. The launcher's claim is kept to compare with it: where the launcher and
the MPI library do not fit together, every process is alone in a world of one and nothing else would say so.
Knows nothing of MPI, torch or the options of hiercomm.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

OPEN_MPI = "Open MPI's mpirun"
MVAPICH = "MVAPICH's launcher"
PALS = "Cray PALS"
INTEL_MPI = "Intel MPI's mpiexec"
HYDRA = "MPICH's mpiexec"
PMI = "a PMI launcher"
SRUN_PMI2 = "srun --mpi=pmi2"
SRUN_PMIX = "srun --mpi=pmix"
SRUN = "srun"
TORCHRUN = "torchrun"
_DAEMONS = ("prted", "orted", "hydra_pmi_proxy")
_DAEMON_GRACE_S = 4


@dataclass(frozen=True)
class Claim:
    """Who started this process, and as which of how many; None where the launcher does not say."""

    launcher: str
    rank: int
    size: int
    local_rank: int | None
    local_size: int | None


def claim(environ: Mapping[str, str]) -> Claim | None:
    """What the launcher's variables say, or None where no launcher speaks. Malformed numbers count as unset.

    The first reader that finds a consistent set of variables wins, so the order is from the innermost launcher
    outwards: a job may be a torchrun under srun, or an mpirun inside a Slurm step whose SLURM_* it inherits.
    """
    for read in _READERS:
        found = read(environ)
        if found is not None:
            return found
    return None


def disagreement(claim: Claim, size: int) -> str:
    """The sentence for a launcher that started another number of processes than MPI's world has."""
    return (
        f"MPI's world has {_count(size, 'rank')}, but {claim.launcher} started {_count(claim.size, 'process')}: "
        f"{_FIXES.get(claim.launcher, _ANOTHER_MPI)}"
    )


def is_misfit(launcher: str, library: str) -> bool:
    """Whether ranks that this launcher starts cannot meet if they load this MPI library.

    Some libraries then end the process when MPI starts, others leave it alone in a world of one. `library` is what
    MPI_Get_library_version says. Launchers that serve several libraries fit any.
    """
    is_open_mpi = re.match(r"Open MPI|IBM Spectrum MPI", library) is not None
    if launcher == OPEN_MPI:
        return not is_open_mpi
    return is_open_mpi and launcher in (HYDRA, INTEL_MPI, MVAPICH)


def end_daemon() -> None:
    """Have the launcher's daemon on this node, which started this process, end in a few seconds if it has not by then.

    Where the node is cut off, the daemon hears nothing from the launcher: it ends the ranks, and stays itself.
    """
    parent = os.getppid()
    with contextlib.suppress(OSError):
        comm = Path(f"/proc/{parent}/comm").read_text(encoding="utf-8").strip()
        if comm in _DAEMONS:  # it may end this process, so another has to do it
            late = f'sleep {_DAEMON_GRACE_S}; [ "$(cat /proc/{parent}/comm)" != {comm} ] || kill {parent}'
            subprocess.Popen(["sh", "-c", late], start_new_session=True, stdin=subprocess.DEVNULL,
                             stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip


def _torchrun(environ: Mapping[str, str]) -> Claim | None:
    # RANK and WORLD_SIZE alone are set by many scripts and batch systems for their own ends.
    if "TORCHELASTIC_RUN_ID" not in environ:
        return None
    return _plain(environ, TORCHRUN, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def _open_mpi(environ: Mapping[str, str]) -> Claim | None:
    return _prefixed(environ, OPEN_MPI, "OMPI_COMM_WORLD_")


def _mvapich(environ: Mapping[str, str]) -> Claim | None:
    return _prefixed(environ, MVAPICH, "MV2_COMM_WORLD_") or _prefixed(environ, MVAPICH, "MVP_COMM_WORLD_")


def _pals(environ: Mapping[str, str]) -> Claim | None:
    return _plain(environ, PALS, "PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE")


def _hydra(environ: Mapping[str, str]) -> Claim | None:
    if "MPI_LOCALRANKID" not in environ:
        return None
    # I_MPI_ROOT is set by merely loading Intel's environment, whichever mpiexec then runs.
    intel = any(name.startswith("I_MPI_") and name != "I_MPI_ROOT" for name in environ)
    launcher = INTEL_MPI if intel else HYDRA
    return _plain(environ, launcher, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


def _pmi(environ: Mapping[str, str]) -> Claim | None:
    found = _plain(environ, PMI, "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")
    step = _slurm_step(environ, SRUN_PMI2)
    if found is not None and step is not None and (step.rank, step.size) == (found.rank, found.size):
        return step
    return found


def _srun_pmix(environ: Mapping[str, str]) -> Claim | None:
    # PMIx gives the rank alone; the step's own numbers count only where they name the same rank.
    step = _slurm_step(environ, SRUN_PMIX)
    return step if step is not None and step.rank == _number(environ, "PMIX_RANK") else None


def _srun(environ: Mapping[str, str]) -> Claim | None:
    return _slurm_step(environ, SRUN)


_READERS: tuple[Callable[[Mapping[str, str]], Claim | None], ...] = (
    _torchrun,
    _open_mpi,
    _mvapich,
    _pals,
    _hydra,
    _pmi,
    _srun_pmix,
    _srun,
)

_ANOTHER_MPI = (
    "it belongs to another MPI than the library that mpi4py has loaded; start with hiercommrun, "
    "or name that launcher's library in MPI4PY_LIBMPI."
)
_WRONG_PMI = (
    "the MPI library does not speak this --mpi=; use --mpi=pmix for Open MPI, --mpi=pmi2 for MPICH and Intel MPI "
    "(srun --mpi=list shows what this Slurm has)."
)
_FIXES = {
    TORCHRUN: "torchrun starts no MPI ranks; start with hiercommrun or mpirun instead.",
    OPEN_MPI: _ANOTHER_MPI,
    MVAPICH: _ANOTHER_MPI,
    PALS: _ANOTHER_MPI,
    INTEL_MPI: _ANOTHER_MPI,
    HYDRA: _ANOTHER_MPI,
    PMI: _ANOTHER_MPI,
    SRUN_PMI2: _WRONG_PMI,
    SRUN_PMIX: _WRONG_PMI,
    SRUN: "srun was given no --mpi= that the MPI library speaks; use srun --mpi=pmix for Open MPI, "
    "srun --mpi=pmi2 for MPICH and Intel MPI.",
}


def _slurm_step(environ: Mapping[str, str], launcher: str) -> Claim | None:
    # A batch script has SLURM_NTASKS and SLURM_PROCID=0 too; only a step started by srun has the number of its tasks.
    if "SLURM_STEP_ID" not in environ:
        return None
    found = _plain(environ, launcher, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "")
    if found is None or found.local_rank is None:
        return found
    local_size = _tasks_of_node(environ, found.size)
    if local_size is None or not found.local_rank < local_size:
        return found
    return Claim(launcher, found.rank, found.size, found.local_rank, local_size)


def _tasks_of_node(environ: Mapping[str, str], size: int) -> int | None:
    """This node's entry in SLURM_STEP_TASKS_PER_NODE, such as '2(x3),1', if all of them make up the step."""
    counts: list[int] = []
    for item in environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,5})\))?", item.strip())
        if match is None:
            return None
        counts += [int(match[1])] * int(match[2] or 1)
    node = _number(environ, "SLURM_NODEID")
    return counts[node] if node is not None and node < len(counts) and sum(counts) == size else None


def _prefixed(environ: Mapping[str, str], launcher: str, prefix: str) -> Claim | None:
    return _plain(environ, launcher, *(prefix + name for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")))


def _plain(
    environ: Mapping[str, str],
    launcher: str,
    rank_name: str,
    size_name: str,
    local_rank_name: str,
    local_size_name: str,
) -> Claim | None:
    """The claim made by four variables; None unless they hold a rank below a size."""
    rank, size = _number(environ, rank_name), _number(environ, size_name)
    if rank is None or size is None or not rank < size:
        return None
    local_rank, local_size = _number(environ, local_rank_name), _number(environ, local_size_name)
    if local_size is not None and not 1 <= local_size <= size:
        local_size = None
    if local_rank is not None and not local_rank < (local_size or size):
        local_rank = local_size = None
    return Claim(launcher, rank, size, local_rank, local_size)


def _number(environ: Mapping[str, str], name: str) -> int | None:
    # Narrower than int(): no sign, no underscore, no foreign digits, no number too long to convert.
    text = environ.get(name, "").strip()
    return int(text) if re.fullmatch(r"[0-9]{1,9}", text) else None


def _count(number: int, noun: str) -> str:
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{number} {noun if number == 1 else plural}"
