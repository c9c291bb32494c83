"""Where a job runs: as a step inside a live allocation, as a Slurm job, or on emulated nodes here; and why."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from hpc_mp.base.command import CommandFailed, Runner, ask
from hpc_mp.cluster.slurm.query import why_silent


@dataclass(frozen=True, slots=True)
class Where:
    """``place``: "step" (of the allocation we are inside), "slurm" (a new job), "local" (emulated nodes), or another back end."""

    place: str
    why: str


def decide(on: str, environ: Mapping[str, str] = os.environ, ask: Runner = ask) -> Where:
    """Where to run.

    Args:
        on: "auto", "slurm" or the name of another back end, which is taken at its word.
    """
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
    return Where("local", f"{silent}; {outside}")


def why_outside(environ: Mapping[str, str], ask: Runner) -> str | None:
    """None inside a live allocation, else why not. ``SLURM_JOB_ID`` alone proves nothing: shells outlive their jobs."""
    job = environ.get("SLURM_JOB_ID")
    if job is None:
        return "not inside an allocation"
    try:
        state = ask(("squeue", "--noheader", "--format=%T", "--jobs", job)).strip()
    except CommandFailed as error:
        return f"SLURM_JOB_ID={job} is no live allocation ({str(error).splitlines()[-1]})"
    return None if state == "RUNNING" else f"the allocation {job} is {state or 'gone'}"
