"""``render``: from a job, its run directories and the facts of a cluster to the text of a job script."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jinja2

from hpc_mp.base.errors import HpcMpError
from hpc_mp.cluster.slurm.options import check_options, options_of
from hpc_mp.cluster.slurm.releases import differences
from hpc_mp.job import AnySpec, ProgramSpec
from hpc_mp.job.values import seconds_of
from hpc_mp.launch.facts import ClusterFacts
from hpc_mp.launch.render import checks, values
from hpc_mp.launch.render.site import ScriptTemplate, shipped
from hpc_mp.launch.render.values import Verbatim, directive, literal, shell
from hpc_mp.rundir import RunDirectory

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
    checks.check_values(spec, runs, python)
    checks.check_forms(spec, facts)
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
    checks.check_directives((line for line, _ in script.explanations), facts.version)
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
