"""Hand a rendered script to Slurm, follow the job, end it.

sbatch is called directly: what was rendered, explained and kept in the run directory is what runs.
"""

from __future__ import annotations

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
    """What sbatch answered: the job's id, and what the site's submit plugin had to say, word for word (may be empty)."""

    job_id: str
    words: str


class SubmissionRefused(RunFailed):
    """sbatch has not taken a script. ``words``: what it said, line by line, or why it could not be asked."""

    def __init__(self, script: Path, words: str) -> None:
        super().__init__(f"sbatch refused {script}:\n{words}")
        self.words = words


def sbatch(script: Path, options: Sequence[str] = (), environ: Mapping[str, str] = os.environ) -> Submission:
    """Give ``script`` to sbatch.

    Args:
        environ: what the job inherits, as far as ``job_environment`` lets it.
        options: of sbatch, beside the script's own: ``("--dependency=afterany:7",)``.

    Raises:
        SubmissionRefused: it is not taken; sbatch's message is passed on as it is.
    """
    try:
        done = subprocess.run(["sbatch", "--parsable", *options, str(script)], stdin=subprocess.DEVNULL,
                              capture_output=True, env=job_environment(environ), encoding="utf-8", errors="replace")
    except OSError as error:
        found = shutil.which("sbatch")
        why = f"{found} cannot be started ({error.strerror})" if found else "sbatch is not on PATH"
        raise SubmissionRefused(script, why) from None
    *greeting, answer = done.stdout.strip().splitlines() or [""]
    if done.returncode or not re.match(r"\d+(;|$)", answer):
        said = "\n".join(filter(None, (done.stdout.strip(), done.stderr.strip())))
        raise SubmissionRefused(script, said or f"it ended with exit code {done.returncode}")
    return Submission(answer.partition(";")[0],  # "ID;CLUSTER" in a federation
                      "\n".join([*greeting, *done.stderr.strip().splitlines()]))


def state(job_id: str, ask: Runner = queue.patient) -> str:
    """The job's state in Slurm's words (``PENDING``, ``RUNNING``, ``COMPLETED`` …), or FORGOTTEN or UNKNOWN."""
    return queue.job_states([job_id], ask)[job_id].state


def cancel(job_ids: str | Sequence[str], signal: str | None = None, script: bool = False) -> None:
    """End jobs, or send their ranks a signal: ``"USR2"`` makes them save at the next step and stop.

    Args:
        script: whether the signal is for the jobs' scripts alone, in which the supervisor runs.

    Raises:
        RunFailed: scancel refuses; its message is passed on as it is.
    """
    named = [job_ids] if isinstance(job_ids, str) else [*job_ids]
    try:
        queue.patient(("scancel", *([f"--signal={signal}"] if signal else []), *(["--batch"] if script else []), *named))
    except CommandFailed as error:
        raise RunFailed(f"scancel refused job {' '.join(named)}:\n{error}") from None


def withdraw(job_ids: Sequence[str], ask: Runner = ask) -> None:
    """Cancel jobs that would find nothing to do; where a site forbids scancel on its nodes they start and end at once."""
    if job_ids:
        with suppress(CommandFailed):
            ask(("scancel", *job_ids))
