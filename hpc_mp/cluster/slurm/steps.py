"""Steps of an allocation: the srun commands that start tasks on its nodes, and srun's messages about them."""

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from hpc_mp.base.command import CommandFailed, Runner, ask

STEPS_OF_A_START = 5  # before, during and after the ranks, and steps that inspect hanging ranks
STARTS_APART = 6  # Slurm sends once a minute until the node has answered or is down, and six starts take longer than a minute
AT_ONCE, EMPTY_S = 8, 30.0  # number of concurrent empty steps, and time limit in seconds of each
NO_GPUS = "--gpus=0"  # a step without GPUs
_SHARED = ("--export=", "--nodes=", "--relative=", "--het-group=", NO_GPUS)  # options of the ranks' srun that other steps keep
_LAUNCH_FAILED = re.compile(r"launch for \S+ failed on node (\S+?): (.*)")
_CONNECTION_LOST = re.compile(r"io error with slurmstepd on node (\d+)")


def srun(options: Sequence[str], command: Sequence[str]) -> list[str]:
    """Return the command that starts ``command`` as the tasks of one step, or of a new job outside of an allocation."""
    return ["srun", *options, *command]


def srun_options(ask: Runner = ask) -> frozenset[str] | None:
    """Return the long options that srun knows, including those of the site's plug-ins; None if srun does not report them."""
    try:
        return frozenset(re.findall(r"--([a-z][a-z-]+)", ask(("srun", "--help"))))
    except CommandFailed:
        return None


def mpi_plugins(ask: Runner = ask) -> tuple[str, ...] | None:
    """Return srun's MPI plug-ins (``srun --mpi=list``); None if srun does not report them."""
    try:
        output = ask(("sh", "-c", "exec srun --mpi=list 2>&1"))  # releases write it to stdout or to stderr
    except CommandFailed:
        return None
    lines = [line.removeprefix("srun: ").strip() for line in output.splitlines()]
    return tuple(line for line in lines if re.fullmatch(r"[a-z]\w*", line)) or None


def one_task_per_node(step: Sequence[str], nodes: int, command: Sequence[str]) -> list[str] | None:
    """Return the command that starts ``command`` once on each node of the ranks' step; None if srun does not start the ranks.
    ``step``: the ranks' command; this step keeps its options that name the nodes. ``nodes``: number of nodes of that step."""
    if os.path.basename(step[0]) != "srun":
        return None
    shared = [word for word in step[1:] if word.startswith(_SHARED)]
    count = [] if any(word.startswith("--het-group=") for word in shared) else [f"--ntasks={nodes}"]
    return [step[0], *shared, *count, "--ntasks-per-node=1", "--overlap", *command]


def use_up_numbers(step: Sequence[str], environ: Mapping[str, str], restart: int) -> None:
    """Start empty steps, so that the steps of this start of a job get numbers that none of its last starts had.

    Slurm counts steps from 0 at each start. If a node does not accept a message, Slurm repeats it a minute later. The end of
    step 1 would then end step 1 of the next start. A job does not start again before all of its nodes have answered or are
    down, and a node that is down is sent nothing. If the empty steps fail, the job runs anyway.
    """
    if os.path.basename(step[0]) != "srun":
        return
    options = [word for word in step[1:] if word.startswith("--het-group=")] or ["--nodes=1", "--ntasks=1"]
    argv = srun([*options, "--relative=0", "--ntasks-per-node=1", "--overlap"], ["true"])
    with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
        for _ in range(STEPS_OF_A_START * (restart % STARTS_APART)):
            pool.submit(subprocess.run, argv, env=environ, stdin=subprocess.DEVNULL, capture_output=True, timeout=EMPTY_S)


def has_numbered_steps(job_id: str) -> bool:
    """Return True if steps of a job run besides that of its script. Raises CommandFailed."""
    steps = ask(("squeue", "--noheader", "--steps", "--format=%i", "--jobs", job_id))
    return re.search(r"\.\d+$", steps, re.MULTILINE) is not None


def is_queue_notice(line: str) -> bool:
    """Return True if this line of srun states that its job waits, or no longer waits."""
    return line.startswith("srun: job")


def failed_nodes(lines: Sequence[str], nodes: Sequence[str] = ()) -> dict[str, str]:
    """Return the nodes that srun could not reach or has lost, with the reason, from its own messages. ``nodes``: nodes of the
    step, in srun's order: srun names a lost node by its number."""
    failed = {match[1]: f"Slurm cannot start a task on it ({match[2]})" for match in map(_LAUNCH_FAILED.search, lines) if match}
    numbers = {int(match[1]) for match in map(_CONNECTION_LOST.search, lines) if match}
    return failed | {nodes[number]: "its task ended before the step" for number in numbers if number < len(nodes)}
