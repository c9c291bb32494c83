"""Steps of an allocation: the srun commands that start tasks on its nodes, and what srun says of them."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hpc_mp.base.command import CommandFailed, Runner, ask

STEPS_OF_A_START = 5  # before, of and after the ranks, and those that look at ranks that hang
STARTS_APART = 6  # Slurm sends once a minute until the node has answered or is down, and six starts take longer than a minute
AT_ONCE, EMPTY_S = 8, 30.0  # empty steps at the same time, and seconds that one may take
_SHARED = ("--export=", "--nodes=", "--relative=", "--het-group=")  # options of the ranks' srun that other steps keep
_LAUNCH_FAILED = re.compile(r"launch for \S+ failed on node (\S+?): (.*)")
_CONNECTION_LOST = re.compile(r"io error with slurmstepd on node (\d+)")


def srun(options: Sequence[str], command: Sequence[str]) -> list[str]:
    """Start ``command`` as the tasks of one step, or of a job of its own where there is no allocation."""
    return ["srun", *options, *command]


def srun_options(ask: Runner = ask) -> frozenset[str] | None:
    """The long options that srun knows, those of the site's plug-ins among them; None when it does not tell."""
    try:
        return frozenset(re.findall(r"--([a-z][a-z-]+)", ask(("srun", "--help"))))
    except CommandFailed:
        return None


def mpi_plugins(ask: Runner = ask) -> tuple[str, ...] | None:
    """The ways in which srun's tasks may meet through MPI (``srun --mpi=list``); None when it does not tell."""
    try:
        said = ask(("sh", "-c", "exec srun --mpi=list 2>&1"))  # releases write it to the one or to the other
    except CommandFailed:
        return None
    lines = [line.removeprefix("srun: ").strip() for line in said.splitlines()]
    return tuple(line for line in lines if re.fullmatch(r"[a-z]\w*", line)) or None


def one_task_per_node(step: Sequence[str], nodes: int, command: Sequence[str]) -> list[str] | None:
    """Start ``command`` once on each node of the ranks' step; None when the ranks are not started by srun.

    Args:
        step: the ranks' command, of whose options this step keeps what names the nodes.
        nodes: of that step.
    """
    if os.path.basename(step[0]) != "srun":
        return None
    shared = [word for word in step[1:] if word.startswith(_SHARED)]
    count = [] if any(word.startswith("--het-group=") for word in shared) else [f"--ntasks={nodes}"]
    return [step[0], *shared, *count, "--ntasks-per-node=1", "--overlap", *command]


def use_up_numbers(step: Sequence[str], environ: Mapping[str, str], restart: int) -> None:
    """Start empty steps, so that those of this start of a job get numbers that none of its last starts had.

    Slurm counts steps from 0 at each start, and sends what a node did not take again a minute later: the end of step 1 would then
    end step 1 of the next start. A job does not start again before all of its nodes have answered or are down, and a node that is
    down is sent nothing. Where it cannot be done, the job runs all the same.
    """
    if os.path.basename(step[0]) != "srun":
        return
    kept = [word for word in step[1:] if word.startswith("--het-group=")] or ["--nodes=1", "--ntasks=1"]
    argv = srun([*kept, "--relative=0", "--ntasks-per-node=1", "--overlap"], ["true"])
    with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
        for _ in range(STEPS_OF_A_START * (restart % STARTS_APART)):
            pool.submit(subprocess.run, argv, env=environ, stdin=subprocess.DEVNULL, capture_output=True, timeout=EMPTY_S)


def script_command(script: Path) -> list[str]:
    """The command that runs the ranks as a step of the allocation we are in: the job script itself.

    Start it with ``variables.step_environment``.
    """
    return ["bash", str(script)]


def has_numbered_steps(job_id: str) -> bool:
    """Return if steps of a job run besides that of its script. Raises CommandFailed."""
    steps = ask(("squeue", "--noheader", "--steps", "--format=%i", "--jobs", job_id))
    return re.search(r"\.\d+$", steps, re.MULTILINE) is not None


def is_queue_notice(line: str) -> bool:
    """Whether srun says with this line that its job waits, or that it no longer does."""
    return line.startswith("srun: job")


def failed_nodes(lines: Sequence[str], nodes: Sequence[str] = ()) -> dict[str, str]:
    """The nodes that srun could not reach or has lost, by its own words, and why.

    Args:
        nodes: of the step, in srun's order: srun names a node that it has lost by its number.
    """
    failed = {found[1]: f"Slurm cannot start a task there ({found[2]})" for found in map(_LAUNCH_FAILED.search, lines) if found}
    numbers = {int(found[1]) for found in map(_CONNECTION_LOST.search, lines) if found}
    return failed | {nodes[number]: "its task ended in the middle of the step" for number in numbers if number < len(nodes)}
