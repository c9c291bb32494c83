"""``render``: from a job, its run directories and the facts of a cluster to the text of a job script, after checks of values that
no script can contain, and of keys that contradict each other.

A site or a project may replace the template of the script, and default values for job files. Both are in a folder ``hpc-mp``:
beside the job file, else in the user's configuration (``~/.config/hpc-mp``), else in ``/etc``.
"""

import itertools
import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jinja2

from hpc_mp.base.assets import FOLDER, asset, config_folders
from hpc_mp.base.errors import HpcMpError
from hpc_mp.cluster.slurm.options import check_options, check_together, options_of
from hpc_mp.cluster.slurm.releases import Version, differences
from hpc_mp.job import AnySpec, Environment, ProgramSpec, Slurm, is_image
from hpc_mp.job.values import seconds_of, toml_value
from hpc_mp.launch.facts import ClusterFacts
from hpc_mp.launch.render import values
from hpc_mp.launch.render.values import Verbatim, directive, literal, shell
from hpc_mp.rundir import RunDirectory

TEMPLATE, DEFAULTS = "job.sbatch.j2", "site.toml"
SECTIONS = ("slurm", "environment")  # of the job file: those that a site may set


@dataclass(frozen=True, slots=True)
class ScriptTemplate:
    path: Path
    text: str


def shipped() -> ScriptTemplate:
    """Return the shipped template, ``slurm/job.sbatch.j2``."""
    return _read(asset(f"slurm/{TEMPLATE}"))


def find_template(project: Path, environ: Mapping[str, str] = os.environ) -> ScriptTemplate:
    """Return the template for job files in the directory ``project``. Raises HpcMpError if it cannot be read."""
    template = _find(TEMPLATE, project, environ)
    return _read(template) if template else shipped()


def site_defaults(project: Path, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the parsed tables of ``site.toml``, the defaults for job files; empty without the file. Raises HpcMpError if it
    cannot be read, or sets keys that a site may not set."""
    path = _find(DEFAULTS, project, environ)
    if path is None:
        return {}
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise HpcMpError(f"site file {path}", f"cannot be read ({error})", "mend or remove it") from None
    for name, table in tree.items():
        if name not in SECTIONS or not isinstance(table, dict):
            raise HpcMpError(f"{name} in {path}", "is not a site's to decide",
                             f"write keys of {' and '.join(f'[{section}]' for section in SECTIONS)} only")
    return tree


def _find(name: str, project: Path, environ: Mapping[str, str]) -> Path | None:
    paths = (folder / name for folder in (project / FOLDER, *config_folders(environ)))
    return next((path for path in paths if path.is_file()), None)


def _read(path: Path) -> ScriptTemplate:
    try:
        return ScriptTemplate(path, path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise HpcMpError(f"template {path}", f"cannot be read ({error})", "mend or remove it") from None


_NO_TEXT = re.compile("[\0\ud800-\udfff]")
_NO_LINE = re.compile("[\0-\x1f\x7f\ud800-\udfff]")
_SWITCHES = re.compile(r"[1-9]\d*(@[\d:-]+)?")
# Names that bash reserves or splits words by, and ours.
_RESERVED = re.compile(r"BASHOPTS|BASH_VERSINFO|SHELLOPTS|E?UID|PPID|IFS|HPC_MP_(?!DEBUG$)\w*")


def check_values(spec: AnySpec, runs: Sequence[Path], python: str) -> None:
    """Refuse unquotable values: those that end a line or a string early, for bash, sbatch or Slurm's patterns."""
    for name, path in (*(("job.directory", str(run)) for run in runs), ("the interpreter", python)):
        if _NO_LINE.search(path) or "\\" in path or not path.startswith("/"):
            raise HpcMpError(f"{name} = {path!r}", "holds a control character, a backslash or no UTF-8, or is not absolute",
                             "choose another directory")
    extras = [("slurm.extra", spec.slurm.extra),
              *((f"slurm.components[{number}].extra", component.extra) for number, component in enumerate(spec.slurm.components))]
    lines = [(f"{where}.{name}", str(value)) for where, extra in extras for name, value in extra.items()]
    lines += [(f"slurm.{name}", value) for name, value in spec.slurm if isinstance(value, str)]
    for key, value in lines:
        if _NO_LINE.search(value):
            raise HpcMpError(f"{key} = {value!r}", "holds a control character", "write it in one line")
    texts = [(f"environment.set.{name}", value) for name, value in spec.environment.set.items()]
    for key, value in (*texts, *(("slurm.setup", line) for line in spec.slurm.setup)):
        if _NO_TEXT.search(value):
            raise HpcMpError(f"{key} = {value!r}", "holds a character that no script can carry", "leave it out")
    for name in spec.environment.set:
        if _RESERVED.fullmatch(name):
            raise HpcMpError(f"environment.set.{name}", "belongs to bash or to hpc-mp", "choose another name")


def check_forms(spec: AnySpec, facts: ClusterFacts) -> None:
    """Refuse keys of [slurm] and [environment] that contradict each other, or have no effect on this cluster."""
    slurm, local = spec.slurm, spec.environment.local
    if spec.sweep.given and slurm.components:
        raise HpcMpError("[sweep] and slurm.components", "exclude each other: Slurm has no arrays of heterogeneous jobs",
                         "leave one of them out")
    nodes = sum(component.nodes for component in slurm.components)
    if slurm.components and nodes != spec.job.nodes:
        raise HpcMpError(f"slurm.components with {nodes} nodes", f"must have job.nodes = {spec.job.nodes} in all",
                         "change the nodes of a component, or job.nodes")
    if slurm.switches is not None and not _SWITCHES.fullmatch(slurm.switches):
        raise HpcMpError(f"slurm.switches = {slurm.switches!r}", "does not read COUNT or COUNT@TIME",
                         'write for example "1@00:30:00"')
    if slurm.switches is not None and facts.topology not in (None, "topology/tree"):
        raise HpcMpError(f"slurm.switches = {slurm.switches!r}", f"has no effect here: Slurm's topology is {facts.topology}",
                         "leave it out; in blocks of nodes slurm.extra.segment keeps ranks together")
    for key, value, why in (
        ("environment.local", local, "names a directory of every node"),
        ("slurm.venv", slurm.venv, "names a directory of every node"),
        ("slurm.conda", slurm.conda if "/" in (slurm.conda or "") else None, "names a directory of every node"),
        ("slurm.python", slurm.python if "/" in (slurm.python or "") else None, "runs in the run directory"),
        ("slurm.container", slurm.container if is_image(slurm.container) else None, "is read from the run directory"),
    ):
        if value is not None and not value.startswith("/"):
            raise HpcMpError(f"{key} = {value!r}", f"must be absolute: it {why}", "write the whole path")
    for key, words in (("slurm.python", [slurm.python]), ("slurm.container", [slurm.container]),
                       ("slurm.conda", [slurm.conda]), ("slurm.modules", slurm.modules)):
        for word in words:
            if word is not None and word.startswith("-"):
                raise HpcMpError(f"{key} = {word!r}", "would be read as an option", "write the name without leading dashes")
    if slurm.container:
        for key, setting in (("slurm.venv", slurm.venv), ("slurm.conda", slurm.conda),
                             ("environment.stage", spec.environment.stage)):
            if setting:
                raise HpcMpError(f"{key} with slurm.container", "has no effect: ranks run the container's Python",
                                 "leave one of them out; slurm.python names an interpreter inside the container")
    elif slurm.container_mounts:
        raise HpcMpError("slurm.container_mounts without slurm.container", "has no effect", "name the container")


def check_directives(lines: Iterable[str], version: Version | None) -> None:
    """Refuse an option given twice, since sbatch would use the last one, and options that sbatch refuses together. ``lines``:
    lines of the script, from the template and ``slurm.extra``."""
    options: dict[str, str] = {}
    for line in itertools.takewhile(lambda line: line.startswith("#"), lines):
        if line == "#SBATCH hetjob":
            options = {}
        match = re.match(r"#SBATCH --([a-z-]+)=?(.*)", line)
        if match and match[1] in options:
            raise HpcMpError(f"slurm.extra.{match[1]}", "is already set by the script", "leave it out")
        if match:
            options[match[1]] = match[2]
        check_together(options, version)


# Keys that the script contains: they must be the same for all runs of a sweep.
SHARED = ("job.name", "job.nodes", "job.ranks_per_node", "job.time_limit", "job.device", "job.directory",
          "model.stage", "data.stage", "program.start", "program.stage", *(f"slurm.{key}" for key in Slurm.model_fields),
          *(f"environment.{key}" for key in Environment.model_fields))


def check_sweep(runs: Sequence[AnySpec]) -> None:
    """Refuse runs that cannot share one script. ``runs``: the job of each run of a sweep, with its own values. Raises HpcMpError
    if a run changes a key that the script contains."""
    first = runs[0]
    for number, run in enumerate(runs):
        for section, name in (key.split(".") for key in SHARED):
            if not hasattr(run, section):  # of a training, or of a program
                continue
            key, value = f"{section}.{name}", getattr(getattr(run, section), name)
            if value != getattr(getattr(first, section), name):
                raise HpcMpError(f"{key} = {toml_value(value)} in run {number + 1} of the sweep",
                                 "is held by the job script, which all runs of a sweep share",
                                 "give it the same value in every run, or launch a job of its own")


ENTRIES = ("hpc_mp.program", RunDirectory.program_script.name)  # entry of a program's ranks; in a container the second
_MARK = "\0"  # separates a line from its reason during rendering: no script can contain it
_CONTROL = re.compile(r"\s*\{[%#].*[%#]\}")  # a template line that leaves no line in the script
_REASON = re.compile(r"\s*\{# ((?:(?!#\}).)*) #\}$")


@dataclass(frozen=True, slots=True)
class JobScript:
    """A rendered script, the reasons of its lines, and the path of its template. ``explanations``: (line, reason) in order,
    without empty lines. ``runs``: the run directories that it names."""

    text: str
    explanations: tuple[tuple[str, str], ...]
    template: str
    runs: tuple[Path, ...] = ()


def render(spec: AnySpec, runs: Path | Sequence[Path], facts: ClusterFacts | None = None, *, python: str,
           template: ScriptTemplate | None = None, dependency: str | None = None) -> JobScript:
    """Return the script, for ``sbatch`` or, unchanged, for ``bash`` as a step inside an allocation. Pure.

    Args:
        runs: the run directory, absolute; for a sweep one per run, in order. They must exist before the script is submitted.
        facts: facts of the cluster; without them, or without its version, the text is valid for every release.
        python: absolute path of the launching interpreter: it runs the host program outside of containers, and the ranks unless
            the job names another.
        dependency: value of ``--dependency``.
        template: template in place of the shipped ``slurm/job.sbatch.j2``.

    Raises:
        HpcMpError: a value that no script can contain, contradictory keys, an option in ``slurm.extra`` that sbatch lacks or
            that the script sets itself, or a template that cannot be filled in.
    """
    facts = facts or ClusterFacts()
    runs = [runs] if isinstance(runs, Path) else list(runs)
    check_values(spec, runs, python)
    check_forms(spec, facts)
    check_options(spec, facts.version)
    seconds = seconds_of(spec.job.time_limit)
    parts = values.parts(spec, facts)
    script = fill(template or shipped(), {
        "spec": spec,
        "program": isinstance(spec, ProgramSpec),
        "tasks": spec.srun_tasks_per_node if isinstance(spec, ProgramSpec) else spec.job.ranks_per_node,
        "by_mpirun": isinstance(spec, ProgramSpec) and spec.by_mpirun,
        "by_script": isinstance(spec, ProgramSpec) and spec.by_script,
        "runs": list(map(str, runs)),
        "log": values.slurm_log(runs[0], array=spec.sweep.given),
        "clean": RunDirectory.clean_environment.name,
        "python": python,
        "dependency": dependency,
        "rank_python": values.rank_python(spec, python),
        "parts": parts,
        # On shared nodes a program's steps get the memory per CPU or node that the site sets, as under sbatch.
        "site_memory": isinstance(spec, ProgramSpec) and not any(part.all_memory or part.exclusive for part in parts),
        "cpus": values.cpus_per_task(spec, facts),
        "threads": values.threads(spec, facts),
        "grace": spec.grace,
        "warned": seconds is None or seconds - spec.grace >= values.EARLY_S + values.START_S,
        "here": differences(facts.version),
        "step_options": {name: value for name, value in options_of(spec, "step").items() if value is not False},
        "runtime": values.runtime(spec, facts),
        "mounts": values.mounts(spec),
        "container_env": facts.srun_options is None or "container-env" in facts.srun_options,
    })
    if isinstance(spec, ProgramSpec) and ENTRIES[spec.slurm.container is not None] not in script.text:
        raise HpcMpError(f"template {script.template}", "starts ranks of hpc-mp's own engine alone, and knows no [program]",
                         "take over the lines under `if program` of the template that hpc-mp ships")
    check_directives((line for line, _ in script.explanations), facts.version)
    return replace(script, runs=tuple(runs))


def fill(template: ScriptTemplate, values: Mapping[str, object]) -> JobScript:
    """Fill a template in. Raises HpcMpError if it is not valid Jinja, or names an unknown value."""
    try:
        filled = _jinja().from_string(_marked(template.text)).render(values)
    except jinja2.TemplateError as error:
        raise HpcMpError(f"template {template.path}", f"cannot be filled in ({error})", "mend it") from None
    lines = re.findall(rf"(.*?){_MARK}(.*?)\n", filled, re.DOTALL)
    return JobScript("".join(f"{line}\n" for line, _ in lines),
                  tuple((line.strip(), why) for line, why in lines if line.strip()), str(template.path))


def _jinja() -> jinja2.Environment:
    jinja = jinja2.Environment(finalize=shell, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
                               keep_trailing_newline=True, autoescape=False)
    jinja.filters |= {"directive": directive, "literal": literal, "verbatim": Verbatim}
    return jinja


def _marked(template: str) -> str:
    """Return the template with a mark at the end of every line that reaches the script, followed by the line's reason."""
    return "".join(
        f"{line}\n" if _CONTROL.fullmatch(line) else f"{_REASON.sub('', line)}{_MARK}{''.join(_REASON.findall(line))}\n"
        for line in template.splitlines()
    )
