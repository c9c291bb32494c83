"""The conclusion of a run, recorded once: its verdict, its report, and the user's notification command."""

import os
import subprocess
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.line_file import append_lines
from hpc_mp.cluster.paces import PacedRun, ledger, record
from hpc_mp.job import load_resolved
from hpc_mp.rundir import SECRET, TOKEN, RunDirectory
from hpc_mp.rundir.expected import MACHINE, observe
from hpc_mp.rundir.outcome import Cause, Outcome, verdict, write_outcome

LIMIT_S = 60.0  # the job's nodes wait for it
MEASURES = 0.1  # predicted MFU below which a step measures launches and latencies rather than the GPU
WORDS = 500  # maximum number of characters of its output

VARIABLES = ("run", "state", "job_id", "steps", "loss", "evaluation_loss", "best_evaluation_loss", "checkpoint",
             "best_checkpoint", "report")
"""Keys of ``outcome.json`` that the command gets as variables: ``HPC_MP_RUN`` …"""


def conclude(outcome: Outcome, attempt: int, warn: Callable[[str], object] = lambda _: None) -> Outcome:
    """Write ``outcome.json``, and ``report.html`` if the run has trained. Return the outcome with the report's path. Run the
    user's command (``notify.command``), once for each attempt. ``attempt``: its number, from 1. ``warn``: called with the reason
    if no report of a trained run could be drawn; the main log has the traceback.

    The verdict is written before the report, which shows it: if the process is killed in between, at least the verdict exists. A
    run whose directory was removed has failed, independent of its ranks' reports, and no file is written. A full disk, or a
    failure to draw the report, must not hide the end of a run.
    """
    run = RunDirectory(outcome.run)
    if run.removed:
        message = f"the run directory {run.path} was removed during the run: no results are left"
        return replace(outcome, state="failed", cause=Cause("removed", message), checkpoint=None)
    repeated = verdict(run, attempt) is not None
    with suppress(OSError):
        write_outcome(outcome, attempt)
    concluded = replace(outcome, report=_drawn(run, warn) if outcome.steps else None)
    if concluded.report is not None:
        with suppress(OSError):
            write_outcome(concluded, attempt)
    if not repeated:
        _teach(concluded, run, attempt)
        _notify(concluded, run, warn)
    return concluded


def _teach(outcome: Outcome, run: RunDirectory, attempt: int) -> None:
    """Add the pace of a completed run to the ledger, unless it is too small to measure its GPUs, or had a slow rank or link."""
    with suppress(OSError):
        observed = observe(run, attempt) if outcome.state == "completed" else None
        if observed and observed.culprit in ("", MACHINE) and (expected := observed.expected).mfu * expected.pace >= MEASURES:
            record(ledger(), PacedRun(expected.gpu, str(run.path), expected.seconds / expected.pace, observed.seconds))


def _notify(outcome: Outcome, run: RunDirectory, warn: Callable[[str], object]) -> None:
    """Start the user's command. Its failure must not hide the end of the run; it is also reported in the main log."""
    try:
        command = load_resolved(run.job).notify.command
    except HpcMpError:
        return
    reason = notify(outcome, command) if command else None
    if reason is not None:
        warn(f"warning: {reason}")
        append_lines(run.main_log, [f"warning: {reason}"])


def _drawn(run: RunDirectory, warn: Callable[[str], object]) -> Path | None:
    """Draw the page of a run. A failure does not affect the run."""
    from hpc_mp.report.page import write_report  # slow to import, and many launches end without a page

    try:
        return write_report(run)
    except Exception as error:  # drawing a half-written run may raise any error
        warn(f"warning: no report ({type(error).__name__}: {error}); see {run.main_log}")
        append_lines(run.main_log, [f"no report could be drawn:\n{traceback.format_exc().rstrip()}"])
        return None


def variables(outcome: Outcome) -> dict[str, str]:
    """Return the outcome as variables, empty if unknown. ``HPC_MP_NAME``: the job's name; ``HPC_MP_CAUSE``: the cause of a
    failure."""
    document = outcome.document()
    values = {f"HPC_MP_{key.upper()}": document[key] for key in VARIABLES}
    values |= {"HPC_MP_NAME": outcome.run.parent.name, "HPC_MP_CAUSE": outcome.cause.message if outcome.cause else None}
    return {name: "" if value is None else str(value) for name, value in values.items()}


def notify(outcome: Outcome, command: Sequence[str]) -> str | None:
    """Run the command to its end. Return the reason of its failure in one line; None if it succeeded."""
    inherited = {name: value for name, value in os.environ.items() if name not in (TOKEN, SECRET)}
    try:
        done = subprocess.run(command, cwd=outcome.run, env={**inherited, **variables(outcome)}, stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", errors="replace",
                              timeout=LIMIT_S, check=False)
    except OSError as error:
        return f"notify.command cannot be started ({error.strerror})"
    except (subprocess.TimeoutExpired, ValueError) as error:  # for example a value with a zero byte
        return f"notify.command was aborted ({error})"
    output = " ".join(done.stdout.split())[-WORDS:]
    return f"notify.command exited with {done.returncode}" + (f": {output}" if output else "") if done.returncode else None
