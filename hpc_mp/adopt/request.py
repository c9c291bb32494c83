"""The request in the ``#SBATCH`` lines of a script: sizes, and the keys of a job file for everything else."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_mp.adopt.account import Fate, LineFate
from hpc_mp.cluster.slurm.allocation import ARRAY_ELEMENT
from hpc_mp.cluster.slurm.option_syntax import Option, option_table
from hpc_mp.cluster.slurm.options import job_options
from hpc_mp.job.sweep import MOST_RUNS
from hpc_mp.job.values import TIME, job_name
from hpc_mp.lint.sbatch.rules.form import malformed, unexpanded
from hpc_mp.lint.sbatch.script import Script

SIGNALS = {"TERM": "TERM", "15": "TERM", "INT": "INT", "2": "INT", "HUP": "HUP", "1": "HUP", "USR1": "USR1", "10": "USR1",
           "USR2": "USR2", "12": "USR2"}
PLAIN = {"partition": "slurm.partition", "account": "slurm.account", "qos": "slurm.qos", "constraint": "slurm.constraint",
         "reservation": "slurm.reservation", "switches": "slurm.switches"}
SIZES = frozenset({"nodes", "ntasks", "ntasks-per-node", "cpus-per-task", "gres", "gpus", "gpus-per-node", "gpus-per-task",
                   "ntasks-per-gpu", "tres-per-task"})
LOGS = frozenset({"output", "error", "open-mode", "job-name"})  # hpc-mp sets these itself


@dataclass(frozen=True, slots=True)
class GpuCount:
    """The GPUs per node that the script requests. ``count``: the number per node; None if unknown. ``form``: the value of
    ``slurm.gpu_request``; ``auto`` if they are not counted per node. ``others``: the whole value of ``--gres`` if it names more
    than GPUs."""

    count: int | None
    type: str | None
    form: str
    others: str = ""


@dataclass(frozen=True, slots=True)
class Request:
    """The request of the directives."""

    options: frozenset[str]  # the names of all options
    nodes: int | None  # the number of nodes; None if the script leaves it to Slurm
    tasks_per_node: int  # the tasks per node of the allocation; 1 by default
    ntasks: int | None  # the number of tasks in the script
    cpus: int | None  # of a task
    gpus: GpuCount | None
    keys: Mapping[str, Any]  # dotted keys of the job file with their values, except for sizes
    fates: tuple[LineFate, ...]
    directory: str | None = None  # the working directory passed to sbatch
    elements: tuple[str, ...] = ()  # the numbers of an array's elements


@dataclass(slots=True)
class _RequestSoFar:
    """The state gathered while the directives are read one by one."""

    lines: Sequence[str]
    keys: dict[str, Any] = field(default_factory=dict)
    fates: list[LineFate] = field(default_factory=list)
    directory: str | None = None
    elements: tuple[str, ...] = ()

    def note(self, option: Option, fate: Fate, where: str, why: str) -> None:
        self.fates.append(LineFate(option.line, option.line, self.lines[option.line - 1].strip(), fate, where, why))

    def keep(self, option: Option, key: str, value: Any, why: str = "", fate: Fate = Fate.KEPT) -> None:
        self.keys[key] = value
        self.note(option, fate, key, why)


def read_request(script: Script) -> Request:
    """Read the directives of a script; for a heterogeneous job, those of the first component."""
    reading = _RequestSoFar(script.lines)
    last = {option.name: option for option in script.options}
    for option in script.options:
        if last[option.name] is not option:
            reading.note(option, Fate.DROPPED, "", f"--{option.name} is set again in line {last[option.name].line}: the last "
                                                   "one counts")
        elif (why := not_understood(option)) is not None and option.name not in LOGS:
            reading.note(option, Fate.LOST, "", why)
        elif option.name not in SIZES:
            _ROWS.get(option.name, _any)(reading, option)
    _contradictions(reading, last)
    for number, component in enumerate(script.header.components[1:], start=2):
        for option in component:
            reading.note(option, Fate.LOST, "", f"belongs to component {number} of a heterogeneous job: write "
                                                "slurm.components by hand")
    for word in script.header.strays:
        option = Option(word.text, None, word.line, False)
        reading.note(option, Fate.LOST, "", f"“{word.text}” is not an option: sbatch refuses the script")
    for line in script.header.unmatched:
        reading.note(Option("", None, line, False), Fate.LOST, "", "an unclosed quote")
    nodes, ntasks, per_node = _nodes(script), script.number("ntasks"), script.number("ntasks-per-node")
    if nodes is not None and ntasks:  # sbatch takes no more nodes than tasks
        nodes = min(nodes, ntasks)
        per_node = min(per_node or ntasks, -(-ntasks // nodes))  # beside --ntasks, sbatch takes --ntasks-per-node as a maximum
    return Request(frozenset(last), nodes, per_node or (ntasks if nodes is None and ntasks else 1), ntasks,
                   script.number("cpus-per-task"), _gpus(script, nodes), reading.keys, tuple(reading.fates), reading.directory,
                   reading.elements)


def size_fates(script: Script, literal: bool) -> list[LineFate]:
    """Return the fates of the lines about sizes. ``literal``: True if hpc-mp starts the ranks; else the options are unchanged."""
    keys = {"nodes": "job.nodes", "ntasks": "job.nodes, job.ranks_per_node", "ntasks-per-node": "job.ranks_per_node",
            "gres": "slurm.gpu_request", "gpus-per-node": "slurm.gpu_request"}
    fates = []
    for option in script.options:
        if option.name in SIZES and not_understood(option) is None and script.option(option.name) is option:
            extra = f"slurm.extra.{option.name}"
            where = keys.get(option.name, extra) if literal or option.name == "nodes" else extra
            least = option.name == "nodes" and "-" in (option.value or "")
            fates.append(LineFate(option.line, option.line, script.lines[option.line - 1].strip(),
                                  Fate.REPLACED if least else Fate.KEPT, where,
                                  "a job has a fixed number of nodes: the minimum of the range" if least else ""))
    return fates


def name_keys(script: Script, request: Request, file: Path) -> dict[str, str]:
    """Return the job's name, and the variable with sbatch's name for it if a job file cannot have that."""
    name, ours = script.value("job-name") or file.name, request.keys.get("job.name", job_name(file.name))
    return {"job.name": ours, **({"program.environment.SLURM_JOB_NAME": name} if name != ours else {})}


def script_keys(script: Script, request: Request, file: Path, arguments: Sequence[str], submitted: Path) -> dict[str, Any]:
    """Return the keys with which the script runs unchanged: its sizes, and the variables that its own sbatch would set. ``file``:
    the script, absolute. ``submitted``: the directory in which sbatch would be called."""
    keys: dict[str, Any] = {
        "job.nodes": request.nodes or 1, "job.ranks_per_node": request.tasks_per_node, "program.start": "script",
        "program.command": (str(file), *arguments), "program.silent_limit": 0, "program.stop_codes": (),
        "slurm.gpu_request": "none", "program.environment.SLURM_SUBMIT_DIR": str(submitted)}
    if mode := script.value("open-mode"):
        keys["program.environment.SLURM_OPEN_MODE"] = mode[0]  # for the output of the script's sruns
    if script.value("account") == "":
        keys["program.environment.SLURM_JOB_ACCOUNT"] = ""  # Slurm takes the user's default and leaves the variable empty
    for option in script.options:
        if option.name in SIZES - {"nodes"} and not_understood(option) is None and option.value:
            keys[f"slurm.extra.{option.name}"] = option.value
    numbers = sorted(map(int, request.elements))
    if numbers:
        step = re.search(r":0*(\d+)", script.value("array") or "")  # the first of several, as slurmctld reads them
        keys |= {f"program.environment.SLURM_ARRAY_TASK_{name}": str(value) for name, value in (
            ("COUNT", len(numbers)), ("MIN", numbers[0]), ("MAX", numbers[-1]), ("STEP", step[1] if step else 1))}
    return keys


def _contradictions(reading: _RequestSoFar, last: Mapping[str, Option]) -> None:
    """Keep the last of several options if sbatch refuses them together or silently drops one."""
    for rows, why in ((job_options()["dropped"], "sbatch silently drops one of them"),
                      (option_table()["conflicts"], "sbatch refuses them together")):
        for group in (row["options"] for row in rows):
            options = sorted((last[name] for name in group if f"slurm.extra.{name}" in reading.keys and name in last),
                             key=lambda option: option.line)
            sizes = [last[name] for name in group if name in SIZES and name in last]  # the job's sizes come from these
            winner = (*options, *sizes)[-1:]
            for option in options if sizes else options[:-1]:
                del reading.keys[f"slurm.extra.{option.name}"]
                reading.fates = [fate for fate in reading.fates if fate.first != option.line]
                reading.note(option, Fate.LOST, "", f"it contradicts --{winner[0].name}: {why}")


_PLACEHOLDER = re.compile(r"\{\{|\{%|@\[|<[^<>]+>|^\[.*\]$|^\{\w+\}$|^!\w")


def not_understood(option: Option) -> str | None:
    """Return the reason for which sbatch cannot use a directive's value: it needs a shell, a template, or another form."""
    value = option.value or ""
    if (variable := unexpanded(option)) is not None or (
            option.name == "mail-user" and (variable := next(iter(re.findall(r"\$\{?\w+\}?", value)), None))):
        return f"“{variable}” in a directive: sbatch expands no variables; write its value into the job file"
    if _PLACEHOLDER.search(value) and option.name not in ("array", "comment"):
        return f"“{value}” is a placeholder: write its value into the job file"
    if (expected := malformed(option)) is not None:
        return f"sbatch does not understand “{value}”; it accepts {expected}"
    return None


def _nodes(script: Script) -> int | None:
    """Return the number of nodes: that of --nodes, the minimum of its range, or derived from tasks and tasks per node."""
    if (match := re.match(r"(\d+)([kK]?)", script.value("nodes") or "")) is not None:
        return max(1, int(match[1]) * (1024 if match[2] else 1))
    ntasks, per_node = script.number("ntasks"), script.number("ntasks-per-node")
    return -(-ntasks // per_node) if ntasks and per_node else None


def _gpus(script: Script, nodes: int | None) -> GpuCount | None:
    """Return the GPUs from the most specific of Slurm's options in the script."""
    if (per_node := script.value("gpus-per-node")) is not None:
        return _typed(per_node, "gpus-per-node", 1)
    if (gres := script.value("gres")) is not None and (match := re.search(r"(?:^|,)(?:gres/)?gpu(?=[:=,]|$)[:=]?([^,]*)", gres)):
        count = _typed(match[1] or "1", "gres", 1)
        return GpuCount(count.count, count.type, "gres", gres if "," in gres else "")
    if (per_task := script.value("gpus-per-task")) is not None:
        tasks = script.number("ntasks-per-node") or -(-script.tasks // max(1, nodes or 1))
        return _typed(per_task, "auto", 1 / max(1, tasks))
    if (total := script.value("gpus")) is not None:
        return _typed(total, "auto", nodes or 1)
    return None


def _typed(value: str, form: str, shares: float) -> GpuCount:
    """Parse ``h100:8``, ``8``, ``1080ti``, ``gpu:8(S:0-1)``, and divide the count by ``shares``."""
    match = re.fullmatch(r"(?:(?:([\w.-]+)[:=])?(\d+)|([\w.-]+?)[:=]?)(?:\(.*\))?", value.strip())
    if match is None or (match[2] and not int(match[2])):
        return GpuCount(None, None, form)
    return GpuCount(max(1, round(int(match[2] or 1) / shares)), match[1] or match[3], form)


def _any(reading: _RequestSoFar, option: Option) -> None:
    name, shown, table = option.name, f"--{option.name}", job_options()
    if name in _NOTES:
        fate, where, why = _NOTES[name]
        reading.note(option, fate, where, why.format(name=name, value=option.value))
    elif name in PLAIN and option.value:
        reading.keep(option, PLAIN[name], option.value)
    elif name in table["options"] or name in table["of_scripts"]:
        reading.keep(option, f"slurm.extra.{name}", True if option.value is None else option.value)
    elif name in table["refused"]:
        rule, remedy = table["refused"][name]
        reading.note(option, Fate.DROPPED, "", f"{shown} {rule}: {remedy}")
    elif not option.is_known:
        reading.note(option, Fate.LOST, "", f"sbatch has no option {shown}; pass an option of a site's plug-in to srun")
    else:
        reading.note(option, Fate.DROPPED, "", f"{shown} affects sbatch itself, not the job")


def _time(reading: _RequestSoFar, option: Option) -> None:
    value = option.value or ""
    if TIME.fullmatch(value):
        reading.keep(option, "job.time_limit", value)
    elif value.lower() in ("infinite", "unlimited"):
        reading.keep(option, "job.time_limit", "0", "0 means no limit")
    else:
        reading.note(option, Fate.LOST, "", f"“{value}” is not a time limit that Slurm accepts: set job.time_limit")


def _name(reading: _RequestSoFar, option: Option) -> None:
    value = option.value or ""
    plain = job_name(value)
    reading.keep(option, "job.name", plain, *(() if plain == value else (
        "it names a run's directory: letters, digits, dots, dashes", Fate.REPLACED)))


def _no_requeue(reading: _RequestSoFar, option: Option) -> None:
    reading.keep(option, "slurm.extra.no-requeue", True)
    reading.keys["slurm.retries"] = 0


def _signal(reading: _RequestSoFar, option: Option) -> None:
    match = re.fullmatch(r"(?:[RB]+:)?(?:SIG)?(\w+)(?:@(\d+))?", option.value or "", re.IGNORECASE)
    name = SIGNALS.get(match[1].upper()) if match else None
    reading.keep(option, "slurm.extra.signal", option.value)
    if match is not None and name is not None:
        reading.keys["program.signal"] = name
        reading.keys["slurm.grace"] = max(1, int(match[2] or 60))


def _array(reading: _RequestSoFar, option: Option) -> None:
    spec, _, simultaneous = (option.value or "").partition("%")
    numbers: list[str] = []
    for part in spec.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part.strip())
        if match is None or int(match[2] or 0) > 10**7:
            reading.note(option, Fate.LOST, "", f"“{spec}” is not a list of array elements: write [sweep]")
            return
        first = int(match[1])
        numbers += map(str, range(first, int(match[2] or first) + 1, max(1, int(match[3] or 1)))[:MOST_RUNS + 1])
    if len(numbers) > MOST_RUNS or not numbers:
        reading.note(option, Fate.LOST, "", f"a sweep has at most {MOST_RUNS} runs: split it into several [sweep] jobs")
        return
    reading.elements = tuple(dict.fromkeys(numbers))
    reading.keys["sweep.grid"] = {f"program.environment.{ARRAY_ELEMENT}": list(reading.elements)}
    if simultaneous.isdecimal() and int(simultaneous):
        reading.keys["sweep.simultaneous"] = int(simultaneous)
    reading.note(option, Fate.REPLACED, "sweep.grid", f"each element is a run of a sweep with its own {ARRAY_ELEMENT}")


def _chdir(reading: _RequestSoFar, option: Option) -> None:
    reading.directory = option.value
    reading.note(option, Fate.KEPT, "program.directory", "")


# Options that become no key: their fate, where their replacement is, and the reason, with the option's name and value.
_NOTES = {
    **dict.fromkeys(("output", "error", "open-mode"), (Fate.REPLACED, "RUN/log", "logs are in the run directory: hpc-mp logs")),
    "input": (Fate.LOST, "", "a job has no stdin: begin the script with exec <{value}"),
    "requeue": (Fate.REPLACED, "slurm.retries", "the job is always requeued after a machine failure"),
    **dict.fromkeys(("container", "container-image", "container-mounts", "container-workdir", "container-name", "container-save",
                     "container-mount-home", "container-env", "container-writable", "container-readonly"),
                    (Fate.LOST, "", "--{name} would run the script itself in an image: pass it to srun instead"))}
_ROWS: Mapping[str, Callable[[_RequestSoFar, Option], None]] = {
    "time": _time, "job-name": _name, "no-requeue": _no_requeue, "signal": _signal, "array": _array, "chdir": _chdir,
    "workdir": _chdir}
