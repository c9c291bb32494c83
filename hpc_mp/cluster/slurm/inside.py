"""The place where a job runs: a step inside a live allocation, a Slurm job, or emulated nodes here; with the reason."""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass

from hpc_mp.base.command import CommandFailed, Runner, ask
from hpc_mp.cluster.slurm.query import why_silent


@dataclass(frozen=True, slots=True)
class Where:
    """The place of a job."""

    place: str  # "step" (of the allocation we are inside), "slurm" (a new job), "local" (emulated nodes), or another back end
    why: str  # the reason for this place
    missed: str = ""  # a note to repeat at the end: Slurm's programs are here, and yet the job did not go to Slurm


def decide(on: str, environ: Mapping[str, str] = os.environ, ask: Runner = ask) -> Where:
    """Decide where to run. ``on``: "auto", "slurm" or the name of another back end, which is used unchecked."""
    if on not in ("auto", "slurm"):
        return Where(on, f"--on {on}")
    outside = why_outside(environ, ask)
    if outside is None:
        return Where("step", f"inside the live allocation {environ['SLURM_JOB_ID']}")
    if on == "slurm":
        return Where("slurm", "--on slurm")
    silent = why_silent(ask)
    if silent is None:
        return Where("slurm", f"scontrol ping answers; {outside}")
    return Where("local", f"{silent}; {outside}", _missed(silent, environ))


def _missed(silent: str, environ: Mapping[str, str]) -> str:
    if shutil.which("sbatch", path=environ.get("PATH")) is None:
        return ""
    unset = "" if "SLURM_CONF" in environ else ", and SLURM_CONF is not set: export it if slurm.conf is not in the default place"
    return f"sbatch is on PATH, but no Slurm answers ({silent}){unset}"


def why_outside(environ: Mapping[str, str], ask: Runner) -> str | None:
    """Return why we are outside; None inside a live allocation. ``SLURM_JOB_ID`` proves nothing: shells outlive their jobs."""
    job = environ.get("SLURM_JOB_ID")
    if job is None:
        return "not inside an allocation"
    try:
        state = ask(("squeue", "--noheader", "--format=%T", "--jobs", job)).strip()
    except CommandFailed as error:
        return f"SLURM_JOB_ID={job} is not a live allocation ({str(error).splitlines()[-1]})"
    return None if state == "RUNNING" else f"the allocation {job} is {state or 'gone'}"
