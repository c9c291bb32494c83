"""The request in the ``#SBATCH`` lines of a script: sizes, and the keys of a job file for everything else."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpc_mp.adopt.account import Fate, LineFate
from hpc_mp.adopt.blanks import BLANK
from hpc_mp.adopt.containers import StepContainer, container_of
from hpc_mp.cluster.slurm.option_syntax import Option
from hpc_mp.cluster.slurm.options import conflicting, contradicting, extra_options, refused_options
from hpc_mp.job.sweep import MOST_RUNS
from hpc_mp.job.values import TIME
from hpc_mp.lint.sbatch.rules.form import malformed, unexpanded
from hpc_mp.lint.sbatch.script import Script

SIGNALS = {"TERM": "TERM", "15": "TERM", "INT": "INT", "2": "INT", "HUP": "HUP", "1": "HUP", "USR1": "USR1", "10": "USR1",
           "USR2": "USR2", "12": "USR2"}
ELEMENT = "SLURM_ARRAY_TASK_ID"
PLAIN = {"partition": "slurm.partition", "account": "slurm.account", "qos": "slurm.qos", "constraint": "slurm.constraint",
         "reservation": "slurm.reservation", "switches": "slurm.switches"}
SIZES = frozenset({"nodes", "ntasks", "ntasks-per-node", "cpus-per-task", "gres", "gpus", "gpus-per-node", "gpus-per-task",
                   "ntasks-per-gpu", "tres-per-task"})
LOGS = frozenset({"output", "error", "open-mode", "job-name", "export", "input"})  # hpc-mp sets these itself


@dataclass(frozen=True, slots=True)
class GpuCount:
    """The GPUs per node that the script asks for.

    Attributes:
        count: the number per node; None if unknown.
        form: the value of ``slurm.gpu_request``.
        others: the whole value of ``--gres`` if it names more than GPUs.
    """

    count: int | None
    type: str | None
    form: str
    others: str = ""


@dataclass(frozen=True, slots=True)
class Request:
    """The request of the directives.

    Attributes:
        nodes: the number of nodes; None if the script leaves it to Slurm.
        tasks_per_node: the tasks per node of the allocation; 1 by default.
        ntasks: the number of tasks as given.
        cpus: the CPUs per task.
        keys: dotted keys of the job file with their values.
        directory: the working directory passed to sbatch.
        elements: the numbers of an array's elements.
        exported: the variables that ``--export`` sets.
        container: the container in which the whole script runs.
    """

    nodes: int | None
    tasks_per_node: int
    ntasks: int | None
    cpus: int | None
    gpus: GpuCount | None
    keys: Mapping[str, Any]
    fates: tuple[LineFate, ...]
    directory: str | None = None
    elements: tuple[str, ...] = ()
    exported: Mapping[str, str] = field(default_factory=dict)
    container: StepContainer = field(default_factory=StepContainer)

    @property
    def total_tasks(self) -> int:
        return self.ntasks or (self.nodes or 1) * self.tasks_per_node


@dataclass(slots=True)
class _RequestSoFar:
    """The state gathered while the directives are read one by one."""

    lines: Sequence[str]
    keys: dict[str, Any] = field(default_factory=dict)
    fates: list[LineFate] = field(default_factory=list)
    directory: str | None = None
    elements: tuple[str, ...] = ()
    exported: dict[str, str] = field(default_factory=dict)

    def note(self, option: Option, fate: Fate, where: str, why: str) -> None:
        self.fates.append(LineFate(option.line, option.line, self.lines[option.line - 1].strip(), fate, where, why))

    def keep(self, option: Option, key: str, value: Any, why: str = "", fate: Fate = Fate.KEPT) -> None:
        self.keys[key] = value
        self.note(option, fate, key, why)


def read_request(script: Script) -> Request:
    """Read the directives of a script; of a heterogeneous job, those of the first component."""
    reading = _RequestSoFar(script.lines)
    last = {option.name: option for option in script.options}
    pyxis: list[Option] = []
    for option in script.options:
        if last[option.name] is not option and option.name != "export":
            reading.note(option, Fate.DROPPED, "", f"--{option.name} is given again in line {last[option.name].line}, which "
                                                   "counts")
        elif "container" in option.name and option.name != "container":
            pyxis.append(option)
        elif (why := not_understood(option)) is not None and option.name not in LOGS:
            reading.note(option, Fate.LOST, "", why)
        elif option.name not in SIZES:
            _ROWS.get(option.name, _any)(reading, option)
    container = container_of(None, pyxis)
    for option, key, why in container.said:
        reading.note(option, Fate.KEPT if key else Fate.LOST, key, why)
    _contradictions(reading, last)
    for number, component in enumerate(script.header.components[1:], start=2):
        for option in component:
            reading.note(option, Fate.LOST, "", f"is of component {number} of a heterogeneous job: write slurm.components "
                                                "by hand")
    for word in script.header.strays:
        option = Option(word.text, None, word.line, False)
        reading.note(option, Fate.DROPPED, "", f"“{word.text}” is no option")
    for line in script.header.unmatched:
        reading.note(Option("", None, line, False), Fate.LOST, "", "a quote is not closed")
    nodes, ntasks, per_node = _nodes(script), script.number("ntasks"), script.number("ntasks-per-node")
    gpus = _gpus(script, nodes)
    if nodes is not None and ntasks:  # then --ntasks-per-node is an upper limit
        nodes = min(nodes, ntasks)
        per_node = -(-ntasks // nodes)
    elif per_node is None and (each := script.number("ntasks-per-gpu")) and gpus and gpus.count:
        per_node = each * gpus.count
    return Request(nodes, per_node or (ntasks if nodes is None and ntasks else 1), ntasks, script.number("cpus-per-task"), gpus,
                   reading.keys, tuple(reading.fates), reading.directory, reading.elements, reading.exported, container)


def _contradictions(reading: _RequestSoFar, last: Mapping[str, Option]) -> None:
    """Keep the last of several options that sbatch refuses together, or of which it silently drops one."""
    for groups, why in ((contradicting(), "sbatch drops one of them in silence"),
                        (conflicting(), "sbatch refuses both together")):
        for group in groups:
            given = sorted((last[name] for name in group if f"slurm.extra.{name}" in reading.keys and name in last),
                           key=lambda option: option.line)
            sizes = [last[name] for name in group if name in SIZES and name in last]  # the job's sizes come from these
            kept = (*given, *sizes)[-1:]
            for option in given if sizes else given[:-1]:
                del reading.keys[f"slurm.extra.{option.name}"]
                reading.fates = [each for each in reading.fates if each.first != option.line]
                reading.note(option, Fate.LOST, "", f"it contradicts --{kept[0].name}: {why}")


_PLACEHOLDER = re.compile(rf"\{{\{{|\{{%|@\[|{BLANK}|^\[.*\]$|^\{{\w+\}}$|^!\w")


def not_understood(option: Option) -> str | None:
    """Return the reason why sbatch cannot use the value of a directive: a shell or a template should have filled it in."""
    value = option.value or ""
    if (found := unexpanded(option)) is not None or (
            option.name == "mail-user" and (found := next(iter(re.findall(r"\$\{?\w+\}?", value)), None))):
        return f"“{found}” in a directive: sbatch expands nothing; write what it stands for into the job file"
    if _PLACEHOLDER.search(value) and option.name not in ("array", "comment"):
        return f"“{value}” is to be filled in: write it into the job file"
    if (words := malformed(option)) is not None:
        return f"sbatch does not understand “{value}” there, but {words}"
    return None


def _nodes(script: Script) -> int | None:
    """Return the number of nodes: as given, the minimum of a range, or derived from tasks and tasks per node."""
    if (given := re.match(r"(\d+)([kK]?)", script.value("nodes") or "")) is not None:
        return max(1, int(given[1]) * (1024 if given[2] else 1))
    ntasks, per_node = script.number("ntasks"), script.number("ntasks-per-node")
    return -(-ntasks // per_node) if ntasks and per_node else None


def _gpus(script: Script, nodes: int | None) -> GpuCount | None:
    """Return the GPUs from the most specific of Slurm's options that is given."""
    if (each := script.value("gpus-per-node")) is not None:
        return _typed(each, "gpus-per-node", 1)
    if (gres := script.value("gres")) is not None and (named := re.search(r"(?:^|,)(?:gres/)?gpu(?=[:=,]|$)[:=]?([^,]*)", gres)):
        found = _typed(named[1] or "1", "gres", 1)
        return GpuCount(found.count, found.type, "gres", gres if "," in gres else "")
    if (each := script.value("gpus-per-task")) is not None:
        tasks = script.number("ntasks-per-node") or -(-script.tasks // max(1, nodes or 1))
        return _typed(each, "auto", 1 / max(1, tasks))
    if (all_of_them := script.value("gpus")) is not None:
        return _typed(all_of_them, "auto", nodes or 1)
    return None


def _typed(value: str, form: str, shares: float) -> GpuCount:
    """Parse ``h100:8``, ``8``, ``1080ti``, ``gpu:8(S:0-1)``, and divide the count by ``shares``."""
    found = re.fullmatch(r"(?:(?:([\w.-]+)[:=])?(\d+)|([\w.-]+?)[:=]?)(?:\(.*\))?", value.strip())
    if found is None or (found[2] and not int(found[2])):
        return GpuCount(None, None, form)
    return GpuCount(max(1, round(int(found[2] or 1) / shares)), found[1] or found[3], form)


def _any(reading: _RequestSoFar, option: Option) -> None:
    name, shown = option.name, f"--{option.name}"
    if name in PLAIN and option.value:
        reading.keep(option, PLAIN[name], option.value)
    elif name in extra_options():
        reading.keep(option, f"slurm.extra.{name}", True if option.value is None else option.value)
    elif name in refused_options():
        rule, remedy = refused_options()[name]
        reading.note(option, Fate.DROPPED, "", f"{shown} {rule}: {remedy}")
    elif not option.is_known:
        reading.note(option, Fate.LOST, "", f"sbatch has no option {shown}; one of a site's plug-in goes into slurm.setup "
                                            "as its variable")
    else:
        reading.note(option, Fate.DROPPED, "", f"{shown} says how sbatch behaves, not what the job is")


def _time(reading: _RequestSoFar, option: Option) -> None:
    value = option.value or ""
    if TIME.fullmatch(value):
        reading.keep(option, "job.time_limit", value)
    elif value.lower() in ("infinite", "unlimited"):
        reading.keep(option, "job.time_limit", "0", "no limit is written 0")
    else:
        reading.note(option, Fate.LOST, "", f"“{value}” is no time that Slurm takes: set job.time_limit")


def job_name(text: str) -> str:
    """Return the nearest valid name of a run's directory."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).lstrip("._-")[:128] or "job"


def _name(reading: _RequestSoFar, option: Option) -> None:
    value = option.value or ""
    plain = job_name(value)
    reading.keep(option, "job.name", plain, *(() if plain == value else (
        "a run's directory has its name: letters, digits, dots, dashes", Fate.REPLACED)))


def _log(reading: _RequestSoFar, option: Option) -> None:
    reading.note(option, Fate.REPLACED, "RUN/log", "logs lie in the run directory, one per node and one per rank: hpc-mp logs")


def _requeue(reading: _RequestSoFar, option: Option) -> None:
    if option.name == "no-requeue":
        reading.keep(option, "slurm.extra.no-requeue", True)
        reading.keys["slurm.retries"] = 0
    else:
        reading.note(option, Fate.REPLACED, "slurm.retries", "the job is always queued again after a fault of a machine")


def _signal(reading: _RequestSoFar, option: Option) -> None:
    found = re.fullmatch(r"(?:[RB]+:)?(?:SIG)?(\w+)(?:@(\d+))?", option.value or "", re.IGNORECASE)
    name = SIGNALS.get(found[1].upper()) if found else None
    if found is None or name is None:
        reading.note(option, Fate.LOST, "", f"“{option.value}” is none that program.signal takes "
                                            f"({', '.join(dict.fromkeys(SIGNALS.values()))})")
        return
    reading.keys["program.signal"] = name
    reading.keys["slurm.grace"] = max(1, int(found[2] or 60))
    reading.note(option, Fate.REPLACED, "program.signal, slurm.grace", "every rank gets it, and not the shell of the script: "
                 "say program.resumes = true if the program saves then")


def _array(reading: _RequestSoFar, option: Option) -> None:
    spec, _, most = (option.value or "").partition("%")
    numbers: list[str] = []
    for part in spec.split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part.strip())
        if found is None or int(found[2] or 0) > 10**7:
            reading.note(option, Fate.LOST, "", f"“{spec}” names no elements: write [sweep]")
            return
        first = int(found[1])
        numbers += map(str, range(first, int(found[2] or first) + 1, max(1, int(found[3] or 1)))[:MOST_RUNS + 1])
    if len(numbers) > MOST_RUNS or not numbers:
        reading.note(option, Fate.LOST, "", f"a sweep has at most {MOST_RUNS} runs: write [sweep] in parts")
        return
    reading.elements = tuple(dict.fromkeys(numbers))
    reading.keys["sweep.grid"] = {f"program.environment.{ELEMENT}": list(reading.elements)}
    if most.isdecimal() and int(most):
        reading.keys["sweep.simultaneous"] = int(most)
    reading.note(option, Fate.REPLACED, "sweep.grid", f"each element is a run of a sweep with its own {ELEMENT}")


def _export(reading: _RequestSoFar, option: Option) -> None:
    named = dict(part.split("=", 1) for part in (option.value or "").split(",") if "=" in part)
    if not all(re.fullmatch(r"[A-Za-z_]\w*", name) for name in named):
        reading.note(option, Fate.LOST, "", f"“{option.value}” names no variables: set environment.set")
        return
    reading.exported.update(named)
    reading.note(option, Fate.REPLACED, "environment.set" if named else "", "what the submitting shell has of Slurm, NCCL, "
        "torch and "
                 "Python is always cleaned, all else is there" + (", and these variables are set" if named else ""))


def _chdir(reading: _RequestSoFar, option: Option) -> None:
    reading.directory = option.value
    reading.note(option, Fate.KEPT, "program.directory", "")


def _container_hook(reading: _RequestSoFar, option: Option) -> None:
    reading.note(option, Fate.LOST, "", "an OCI bundle of sbatch --container has no counterpart: set slurm.container")


def _exclusive(reading: _RequestSoFar, option: Option) -> None:
    if option.value in (None, "exclusive"):
        reading.keys["slurm.extra.exclusive"] = None  # hpc-mp asks for it anyway
        reading.note(option, Fate.KEPT, "", "whole nodes are what hpc-mp asks for by itself")
    else:
        reading.keep(option, "slurm.extra.exclusive", option.value)


def _mem(reading: _RequestSoFar, option: Option) -> None:
    if option.value in ("0", None):
        reading.keys["slurm.extra.mem"] = None
        reading.note(option, Fate.KEPT, "", "all memory of a node is what hpc-mp asks for by itself")
    else:
        reading.keep(option, "slurm.extra.mem", option.value)


_ROWS: Mapping[str, Callable[[_RequestSoFar, Option], None]] = {
    "time": _time, "job-name": _name, "output": _log, "error": _log, "open-mode": _log, "requeue": _requeue,
    "no-requeue": _requeue, "signal": _signal, "array": _array, "export": _export, "chdir": _chdir, "workdir": _chdir,
    "container": _container_hook,
    "exclusive": _exclusive, "mem": _mem}
