"""``hpc-mp verify``: a job's model on its layout, shrunk, against Hugging Face's own model."""

import json
from dataclasses import asdict
from pathlib import Path

import click

from hpc_mp.base.extras import need_train
from hpc_mp.job import load_job
from hpc_mp.job.layout import check_job, read_shape
from hpc_mp.launch.verification import verified


@click.command(help="Compare a job's model on its layout with Hugging Face's own model in one process: loss, outputs of modules, "
                    "gradients, and parameters behind two steps, in fp64 on CPUs. Both are shrunk, with every kind of layer, and "
                    "two ranks for every axis. It takes seconds, and is done by itself before a job's first start. A result is "
                    "kept. A difference is refused, with the first module that differs.")
@click.argument("job", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key of the job file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(job: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    need_train("hpc-mp verify")
    spec = load_job(job, overrides)
    check_job(spec, read_shape(spec))
    record = verified(spec)
    click.echo(json.dumps(asdict(record)) if as_json else f"verified  {record.words()}")
