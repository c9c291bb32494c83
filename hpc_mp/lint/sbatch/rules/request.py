"""HM2xx: the request of the directives: time, memory, GPUs, output."""

import itertools
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.findings import Hit, Rule
from hpc_mp.base.rule_table import rules_of
from hpc_mp.base.text import counted
from hpc_mp.cluster.slurm.nodelist import compress, expand
from hpc_mp.cluster.slurm.option_syntax import Option, option_table
from hpc_mp.cluster.slurm.releases import parse_version
from hpc_mp.lint.sbatch.programs import torchrun
from hpc_mp.lint.sbatch.rules.finders import HitWords, lacking, of_directives, of_job, of_options, of_variables
from hpc_mp.lint.sbatch.script import Script
from hpc_mp.lint.sbatch.shell import ShellAssignment

MEMORY = ("mem", "mem-per-cpu", "mem-per-gpu")
WITHOUT_HINT = ("cpu-bind", "threads-per-core", "ntasks-per-core", "cores-per-socket", "sockets-per-node", "extra-node-info")
GPUS_PER_TASK = ("gpus-per-task", "ntasks-per-gpu", "tres-per-task")
NUMBERS_OF_TASKS = ("ntasks", "gpus", "ntasks-per-node", "ntasks-per-gpu")
A_GIGABYTE = 1024  # MB: a program with torch does not start with less
HOURS = ("24", "36", "48", "72", "96", "120", "168")  # values that probably mean hours, not minutes
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_ONE_GPU = re.compile(r"(verbose,)?(single|closest|per_task|map_gpu|mask_gpu)")
_CPUS = re.compile(r"\$(SLURM_CPUS_PER_TASK\b|\{SLURM_CPUS_PER_TASK\})")
_COUNT_BEHIND_EQUALS = re.compile(r"(?<!\w)(\w+)=(\d+)(?=,|$)")
_TASK_ID = re.compile(r"%(\d*[aAjJ])")


def _short_time(_: Script, time: Option) -> HitWords:
    match = re.fullmatch(r"(\d+):(\d\d)", time.value or "")
    return match and (f"{counted(int(match[1]), 'minute')} and {counted(int(match[2]), 'second')}", f"{match[0]}:00")


def _cpus_unset(script: Script) -> Iterable[Hit]:
    """Yield uses of an unset SLURM_CPUS_PER_TASK: Slurm sets it only if CPUs per task are requested."""
    names = {option.name for option in (*script.directives, *script.everywhere)}
    if script.options and not {"cpus-per-task", "tres-per-task"} & names and not script.sets("SLURM_CPUS_PER_TASK"):
        uses = (number for number, line in enumerate(script.lines, start=1)
                if not line.lstrip().startswith("#") and _CPUS.search(line))
        yield from map(Hit, itertools.islice(uses, 1))


def _conflicts(script: Script) -> Iterable[tuple[Option, str, str, str]]:
    """Yield (the later option, the names of both, the first release in which sbatch refuses them together, advice). The release
    is empty if every release does, or the script's own."""
    for options in script.header.components:
        by_name = {option.name: option for option in options} | {_with_kind(option): option for option in options}
        for row in option_table()["conflicts"]:
            for first, second in itertools.combinations(row["options"], 2):
                if first in by_name and second in by_name:
                    later = max(by_name[first], by_name[second], key=lambda option: option.line)
                    since = row["since"] and not (script.version and script.version >= parse_version(row["since"]))
                    yield later, f"--{first} and --{second}", row["since"] if since else "", row["advice"]


def _with_kind(option: Option) -> str:
    """Return the option with its kind: ``gres=gpu`` for ``--gres=gres/gpu:4``, ``distribution=arbitrary``."""
    match = re.match(r"(?:gres/)?(\w+)", option.value or "")
    return f"{option.name}={match[1]}" if match else option.name


def _hint_dropped(script: Script) -> Iterable[Hit]:
    for options in (script.options, *((*script.options, *step.options) for step in script.steps)):
        by_name = {option.name: option for option in options}
        others = [name for name in WITHOUT_HINT if name in by_name]
        if "hint" in by_name and others:
            yield Hit(by_name["hint"].line, f"--{others[0]}")


def _megabytes(_: Script, option: Option) -> HitWords:
    value = option.value or ""
    wrong = option.name in MEMORY and value.isdecimal() and 0 < int(value) < A_GIGABYTE
    return (f"--{option.name}={value} is {value} MB", f"{value}G") if wrong else None


def _named_nodes(script: Script, name: str) -> frozenset[str]:
    """Return the hosts of --nodelist or --exclude; an empty set if a file or a variable names them."""
    with suppress(HpcMpError):
        return frozenset(expand(script.value(name) or ""))
    return frozenset()


def _fewer_nodes_than_named(script: Script, nodes: Option) -> HitWords:
    """Judge --nodes below the length of --nodelist. Source: the message of sbatch 22.05.8, and sbatch/opt.c until 26.05: "invalid
    number of nodes (-N 10-2)"."""
    named, limit = len(_named_nodes(script, "nodelist")), re.fullmatch(r"(?:\d+-)?(\d+)", nodes.value or "")
    fewer = limit and named > int(limit[1])
    return (f"--nodes={nodes.value}, but --nodelist names {named}", str(named)) if fewer else None


def _more_threads_than_cpus(script: Script, variable: ShellAssignment) -> HitWords:
    cpus = script.value("cpus-per-task") or ""
    more = variable.value.isdecimal() and cpus.isdecimal() and int(variable.value) > int(cpus) and not script.option("exclusive")
    return (f"{variable.name}={variable.value}", f"--cpus-per-task={cpus}") if more else None


def _hidden_peers(script: Script) -> Iterable[Hit]:
    if any(option.name in ("gpu-bind", "tres-bind") and (option.value or "").endswith("none") for option in script.everywhere):
        return
    for options, shared in ((script.options, script.tasks > script.nodes),
                            *((step.options, script.tasks_share_a_node(step)) for step in script.steps)):
        for option in options:
            gpus = option.name != "tres-per-task" or "gpu" in (option.value or "")
            if option.name in GPUS_PER_TASK and gpus and shared:
                yield Hit(option.line, f"--{option.name}")


def _nodes_times_tasks(script: Script, ntasks: Option) -> HitWords:
    per_node, nodes = script.number("ntasks-per-node"), script.value("nodes") or ""
    product = int(nodes) * per_node if per_node and nodes.isdecimal() else None
    if product is None or ntasks.value in (None, str(product)):
        return ""
    return f"--ntasks={ntasks.value}, but {counted(int(nodes), 'node')} × {per_node} = {counted(product, 'task')}"


def _output_folder(script: Script) -> Iterable[Hit]:
    start = Path(script.value("chdir") or ".")
    for name in ("output", "error", "input"):
        option = script.option(name)
        folder = Path(option.value).parent if option and option.value else Path()
        taken_as_written = not re.search(r"[$~\0]", str(folder))  # HM111 and HM103 handle the others
        if option and folder != Path() and taken_as_written and not (start / folder).is_absolute() \
                and not _is_dir(script.directory / start / str(folder).replace("%%", "%")):
            yield Hit(option.line, str(folder))


def _is_dir(path: Path) -> bool:
    with suppress(OSError):  # a name that is too long
        return path.is_dir()
    return False


def _one_file_for_an_array(script: Script) -> Iterable[Hit]:
    for name in ("output", "error"):
        option = script.option(name)
        shared = option and option.value != "/dev/null" and not _TASK_ID.search(option.value or "")
        if option and shared and script.option("array"):
            yield Hit(option.line, f"--{name}={option.value}")


def drops_the_rest(export: Option) -> bool:
    """Return True if a list in --export names variables without ALL."""
    return not {"ALL", "NONE", "NIL"} & {part.strip().upper() for part in (export.value or "ALL").split(",")}


def names_of(export: Option) -> str:
    """Return the option without its values, which may be secrets."""
    return "--export=" + ",".join(part.partition("=")[0] for part in (export.value or "").split(","))


def _export_commas(script: Script) -> Iterable[Hit]:
    for option in script.everywhere:
        parts = (option.value or "").split(",") if option.name == "export" else []
        for before, part in itertools.pairwise(parts):
            if "=" in before and "=" not in part and not re.fullmatch(r"[A-Z_][A-Z0-9_]*", part):
                yield Hit(option.line, f"{before.partition('=')[0]}=…,{part}")


RULES: tuple[Rule[Script], ...] = rules_of("slurm/script-rules.toml", {
    "HM201": lacking("time"),
    "HM202": of_job("time", _short_time),
    "HM203": lambda script: (Hit(option.line, both, advice) for option, both, since, advice in _conflicts(script) if not since),
    "HM204": lambda script: (Hit(option.line, f"{both} exclude each other: Slurm {since} and later refuse them together", advice)
                            for option, both, since, advice in _conflicts(script) if since),
    "HM205": _hint_dropped,
    "HM206": lacking(*MEMORY, "exclusive"),
    "HM207": of_job("exclusive", lambda script, exclusive: exclusive.value is None and not any(map(script.option, MEMORY))),
    "HM208": _hidden_peers,
    "HM209": of_options(lambda _, option: f"--gpu-bind={option.value}" if option.name == "gpu-bind" and _ONE_GPU.match(
        option.value or "") else ""),
    "HM210": of_job("ntasks", _nodes_times_tasks),
    "HM211": _output_folder,
    "HM212": _one_file_for_an_array,
    "HM213": of_job("requeue", lambda script, _: not (script.value("open-mode") or "").lower().startswith("a")),
    "HM214": of_job("export", lambda _, export: drops_the_rest(export) and names_of(export)),
    "HM215": _export_commas,
    "HM216": of_job("gpus-per-task", lambda script, _: not any(map(script.option, NUMBERS_OF_TASKS))),
    "HM217": of_job("exclusive", lambda script, _: not script.asks_for_gpus and (
        any(script.commands("nvidia-smi")) or any(torchrun(command.words) for command in script.shell.commands))),
    "HM218": of_job("switches", lambda _, switches: "" if "@" in (switches.value or "@") else switches.value),
    "HM219": of_directives(lambda script, option: option.name == "array" and len(script.header.components) > 1),
    "HM220": of_options(_megabytes),
    "HM221": of_job("time", lambda _, time: (time.value, f"{time.value}:00:00") if time.value in HOURS else None),
    "HM222": of_job("ntasks", lambda script, ntasks: (
        f"--ntasks={ntasks.value} on {script.number('nodes')} nodes", ntasks.value) if ntasks.value and ntasks.value.isdecimal()
        and 0 < int(ntasks.value) < (script.number("nodes") or 0) else None),
    "HM223": of_variables(THREADS, _more_threads_than_cpus),
    "HM224": _cpus_unset,
    "HM225": of_directives(lambda _, option: (f"--gres={option.value}", f"--gres={mended}") if option.name == "gres" and (
        mended := _COUNT_BEHIND_EQUALS.sub(r"\1:\2", option.value or "")) != option.value else None),
    "HM226": of_job("nodes", _fewer_nodes_than_named),
    "HM227": of_job("exclude", lambda script, _: compress(sorted(
        _named_nodes(script, "nodelist") & _named_nodes(script, "exclude")))),
})
