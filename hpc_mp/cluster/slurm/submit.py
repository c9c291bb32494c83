"""Hand a rendered script to Slurm, follow the job, end it.

sbatch is called directly: what was rendered, explained and kept in the run directory is what runs.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_mp.base.command import CommandFailed, Runner
from hpc_mp.base.errors import RunFailed
from hpc_mp.cluster.slurm import jobs as queue
from hpc_mp.cluster.slurm.job import FINAL, FORGOTTEN, UNKNOWN
from hpc_mp.cluster.slurm.variables import FOREIGN

__all__ = ["FINAL", "FORGOTTEN", "UNKNOWN", "Submission", "cancel", "sbatch", "state", "step_command",
           "step_environment"]

_DEFAULTS = re.compile(r"SBATCH_|SALLOC_")  # options that sbatch and srun take from the environment
_ACCESS = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT"})  # how programs reach the controller
_ALLOCATION = frozenset({"SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_CLUSTER_NAME", "SLURM_JOB_END_TIME"})


@dataclass(frozen=True, slots=True)
class Submission:
    """What sbatch answered: the job's id, and what the site's submit plugin had to say, word for word (may be empty)."""

    job_id: str
    words: str


def sbatch(script: Path, options: Sequence[str] = (), environ: Mapping[str, str] = os.environ) -> Submission:
    """Give ``script`` to sbatch.

    The job inherits ``environ`` without what another job, a launcher or a profile left in it (``SLURM_*``, ``SBATCH_*``
    …): that would override the script's own directives in silence.

    Args:
        options: of sbatch, beside the script's own: ``("--dependency=afterany:7",)``.

    Raises:
        RunFailed: sbatch refuses; its message is passed on as it is.
    """
    try:
        done = subprocess.run(["sbatch", "--parsable", *options, str(script)], stdin=subprocess.DEVNULL,
                              capture_output=True, env=_keep(environ, _ACCESS), encoding="utf-8", errors="replace")
    except OSError as error:
        found = shutil.which("sbatch")
        raise RunFailed(f"{found} cannot be started ({error.strerror})" if found else "sbatch is not on PATH") from None
    *greeting, answer = done.stdout.strip().splitlines() or [""]
    if done.returncode or not re.match(r"\d+(;|$)", answer):
        said = "\n".join(filter(None, (done.stdout.strip(), done.stderr.strip())))
        raise RunFailed(f"sbatch refused {script}:\n{said or f'it ended with exit code {done.returncode}'}")
    return Submission(answer.partition(";")[0],  # "ID;CLUSTER" in a federation
                      "\n".join([*greeting, *done.stderr.strip().splitlines()]))


def step_command(script: Path) -> list[str]:
    """What runs the ranks as a step of the allocation we are in: the very script, whose last word is ``exec srun``.

    Start it with ``step_environment``. The process becomes srun: a SIGUSR2 to it reaches all ranks, SIGTERM ends them.
    """
    return ["bash", str(script)]


def step_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """``environ`` for ``step_command``: of Slurm's variables only those that name the allocation.

    The others describe the shell or notebook step we are in, and srun would take them for its options. Ours overlaps
    that step, which holds the CPUs and GPUs and would else let srun wait for ever.
    """
    return _keep(environ, _ACCESS | _ALLOCATION) | {"SLURM_OVERLAP": "1"}


def state(job_id: str, ask: Runner = queue.patient) -> str:
    """The job's state in Slurm's words (``PENDING``, ``RUNNING``, ``COMPLETED`` …), or FORGOTTEN or UNKNOWN."""
    return queue.look([job_id], ask)[job_id].state


def cancel(job_ids: str | Sequence[str], signal: str | None = None) -> None:
    """End jobs, or send their ranks a signal: ``"USR2"`` makes them save at the next step and stop.

    Raises:
        RunFailed: scancel refuses; its message is passed on as it is.
    """
    named = [job_ids] if isinstance(job_ids, str) else [*job_ids]
    try:
        queue.patient(("scancel", *([f"--signal={signal}"] if signal else []), *named))
    except CommandFailed as error:
        raise RunFailed(f"scancel refused job {' '.join(named)}:\n{error}") from None


def _keep(environ: Mapping[str, str], names: frozenset[str]) -> dict[str, str]:
    return {name: value for name, value in environ.items()
            if name in names or not (FOREIGN.match(name) or _DEFAULTS.match(name))}
