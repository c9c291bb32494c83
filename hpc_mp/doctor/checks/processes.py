"""Checks for stuck, zombie and leftover processes."""

from __future__ import annotations

from collections.abc import Iterator

from hpc_mp.base.text import duration, several
from hpc_mp.cluster.node.processes import NodeProcess, Processes, read_processes
from hpc_mp.doctor.checks.check import Check, Judgement

_ZOMBIES = 20


def stuck(processes: Processes) -> Iterator[Judgement]:
    names = [f"{_named(process)} in {process.waits}" if process.waits else _named(process) for process in processes.stuck]
    yield Judgement("warning" if names else "ok",
                    f"{len(names)} processes wait in the kernel and do not come on: {several(names)}" if names
                    else f"none of {processes.count} processes")


def zombies(processes: Processes) -> Iterator[Judgement]:
    count = len(processes.zombies)
    yield Judgement("warning" if count > _ZOMBIES else "ok",
                    f"{count} dead processes that nobody waits for: {several([*map(_named, processes.zombies)])}".rstrip(": "))


def orphans(processes: Processes) -> Iterator[Judgement]:
    if processes.slurm:
        names = [f"{_named(process)} of user {process.user}, {duration(process.age)} old" for process in processes.orphans]
        yield Judgement("warning" if names else "ok",
                        f"{len(names)} processes of users whose parent has gone: {several(names)}" if names else "none")


def _named(process: NodeProcess) -> str:
    return f"{process.name} ({process.pid})"


CHECKS: tuple[Check[Processes], ...] = (
    Check("process-stuck", read_processes, stuck, "`/proc/*/{stat,status,wchan}`, twice",
          "warning: uninterruptible, and not a step further after half a second",
          "look what they wait for (/proc/PID/stack): a dead file server, disk or GPU; only a reboot removes them"),
    Check("process-zombies", read_processes, zombies, "`/proc/*/stat`",
          "warning: more than 20 that were started more than a minute ago", "find their parent (ps -o ppid=) and end it"),
    Check("process-leftovers", read_processes, orphans, "`/proc/*/{stat,status}`, where slurmd runs",
          "warning: a user's process, older than a minute, whose parent has gone",
          "end it if its job has ended; proctrack/cgroup in slurm.conf keeps such from being left"),
)
