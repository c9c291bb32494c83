"""A schedule as a table: CSV with a line per rank and a cell per time slot, in the format of torch's pipelining.

A cell is stage, action, microbatch: ``0F0``, ``1B0``, ``1I0``, ``1W0``; an empty cell is idle. Messages and reductions are not
included, because they follow from the order; so do the number of stages and their placement on ranks.
"""

import csv
import io
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpc_mp.base.errors import HpcMpError
from hpc_mp.layout.schedule.actions import Action, Schedule
from hpc_mp.layout.schedule.complete import Reduce, complete
from hpc_mp.layout.schedule.simulate import SLOTS, simulate
from hpc_mp.layout.schedule.validate import validate

CELL = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})")


def slots(schedule: Schedule) -> list[list[Action | None]]:
    """Return rank → time slot → its computation, every computation one slot long; None = idle. All rows are equally long."""
    timeline = simulate(schedule, SLOTS)
    rows: list[list[Action | None]] = [[None] * int(timeline.makespan) for _ in schedule.ranks]
    for row, computations in zip(rows, timeline.ranks, strict=True):
        for slot in computations:
            row[int(slot.start)] = slot.action
    return rows


def cell(action: Action) -> str:
    """Format stage, action, microbatch: ``0F0``, ``1B0``, ``1SEND_B0``."""
    return f"{action.stage}{action.kind}{action.microbatch}"


def to_csv(schedule: Schedule) -> str:
    """Return one line per rank, only computations, an empty cell for each idle slot."""
    text = io.StringIO()
    rows = [["" if action is None else cell(action) for action in row] for row in slots(schedule)]
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def to_dict(schedule: Schedule) -> dict[str, Any]:
    """Return the placement of stages, and every action of every rank, including communication and reductions."""
    return {"placement": list(schedule.placement),
            "ranks": [{"rank": rank, "actions": [asdict(a) for a in actions]} for rank, actions in enumerate(schedule.ranks)]}


def from_csv(text: str, reduce: Reduce = "last") -> Schedule:
    """Return the complete and valid schedule of a table. Empty lines, and the positions of empty cells in a line, do not matter.
    Raises ValueError, naming the malformed cell, or the action that is missing, superfluous, on the wrong rank, out of order or
    never possible."""
    lines = [line for line in csv.reader(io.StringIO(text)) if line]
    ranks = tuple(tuple(_action(field, rank) for field in line if field.strip()) for rank, line in enumerate(lines))
    rank_of = {action: rank for rank, actions in enumerate(ranks) for action in actions}
    if not rank_of:
        raise ValueError("it has no cell")
    holders = {action.stage: rank for action, rank in rank_of.items()}
    for stage in range(max(holders)):
        if stage not in holders:
            raise ValueError(f"stage {stage} is missing, but there is a stage {max(holders)}")
    microbatches = 1 + max(action.microbatch for action in rank_of)
    for microbatch in range(microbatches):  # before anything is counted for a microbatch of nine digits
        if Action("F", 0, microbatch) not in rank_of:
            raise ValueError(f"{Action('F', 0, microbatch)} appears 0 times, expected once")
    placement = tuple(holders[stage] for stage in range(len(holders)))
    schedule = complete(Schedule(ranks, placement, microbatches), reduce)
    validate(schedule)
    return schedule


def read_table(path: Path, reduce: Reduce = "last") -> Schedule:
    """Return the schedule in a file. Raises HpcMpError, with the reason, if the file cannot be read or its table is not a valid
    schedule."""
    value, remedy = f"schedule {path}", "correct the table; `hpc-mp schedule --csv` prints valid ones"
    try:
        return from_csv(path.read_text(encoding="utf-8-sig"), reduce)
    except OSError as error:
        raise HpcMpError(value, f"cannot be read ({error.strerror})", "name a file that can be read") from None
    except UnicodeDecodeError:
        raise HpcMpError(value, "is not UTF-8 text", "save it as UTF-8") from None
    except (ValueError, csv.Error) as error:
        raise HpcMpError(value, f"is not a valid schedule: {error}", remedy) from None


def _action(text: str, rank: int) -> Action:
    match = CELL.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text.strip()[:40]!r} of rank {rank} is not stage, F, B, I or W, and microbatch, such as 0F0")
    stage, kind, microbatch = match.groups()
    return Action(kind, int(stage), int(microbatch))  # type: ignore[arg-type]


def check_table(name: str, schedule: Schedule, ranks: tuple[str, int | None], microbatches: tuple[str, int | None],
                stages_per_rank: tuple[str, int | None]) -> None:
    """Check that a table has the requested sizes, each (the key by which the user knows it, its value or None for any). Raises
    HpcMpError for the first that differs."""
    count = len(schedule.ranks)
    for (key, value), size, what in ((ranks, count, "pipeline ranks"), (microbatches, schedule.microbatches, "microbatches"),
                                     (stages_per_rank, schedule.stages / count, "stages per rank")):
        if value is not None and value != size:
            raise HpcMpError(f"{key} = {value}", f"the table {name} is for {size:g} {what}",
                             f"set {key} to {size:g}" if size == int(size) else "give every rank the same number of stages")
