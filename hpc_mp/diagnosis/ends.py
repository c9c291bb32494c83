"""The end of a rank without a record, from the messages of the process that saw it end and from its own log."""

import math
import re
import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from hpc_mp.base.exit_codes import ending
from hpc_mp.diagnosis import launchers
from hpc_mp.diagnosis.stacks import before_abort, before_dump, crash_place, numbers
from hpc_mp.diagnosis.texts import TIMED_OUT, kind_in_output
from hpc_mp.diagnosis.tracebacks import PythonError, last_error
from hpc_mp.diagnosis.watchdogs import given_reason, thrown
from hpc_mp.rundir.attempt import AttemptReader, last_words
from hpc_mp.rundir.failures import CONTROL, KINDS, RankFailure, kind_of_end

CRASHES = (-signal.SIGABRT, -signal.SIGSEGV)
AT_ITS_EXIT = 6  # lines after a traceback beyond which a crash no longer counts as one of Python's teardown
# Words of slurmstepd and of srun; and of Python about a child that somebody killed.
OUT_OF_MEMORY = re.compile(r"Detected \d+ oom[-_]kill event|Exceeded (job|step) memory limit|tasks? \S+: Out Of Memory")
OF_KILLED_CHILD = re.compile(r"BrokenProcessPool|exited unexpectedly|terminated abruptly")
OF_ONE_THAT_LIVES = 3  # maximum of lines after the traceback of a rank that has not ended, for it to count as failed
# The rank that another rank waited for: the sender of NCCL's id, or a rank that did not reach a barrier.
MISSED = re.compile(r"\[(?P<by>\d+)\] is setting up NCCL communicator and retr\w+ ncclUniqueId from \[(?P<rank>\d+)\]|"
                    r"Ranks? (?P<late>\d+) failed to pass monitoredBarrier")


@dataclass(frozen=True, slots=True)
class Symptom:
    """One finding about a failure, of a rank, a task, a node or the job."""

    kind: str  # a key of failures.KINDS
    text: str  # the evidence, without its subject
    host: str | None = None
    rank: int | None = None
    task: int | None = None
    time: float = math.inf  # unix seconds, if known
    lost: tuple[str, ...] = ()  # hosts that did not answer
    own: bool = False  # True if a program reported it, whose output may mention anything
    inner: int | None = None  # the failed rank that a node's command reports
    traceback: str = ""  # that of a Python error; may be empty


def words_of_end(lines: Sequence[str], code: int, *, program: bool = False, of_node: bool = False) -> Symptom:
    """Return the reason for which a process ended.

    Args:
        lines: its output.
        code: exit code as from ``subprocess``: negative for a signal.
        program: True for the user's program, False for a rank of our own engine.
        of_node: True for the one command of a node, which numbers its ranks itself.
    """
    if not program:
        return _end(lines, code, _error(before_abort(lines), code, program, of_node), program, of_node)
    lines = [CONTROL.sub("", line) for line in lines]
    received = launchers.asked_to_end(lines) if code == 1 else None
    forced = any(map(launchers.FORCED.search, lines[-launchers.BY_LAUNCHER:]))  # it ended itself by a signal
    report = launchers.report_of(lines) if code > 0 or forced else None
    raised = report.blames[0].code if report and report.blames[0].code > 0 else 1 if forced else code
    error = _error(before_dump(lines) if raised < 0 else lines, raised, program, of_node)
    end = _end(lines, code if received is None or (error and not error.of_child) else -received, error, program, of_node)
    return _with_memory(end, lines) if report is None else _reported(lines, report, end, error, of_node)


def _end(lines: Sequence[str], code: int, error: PythonError | None, program: bool, of_node: bool) -> Symptom:
    """Return the reason of an end from the process's own output. ``error``: the exception that ended it."""
    if error is not None:
        return _of_error(error, of_node)
    output = before_abort(lines) if not program else before_dump(lines) if code < 0 else list(lines)
    inner = launchers.passed_on(code, of_node) if program else code
    kind = kind_of_end(inner, program)
    how = ending(code) if inner == code else f"{ending(code)}: its child process {ending(inner)}"
    what = "" if not program else (
        thrown(output) if inner == -signal.SIGABRT else given_reason(output[-launchers.BY_LAUNCHER:]) if code > 0 else "")
    last_output = "" if what else last_words(output)
    place = crash_place(lines) if program and inner < 0 and not what else ""
    exact = kind_in_output(what or last_output) if program and kind in ("exit", "crash") else None
    parts = (f"{how}: {what}" if what else how, place and f"it was in {place}", last_output and f"its last words: {last_output}")
    return Symptom(exact or kind, "; ".join(filter(None, parts)))


def _reported(lines: Sequence[str], report: launchers.LauncherReport, end: Symptom, error: PythonError | None,
              of_node: bool) -> Symptom:
    """Return the reason of an end that a launcher reports: the end of a process that it blames, or the exception. ``end``: the
    end of the launcher by its own output, of ``error`` if there is one."""
    if error is not None and not error.of_child:
        after = len(lines) - error.behind > report.begin  # the failed process was not the last word
        crashed = any(blame.code < 0 for blame in report.blames)
        killed = report.blames[0].code == -signal.SIGKILL
        if after or not crashed or (error.uncaught and not killed and not KINDS[end.kind].echo):
            return end
    before, blames = lines[:report.begin], report.blames
    if blames[0].code == -signal.SIGABRT:  # of ranks that abort at the same time, a launcher blames any
        blames += tuple(launchers.LauncherBlame(blames[0].code, rank) for rank in launchers.ranks_in(before)
                        if rank != blames[0].rank)
    child = min((_of_child(before, blame, of_node) for blame in blames), key=lambda child: KINDS[child.kind].echo)
    if error is not None and not error.of_child and KINDS[child.kind].echo:
        return end
    return _with_memory(child, lines)


def _with_memory(end: Symptom, lines: Sequence[str]) -> Symptom:
    """Return the end, for lack of memory if Slurm says so in the same output and nothing else explains it."""
    evidence = next(filter(OUT_OF_MEMORY.search, reversed(lines)), None)
    if evidence is None or not (end.kind in ("signal", "exit") or OF_KILLED_CHILD.search(end.text)):
        return end
    return replace(end, kind="memory", text=f"{end.text}; {evidence.strip()}")


def _of_child(lines: Sequence[str], blame: launchers.LauncherBlame, of_node: bool) -> Symptom:
    """Return the end of a process that a launcher saw fail, from the output before the launcher's report."""
    own = launchers.output_of(lines, blame)
    error = _error(before_dump(own) if blame.code < 0 else own, blame.code, True, of_node)
    if error is not None and not error.uncaught and blame.code < 0 and error.kind is not None and KINDS[error.kind].echo:
        error = None  # perhaps of another process, which lost this one
    end = _end(own, blame.code, error, True, of_node)
    if error is None and blame.code < 0 and KINDS[end.kind].echo and not end.text.startswith(f"{ending(blame.code)}: "):
        end = replace(end, kind=kind_of_end(blame.code, True))  # so may its last words be
    inner = blame.rank if of_node else None
    return end if error is not None else replace(end, text=f"lost {blame}, which {end.text}", inner=inner)


def given_up(lines: Sequence[str], of_node: bool = False) -> Symptom | None:
    """Return the failure of a program's process that has not ended: its last output is a traceback, and at its exit MPI, NCCL or
    a thread waits for others. None without such a traceback, or if it only reports that others are gone."""
    error = last_error(before_abort(lines), code=0)
    if error is None or error.behind > OF_ONE_THAT_LIVES or (error.kind is not None and KINDS[error.kind].echo):
        return None
    end = _of_error(error, of_node)
    return replace(end, text=f"{end.text}; it was still running when the others were ended")


def awaited_in_vain(complaints: Mapping[int, str], ranks: Collection[int]) -> tuple[int, str] | None:
    """Return the rank of a program that all others gave up waiting for, and the evidence; None if it cannot be determined.
    ``complaints``: message of each rank that lost others or timed out waiting for them. ``ranks``: all ranks."""
    others = {rank for rank in ranks if rank not in complaints}
    waited = [rank for rank in sorted(complaints) if TIMED_OUT.search(complaints[rank])]  # the others mostly lost these
    named = {int(match["rank"] or match["late"]) for rank in waited for match in [MISSED.search(complaints[rank])]
             if match is not None and match["by"] in (None, str(rank))} & others  # a smaller group has other numbers
    missing = others if len(others) == 1 else named
    if len(missing) != 1 or not waited:
        return None
    return next(iter(missing)), f"{numbers(waited)} gave up waiting for it: {complaints[waited[0]]}"


def unsaid_end(
    attempt: AttemptReader, rank: int, node: str, code: int, time: float, *, program: bool = False, of_node: bool = False,
    ours: bool = False, at: tuple[tuple[str, int], ...] = (),
) -> RankFailure:
    """Return the failure of a rank without a record: the traceback at the end of its log, else its last line.

    Args:
        code: exit code as from ``subprocess``: negative for a signal.
        time: unix seconds.
        program: True for the user's program, False for a rank of our own engine.
        of_node: True for the one command of a node, which numbers its ranks itself.
        ours: True if we killed the rank, because it did not end with the others.
        at: its coordinates.
    """
    lines = attempt.last_lines(rank)
    if ours:
        last = last_words(before_abort(lines))
        end = (given_up(lines, of_node) if program else None) or Symptom("straggled", last and f"its last words: {last}")
    else:
        end = words_of_end(lines, code, program=program, of_node=of_node)
    return RankFailure(rank, node, end.kind, end.text, time, attempt.number, place=at, traceback=end.traceback, of_node=of_node,
                       inner=end.inner)


def _error(lines: Sequence[str], code: int, program: bool, of_node: bool) -> PythonError | None:
    """Return the exception that ended it. Python exits with 1 after one; later, code that is torn down may crash."""
    if code > 0 and not (program and launchers.passed_on(code, of_node) < 0):
        return last_error(lines, 1 if of_node else code)
    before = list(takewhile(lambda line: not given_reason([line]), lines))  # at exit a library may wait for others in vain
    error = last_error(before, code) if program and code in CRASHES else None
    return error if error is not None and error.behind <= AT_ITS_EXIT else None


def _of_error(error: PythonError, of_node: bool) -> Symptom:
    kind, text = error.kind or "error", error.message if of_node else str(error)
    return Symptom(kind, text if KINDS[kind].text else f"failed: {text}", inner=error.rank if of_node else None,
                   traceback=error.traceback)
