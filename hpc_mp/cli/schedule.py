"""``hpc-mp schedule``: the action table of a pipeline schedule."""

from __future__ import annotations

import json

import click
from rich.console import Console
from rich.table import Table

from hpc_mp.base.errors import HpcMpError
from hpc_mp.layout.schedule.actions import Schedule
from hpc_mp.layout.schedule.draw import cell, draw, to_csv, to_dict
from hpc_mp.layout.schedule.generators import SCHEDULES, build
from hpc_mp.layout.schedule.simulate import simulate
from hpc_mp.layout.schedule.validate import peak_in_flight


@click.command(help="Show the action table of a pipeline schedule.")
@click.option("--schedule", "name", default="1f1b", show_default=True, help=f"One of {', '.join(SCHEDULES)}.")
@click.option("--pp", "pipeline", type=int, required=True, help="Pipeline ranks.")
@click.option("--microbatches", type=int, required=True, help="Microbatches per replica and optimizer step.")
@click.option("--virtual-stages", type=int, default=1, show_default=True,
              help="Stages per rank (interleaved_1f1b only): a smaller bubble for more messages.")
@click.option("--json", "as_json", is_flag=True, help="Print every action as one JSON document.")
@click.option("--csv", "as_csv", is_flag=True, help="Print compute actions as torch's pipelining reads them.")
@click.option("--draw", "as_drawing", is_flag=True, help="Draw time slots, every F and B one slot long.")
def command(
    name: str, pipeline: int, microbatches: int, virtual_stages: int, as_json: bool, as_csv: bool, as_drawing: bool
) -> None:
    if as_json + as_csv + as_drawing > 1:
        raise HpcMpError("--json, --csv, --draw", "only one of them can be printed", "give one")
    schedule = build(name, pipeline, microbatches, virtual_stages)
    console = Console(highlight=False)
    if as_csv:
        click.echo(to_csv(schedule), nl=False)
    elif as_json:
        given = {"schedule": name, "pipeline": pipeline, "microbatches": microbatches, "virtual_stages": virtual_stages}
        click.echo(json.dumps({**given, **_figures(schedule), **to_dict(schedule)}))
    elif as_drawing:
        console.print(draw(schedule, console.width), soft_wrap=True)
        _print_summary(console, schedule)
    else:
        console.print(_table(schedule))
        _print_summary(console, schedule)


def _figures(schedule: Schedule) -> dict[str, object]:
    return {"bubble": simulate(schedule).bubble, "peak_in_flight": [peak_in_flight(actions) for actions in schedule]}


def _table(schedule: Schedule) -> Table:
    table = Table("rank", "actions (stage, action, microbatch)", box=None, padding=(0, 1, 1, 0))
    for rank, actions in enumerate(schedule):
        table.add_row(str(rank), " ".join(map(cell, actions)))
    return table


def _print_summary(console: Console, schedule: Schedule) -> None:
    peaks = ", ".join(str(peak_in_flight(actions)) for actions in schedule)
    console.print(f"idle (bubble): {simulate(schedule).bubble:.1%} of all rank time, a backward taking two forwards")
    console.print(f"microbatches in flight at most, by rank (each stage's counted): {peaks}")
