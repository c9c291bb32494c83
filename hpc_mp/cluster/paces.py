"""The pace of a GPU model: measured by predicted seconds of a step, from a ledger to which every completed run adds a line.

The ledger is ``$XDG_STATE_HOME/hpc-mp/paces.jsonl`` (``~/.local/state`` by default), private to the user, like that of bad nodes.
Lines are only appended, because several jobs may write at once; the last line of a run counts.
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from hpc_mp.base.assets import state_folder
from hpc_mp.base.files import read_lines

LAST = 5  # runs that count
MOST = 2.0  # pace, or its inverse: what is further off is no trait of a GPU


@dataclass(frozen=True, slots=True)
class PacedRun:
    """Seconds of the steps of a completed run. ``predicted``: without the pace of earlier runs."""

    gpu: str
    run: str
    predicted: float
    measured: float


def ledger(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the user's file."""
    return state_folder(environ) / "paces.jsonl"


def record(path: Path, run: PacedRun) -> None:
    """Add a run. Raises OSError if the file cannot be written."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(run)) + "\n")


def pace(path: Path, gpu: str) -> float:
    """Return the factor of a GPU model: of the median m of its last n runs m^(n/(n + 1)), so that one run counts half; 1 without
    runs. Malformed lines are skipped, and so is a file that cannot be read."""
    ratios: dict[str, float] = {}
    with suppress(OSError):
        for line in read_lines(path):
            with suppress(TypeError, ZeroDivisionError):
                run = PacedRun(**line)
                ratios |= {run.run: run.measured / run.predicted} if run.gpu == gpu else {}
    last = list(ratios.values())[-LAST:]
    return min(MOST, max(1 / MOST, median(last))) ** (len(last) / (len(last) + 1)) if last else 1.0
