"""``hpc-mp schedule``: the action table of a pipeline schedule."""

import json
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hpc_mp.base.errors import HpcMpError
from hpc_mp.layout.schedule import Schedule, build, peak_in_flight, simulate
from hpc_mp.layout.schedule.actions import Action, Kind
from hpc_mp.layout.schedule.names import NAMES, is_table
from hpc_mp.layout.schedule.table import cell, check_table, read_table, slots, to_csv, to_dict

STYLES: dict[Kind, str] = {"F": "cyan", "B": "green", "I": "yellow", "W": "magenta"}
IDLE = "·"


@click.command(help="Show the action table of a pipeline schedule.")
@click.option("--schedule", "name", default="1f1b", show_default=True,
              help=f"One of {NAMES}, or the .csv file of a table, which is checked.")
@click.option("--pp", "pipeline", type=int, help="Pipeline ranks; a table has its own.")
@click.option("--microbatches", type=int, help="Microbatches per replica and optimizer step; a table has its own.")
@click.option("--virtual-stages", type=int,
              help="Stages per rank of interleaved_1f1b and breadth_first: a smaller bubble for more messages. [default: 1]")
@click.option("--json", "as_json", is_flag=True, help="Print every action as one JSON document.")
@click.option("--csv", "as_csv", is_flag=True, help="Print compute actions in the format of torch's pipelining.")
@click.option("--draw", "as_drawing", is_flag=True, help="Draw time slots; F, B, I and W each take one.")
def command(name: str, pipeline: int | None, microbatches: int | None, virtual_stages: int | None, as_json: bool, as_csv: bool,
            as_drawing: bool) -> None:
    if as_json + as_csv + as_drawing > 1:
        raise HpcMpError("--json, --csv, --draw", "exclude each other", "pass one of them")
    schedule = _schedule(name, pipeline, microbatches, virtual_stages)
    console = Console(highlight=False)
    if as_csv:
        click.echo(to_csv(schedule), nl=False)
    elif as_json:
        sizes = {"schedule": name, "pipeline": len(schedule.ranks), "microbatches": schedule.microbatches,
                 "virtual_stages": schedule.stages // len(schedule.ranks), "bubble": simulate(schedule).bubble,
                 "peak_in_flight": [peak_in_flight(actions) for actions in schedule.ranks]}
        click.echo(json.dumps({**sizes, **to_dict(schedule)}))
    elif as_drawing:
        console.print(draw(schedule, console.width), soft_wrap=True)
        _print_summary(console, schedule)
    else:
        console.print(_table(schedule))
        _print_summary(console, schedule)


def _schedule(name: str, pipeline: int | None, microbatches: int | None, virtual_stages: int | None) -> Schedule:
    options = {"--pp": pipeline, "--microbatches": microbatches, "--virtual-stages": virtual_stages}
    if is_table(name):
        schedule = read_table(Path(name))
        check_table(name, schedule, *options.items())
        return schedule
    if pipeline is None or microbatches is None:
        raise HpcMpError(" and ".join(key for key in ("--pp", "--microbatches") if options[key] is None),
                         "must be set to build a schedule", "pass a number, or a table with --schedule FILE.csv")
    return build(name, pipeline, microbatches, 1 if virtual_stages is None else virtual_stages)


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


def _table(schedule: Schedule) -> Table:
    table = Table("rank", "actions (stage, action, microbatch)", box=None, padding=(0, 1, 1, 0))
    for rank, actions in enumerate(schedule.ranks):
        table.add_row(str(rank), " ".join(map(cell, actions)))
    return table


def _print_summary(console: Console, schedule: Schedule) -> None:
    peaks = ", ".join(str(peak_in_flight(actions)) for actions in schedule.ranks)
    console.print(f"idle (bubble): {simulate(schedule).bubble:.1%} of all rank time, if a backward takes as long as two forwards")
    console.print(f"maximum of microbatches in flight, by rank (summed over stages): {peaks}")
