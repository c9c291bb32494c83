"""Submission of a rendered script to Slurm, and the end of its job; and ``sbatch --test-only``, Slurm's own verdict on a script.

sbatch is called directly: the rendered script that was explained and kept in the run directory is the one that runs.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpc_mp.base.command import CommandFailed, Runner, ask
from hpc_mp.base.errors import RunFailed
from hpc_mp.cluster.slurm import jobs as queue
from hpc_mp.cluster.slurm.allocation import job_environment
from hpc_mp.cluster.slurm.nodes import node_states
from hpc_mp.cluster.slurm.query import NO_CONTROLLER


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


PATIENCE_S = 20.0  # timeout of an answer: the controller searches nodes first
UNTESTED = re.compile("|".join((*NO_CONTROLLER, r"unrecognized option", r"[Tt]imed out", r"Connection refused",
                                r"try again later", r"Slurm backup controller", r"test.only.* not supported")))
# Errors that also occur for a job that only has to wait for nodes out of service, and that sbatch would accept.
FOR_NOW = re.compile(r"Requested node configuration is not available|Required node not available|nodes are busy")


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """The result of a rehearsal."""

    # "accepted"; "refused"; "waits": the only obstacle is nodes out of service; "untested": unknown
    state: Literal["accepted", "refused", "waits", "untested"]
    words: str  # Slurm's own words, on one line; or the reason why it has none


def rehearse(script: str, partition: str | None = None, environ: Mapping[str, str] = os.environ, ask: Runner = ask) -> Rehearsal:
    """Ask sbatch whether it would accept a script, and when the job would start.

    Args:
        script: its text.
        partition: the partition whose nodes may be out of service; None: all partitions.
        environ: the environment that the job would inherit, filtered by ``job_environment``.
    """
    try:
        process = subprocess.run(["sbatch", "--test-only"], input=script, capture_output=True, env=job_environment(environ),
                                 encoding="utf-8", errors="replace", timeout=PATIENCE_S, check=False)
    except subprocess.TimeoutExpired:
        return Rehearsal("untested", f"sbatch --test-only did not answer within {PATIENCE_S:g} s")
    except OSError as error:
        return Rehearsal("untested", f"sbatch cannot be started ({error.strerror})")
    message = one_line(process.stdout, process.stderr) or f"sbatch --test-only ended with exit code {process.returncode}"
    if not process.returncode:
        return Rehearsal("accepted", message)
    if UNTESTED.search(message):
        return Rehearsal("untested", message)
    absent = _out_of_service(partition, ask) if FOR_NOW.search(message) else ()
    return Rehearsal("waits", f"{message} ({', '.join(absent)})") if absent else Rehearsal("refused", message)


def one_line(*texts: str) -> str:
    """Return the output of a program of Slurm with its lines joined."""
    return "; ".join(line.strip() for text in texts for line in text.splitlines() if line.strip())


def _out_of_service(partition: str | None, ask: Runner) -> Collection[str]:
    """Return the nodes that Slurm currently gives to no job, each with its state; none if Slurm does not report them."""
    try:
        states = node_states(partition=partition, ask=ask)
    except CommandFailed:
        return ()
    return tuple(f"{name} is {state.state}" for name, state in states.items() if not state.in_service)
