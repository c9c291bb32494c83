"""``hpc-mp lint``: problems of files of any known kind: job scripts, job files, variables, slurm.conf, templates."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import click

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.files import text_of
from hpc_mp.base.findings import Finding
from hpc_mp.base.plugins import plugin
from hpc_mp.cli.output import finish
from hpc_mp.cluster.slurm.releases import Version, parse_version
from hpc_mp.environment.findings import lint_nccl_conf, lint_variables
from hpc_mp.job.load import load_sweep
from hpc_mp.lint import sbatch
from hpc_mp.lint.kinds import KINDS, RENDER_FIRST, Kind, kind_of
from hpc_mp.lint.slurm_conf.files import lint_slurm_conf, lint_topology

Linter = Callable[[Path, str, Version | None], Sequence[Finding]]


@click.command(help="Find problems of files; exit 1 for an error on any cluster. It detects the kind of a file: a job script "
                    "(read as if sbatch were called in this directory, and never run), a job file, variables (output of env, "
                    "shell exports, nccl.conf), slurm.conf, topology.conf, an Azure CycleCloud template or project.")
@click.argument("files", type=click.Path(path_type=Path), nargs=-1, required=True, metavar="FILE...")
@click.option("--as", "kind", type=click.Choice(list(KINDS)),
              help="Kind of the files, instead of the detected one.")
@click.option("--slurm-version", metavar="24.05", help="Release of Slurm for a job script; without it, every release counts.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(files: tuple[Path, ...], kind: Kind | None, slurm_version: str | None, as_json: bool) -> None:
    release = None if slurm_version is None else parse_version(slurm_version)
    findings: list[Finding] = []
    for file in files:
        try:
            findings += _lint(file, kind, release)
        except HpcMpError as error:  # the other files are checked anyway
            if len(files) == 1:
                raise
            findings.append(Finding("file", "error", error.value, f"{error.rule}.", error.remedy, str(file)))
    finish(findings, as_json)


def _lint(file: Path, kind: Kind | None, release: Version | None) -> Sequence[Finding]:
    """Return the findings of one file. Raises HpcMpError if the file cannot be read, or no rules exist for its kind."""
    text = text_of(file, "file, such as a job script")
    file_kind = kind or kind_of(file, text)
    if file_kind is None:
        raise HpcMpError(str(file), f"is not a known kind of file ({', '.join(KINDS.values())})",
                         "name its kind with --as, such as --as sbatch")
    return _LINTERS[file_kind](file, text, release)


def _job(file: Path, text: str, release: Version | None) -> Sequence[Finding]:
    """Return a finding for each invalid value; without one, for the first inconsistency between values."""
    try:
        load_sweep(file)
    except HpcMpError as error:
        return [Finding("HM801", "error", fault.value, f"{fault.rule}.", fault.remedy, str(file), _line_of(fault.value, text))
                for fault in error.several or (error,)]
    return []


def _line_of(value: str, text: str) -> int | None:
    """Return the line of the key of a ``train.steps = -3`` in a job file; None if it is written in another form."""
    *section, key = value.partition(" = ")[0].split(".")
    table = ""
    for number, line in enumerate(text.splitlines(), start=1):
        head = re.match(r"\s*\[([\w.]+)\]", line)
        table = head[1] if head else table
        if head and not section and table == key:
            return number
        if table == ".".join(section) and re.match(rf"\s*{re.escape(key)}\s*=", line):
            return number
    return None


def _alone(finding: Finding) -> Linter:
    return lambda file, text, release: [replace(finding, file=str(file))]


_JUDGED_TOGETHER = Finding("slurm-part", "info", "",
                           "is checked together with slurm.conf, which defines the nodes and their GPUs.",
                           "Lint the slurm.conf in the same directory.")
_LINTERS: dict[Kind, Linter] = {
    "sbatch": lambda file, text, release: sbatch.lint(text, file=str(file), directory=Path.cwd(), version=release),
    "job": _job,
    "variables": lambda file, text, release: lint_variables(text, str(file)),
    "nccl": lambda file, text, release: lint_nccl_conf(file.read_bytes(), str(file)),
    "slurm-conf": lambda file, text, release: lint_slurm_conf(text, file, release),
    "slurm-part": _alone(_JUDGED_TOGETHER),
    "topology": lambda file, text, release: lint_topology(text, file),
    "template": lambda file, text, release: plugin("linters", "template")(file),
    "project": lambda file, text, release: plugin("linters", "project")(file),
    "jinja": _alone(RENDER_FIRST),
}
