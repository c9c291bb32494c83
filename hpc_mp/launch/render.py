"""A job file becomes a job script: the template ``slurm/job.sbatch.j2``, filled in and explained line by line."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jinja2

from hpc_mp.assets import asset
from hpc_mp.errors import HpcMpError
from hpc_mp.job import JobSpec
from hpc_mp.launch.quoting import Verbatim, directive, literal, shell
from hpc_mp.launch.sbatch_options import check_options

TEMPLATE = "slurm/job.sbatch.j2"
GPU_REQUESTS = {"auto": "gpus-per-node={}", "gpus-per-node": "gpus-per-node={}", "gres": "gres=gpu:{}"}

_MARK = "\0"  # while filling in, stands between a line and its reason: no script can hold it
_CONTROL = re.compile(r"\s*\{[%#].*[%#]\}")  # a template line that leaves no line in the script
_REASON = re.compile(r"\s*\{# ((?:(?!#\}).)*) #\}$")
_NO_TEXT = re.compile("[\0\ud800-\udfff]")
_NO_LINE = re.compile("[\0-\x1f\x7f\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Script:
    """A rendered script, and why its lines are there: (line, why) in order, without empty lines."""

    text: str
    explanations: tuple[tuple[str, str], ...]


def render(spec: JobSpec, run: Path, *, python: str, slurm_version: tuple[int, int] | None = None,
           template: str | None = None) -> Script:
    """The script that ``sbatch`` takes, and that ``bash`` runs just so as a step inside an allocation.

    Args:
        run: the run directory, absolute; its ``log`` folder must be there before the script is submitted.
        python: absolute path of the interpreter that runs the ranks.
        slurm_version: (23, 11) for Slurm 23.11; None when it is not known, then options are not checked against it.
        template: text of a template to use in place of ``slurm/job.sbatch.j2``.

    Raises:
        HpcMpError: a value that no script can carry, an option in ``slurm.extra`` that sbatch lacks or that the script
            settles itself, a template that is not Jinja.
    """
    _check_values(spec, run, python)
    check_options(spec, slurm_version)
    source = asset(TEMPLATE).read_text(encoding="utf-8") if template is None else template
    values = {"spec": spec, "run": str(run), "python": python, "gpu_request": gpu_request(spec)}
    try:
        filled = _jinja().from_string(_marked(source)).render(values)
    except jinja2.TemplateError as error:
        raise HpcMpError(TEMPLATE, f"cannot be filled in ({error})", "mend the template") from None
    lines = re.findall(rf"(.*?){_MARK}(.*?)\n", filled, re.DOTALL)
    _check_directives(line for line, _ in lines)
    return Script("".join(f"{line}\n" for line, _ in lines),
                  tuple((line.strip(), why) for line, why in lines if line.strip()))


def gpu_request(spec: JobSpec) -> str | None:
    """The option of sbatch, without its dashes, that asks for one GPU per rank; None when the job asks for none."""
    if spec.job.device == "cpu" or spec.slurm.gpu_request == "none":
        return None
    kind = f"{spec.slurm.gpu_type}:" if spec.slurm.gpu_type else ""
    return GPU_REQUESTS[spec.slurm.gpu_request].format(f"{kind}{spec.job.ranks_per_node}")


def _jinja() -> jinja2.Environment:
    jinja = jinja2.Environment(finalize=shell, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
                               keep_trailing_newline=True, autoescape=False)
    jinja.filters |= {"directive": directive, "literal": literal, "verbatim": Verbatim}
    return jinja


def _marked(template: str) -> str:
    """The template with a mark at the end of every line that reaches the script, and the line's reason behind it."""
    return "".join(
        f"{line}\n" if _CONTROL.fullmatch(line) else _REASON.sub("", line) + _MARK + _reason(line) + "\n"
        for line in template.splitlines()
    )


def _reason(line: str) -> str:
    found = _REASON.search(line)
    return found[1] if found else ""


def _check_values(spec: JobSpec, run: Path, python: str) -> None:
    """Refuse what cannot be quoted: what would end a line or a string early, for bash, sbatch or Slurm's patterns."""
    for name, path in (("job.directory", str(run)), ("the interpreter", python)):
        if _NO_LINE.search(path) or "\\" in path:
            raise HpcMpError(f"{name} = {path!r}", "holds a control character, a backslash or no UTF-8",
                             "choose another directory")
    for key, value in spec.slurm.extra.items():
        if _NO_LINE.search(str(value)):
            raise HpcMpError(f"slurm.extra.{key} = {value!r}", "holds a control character", "write it in one line")
    texts = [(f"environment.set.{name}", value) for name, value in spec.environment.set.items()]
    for key, value in (*texts, *(("slurm.setup", line) for line in spec.slurm.setup)):
        if _NO_TEXT.search(value):
            raise HpcMpError(f"{key} = {value!r}", "holds a character that no script can carry", "leave it out")


def _check_directives(lines: Iterator[str]) -> None:
    """Refuse an option given twice, as sbatch would take the last: ``slurm.extra`` against what the template wrote."""
    head = itertools.takewhile(lambda line: line.startswith("#") or not line, lines)
    options = Counter(name for line in head for name in re.findall(r"^#SBATCH --([a-z-]+)", line))
    for name, count in options.items():
        if count > 1:
            raise HpcMpError(f"slurm.extra.{name}", "is set by the script already", "leave it out")
