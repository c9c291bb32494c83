"""``sbatch --test-only``: Slurm's own verdict on a script, without submitting it."""

import os
import re
import subprocess
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from hpc_mp.base.command import CommandFailed, Runner, ask
from hpc_mp.cluster.slurm.nodes import node_states
from hpc_mp.cluster.slurm.query import NO_CONTROLLER
from hpc_mp.cluster.slurm.variables import job_environment

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
