"""A schedule as a coloured drawing. One column per time slot, every F, B, I and W one slot long."""

from rich.text import Text

from hpc_mp.layout.schedule.actions import Action, Kind, Schedule
from hpc_mp.layout.schedule.table import cell, slots

STYLES: dict[Kind, str] = {"F": "cyan", "B": "green", "I": "yellow", "W": "magenta"}
IDLE = "·"


def draw(schedule: Schedule, width: int = 80) -> Text:
    """Draw one line per rank, ``F3`` = forward of microbatch 3 (``4F3`` on stage 4 if ranks hold several stages). Time runs to
    the right and continues in another block of lines if it exceeds ``width`` columns."""
    rows = slots(schedule)
    several = schedule.stages > len(schedule.ranks)

    def label(action: Action | None) -> tuple[str, str]:
        if action is None:
            return IDLE, "dim"
        return cell(action) if several else f"{action.kind}{action.microbatch}", STYLES[action.kind]

    labels = [list(map(label, row)) for row in rows]
    names = [f"rank {rank} " for rank in range(len(rows))]
    margin, column = len(names[-1]), 1 + max(len(text) for row in labels for text, _ in row)
    per_block = max(1, (width - margin) // column)
    blocks = ([Text.assemble(name.ljust(margin), *((text.rjust(column), style) for text, style in row[begin:begin + per_block]))
               for name, row in zip(names, labels, strict=True)] for begin in range(0, len(rows[0]), per_block))
    return Text("\n\n").join(map(Text("\n").join, blocks))
