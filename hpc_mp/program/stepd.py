"""The watch over slurmstepd, which starts the ranks of a node. If it is killed, the ranks keep running, and neither Slurm nor
srun notices.

A separate process on the node waits for the end of slurmstepd. It then ends the other processes of the step on that node, which
would disturb the next attempt, and records the failure.
"""

import os
import select
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress

from hpc_mp.layout.placement import from_dict
from hpc_mp.program.stacks import lives, read_proc, stat_of
from hpc_mp.rundir import TOKEN, RunDirectory, read_attempt, read_json
from hpc_mp.rundir.failures import RankFailure, write_failure
from hpc_mp.rundir.rank_env import at_place, node_name

NAME = "slurmstepd"
STEP = ("SLURM_JOB_ID", "SLURM_STEP_ID")  # variables of all processes of a step
POLL_S = 0.2


def watch_stepd(run: RunDirectory, environ: Mapping[str, str] = os.environ) -> None:
    """Start the watch, which ends with this process. Does nothing unless this is the first task that srun started on its node."""
    stepd = stepd_above()
    killed = stepd == 0 and environ.get("SLURM_TASK_PID") == str(os.getpid())  # while this program was being loaded
    if not (stepd or killed) or TOKEN not in environ or environ.get("SLURM_LOCALID") != "0":
        return
    task, child = os.getpid(), os.fork()
    if child:
        os.waitpid(child, 0)
        return
    try:
        if os.fork() == 0:  # not a child of the rank, which may wait for all its children
            _detach()
            _watch(run, environ, stepd, task)
    finally:
        os._exit(0)


def _detach() -> None:
    """Detach from the rank's streams and signals."""
    os.setsid()
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)


def _watch(run: RunDirectory, environ: Mapping[str, str], stepd: int | None, task: int) -> None:
    """Wait for the end of slurmstepd, and end its step; ``stepd`` is 0 if it has been killed."""
    if stepd:
        await_end(stepd, task)
        if lives(stepd) or not lives(task):  # slurmstepd ends after its tasks
            return
    for pid in _of_step(environ):
        with suppress(OSError):  # it has ended by now
            os.kill(pid, signal.SIGKILL)
    record = read_attempt(run.attempt_record)
    if record.token == environ[TOKEN]:
        who = at_place(from_dict(read_json(run.placement)), record.hosts, node_name(environ), 0, "Slurm")
        message = f"{f'process {stepd}' if stepd else 'it'} was killed, and its processes there were ended"
        write_failure(run, RankFailure(who.rank, who.node, "orphaned", message, time.time(), record.attempt, nodes=(who.node,)))


def await_end(*pids: int) -> None:
    """Wait until one of these processes has ended."""
    with suppress(OSError, AttributeError):  # AttributeError before Linux 5.3
        ends = select.poll()
        for pid in pids:
            ends.register(os.pidfd_open(pid), select.POLLIN)
        ends.poll()
        return
    while all(map(lives, pids)):
        time.sleep(POLL_S)


def stepd_above() -> int | None:
    """Return the slurmstepd that has started this process or a parent; 0 without one, None if this user cannot see it."""
    pid = os.getppid()
    while pid > 1 and read_proc(pid, "comm").strip() != NAME:
        pid = int((stat_of(pid) or ("", "0"))[1])  # /proc may hide processes of others
    return {0: None, 1: 0}.get(pid, pid)


def _of_step(environ: Mapping[str, str]) -> Iterator[int]:
    variables = {f"{name}={environ.get(name)}" for name in STEP}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid() and variables <= set(read_proc(int(entry), "environ").split("\0")):
            yield int(entry)
