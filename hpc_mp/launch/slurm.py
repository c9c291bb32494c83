"""Hand a rendered script to Slurm, follow the job, end it.

sbatch is called directly: what was rendered, explained and kept in the run directory is what runs.
"""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from hpc_mp.cluster.ask import Ask, NoAnswer, ask
from hpc_mp.cluster.slurm_query import Partition
from hpc_mp.errors import RunFailed
from hpc_mp.job import JobSpec
from hpc_mp.launch.environment import FOREIGN

FORGOTTEN = "FORGOTTEN"  # our word: Slurm no longer knows the job; its run directory tells how it ended
UNKNOWN = "UNKNOWN"  # our word: Slurm does not answer just now
FINAL = frozenset({"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
                   "PREEMPTED", "REVOKED", "TIMEOUT", FORGOTTEN})
DELAYS_S = (2, 5, 10, 20, 30)  # between two looks, the last for ever: schedulers serve many people

_DEFAULTS = re.compile(r"SBATCH_|SALLOC_")  # options that sbatch and srun take from the environment
_ACCESS = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT"})  # how programs reach the controller
_ALLOCATION = frozenset({"SLURM_JOB_ID", "SLURM_JOB_NODELIST"})


def submit(script: Path, environ: Mapping[str, str] = os.environ) -> str:
    """Give ``script`` to sbatch and return the job's id.

    The job inherits ``environ`` without what another job, a launcher or a profile left in it (``SLURM_*``, ``SBATCH_*``
    …): that would override the script's own directives in silence.

    Raises:
        RunFailed: sbatch refuses; its message is passed on as it is.
    """
    try:
        answer = ask(("sbatch", "--parsable", str(script)), timeout=None, environ=_keep(environ, _ACCESS))
    except NoAnswer as error:
        raise RunFailed(f"sbatch refused {script}:\n{error}") from None
    return answer.strip().splitlines()[-1].partition(";")[0]  # "ID;CLUSTER" in a federation


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


def state(job_id: str, ask: Ask = ask) -> str:
    """The job's state in Slurm's words (``PENDING``, ``RUNNING``, ``COMPLETED`` …), or FORGOTTEN or UNKNOWN."""
    questions: tuple[tuple[tuple[str, ...], str], ...] = (
        (("squeue", "--noheader", "--states=all", "--format=%T", "--jobs", job_id), r"^([A-Z_]+)$"),
        (("scontrol", "show", "job", "--oneliner", job_id), r"\bJobState=([A-Z_]+)"),
        (("sacct", "--noheader", "--parsable2", "--allocations", "--format=State", "--jobs", job_id), r"^([A-Z_]+)"),
    )
    verdict = UNKNOWN
    for argv, pattern in questions:
        try:
            found = re.search(pattern, ask(argv), re.MULTILINE)
        except NoAnswer as error:
            if "Invalid job id" in str(error):
                verdict = FORGOTTEN
            continue
        if found:
            return found[1]
    return verdict


def wait(job_id: str, pause: Callable[[str, float], None] | None = None, ask: Ask = ask) -> str:
    """Look at the job now and then until it has ended, and return its last state.

    Args:
        pause: called with (state, seconds) between two looks; returns after so many seconds. It may show progress
            meanwhile. Default: sleep.
    """
    for delay in itertools.chain(DELAYS_S, itertools.repeat(DELAYS_S[-1])):
        now = state(job_id, ask)
        if now in FINAL:
            break
        (pause or _sleep)(now, delay)
    return now


def cancel(job_id: str, signal: str | None = None) -> None:
    """End the job, or send its ranks a signal: ``"USR2"`` makes them save at the next step and stop.

    Raises:
        RunFailed: scancel refuses; its message is passed on as it is.
    """
    try:
        ask(("scancel", *([f"--signal={signal}"] if signal else []), job_id))
    except NoAnswer as error:
        raise RunFailed(f"scancel refused job {job_id}:\n{error}") from None


def settle(spec: JobSpec, partitions: Iterable[Partition]) -> JobSpec:
    """``device = "auto"`` and ``gpu_request = "auto"`` decided by the job's partition (else the default one).

    A partition whose nodes list GPUs gives ``cuda`` and ``gpus-per-node``, one without ``cpu`` and ``none``: some sites
    with GPUs do not count them, there say ``device = "cuda"``. A partition that is not among them decides nothing.
    """
    wanted = spec.slurm.partition
    for partition in partitions:
        if partition.name == wanted or (wanted is None and partition.default):
            counted = any(kind.gpus for kind in partition.kinds)
            break
    else:
        return spec
    device = ("cuda" if counted else "cpu") if spec.job.device == "auto" else spec.job.device
    request = ("gpus-per-node" if counted else "none") if spec.slurm.gpu_request == "auto" else spec.slurm.gpu_request
    return spec.model_copy(update={"job": spec.job.model_copy(update={"device": device}),
                                   "slurm": spec.slurm.model_copy(update={"gpu_request": request})})


def _keep(environ: Mapping[str, str], names: frozenset[str]) -> dict[str, str]:
    return {name: value for name, value in environ.items()
            if name in names or not (FOREIGN.match(name) or _DEFAULTS.match(name))}


def _sleep(_state: str, seconds: float) -> None:
    time.sleep(seconds)
