"""Every launcher's variables, and the traps: inherited, stale, inconsistent and malformed ones."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hiercomm import launcher
from hiercomm.launcher import Claim, claim, disagreement


def ompi(rank: object, size: object, local_rank: object, local_size: object) -> dict[str, str]:
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    values = (rank, size, local_rank, local_size)
    return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in zip(names, values, strict=True)}


def step(rank: int, size: int, local_rank: int, node: int, per_node: str) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "17",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_NTASKS": str(size),
        "SLURM_LOCALID": str(local_rank),
        "SLURM_NODEID": str(node),
        "SLURM_STEP_TASKS_PER_NODE": per_node,
    }


BATCH_SCRIPT = {
    "SLURM_JOB_ID": "17",
    "SLURM_NTASKS": "4",
    "SLURM_NPROCS": "4",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_GTIDS": "0",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}
# A PBS job that has two chunks of two ranks.
PBS = {
    "PBS_JOBID": "17.server",
    "PBS_NODEFILE": "/var/spool/pbs/aux/17.server",
    "PBS_NODENUM": "0",
    "PBS_TASKNUM": "1",
    "PBS_VNODENUM": "0",
    "NCPUS": "2",
}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "GROUP_RANK": "1",
    "ROLE_RANK": "5",
    "ROLE_WORLD_SIZE": "8",
    "MASTER_ADDR": "n1",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
}
HYDRA = {"PMI_FD": "6", "PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
INTEL = {
    **HYDRA,
    "HYDRA_BSTRAP_LAUNCHER": "slurm",
    "I_MPI_HYDRA_UUID": "cc0c0000-3bfe-a322-8361-0600e0604d4f",
    "I_MPI_HYDRA_TOPOLIB": "ipl2",
}
PMIX = {"PMIX_RANK": "3", "PMIX_NAMESPACE": "slurm.pmix.17.0", "PMIX_HOSTNAME": "n2", "SLURM_MPI_TYPE": "pmix"}
PMI2 = {"PMI_FD": "13", "PMI_JOBID": "17.0", "PMI_RANK": "3", "PMI_SIZE": "4", "SLURM_MPI_TYPE": "pmi2"}

# Rank 3 of 4, the second on the second of two nodes. Recorded on real ones, but for MVAPICH, PALS and PBS.
LAUNCHERS = {
    "Open MPI 4 mpirun": (
        {**ompi(3, 4, 1, 2), "PMIX_RANK": "3", "PMIX_NAMESPACE": "335413249", "PMIX_VERSION": "3.2.5a1"},
        Claim(launcher.OPEN_MPI, 3, 4, 1, 2),
    ),
    "Open MPI 5 mpirun": (
        {**ompi(3, 4, 1, 2), "PMIX_RANK": "3", "PMIX_NAMESPACE": "prterun-n1-2481@1", "PRTE_LAUNCHED": "1"},
        Claim(launcher.OPEN_MPI, 3, 4, 1, 2),
    ),
    "MPICH 4 mpiexec": (HYDRA, Claim(launcher.HYDRA, 3, 4, 1, 2)),
    "MPICH 5 mpiexec": ({**HYDRA, "PMI_HOSTNAME": "n2"}, Claim(launcher.HYDRA, 3, 4, 1, 2)),
    "MPICH gforker": (
        {"PMI_FD": "16", "PMI_RANK": "3", "PMI_SIZE": "4", "PMI_DEBUG": "0", "MPI_APPNUM": "0"},
        Claim(launcher.PMI, 3, 4, None, None),
    ),
    "Intel MPI mpiexec": (INTEL, Claim(launcher.INTEL_MPI, 3, 4, 1, 2)),
    "MVAPICH2": (
        {
            "MV2_COMM_WORLD_RANK": "3",
            "MV2_COMM_WORLD_SIZE": "4",
            "MV2_COMM_WORLD_LOCAL_RANK": "1",
            "MV2_COMM_WORLD_LOCAL_SIZE": "2",
        },
        Claim(launcher.MVAPICH, 3, 4, 1, 2),
    ),
    "Cray PALS": (
        {
            "PALS_APID": "2f1e",
            "PALS_NODEID": "1",
            "PALS_RANKID": "3",
            "PALS_LOCAL_RANKID": "1",
            "PALS_LOCAL_SIZE": "2",
            "PMI_RANK": "3",
            "PMI_SIZE": "4",
            "PMI_LOCAL_RANK": "1",
            "PMI_LOCAL_SIZE": "2",
            **PBS,
        },
        Claim(launcher.PALS, 3, 4, 1, 2),
    ),
    "Open MPI mpirun in a PBS job": ({**PBS, **ompi(3, 4, 1, 2)}, Claim(launcher.OPEN_MPI, 3, 4, 1, 2)),
    "MPICH mpiexec in a PBS job": ({**PBS, **HYDRA}, Claim(launcher.HYDRA, 3, 4, 1, 2)),
    "srun pmi2": ({**PMI2, **step(3, 4, 1, 1, "2(x2)")}, Claim(launcher.SRUN_PMI2, 3, 4, 1, 2)),
    "srun pmix": ({**PMIX, **step(3, 4, 1, 1, "2(x2)")}, Claim(launcher.SRUN_PMIX, 3, 4, 1, 2)),
    "srun without an MPI": (step(3, 4, 1, 1, "2(x2)"), Claim(launcher.SRUN, 3, 4, 1, 2)),
    "torchrun": (TORCHRUN, Claim(launcher.TORCHRUN, 5, 8, 1, 4)),
    "another PMI launcher": (
        {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_LOCAL_RANK": "0", "PMI_LOCAL_SIZE": "1"},
        Claim(launcher.PMI, 1, 2, 0, 1),
    ),
}

TRAPS = {
    # Under mpirun in a Slurm job SLURM_* are those of the batch script, or of the step that started the daemon.
    "mpirun in a batch script": ({**BATCH_SCRIPT, **ompi(3, 4, 1, 2)}, Claim(launcher.OPEN_MPI, 3, 4, 1, 2)),
    "Open MPI 5 on another node than mpirun's": (
        {**step(0, 1, 0, 0, "1"), "SLURM_NNODES": "1", **ompi(3, 4, 1, 2), "PMIX_RANK": "3"},
        Claim(launcher.OPEN_MPI, 3, 4, 1, 2),
    ),
    # Hydra's own srun: LOCALID is 0 everywhere, and MPICH 4 and Intel MPI hand on the first node's variables.
    "MPICH 5 in a Slurm job": ({**step(1, 2, 0, 1, "1(x2)"), **HYDRA}, Claim(launcher.HYDRA, 3, 4, 1, 2)),
    "MPICH 4 in a Slurm job": (
        {**step(0, 2, 0, 0, "1(x2)"), "SLURM_NTASKS": "4", **HYDRA},
        Claim(launcher.HYDRA, 3, 4, 1, 2),
    ),
    "Intel MPI in a Slurm job": (
        {**step(1, 2, 0, 1, "1(x2)"), "SLURM_NTASKS": "4", **INTEL},
        Claim(launcher.INTEL_MPI, 3, 4, 1, 2),
    ),
    "PMI that is not the step's": (
        {"PMI_RANK": "1", "PMI_SIZE": "4", **step(0, 1, 0, 0, "1")},
        Claim(launcher.PMI, 1, 4, None, None),
    ),
    "PMIX_RANK that is not the step's": (
        {"PMIX_RANK": "2", **step(0, 4, 0, 0, "4")},
        Claim(launcher.SRUN, 0, 4, 0, 4),
    ),
    "Intel's environment loaded, MPICH's mpiexec": (
        {**HYDRA, "I_MPI_ROOT": "/opt/intel/mpi"},
        Claim(launcher.HYDRA, 3, 4, 1, 2),
    ),
    "torchrun under srun": (
        {**step(1, 2, 0, 1, "1(x2)"), "PMIX_RANK": "1", **TORCHRUN},
        Claim(launcher.TORCHRUN, 5, 8, 1, 4),
    ),
    "torchrun under mpirun": ({**ompi(1, 2, 0, 1), **TORCHRUN}, Claim(launcher.TORCHRUN, 5, 8, 1, 4)),
    "a step over uneven nodes": (step(4, 5, 1, 2, "2,1,2"), Claim(launcher.SRUN, 4, 5, 1, 2)),
    "a step whose counts do not add up": (step(3, 4, 1, 1, "2(x3)"), Claim(launcher.SRUN, 3, 4, 1, None)),
    "a step whose counts are garbled": (step(3, 4, 1, 1, "2(x2"), Claim(launcher.SRUN, 3, 4, 1, None)),
    "a node beyond the counts": (step(3, 4, 1, 7, "2(x2)"), Claim(launcher.SRUN, 3, 4, 1, None)),
    "a local rank beyond its node's count": (step(3, 4, 3, 1, "2(x2)"), Claim(launcher.SRUN, 3, 4, 3, None)),
    "no local variables": (
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        Claim(launcher.OPEN_MPI, 0, 1, None, None),
    ),
    "local rank out of range": (ompi(3, 4, 2, 2), Claim(launcher.OPEN_MPI, 3, 4, None, None)),
    "local size above the size": (ompi(3, 4, 1, 9), Claim(launcher.OPEN_MPI, 3, 4, 1, None)),
    "spaces around": (ompi(" 3 ", "4\n", 1, 2), Claim(launcher.OPEN_MPI, 3, 4, 1, 2)),
}

NO_CLAIM = {
    "nothing": {},
    "a batch script that runs python itself": BATCH_SCRIPT,
    "a PBS script that runs python itself": PBS,
    "RANK and WORLD_SIZE of somebody else": {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"},
    "a launcher of Horovod's": {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "4"},
    "rank only": {"OMPI_COMM_WORLD_RANK": "0"},
    "PMIX_RANK only": {"PMIX_RANK": "0"},
    "rank not below size": ompi(4, 4, 0, 1),
    "size 0": ompi(0, 0, 0, 0),
    **{f"rank {text!r}": ompi(text, 4, 0, 1) for text in ("", "-1", "1.0", "0x1", "1_0", "٣", "one", "9" * 5000)},
}


@pytest.mark.parametrize(("environ", "expected"), LAUNCHERS.values(), ids=LAUNCHERS)
def test_each_launcher_is_recognised(environ, expected):
    assert claim(environ) == expected


@pytest.mark.parametrize(("environ", "expected"), TRAPS.values(), ids=TRAPS)
def test_trap(environ, expected):
    assert claim(environ) == expected


@pytest.mark.parametrize("environ", NO_CLAIM.values(), ids=NO_CLAIM)
def test_no_claim(environ):
    assert claim(environ) is None


NAMES = sorted({name for environ, _ in LAUNCHERS.values() for name in environ})


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES), st.text("0123456789-(x), a\u0663", max_size=12), max_size=12))
def test_whatever_the_variables_hold_a_claim_is_consistent(environ):
    found = claim(environ)
    if found is not None:
        assert 0 <= found.rank < found.size
        assert found.local_size is None or 1 <= found.local_size <= found.size
        assert found.local_rank is None or 0 <= found.local_rank < (found.local_size or found.size)


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        (launcher.OPEN_MPI, "MPI4PY_LIBMPI"),
        (launcher.HYDRA, "another MPI"),
        (launcher.INTEL_MPI, "another MPI"),
        (launcher.MVAPICH, "another MPI"),
        (launcher.PALS, "another MPI"),
        (launcher.PMI, "another MPI"),
        (launcher.SRUN, "srun --mpi=pmix"),
        (launcher.SRUN_PMI2, "--mpi=pmix for Open MPI"),
        (launcher.SRUN_PMIX, "--mpi=pmi2 for MPICH"),
        (launcher.TORCHRUN, "hiercommrun or mpirun"),
        ("a launcher of the future", "another MPI"),
    ],
)
def test_a_disagreement_names_both_numbers_the_launcher_and_a_fix(name, fix):
    sentence = disagreement(Claim(name, 0, 4, None, None), 1)
    assert f"MPI's world has 1 rank, but {name} started 4 processes: " in sentence
    assert fix in sentence
    assert sentence.endswith(".")
    assert "\n" not in sentence
