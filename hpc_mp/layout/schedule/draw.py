"""A schedule as text: coloured drawing, CSV, plain data. One column per time slot, every F and B one slot long."""

from __future__ import annotations

import csv
import io
from dataclasses import asdict
from typing import Any

from rich.text import Text

from hpc_mp.layout.schedule.actions import Action, Kind, Schedule
from hpc_mp.layout.schedule.simulate import simulate

STYLES: dict[Kind, str] = {"F": "cyan", "B": "green"}
IDLE = "·"


def slots(schedule: Schedule) -> list[list[Action | None]]:
    """Rank → time slot → what it computes then; None = idle. All rows are equally long."""
    timeline = simulate(schedule, forward=1, backward=1)
    rows: list[list[Action | None]] = [[None] * int(timeline.makespan) for _ in schedule]
    for row, computations in zip(rows, timeline.ranks, strict=True):
        for slot in computations:
            row[int(slot.start)] = slot.action
    return rows


def cell(action: Action) -> str:
    """Stage, action, microbatch, as torch's pipelining writes it: ``0F0``, ``1B0``, ``1SEND_B0``."""
    return f"{action.stage}{action.kind}{action.microbatch}"


def to_csv(schedule: Schedule) -> str:
    """One line per rank, compute actions only, an empty cell where the rank is idle."""
    text = io.StringIO()
    rows = [["" if action is None else cell(action) for action in row] for row in slots(schedule)]
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def to_dict(schedule: Schedule) -> dict[str, Any]:
    """Every action of every rank, communication and reductions included."""
    return {"ranks": [{"rank": rank, "actions": [asdict(a) for a in actions]} for rank, actions in enumerate(schedule)]}


def draw(schedule: Schedule, width: int = 80) -> Text:
    """One line per rank, ``F3`` = forward of microbatch 3 (``4F3`` on stage 4 where ranks hold several stages).

    Time runs to the right and goes on in a further block of lines where ``width`` columns do not suffice.
    """
    rows = slots(schedule)
    several = any(action.stage >= len(schedule) for actions in schedule for action in actions)

    def label(action: Action | None) -> tuple[str, str]:
        if action is None:
            return IDLE, "dim"
        return cell(action) if several else f"{action.kind}{action.microbatch}", STYLES[action.kind]

    labels = [list(map(label, row)) for row in rows]
    names = [f"rank {rank} " for rank in range(len(rows))]
    margin, column = len(names[-1]), 1 + max(len(text) for row in labels for text, _ in row)
    per_block = max(1, (width - margin) // column)
    blocks = [
        Text("\n").join(
            Text(name.ljust(margin)).append_text(
                Text.assemble(*((text.rjust(column), style) for text, style in row[begin : begin + per_block]))
            )
            for name, row in zip(names, labels, strict=True)
        )
        for begin in range(0, len(rows[0]), per_block)
    ]
    return Text("\n\n").join(blocks)
