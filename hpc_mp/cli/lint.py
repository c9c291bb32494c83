"""``hpc-mp lint``: what is wrong with a job script."""

from __future__ import annotations

import re
from pathlib import Path

import click

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.files import text_of
from hpc_mp.cli.output import finish
from hpc_mp.lint.sbatch import lint


@click.command(help="Find what is wrong with an sbatch script; exit 1 if something is wrong on any cluster. The script "
                    "is read as if sbatch were called in this directory, and never run.")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--slurm-version", metavar="24.05", help="What the script is for; without it, every release counts.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(file: Path, slurm_version: str | None, as_json: bool) -> None:
    findings = lint(text_of(file, "job script"), file=str(file), directory=Path.cwd(), version=_version(slurm_version))
    finish(findings, as_json)


def _version(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    found = re.fullmatch(r"(\d\d)\.(\d\d)(\.\d+)?", text)
    if not found:
        raise HpcMpError(f"--slurm-version {text}", "is no release of Slurm",
                         "write it as 24.05, as sinfo --version prints it")
    return int(found[1]), int(found[2])
