"""The end of an attempt, written down once: its verdict with the report beside it."""

from __future__ import annotations

import traceback
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from hpc_mp.report.page import write_report
from hpc_mp.rundir import LineFile, RunDirectory
from hpc_mp.rundir.outcome import Outcome, write_outcome


def conclude(outcome: Outcome, attempt: int) -> Outcome:
    """Write ``outcome.json``, and ``report.html`` if the run has trained; returns the outcome with the report's path.

    The verdict is there before the report is drawn, which shows it: whoever is killed in between leaves at least the verdict.
    A full disk, or a report that cannot be drawn, is no reason to hide how a run ended.

    Args:
        attempt: whose end this is, from 1.
    """
    with suppress(OSError):
        write_outcome(outcome, attempt)
    concluded = replace(outcome, report=_drawn(RunDirectory(outcome.run)) if outcome.steps else None)
    if concluded.report is not None:
        with suppress(OSError):
            write_outcome(concluded, attempt)
    return concluded


def _drawn(run: RunDirectory) -> Path | None:
    """The page of a run; why there is none stands in the main log. A run is no worse for lack of pictures."""
    try:
        return write_report(run)
    except Exception as error:  # of whatever a half-written run makes of its drawing
        log = LineFile(run.main_log)
        for line in (f"warning: no report ({type(error).__name__}: {error})", *traceback.format_exc().splitlines()):
            log.write(line)
        log.close()
        return None
