"""Checks before a script is written: values that no script can contain, and keys that contradict each other."""

import itertools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from hpc_mp.base.errors import HpcMpError
from hpc_mp.cluster.slurm.options import check_together
from hpc_mp.cluster.slurm.releases import Version
from hpc_mp.job import AnySpec, Environment, Slurm, is_image
from hpc_mp.job.values import toml_value
from hpc_mp.launch.facts import ClusterFacts

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
