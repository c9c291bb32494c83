"""``hpc-mp bench``: bandwidth of collectives between ranks, measured like nccl-tests."""

import json
import os
import sys
from contextlib import AbstractContextManager
from datetime import datetime
from typing import Any

import click
import tomli_w
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from hpc_mp.cluster.slurm.allocation import decide
from hpc_mp.doctor.bench.kernels import measured_rows
from hpc_mp.doctor.bench.plan import BenchLayout, BenchRequest, plan
from hpc_mp.doctor.bench.result import BenchRow, guess, judge, yardstick
from hpc_mp.doctor.bench.spec import ELEMENT, BenchSpec, parse_size
from hpc_mp.doctor.bench.start import follow
from hpc_mp.doctor.bench.table import document, foot, head, line
from hpc_mp.planner.collectives import COLLECTIVES

KERNELS = "kernels"


def _size(_context: click.Context, _option: click.Parameter, text: str | None) -> int | None:
    return None if text is None else parse_size(text)


@click.command(help="Measure the bandwidth of a collective, with the table, options and definitions of nccl-tests, and compare "
                    "it with the expected bandwidth of the fabric. Exit 1 for wrong data or low bandwidth. `kernels` in place "
                    "of a collective: what this machine reaches in a training's kernels, as rows of machines.toml.")
@click.argument("collective", type=click.Choice([*COLLECTIVES, KERNELS]))
@click.option("-b", "--minbytes", callback=_size, metavar="SIZE", help="First size [default: 1M for NCCL, else 1K].")
@click.option("-e", "--maxbytes", callback=_size, metavar="SIZE", help="Last size [default: 1G for NCCL, else 16M].")
@click.option("-f", "--stepfactor", type=int, help="Factor from one size to the next [default: 4].")
@click.option("-i", "--stepbytes", callback=_size, metavar="SIZE", help="Or the bytes from one size to the next.")
@click.option("-n", "--iters", type=int, default=20, show_default=True, help="Timed operations of each size.")
@click.option("-w", "--warmup-iters", type=int, default=5, show_default=True, help="Untimed operations before them.")
@click.option("-d", "--datatype", type=click.Choice(list(ELEMENT)), default="float", show_default=True)
@click.option("-c", "--check", type=click.IntRange(0, 1), default=1, show_default=True, help="0: do not compare the data.")
@click.option("--backend", type=click.Choice(["auto", "nccl", "gloo"]), default="auto", show_default=True,
              help="auto: NCCL if every rank has a GPU, else gloo.")
@click.option("--nodes", type=int, help="Number of nodes. Default: all of the allocation; 2 in a new job, else 1.")
@click.option("--ranks-per-node", type=int, help="Number of ranks per node. Default: the GPUs of a node.")
@click.option("--split", default="all", show_default=True, metavar="HOW",
              help="Groups that measure at the same time: all, node, rail, or a value of NCCL_TESTS_SPLIT, \"MOD 8\".")
@click.option("--axis", type=click.Choice(["tp", "pp", "dp", "mp", "tp_dp"]),
              help="Groups along an axis of a job's layout.")
@click.option("--tp", "tensor", type=int, default=1, show_default=True,
              help="Tensor degree of the layout; the data degree follows.")
@click.option("--pp", "pipeline", type=int, default=1, show_default=True, help="Pipeline degree of the layout.")
@click.option("--order", default="cluster", show_default=True, help="Order of the layout, as for `hpc-mp placement`.")
@click.option("--on", type=click.Choice(["auto", "slurm", "local"]), default="auto", show_default=True,
              help="As for `hpc-mp launch`: a step of the allocation, a job, or emulated nodes here.")
@click.option("--partition", help="Partition of the job.")
@click.option("--account", help="Account of the job.")
@click.option("--srun", multiple=True, metavar="NAME=VALUE", help="Any other option of srun, without its dashes.")
@click.option("--fabric", metavar="NAME", help="Fabric or machine of env/machines to compare with.")
@click.option("--node-rate", type=float, metavar="GB/S",
              help="Network bandwidth of a node in each direction, to compare with; needed for gloo.")
@click.option("--timeout", type=float, default=300.0, show_default=True, metavar="SECONDS",
              help="Maximum wait of ranks for each other.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document: that of nccl-tests, with more entries.")
def command(
    collective: str, minbytes: int | None, maxbytes: int | None, stepfactor: int | None, stepbytes: int | None, iters: int,
    warmup_iters: int, datatype: str, check: int, backend: str, nodes: int | None, ranks_per_node: int | None, split: str,
    axis: str | None, tensor: int, pipeline: int, order: str, on: str, partition: str | None, account: str | None,
    srun: tuple[str, ...], fabric: str | None, node_rate: float | None, timeout: float, as_json: bool,
) -> int:
    if collective == KERNELS:
        click.echo("measuring the kernels of a training, all devices at the same time: about half a minute", err=True)
        rows = measured_rows(ranks_per_node, node_rate)
        click.echo(json.dumps(rows) if as_json else tomli_w.dumps(rows), nl=as_json)
        return 0
    against = yardstick(fabric, node_rate)
    options = [f"{name}={value}" for name, value in (("partition", partition), ("account", account)) if value is not None]
    layout = BenchLayout(axis, tensor, pipeline, order) if axis else None
    request = BenchRequest(collective, backend, nodes, ranks_per_node, split, layout, (minbytes, maxbytes, stepfactor, stepbytes),
                        datatype, warmup_iters, iters, bool(check), timeout, (*options, *srun))
    chosen = plan(request, decide(on))
    began = _now()
    with BenchTable(chosen.spec, table=not as_json) as shown:
        measured = follow(chosen.spec, chosen.start(), shown)
    against = guess(against, chosen.spec, (rank["name"] for rank in measured.ranks))
    judged = judge(chosen.spec, measured.rows, against)
    if as_json:
        click.echo(json.dumps(document(chosen.spec, measured.ranks, measured.versions, measured.rows, judged, os.environ,
                                       sys.argv, (began, _now()))))
    else:
        for text in foot(chosen.spec, measured.rows, judged):
            click.echo(text)
    return int(any(row.wrong for row in measured.rows) or any(judgement.verdict == "slow" for judgement in judged))


def _now() -> str:
    return f"{datetime.now():%Y-%m-%d %H:%M:%S}"


class BenchTable(AbstractContextManager["BenchTable"]):
    """The growing table; if standard error is a terminal, also the size that is being measured."""

    def __init__(self, spec: BenchSpec, table: bool) -> None:
        self._spec, self._table = spec, table
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.completed}/{task.total} sizes"))
        self._bars = Progress(*columns, console=console, transient=True, disable=not console.is_terminal, auto_refresh=False,
                              redirect_stdout=False, redirect_stderr=False)
        self._task = self._bars.add_task("waiting for the ranks", total=len(spec.sizes))

    def met(self, ranks: list[dict[str, Any]], versions: dict[str, str]) -> None:
        self._print("\n".join(head(self._spec, ranks, versions)))

    def begins(self, size: int) -> None:
        self._bars.update(self._task, description=f"{size} B", refresh=True)

    def row(self, row: BenchRow) -> None:
        self._bars.advance(self._task)
        self._print(line(self._spec, row))

    def note(self, text: str) -> None:
        self._say(text, err=True)

    def _print(self, text: str) -> None:
        if self._table:
            self._say(text)

    def _say(self, text: str, err: bool = False) -> None:
        self._bars.stop()  # the bar occupies the place of the line
        click.echo(text, err=err)
        self._bars.start()

    def __enter__(self) -> "BenchTable":
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()
