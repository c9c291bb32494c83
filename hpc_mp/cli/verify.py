"""``hpc-mp verify``: a job's model on its layout, shrunk, against Hugging Face's own model."""

import json
from dataclasses import asdict
from pathlib import Path

import click

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.extras import need_train
from hpc_mp.job import load_job
from hpc_mp.job.layout import check_job, read_shape
from hpc_mp.launch.program_verification import verify_program
from hpc_mp.launch.verification import verified


@click.command(help="Compare a job's model on its layout with Hugging Face's own model in one process: loss, outputs of modules, "
                    "gradients, and parameters behind two steps, in fp64 on CPUs. Both are shrunk, with every kind of layer, and "
                    "two ranks for every axis. It takes seconds, and is done by itself before a job's first start. A result is "
                    "kept. A difference is refused, with the first module that differs. With --program: compare the losses of a "
                    "script with one and with two tensor ranks; exit code 1 if they differ.")
@click.argument("words", nargs=-1, required=True, type=click.UNPROCESSED, metavar="JOB | -- COMMAND [ARG]…")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key of the job file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--program", is_flag=True,
              help="COMMAND is a program that says its loss by hpc_mp.log, with {tensor} in place of its tensor degree.")
def command(words: tuple[str, ...], overrides: tuple[str, ...], as_json: bool, program: bool) -> int:
    if program:
        compared = verify_program(words, overrides)
        click.echo(json.dumps(asdict(compared)) if as_json else compared.words())
        return int(not compared.equal)
    if len(words) > 1:
        raise HpcMpError(f"hpc-mp verify {' '.join(words)}", "takes one job file", "write --program before a command")
    need_train("hpc-mp verify")
    spec = load_job(click.Path(path_type=Path, exists=True, dir_okay=False)(words[0]), overrides)
    check_job(spec, read_shape(spec))
    record = verified(spec)
    click.echo(json.dumps(asdict(record)) if as_json else f"verified  {record.words()}")
    return 0
