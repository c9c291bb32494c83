"""Evidence on a failed attempt of a run, gathered from its directory and from Slurm."""

import mmap
import os
import re
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpc_mp.base.command import CommandFailed, Runner, ask
from hpc_mp.cluster.slurm.jobs import largest_task
from hpc_mp.cluster.slurm.nodes import node_states
from hpc_mp.diagnosis.evidence import Evidence, Hang
from hpc_mp.diagnosis.lines import JOB_CANCELLED, LABEL, NODE_LOST, OURS, task_ends
from hpc_mp.job import ProgramSpec
from hpc_mp.layout.placement import RankPlace
from hpc_mp.rundir import RunDirectory
from hpc_mp.rundir.attempt import lines_of
from hpc_mp.rundir.failures import read_failures
from hpc_mp.rundir.layout import FilesOfRun
from hpc_mp.rundir.records import RankStart, read_records
from hpc_mp.rundir.standings import read_standings
from hpc_mp.supervisor.context import AttemptContext

TAIL = 1 << 16  # bytes of each log that are read, from its end
LONG_TAIL = 1 << 20  # the same for a program, whose exceptions may fill hundreds of KiB, and for srun
DEEP, DEEP_LINES = 1 << 28, 400  # bytes and lines searched in a log in which other tasks have drowned a task's output
OVER_LIMIT = re.compile(r"StepId=(\d+\.\d+) exceeded (?:virtual )?memory limit")


@dataclass(frozen=True, slots=True)
class ScriptLog:
    """Slurm's log of the job script, and the position in it where this attempt begins: all attempts of a job share one file."""

    path: Path
    begin: int


def script_log() -> ScriptLog | None:
    """Return the file that this process writes to; None if it is not a file."""
    try:
        path = Path(os.readlink("/proc/self/fd/1"))
        return ScriptLog(path, path.stat().st_size) if path.is_file() else None
    except OSError:  # a pipe, or a container without /proc
        return None


def said_in(script: ScriptLog | None) -> tuple[str, ...]:
    """Return the last lines of other programs in the script's log, from this attempt."""
    lines = _tail(script.path, script.begin) if script is not None else ()
    return tuple(line for line in lines if not line.startswith(OURS))


def before(script: ScriptLog | None) -> list[str]:
    """Return the lines of the script's log from before this attempt."""
    if script is None:
        return []
    with open(script.path, "rb") as file:
        file.seek(max(0, script.begin - LONG_TAIL))
        return lines_of(file.read(min(LONG_TAIL, script.begin)))


def user_cancelled(script: ScriptLog | None) -> bool:
    """Return True if the job was ended with scancel, or its script got SIGTERM: slurmstepd then gives no reason."""
    return any(map(JOB_CANCELLED.search, said_in(script)))


def node_lost(run: RunDirectory, script: ScriptLog | None) -> bool:
    """Return True if Slurm has ended the job because of a node: it then sends SIGTERM, as for a requested stop."""
    lines = _tail(run.srun_log) + said_in(script)
    return any(NODE_LOST.search(line) for line in lines)


def gather(attempt: AttemptContext, code: int, script: ScriptLog | None = None, ask: Runner = ask,
           hang: Hang | None = None, unended: Sequence[str] = ()) -> Evidence:
    """Read all available evidence. Absent, broken or refused parts are left out.

    Args:
        code: srun's exit code.
        script: the log of the job's script.
        hang: the hang that was noticed.
        unended: hosts that did not report the ends of their tasks.
    """
    run, number = attempt.run, attempt.record.attempt
    hosts, places = attempt.seats()
    program = isinstance(attempt.spec, ProgramSpec)
    srun = _tail(run.srun_log, size=LONG_TAIL) + said_in(script)
    if attempt.by_mpirun:
        logs = _by_rank(run, places, hosts)
    else:
        logs = _by_host(run.node_log, LONG_TAIL if program else TAIL)
        logs = _with_the_drowned(run, srun, logs) if program else logs
    announced = [start for start in read_records(run.ranks, RankStart) if start.attempt == number]
    return Evidence(
        code=code,
        failures=tuple(failure for failure in read_failures(run, number) if hang is None or failure.time < hang.time),
        standings=tuple(read_standings(run, number)),
        srun=srun,
        logs=logs,
        kernel=_by_host(run.kernel_log),
        states=_states(attempt.record.hosts, ask) if attempt.allocation else {},
        places={place.rank: place for place in places},
        hosts=hosts,
        supervisor_host=os.environ.get("SLURMD_NODENAME"),
        pids={(start.node, start.pid): start.rank for start in announced},
        resident=_resident(run),
        largest=_largest([*srun, *(line for lines in logs.values() for line in lines)], ask),
        run=run,
        hang=hang,
        unended=tuple(unended),
        program=program,
        axes=isinstance(attempt.spec, ProgramSpec) and attempt.spec.program.axes is not None,
        of_node=isinstance(attempt.spec, ProgramSpec) and attempt.spec.program.start == "node",
        by_mpirun=attempt.by_mpirun,
        by_mpi=isinstance(attempt.spec, ProgramSpec) and attempt.spec.program.start == "mpi" and not attempt.by_mpirun,
        job=attempt.job_id,
        user=os.getuid(),
    )


def _by_host(logs: FilesOfRun, size: int = TAIL) -> dict[str, tuple[str, ...]]:
    return {logs.values(path)[0]: _tail(path, size=size) for path in logs.found()}


def _by_rank(run: RunDirectory, places: Sequence[RankPlace], hosts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the last lines of each host's ranks if each rank has its own log; its number precedes its lines, as from srun."""
    logs: dict[str, tuple[str, ...]] = {}
    for place in places:
        lines = tuple(f"{place.rank}: {line}" for line in _tail(run.rank_log(place.rank), size=LONG_TAIL))
        logs[hosts[place.node]] = logs.get(hosts[place.node], ()) + lines
    return logs


def _with_the_drowned(run: RunDirectory, srun: Sequence[str], logs: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Return the logs with the last lines of the tasks that ended first, if other tasks dominate their node's log."""
    first = next((end for end in task_ends(srun) if end.code != 0), None)
    if first is None or first.host not in logs:
        return logs
    lines, path = logs[first.host], run.node_log(first.host)
    counts = Counter(int(label[1]) for label in map(LABEL.match, lines) if label)
    drowned = {task: more for task in first.tasks if counts[task] < DEEP_LINES
               and len(more := _lines_of_task(path, task)) > counts[task]}
    others = (line for line in lines if not ((label := LABEL.match(line)) and int(label[1]) in drowned))
    return {**logs, first.host: (*(line for more in drowned.values() for line in more), *others)}


def _lines_of_task(path: Path, task: int) -> list[str]:
    pattern = re.compile(rb"(?m)^ *%d: .*$" % task)
    with suppress(OSError, ValueError), open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        begin = max(0, len(data) - DEEP)
        last = deque((match.span() for match in pattern.finditer(data, begin)), DEEP_LINES)
        return [line for low, high in last for line in lines_of(data[low:high])]
    return []


def _tail(path: Path, begin: int = 0, size: int = TAIL) -> tuple[str, ...]:
    """Return the last whole lines of a file, from the offset ``begin`` on, at most ``size`` bytes."""
    try:
        with open(path, "rb") as file:
            cut = file.seek(0, 2) - size
            file.seek(max(begin, cut))
            lines = lines_of(file.read())
    except OSError:
        return ()
    return tuple(lines[cut > begin:len(lines) - (lines[-1] == "")])


def _states(hosts: tuple[str, ...], ask: Runner) -> dict[str, str]:
    if not hosts:
        return {}
    with suppress(CommandFailed):
        return {name: node.state for name, node in node_states(hosts, ask=ask).items()}
    return {}


def _resident(run: RunDirectory) -> dict[int, int]:
    sizes = {}
    for path in run.memory.found():
        with suppress(OSError, ValueError):
            sizes[int(run.memory.values(path)[0])] = int(path.read_text(encoding="ascii"))
    return sizes


def _largest(lines: list[str], ask: Runner) -> int | None:
    """Return the largest task, from Slurm's accounting: Slurm ends a whole step for its memory without naming a task."""
    step = next((match[1] for line in lines if (match := OVER_LIMIT.search(line))), None)
    return largest_task(step, ask) if step is not None else None
