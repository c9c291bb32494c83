"""Submission of a rendered script to Slurm, and the end of its job.

sbatch is called directly: the rendered script that was explained and kept in the run directory is the one that runs.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpc_mp.base.command import CommandFailed, Runner, ask
from hpc_mp.base.errors import RunFailed
from hpc_mp.cluster.slurm import jobs as queue
from hpc_mp.cluster.slurm.variables import job_environment


@dataclass(frozen=True, slots=True)
class Submission:
    """sbatch's answer: the job's id, and the verbatim output of the site's submit plugin (may be empty)."""

    job_id: str
    words: str


class SubmissionRefused(RunFailed):
    """sbatch did not accept a script. ``words``: its output, line by line, or the reason why it could not be run."""

    def __init__(self, script: Path, output: str) -> None:
        super().__init__(f"sbatch refused {script}:\n{output}")
        self.words = output


def sbatch(script: Path, options: Sequence[str] = (), environ: Mapping[str, str] = os.environ) -> Submission:
    """Submit ``script`` with sbatch. Raises SubmissionRefused, with sbatch's message unchanged, if it is not accepted.
    ``environ``: the environment that the job inherits, filtered by ``job_environment``. ``options``: of sbatch, in addition to
    the script's own: ``("--dependency=afterany:7",)``."""
    try:
        process = subprocess.run(["sbatch", "--parsable", *options, str(script)], stdin=subprocess.DEVNULL,
                                 capture_output=True, env=job_environment(environ), encoding="utf-8", errors="replace")
    except OSError as error:
        program = shutil.which("sbatch")
        why = f"{program} cannot be started ({error.strerror})" if program else "sbatch is not on PATH"
        raise SubmissionRefused(script, why) from None
    *greeting, answer = process.stdout.strip().splitlines() or [""]
    if process.returncode or not re.match(r"\d+(;|$)", answer):
        output = "\n".join(filter(None, (process.stdout.strip(), process.stderr.strip())))
        raise SubmissionRefused(script, output or f"it ended with exit code {process.returncode}")
    return Submission(answer.partition(";")[0],  # "ID;CLUSTER" in a federation
                      "\n".join([*greeting, *process.stderr.strip().splitlines()]))


def cancel(job_ids: str | Sequence[str], signal: str | None = None, script: bool = False) -> None:
    """End jobs, or send their ranks a signal: ``"USR2"`` makes them save at the next step and stop. Raises RunFailed, with its
    message unchanged, if scancel refuses. ``script``: True if the signal is only for the jobs' scripts, in which the supervisor
    runs."""
    named = [job_ids] if isinstance(job_ids, str) else [*job_ids]
    try:
        queue.patient(("scancel", *([f"--signal={signal}"] if signal else []), *(["--batch"] if script else []), *named))
    except CommandFailed as error:
        raise RunFailed(f"scancel refused job {' '.join(named)}:\n{error}") from None


def withdraw(job_ids: Sequence[str], ask: Runner = ask) -> None:
    """Cancel jobs that would have no work; if a site forbids scancel on its nodes, they start and end at once."""
    if job_ids:
        with suppress(CommandFailed):
            ask(("scancel", *job_ids))
