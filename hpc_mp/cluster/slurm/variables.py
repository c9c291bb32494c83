"""Environment variables of schedulers and launchers: those that a new job, or a step of this allocation, may inherit."""

import os
import re
from collections.abc import Collection, Mapping

# Variables that a scheduler or another launcher left here do not concern our ranks.
FOREIGN = re.compile(r"SLURM_|SLURMD_|SRUN_|PMI|OMPI_|PRTE_|HYDI_|MPI_LOCALN?RANK|PALS_|TORCHELASTIC_|"
                     r"HPC_MP_(EMULATED|LISTEN_FD|TOKEN|SECRET|MPI|LOCAL|STAGED|RUN)$|"
                     r"(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|NODE_RANK|GROUP_RANK|MASTER_ADDR|MASTER_PORT)$")
STARTERS = frozenset({"srun", "sbatch", "salloc"})  # programs of Slurm that start ranks, or a job that starts them
ARRAY_ELEMENT = "SLURM_ARRAY_TASK_ID"  # the number of an array's element
_DEFAULTS = re.compile(r"SBATCH_|SALLOC_")  # options that sbatch and srun take from the environment
_ACCESS = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT"})  # how programs reach the controller
_ALLOCATION = frozenset({"SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_CLUSTER_NAME", "SLURM_JOB_END_TIME"})
_COMPONENT_TASKS = re.compile(r"SLURM_N?(TASKS|PROCS)(_PER_NODE)?_HET_GROUP_")


def job_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return ``environ`` for a separate job, without variables of another job, a launcher or a profile. ``SLURM_*`` and
    ``SBATCH_*`` would silently override the job's own options."""
    return _keep(environ, _ACCESS)


def step_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return ``environ`` for a step of this allocation: of Slurm's variables only those that name the allocation.

    The others describe the current shell or notebook step, and srun would read them as options. Our step overlaps that step,
    which holds the CPUs and GPUs; otherwise srun would wait forever.
    """
    return _keep(environ, _ACCESS | _ALLOCATION) | {"SLURM_OVERLAP": "1"}


def one_task_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` without the variables that make srun start as many tasks in each component as the ranks' step has."""
    return {name: value for name, value in environ.items() if not _COMPONENT_TASKS.match(name)}


def _keep(environ: Mapping[str, str], names: Collection[str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name in names or not (FOREIGN.match(name) or _DEFAULTS.match(name))}
