"""The conclusion of a run, recorded once: its verdict, its report, and the user's notification command."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job import load_resolved
from hpc_mp.report.notify import notify
from hpc_mp.rundir import LineFile, RunDirectory
from hpc_mp.rundir.outcome import Cause, Outcome, verdict, write_outcome


def conclude(outcome: Outcome, attempt: int, warn: Callable[[str], object] = lambda _: None) -> Outcome:
    """Write ``outcome.json``, and ``report.html`` if the run has trained. Return the outcome with the report's path. Run the
    user's command (``notify.command``), once for each attempt.

    The verdict is written before the report, which shows it: if the process is killed in between, at least the verdict exists.
    A run whose directory was removed has failed, independent of its ranks' reports, and no file is written. A full disk, or a
    failure to draw the report, must not hide the end of a run.

    Args:
        attempt: number of the attempt, from 1.
        warn: called with the reason if no report of a trained run could be drawn; the main log has the traceback.
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
        _notify(concluded, run, warn)
    return concluded


def _notify(outcome: Outcome, run: RunDirectory, warn: Callable[[str], object]) -> None:
    """Start the user's command. Its failure must not hide the end of the run; it is also reported in the main log."""
    try:
        command = load_resolved(run.job).notify.command
    except HpcMpError:
        return
    reason = notify(outcome, command) if command else None
    if reason is not None:
        warn(f"warning: {reason}")
        log = LineFile(run.main_log)
        log.write(f"warning: {reason}")
        log.close()


def _drawn(run: RunDirectory, warn: Callable[[str], object]) -> Path | None:
    """Draw the page of a run. A failure does not affect the run."""
    from hpc_mp.report.page import write_report  # slow to import, and many launches end without a page

    try:
        return write_report(run)
    except Exception as error:  # drawing a half-written run may raise any error
        warn(f"warning: no report ({type(error).__name__}: {error}); see {run.main_log}")
        log = LineFile(run.main_log)
        log.write(f"no report could be drawn:\n{traceback.format_exc().rstrip()}")
        log.close()
        return None
