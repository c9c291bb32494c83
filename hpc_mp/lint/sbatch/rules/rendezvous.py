"""HM4xx: the rendezvous of ranks: MASTER_ADDR, ports, torchrun's rendezvous, rank numbers."""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator

from hpc_mp.base.findings import Hit, Rule
from hpc_mp.base.rule_table import rules_of
from hpc_mp.lint.sbatch.programs import NodeLauncher, torchrun
from hpc_mp.lint.sbatch.rules.finders import Finder, HitWords, of_variables
from hpc_mp.lint.sbatch.rules.steps import CONTAINERS
from hpc_mp.lint.sbatch.script import Script
from hpc_mp.lint.sbatch.shell import ShellAssignment, Word

ADDRESSES = ("MASTER_ADDR", "MASTER_IP", "MASTER_NODE", "HEAD_NODE", "HEAD_NODE_IP", "RDZV_HOST", "master_addr",
             "master_node", "head_node", "head_node_ip")
PORTS = ("MASTER_PORT", "RDZV_PORT", "PORT", "master_port", "rdzv_port")
RANKS = ("RANK", "NODE_RANK", "LOCAL_RANK", "GROUP_RANK", "MACHINE_RANK", "node_rank")
TASK_VARIABLES = frozenset({"SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"})  # 0 in the job's own shell
_NODE_RANK = re.compile(r"(node|machine)[-_]rank\b")
_PORT_OPTION = re.compile(r"--(?:main[-_]process|master)[-_]port=(\d+)")
_LOCAL = re.compile(r"\b(localhost|127\.\d+\.\d+\.\d+)\b")
_FALLBACK = re.compile(rf"(?:\{{[^{{}}]*[-=]|\|\|\s*\w+\s+)[\"']?{_LOCAL.pattern}")
_HOSTNAME_I = re.compile(r"\bhostname\s+(-i\b|--ip-address)")
_HOSTNAME_F = re.compile(r"\bhostname\s+(-f\b|--fqdn|--long)")
_RANGE = re.compile(r"(\d+)\s*\+[^%]*%\s*(\d+)|\bshuf\b.*?-i\s*(\d+)-(\d+)")
EPHEMERAL = 32768  # first port that Linux assigns to outgoing connections (ip_local_port_range)
_LIST = r"\$\{?SLURM_(?:JOB_)?NODELIST\}?"
_NODELIST = re.compile(rf'{_LIST}|\$\(echo\s+"?{_LIST}"?\s*\|\s*(cut|awk|sed|head|tr)\b.*\)', re.DOTALL)
_OWN_NAME = re.compile(r"\$\(hostname\b|`hostname\b|\$\{?(HOSTNAME|SLURMD_NODENAME)\b|\$\(/bin/hostname\b")


def _addresses(wrong: Callable[[Script, ShellAssignment], object]) -> Finder:
    """Make a finder of variables that are wrong as the address of the first rank."""
    return of_variables(
        ADDRESSES, lambda script, variable: variable.name if not variable.captured and wrong(script, variable) else "")


def _launchers(script: Script) -> Iterator[NodeLauncher]:
    return (launcher for command in script.shell.commands if command.name != "srun" and (launcher := torchrun(command.words)))


def _endpoints(script: Script) -> Iterator[tuple[NodeLauncher, str, str, int]]:
    """Yield (the call, the option, its value, its line) of the options that name torchrun's rendezvous."""
    for launcher in _launchers(script):
        for name in {"master-addr", "rdzv-endpoint"} & launcher.options.keys():
            yield launcher, f"--{name}", *launcher.options[name]


def _ports(script: Script) -> Iterable[Hit]:
    """Yield port numbers. 0 means any free port. On exclusive nodes, only an earlier attempt of the job could hold one."""
    for variable in script.shell.assignments:
        if variable.name in PORTS and re.fullmatch(r"\d+", variable.value):
            yield Hit(variable.line, variable.value)
    for launcher in _launchers(script):
        for name in ("master-port", "rdzv-endpoint"):
            value, line = launcher.option(name)
            if port := re.fullmatch(r"(?:.*:)?(\d+)", value):
                yield Hit(line, port[1])
    for command in script.commands("accelerate", "deepspeed"):
        for word, following in itertools.pairwise((*command.words, Word("", 0))):
            text = word.text if "=" in word.text else f"{word.text}={following.text}"
            if port := _PORT_OPTION.fullmatch(text):
                yield Hit(word.line, port[1])


def _hostname_i(script: Script) -> Iterable[Hit]:
    yield from _addresses(lambda _, address: _HOSTNAME_I.search(address.raw))(script)
    yield from (Hit(line, name) for _, name, value, line in _endpoints(script)
                if value.startswith(("$(", "`")) and _HOSTNAME_I.search(value))


def _localhost(script: Script) -> Iterable[Hit]:
    if script.nodes > 1:
        yield from of_variables(ADDRESSES, lambda _, address: (
            (address.name, address.value) if _LOCAL.fullmatch(address.value) and not address.captured else None))(script)
        for launcher, name, value, line in _endpoints(script):
            if not launcher.alone and (local := _LOCAL.match(value)):
                yield Hit(line, name, local[0])


def _expanded_too_early(script: Script) -> Iterable[Hit]:
    for step in script.steps:
        if not script.several_tasks(step) or step.command.task:
            continue
        c10d = any("c10d" in word.text for word in step.program)  # c10d ignores the node rank, see HM410
        for before, word in itertools.pairwise((Word("", 0), *step.program)):
            if not (c10d and _NODE_RANK.search(f"{before.text} {word.text}")):
                yield from (Hit(line, name) for name, line in word.expands if name in TASK_VARIABLES)


def _rank_of_the_batch_shell(script: Script) -> Iterable[Hit]:
    if not any(script.several_tasks(step) for step in script.steps):
        return
    in_tasks = {variable.name for variable in script.shell.assignments if variable.task}
    for variable in script.shell.assignments:
        variables = TASK_VARIABLES & {name for name, _ in variable.expands}
        if variables and not variable.task and not variable.captured and variable.name in RANKS \
                and variable.name not in in_tasks and (variable.exported or variable.name in script.shell.exported):
            yield Hit(variable.line, variable.name, sorted(variables)[0])


def _ephemeral_port(_: Script, port: ShellAssignment) -> HitWords:
    match = _RANGE.search(port.raw)
    highest = 0 if match is None else int(match[1]) + int(match[2]) - 1 if match[1] else int(match[4])
    return str(highest) if highest >= EPHEMERAL else ""


RULES: tuple[Rule[Script], ...] = rules_of("slurm/script-rules.toml", {
    "HM401": lambda script: (hit for hit in _ports(script) if int(hit.item) and (script.option("requeue") or not
                                                                                script.option("exclusive"))),
    "HM402": of_variables(PORTS, lambda _, port: port.task and bool(re.search(r"\bRANDOM\b|\bshuf\b", port.raw))),
    "HM403": lambda script: (Hit(launcher.line) for launcher in _launchers(script)
                            if script.nodes > 1 and not launcher.alone
                            and not {"master-addr", "rdzv-endpoint", "rdzv-conf", "*"} & launcher.options.keys()
                            and not script.sets("PET_RDZV_ENDPOINT") and not script.sets("PET_MASTER_ADDR")),
    "HM404": _hostname_i,
    "HM405": _addresses(lambda script, address: address.task and script.nodes > 1 and "srun" not in address.raw
                        and _OWN_NAME.search(address.raw)),
    "HM406": _localhost,
    "HM407": of_variables(ADDRESSES, lambda _, address: (address.name, local[1]) if not address.captured and (
        local := _FALLBACK.search(address.raw)) else None),
    "HM408": _addresses(lambda _, address: "SLURM_LAUNCH_NODE_IPADDR" in address.raw),
    "HM409": _addresses(lambda script, address: script.nodes > 1 and _NODELIST.fullmatch(address.raw.strip('"'))),
    "HM410": lambda script: (Hit(launcher.option("node-rank")[1], launcher.option("rdzv-backend")[0])
                            for launcher in _launchers(script) if "node-rank" in launcher.options and launcher.meets),
    "HM411": _expanded_too_early,
    "HM412": _rank_of_the_batch_shell,
    "HM413": of_variables(PORTS, _ephemeral_port),
    "HM414": of_variables(PORTS, lambda script, port: bool(script.option("requeue")) and "SLURM_JOB" in port.raw
                          and "SLURM_RESTART_COUNT" not in port.raw),
    "HM415": lambda script: (Hit(command.line) for step in script.steps
                            if step.option("container-image") or (step.program and step.program[0].base in CONTAINERS)
                            for command in script.commands("scontrol") if command.task and command.arguments[:1] == ("show",)
                            and step.line <= command.line <= max(
                                (word.line + word.text.count("\n") for word in step.program), default=0)),
    "HM416": _addresses(lambda script, address: any(_launchers(script)) and _HOSTNAME_F.search(address.raw)),
})
