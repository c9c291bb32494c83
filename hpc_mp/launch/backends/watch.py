"""The watch over emulated ranks: it follows them to their end and determines the outcome."""

import math
import selectors
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime

from hpc_mp.base.line_file import append_lines
from hpc_mp.diagnosis.classify import classify
from hpc_mp.diagnosis.ends import unsaid_end
from hpc_mp.diagnosis.evidence import Evidence
from hpc_mp.job.program import Program
from hpc_mp.launch.backends.interrupts import MEANINGS, Interrupts
from hpc_mp.launch.emulator.emulator import Emulator, Exit
from hpc_mp.launch.listener import Listener
from hpc_mp.layout.placement import Placement
from hpc_mp.report.conclude import conclude
from hpc_mp.rundir.attempt import AttemptReader
from hpc_mp.rundir.failures import RankFailure, coordinates, read_failures, write_failure
from hpc_mp.rundir.outcome import STOPPED, Cause, Outcome, State, figures
from hpc_mp.rundir.rank_env import emulated_node
from hpc_mp.rundir.standings import read_standings

POLL_S = 1.0  # between two checks for a hang
ENDING_A_HANG, ABORT_S = ("abort", "kill"), 2.0  # commands for ranks that hang, and seconds between them
COMMANDS = ("stop", "kill")  # commands for the ranks at the first and the second interrupt


@dataclass(frozen=True, slots=True)
class RanksEnd:
    """The ends of all ranks. ``interrupted``: True if the user asked for the end. ``broken``: reason why the emulator itself
    failed; None if it did not."""

    exits: tuple[Exit, ...]
    interrupted: bool = False
    broken: str | None = None


def watch(emulator: Emulator, attempt: AttemptReader, interrupts: Interrupts, listener: Listener,
          hung: Callable[[], bool] | None = None) -> RanksEnd:
    """Show progress and forward interrupts (the first saves and stops, the second kills) until nothing runs any more. ``hung``
    is called every second, and True ends the ranks, because they hang. None: they notice a hang themselves."""
    pressed, due, ending = 0, -math.inf, list(ENDING_A_HANG)
    pause = listener.interval if hung is None else min(listener.interval or POLL_S, POLL_S)
    with selectors.DefaultSelector() as selector:
        selector.register(emulator, selectors.EVENT_READ)
        selector.register(interrupts, selectors.EVENT_READ)
        while emulator.running:
            selector.select(pause)
            for _ in range(interrupts.received()):
                listener.note(MEANINGS[min(pressed, 1)])
                emulator.command(COMMANDS[min(pressed, 1)])
                pressed += 1
            emulator.receive()
            if hung is not None and ending and emulator.running and time.monotonic() >= due and hung():
                emulator.command(ending.pop(0))
                due = time.monotonic() + ABORT_S
            if emulator.running:
                listener.update(attempt.status(), attempt.steps())
                listener.evaluated(attempt.evaluations())
        listener.evaluated(attempt.evaluations())
        emulator.close()  # frees the run, which the launcher holds open, while interrupts are still handled
    return RanksEnd(tuple(emulator.exits), pressed > 0, emulator.broken)


def judge(ended: RanksEnd, attempt: AttemptReader, placement: Placement,
          joint_failures: Sequence[RankFailure] = (), program: Program | None = None) -> tuple[State, Cause | None]:
    """Return the state of an emulated attempt, and the cause of its failure. Ranks that ended without a record get one.
    ``joint_failures``: failures that the end of a single rank does not show. ``program``: the program that the ranks run, without
    coordinates unless it has axes; None for our own engine."""
    orderly = (0, STOPPED) if program is None else (0, *program.stop_codes)
    bad = [end for end in ended.exits if end.code not in orderly and not (end.ours and ended.interrupted)]
    if ended.broken is not None:
        return "failed", Cause("launcher", ended.broken)
    covered = {failure.rank for failure in joint_failures}
    failures = {failure.rank: failure for failure in read_failures(attempt.run, attempt.number) if failure.rank not in covered}
    for end in bad:
        if end.rank not in failures:
            failures[end.rank] = _silent(end, attempt, placement, program)
            if end.rank not in covered or failures[end.rank].kind != "straggled":
                with suppress(OSError):  # a full disk must not hide how the run ended
                    write_failure(attempt.run, failures[end.rank])
    ends = (*(failures[end.rank] for end in bad), *joint_failures)
    if program is not None:  # a rank that we had to end is the cause only if all others have waited for it
        ends = tuple(failure for failure in ends if failure.kind != "straggled") or ends
    root_cause = _root_cause(attempt, ends, placement, program) if ends else None
    if root_cause is not None and not (ended.interrupted and root_cause.kind == "peer"):
        return "failed", root_cause
    by_user = program is not None and ended.interrupted  # many programs exit with 0 after SIGTERM
    return ("stopped" if by_user or any(end.code for end in ended.exits) else "completed"), None


def conclude_ranks(attempt: AttemptReader, state: State, cause: Cause | None, listener: Listener, *before: str) -> Outcome:
    """Write the cause to the main log, after the lines ``before``, and return the outcome with its report."""
    run, number = attempt.run, attempt.number
    if cause is not None:
        append_lines(run.main_log, [f"{datetime.now():%H:%M:%S} {message}"
                                    for message in (*before, f"attempt {number} failed: {cause.message}")])
    return conclude(Outcome(run.path, state, cause=cause, **figures(run, number)), number, listener.note)


def _root_cause(
    attempt: AttemptReader, ends: tuple[RankFailure, ...], placement: Placement, program: Program | None,
) -> Cause:
    return classify(Evidence(
        failures=ends, standings=tuple(read_standings(attempt.run, attempt.number)), run=attempt.run,
        places={place.rank: place for place in placement.ranks},
        hosts=tuple(emulated_node(node) for node in range(placement.nodes)), program=program is not None,
        axes=program is not None and program.axes is not None, of_node=program is not None and program.start == "node"))


def _silent(end: Exit, attempt: AttemptReader, placement: Placement, program: Program | None) -> RankFailure:
    """Return the failure of a rank that left no record, but perhaps a traceback in its log."""
    place = placement.ranks[end.rank]
    node, has_axes = emulated_node(place.node), program is None or program.axes is not None
    return unsaid_end(attempt, end.rank, node, end.code, end.time, program=program is not None, ours=end.ours,
                      of_node=program is not None and program.start == "node", at=coordinates(place) if has_axes else ())
