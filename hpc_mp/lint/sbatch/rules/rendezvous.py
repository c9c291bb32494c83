"""HM4xx: the rendezvous of ranks: MASTER_ADDR, ports, torchrun's rendezvous, rank numbers."""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator

from hpc_mp.base.findings import Hit, Rule
from hpc_mp.lint.sbatch.programs import NodeLauncher, torchrun
from hpc_mp.lint.sbatch.rules.finders import Finder, HitWords, of_variables
from hpc_mp.lint.sbatch.rules.steps import CONTAINERS
from hpc_mp.lint.sbatch.script import Script
from hpc_mp.lint.sbatch.shell import ShellAssignment
from hpc_mp.lint.sbatch.word import Word

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


def _fixed_port(script: Script) -> Iterable[Hit]:
    """Yield fixed ports. Port 0 means any free port. On exclusive nodes, only an earlier attempt of the job could hold one."""
    alone = script.option("exclusive") and not script.option("requeue")
    yield from (hit for hit in _ports(script) if int(hit.item) and not alone)


def _ports(script: Script) -> Iterable[Hit]:
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


def _no_endpoint(script: Script) -> Iterable[Hit]:
    for launcher in _launchers(script):
        named = {"master-addr", "rdzv-endpoint", "rdzv-conf", "*"} & launcher.options.keys()
        set_as_well = script.sets("PET_RDZV_ENDPOINT") or script.sets("PET_MASTER_ADDR")
        if script.nodes > 1 and not launcher.alone and not named and not set_as_well:
            yield Hit(launcher.line)


def _own_name(script: Script, address: ShellAssignment) -> bool:
    return address.task and script.nodes > 1 and bool(_OWN_NAME.search(address.raw)) and "srun" not in address.raw


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


def _fallback_to_localhost(_: Script, address: ShellAssignment) -> HitWords:
    local = _FALLBACK.search(address.raw)
    return (address.name, local[1]) if local and not address.captured else None


def _inert_node_rank(script: Script) -> Iterable[Hit]:
    for launcher in _launchers(script):
        if "node-rank" in launcher.options and launcher.meets:
            yield Hit(launcher.option("node-rank")[1], launcher.option("rdzv-backend")[0])


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


def _port_of_the_last_attempt(script: Script, port: ShellAssignment) -> HitWords:
    return bool(script.option("requeue")) and "SLURM_JOB" in port.raw and "SLURM_RESTART_COUNT" not in port.raw


def _scontrol_in_a_container(script: Script) -> Iterable[Hit]:
    for step in script.steps:
        inside = step.option("container-image") or (step.program and step.program[0].base in CONTAINERS)
        lines = range(step.line, max((word.line + word.text.count("\n") for word in step.program), default=0) + 1)
        if inside:
            yield from (Hit(command.line) for command in script.commands("scontrol")
                        if command.task and command.line in lines and command.arguments[:1] == ("show",))


RULES: tuple[Rule[Script], ...] = (
    Rule("HM401", "warning", _fixed_port,
         "Port {it} is fixed: jobs that share a node collide on it, and so do the attempts of a requeued job.",
         "export MASTER_PORT=$((10000 + (SLURM_JOB_ID + 7919 * ${SLURM_RESTART_COUNT:-0}) % 20000))"),
    Rule("HM402", "error",
         of_variables(PORTS, lambda _, port: port.task and bool(re.search(r"\bRANDOM\b|\bshuf\b", port.raw))),
         "Every task draws another port: the ranks never meet.",
         "Choose the port in the job script, before srun."),
    Rule("HM403", "error", _no_endpoint,
         "torchrun on several nodes without --rdzv-endpoint or --master-addr: every node waits at 127.0.0.1 for the others.",
         "--rdzv-backend=c10d --rdzv-id=$SLURM_JOB_ID --rdzv-endpoint=$MASTER_ADDR:$MASTER_PORT"),
    Rule("HM404", "warning", _hostname_i,
         "{it} from hostname -i: on many systems that is 127.0.1.1, an address that other nodes cannot reach.",
         '{it}=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)'),
    Rule("HM405", "error", _addresses(_own_name), "Every task sets {it} to its own host: the nodes never meet.",
         'Set it in the job script: {it}=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)'),
    Rule("HM406", "error", _localhost, "{it} is {advice} in a job of several nodes: each node connects to itself.",
         'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)'),
    Rule("HM407", "warning", of_variables(ADDRESSES, _fallback_to_localhost),
         "{it} falls back to {advice}: if the real address is missing, ranks wait for each other without an error.",
         "Stop instead: ${{it}:?is not set}"),
    Rule("HM408", "warning", _addresses(lambda _, address: "SLURM_LAUNCH_NODE_IPADDR" in address.raw),
         "{it} from SLURM_LAUNCH_NODE_IPADDR: that is the host that called srun, and it is not set in the job script.",
         '{it}=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)'),
    Rule("HM409", "error",
         _addresses(lambda script, address: script.nodes > 1 and _NODELIST.fullmatch(address.raw.strip('"'))),
         "{it} is a list such as node[01-04], not a host name.",
         '{it}=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)'),
    Rule("HM410", "warning", _inert_node_rank,
         "--node-rank has no effect with --rdzv-backend={it}: torchrun numbers nodes as they arrive, so ranks may differ "
         "from Slurm's order.",
         "Leave it out. If the order matters, use srun with a task per GPU, or the static backend."),
    Rule("HM411", "error", _expanded_too_early,
         "The job's own shell expands ${it}, which is 0 there: every task gets the same number.",
         "Let each task expand it: srun bash -c '… ${it} …' in single quotes."),
    Rule("HM412", "error", _rank_of_the_batch_shell,
         "{it} is set once, in the job's own shell, in which {advice} is 0: every rank becomes rank 0.",
         "Set it in the tasks: srun bash -c 'export {it}=${advice}; exec python …'"),
    Rule("HM413", "info", of_variables(PORTS, _ephemeral_port),
         "The port may be as high as {it}: Linux assigns ports from 32768 on to connections, so it may be in use.",
         "Stay below: $((10000 + SLURM_JOB_ID % 20000))."),
    Rule("HM414", "info", of_variables(PORTS, _port_of_the_last_attempt),
         "A requeued job keeps its job ID and therefore this port: ranks left on an unreachable node may still hold it.",
         "Include the attempt: $((10000 + (SLURM_JOB_ID + 7919 * ${SLURM_RESTART_COUNT:-0}) % 20000))."),
    Rule("HM415", "warning", _scontrol_in_a_container, "scontrol inside a container, which has no Slurm client.",
         "Call it in the job script, before srun, and export the result."),
    Rule("HM416", "info", _addresses(lambda script, address: any(_launchers(script)) and _HOSTNAME_F.search(address.raw)),
         "{it} is a fully qualified host name: torchrun compares it with short names, and may match no host.",
         '{it}=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)'),
)
