"""The end of a rank without a record, from the messages of the process that saw it end and from its own log."""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from hpc_mp.base.exit_codes import NAMES, SIGNALS, ending
from hpc_mp.diagnosis.native import kind_in_output
from hpc_mp.diagnosis.stacks import before_abort, before_dump, crash_place, numbers
from hpc_mp.diagnosis.texts import TIMED_OUT
from hpc_mp.diagnosis.tracebacks import (
    HEAD,
    NAMED_SO,
    OF_LAUNCHER,
    RANK,
    ROOT,
    PythonError,
    last_error,
    without_tags,
)
from hpc_mp.diagnosis.watchdogs import given_reason, thrown
from hpc_mp.rundir.attempt import AttemptReader, last_words
from hpc_mp.rundir.failures import KINDS, RankFailure, kind_of_end

SHELL = 128  # a shell exits with this plus the number of the signal that ended its command
CRASHES = (-signal.SIGABRT, -signal.SIGSEGV)
AT_ITS_EXIT = 6  # lines after a traceback beyond which a crash no longer counts as one of Python's teardown
# First lines of reports that have several: torchrun's and its table's, horovodrun's, Hydra's.
REPORT = re.compile(r"Sending process \d+ closing signal |Horovod detected that |RANK \d+ PID \d+ RUNNING AT |"
                    r"^\s*rank +: \d+ \(local_rank: ")
BY_LAUNCHER = 100  # last lines in which a launcher reports its failed process
OF_ONE_THAT_LIVES = 3  # maximum of lines after the traceback of a rank that has not ended, for it to count as failed
# Messages of launchers about a failed process: torchrun's table and its log, accelerate's and others' subprocess, horovodrun's
# error, torch's spawn, DeepSpeed's launcher, Open MPI's mpirun, Hydra's, srun.
LAUNCHER_WORDS = tuple(map(re.compile, (
    r"rank +: (?P<rank>\d+) \(local_rank: \d+\)\n\s*exitcode +: (?P<code>-?\d+) ",
    r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<local>\d+) \(pid: \d+\) of binary",
    r"CalledProcessError: Command .* died with (<Signals\.\w+: |unknown signal )(?P<signal>\d+)",
    r"CalledProcessError: Command .* returned non-zero exit status (?P<code>12[89]|1[3-9]\d|2\d\d)\.",
    r"Horovod detected that .*\n?.*Process name: (?P<rank>\d+)\n?.*Exit code: (?P<code>-?\d+)",
    r"ProcessExitedException: process (?P<local>\d+) terminated with (signal SIG(?P<name>\w+)|exit code (?P<code>\d+))",
    r"sigkill_handler\] (?:.*--local_rank=(?P<local>\d+))?.* exits with return code = (?P<code>-?\d+)",
    r"process rank (?P<rank>\d+) with PID \d+ on node \S+ exited on signal (?P<signal>\d+)",
    r"RANK (?P<rank>\d+) PID \d+ RUNNING AT .*\n=?\s*(EXIT CODE: (?P<code>\d+)|KILLED BY SIGNAL: (?P<signal>\d+))",
    r"srun: error: \S+: tasks? (?P<rank>\d+)\S*: (?P<words>[A-Z][a-z ]+[a-z])( \(core dumped\))?(\n|$)",
)))
# The rank that another rank waited for: the sender of NCCL's id, or a rank that did not reach a barrier.
MISSED = re.compile(r"\[(?P<by>\d+)\] is setting up NCCL communicator and retr\w+ ncclUniqueId from \[(?P<rank>\d+)\]|"
                    r"Ranks? (?P<late>\d+) failed to pass monitoredBarrier")


@dataclass(frozen=True, slots=True)
class LauncherBlame:
    """The process that a launcher saw end first; ``code`` as from ``subprocess``.

    Attributes:
        rank: its number in the launcher's world, if reported; ``local``: its number on its node.
    """

    code: int
    rank: int | None = None
    local: int | None = None

    def __str__(self) -> str:
        return f"its rank {self.rank}" if self.rank is not None else (
            "a process that it had started" if self.local is None else f"its local rank {self.local}")


def blamed_by_launcher(lines: Sequence[str]) -> LauncherBlame | None:
    """Return the first failed process that a launcher names; None without one."""
    last = lines[-BY_LAUNCHER:]
    root = next((number for number in reversed(range(len(last))) if ROOT.match(last[number])), 0)
    text = "\n".join(last[root:])
    match = next(filter(None, (pattern.search(text) for pattern in LAUNCHER_WORDS)), None)
    if match is None:
        return None
    fields = {name: value for name, value in match.groupdict().items() if value is not None}
    killed = (fields.get("signal") or SIGNALS.get(fields.get("words", ""))
              or signal.Signals.__members__.get(f"SIG{fields.get('name')}"))
    if killed is None and "code" not in fields:
        return None
    rank, local = (int(fields[name]) if name in fields else None for name in ("rank", "local"))
    code = -int(killed) if killed is not None else int(fields["code"])
    return LauncherBlame(SHELL - code if code - SHELL in NAMES else code, rank, local)


@dataclass(frozen=True, slots=True)
class Symptom:
    """One finding about a failure, of a rank, a task, a node or the job.

    Attributes:
        kind: a key of ``failures.KINDS``.
        text: the evidence, without its subject.
        lost: hosts that did not answer.
        time: unix seconds, if known.
        own: True if a program reported it, whose output may mention anything.
        inner: the failed rank that a node's command reports.
        traceback: that of a Python error; may be empty.
    """

    kind: str
    text: str
    host: str | None = None
    rank: int | None = None
    task: int | None = None
    time: float = math.inf
    lost: tuple[str, ...] = ()
    own: bool = False
    inner: int | None = None
    traceback: str = ""


def words_of_end(lines: Sequence[str], code: int, *, program: bool = False, of_node: bool = False) -> Symptom:
    """Return the reason for which a process ended.

    Args:
        lines: its output.
        code: exit code as from ``subprocess``: negative for a signal.
        program: True for the user's program, False for a rank of our own engine.
        of_node: True for the one command of a node, which numbers its ranks itself.
    """
    output = before_abort(lines) if not program else before_dump(lines) if code < 0 else list(lines)
    error = _error(output, code, program, of_node)
    blamed = blamed_by_launcher(lines) if program and code > 0 else None
    if blamed is not None and (error is None or (blamed.code < 0 and not error.uncaught) or blamed.code == -signal.SIGKILL):
        end = _of_child(lines, blamed, of_node)
        if error is None or error.of_child or not KINDS[end.kind].echo:
            return end
    if error is not None:
        return _of_error(error, of_node)
    inner = SHELL - code
    if program and -inner in NAMES and code > SHELL:
        how, kind = f"{ending(code)}: its child process {ending(inner)}", kind_of_end(inner, program)
    else:
        how, kind, inner = ending(code), kind_of_end(code, program), code
    what = "" if not program else (
        thrown(output) if inner == -signal.SIGABRT else given_reason(output[-BY_LAUNCHER:]) if code == 1 else "")
    last_output = "" if what else last_words(output)
    place = crash_place(lines) if program and inner < 0 and not what else ""
    exact = kind_in_output(what or last_output) if program and kind in ("exit", "crash") else None
    parts = (f"{how}: {what}" if what else how, place and f"it was in {place}", last_output and f"its last words: {last_output}")
    return Symptom(exact or kind, "; ".join(filter(None, parts)))


def _of_child(lines: Sequence[str], blamed: LauncherBlame, of_node: bool) -> Symptom:
    """Return the end of the process that a launcher saw end first, from the output before the launcher's report."""
    plain = without_tags(lines)
    own = [line for line, mark in zip(lines, map(RANK.match, plain), strict=True) if mark is None or int(mark[1]) == blamed.rank]
    end = words_of_end(own[:_report(without_tags(own))], blamed.code, program=True, of_node=of_node)
    if end.traceback:
        return end
    return replace(end, text=f"lost {blamed}, which {end.text}", inner=blamed.rank if of_node else None)


def _report(lines: Sequence[str]) -> int:
    """Return the number of the line from which a launcher reports its failed process."""
    first = max(0, len(lines) - BY_LAUNCHER)
    begin = next(number for number in range(first, len(lines))
                 if any(pattern.search(lines[number]) for pattern in (REPORT, *LAUNCHER_WORDS)))
    for number in range(begin, first - 1, -1):  # to the beginning of the launcher's own traceback
        if HEAD.search(lines[number]):
            return number
        if number < begin and NAMED_SO.match(lines[number]) and not OF_LAUNCHER.match(lines[number]):
            break
    return begin


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

    Args:
        complaints: message of each rank that lost others or timed out waiting for them.
        ranks: all ranks.
    """
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
    if code > 0 and not (program and code > SHELL and code - SHELL in NAMES):
        return last_error(lines, 1 if of_node else code)
    before = list(takewhile(lambda line: not given_reason([line]), lines))  # at exit a library may wait for others in vain
    error = last_error(before, code) if program and code in CRASHES else None
    return error if error is not None and error.behind <= AT_ITS_EXIT else None


def _of_error(error: PythonError, of_node: bool) -> Symptom:
    kind, text = error.kind or "error", error.message if of_node else str(error)
    return Symptom(kind, text if KINDS[kind].text else f"failed: {text}", inner=error.rank if of_node else None,
                   traceback=error.traceback)
