"""Rules on the start, confinement, end and requeuing of jobs, and on the equipment of the cluster: GPUs, memory, nodes,
partitions, switches, accounting, health."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from hpc_mp.base.findings import Hit, Rule
from hpc_mp.base.grouping import grouped
from hpc_mp.base.rule_table import rules_of
from hpc_mp.base.text import counted
from hpc_mp.cluster.slurm.conf_file import read_conf
from hpc_mp.cluster.slurm.limits import seconds
from hpc_mp.cluster.slurm.query import parse_gpus
from hpc_mp.cluster.slurm.records import Words
from hpc_mp.cluster.topology.check import agreement
from hpc_mp.cluster.topology.model import chosen, listed
from hpc_mp.lint.slurm_conf.config import SlurmFacts, number

GRACE_S = 120  # seconds that hpc-mp's ranks have to save (checkpoint.grace, slurm.grace by default)
SHORT_KILL_S = 30  # Slurm's own default of KillWait
LATE_S = 600  # seconds from which an unnoticed dead node costs more than a restart; Slurm's default is 300
Judge = Callable[[SlurmFacts], str | Iterable[str]]
"""Function that returns the wrong settings as subjects of findings: one, "" for none, or several."""


def rules(judges: Mapping[str, Judge]) -> tuple[Rule[SlurmFacts], ...]:
    """Return the rules of these judges."""
    def finder(judge: Judge) -> Callable[[SlurmFacts], Iterator[Hit]]:
        def find(facts: SlurmFacts) -> Iterator[Hit]:
            wrong = judge(facts)
            yield from (Hit(subject=subject) for subject in ([wrong] if isinstance(wrong, str) else wrong) if subject)
        return find

    return rules_of("slurm/conf-rules.toml", {code: finder(judge) for code, judge in judges.items()})


def has_value(key: str, *wrong: str) -> Judge:
    """Make a judge of a setting that Slurm shows with a lower-case value in ``wrong``."""
    return lambda facts: facts.shown(key) if key in facts.config and facts.says(key).lower() in wrong else ""


def _lasts(key: str, wrong: Callable[[int], bool]) -> Judge:
    """Make a judge of a setting whose seconds are wrong."""
    return lambda facts: f"{key}={wait} s" if (wait := facts.seconds(key)) is not None and wrong(wait) else ""


def _fence(key: str, gpus_only: bool = False) -> Judge:
    def judge(facts: SlurmFacts) -> str:
        if facts.cgroup is None or "task/cgroup" not in facts.listed("TaskPlugin") or (gpus_only and not facts.gpu_nodes):
            return ""
        value = next((value for name, value in facts.cgroup.items() if name.lower() == key.lower()), "no")
        return f"cgroup.conf: {key}={value or 'no'}" if value.lower() != "yes" else ""
    return judge


def _memlock(facts: SlurmFacts) -> str:
    """Return the setting that propagates memlock. Slurm uses only one of the two settings."""
    exceptions = facts.listed("PropagateResourceLimitsExcept")
    if exceptions:
        return "" if {"all", "memlock"} & set(exceptions) else facts.shown("PropagateResourceLimitsExcept")
    return facts.shown("PropagateResourceLimits") if {"all", "memlock"} & set(facts.listed("PropagateResourceLimits")) else ""


def _prolog(facts: SlurmFacts) -> str:
    has = any(value for key, value in facts.config.items() if key.partition("[")[0] == "Prolog")
    early = {"alloc", "contain", "x11"} & set(facts.listed("PrologFlags"))  # the other two imply Alloc
    return facts.shown("PrologFlags") if has and not early else ""


FLAT = ("", "topology/none", "topology/default", "topology/flat")
OUT = {"DOWN", "DRAIN", "FAIL", "FAILING", "INVAL", "INVALID_REG"}  # states of a node
NODES_SHOWN = 3  # number of reasons for broken nodes that are shown


def _partitions(fault: Callable[[Words], str]) -> Judge:
    """Make a judge of partitions: ``fault`` returns a partition's wrong settings, "" without any."""
    return lambda facts: (f"{partition['PartitionName']}: {text}" for partition in facts.partitions if (text := fault(partition)))


def _nodes(fault: Callable[[Words], str]) -> Judge:
    return lambda facts: (f"{listed(nodes)}: {text}" for text, nodes in _by_fault(facts, fault).items())


def _by_fault(facts: SlurmFacts, fault: Callable[[Words], str]) -> dict[str, list[str]]:
    return grouped((text, node["NodeName"]) for node in facts.nodes if (text := fault(node)))


def _memory(facts: SlurmFacts) -> str:
    whole = facts.says("SelectType").lower() == "select/linear" or (facts.partitions and all(map(_alone, facts.partitions)))
    wrong = "SelectTypeParameters" in facts.config and "memory" not in facts.says("SelectTypeParameters").lower() and not whole
    return facts.shown("SelectTypeParameters") if wrong else ""


def _alone(partition: Words) -> bool:
    """Return True if jobs of this partition share no node, or its own SelectTypeParameters allocate memory."""
    fields = {key.lower(): value.lower() for key, value in partition.items()}
    exclusive = fields.get("oversubscribe", fields.get("shared", "")) == "exclusive"
    return exclusive or "memory" in fields.get("selecttypeparameters", "")


def _gres_file(facts: SlurmFacts) -> Iterator[str]:
    """Yield GPUs in gres.conf without File=, MultipleFiles= or AutoDetect=, on their line or on a line for all."""
    lines = [line.text.strip().lower() for line in read_conf(facts.gres_conf or "")]
    if facts.gpu_nodes and not any(re.match(r"autodetect=(?!off)", line) for line in lines):
        yield from (f"gres.conf: {line}" for line in lines
                    if re.search(r"\bname=gpu\b", line) and not re.search(r"files?=|autodetect=(?!off)", line))


def _gres_type(facts: SlurmFacts) -> str:
    bare, typed = ([node["NodeName"] for node in facts.gpu_nodes if re.match(form, node["Gres"])]
                   for form in (r"gpu:\d", r"gpu:[^\d]"))
    return f"{listed(bare)} without a type, {listed(typed)} with one" if bare and typed else ""


def _few_cpus(node: Words) -> str:
    cpus, gpus = number(node, "CPUTot"), sum(count for _, count in parse_gpus(node.get("Gres", "")))
    return f"CPUTot={cpus}" + (f" for {counted(gpus, 'GPU')}" if gpus else "") if cpus is not None and cpus < max(gpus, 2) else ""


def _broken(facts: SlurmFacts) -> Iterator[str]:
    reasons = list(_by_fault(facts, _outage).items())
    yield from (f"{listed(nodes)} {reason}" for reason, nodes in reasons[:NODES_SHOWN])
    if len(reasons) > NODES_SHOWN:
        yield f"{sum(len(nodes) for _, nodes in reasons[NODES_SHOWN:])} more nodes for other reasons"


def _outage(node: Words) -> str:
    """Return the state and reason of a broken node. A cloud node that is powered off does not respond, but is started for a
    job."""
    states = {*re.findall(r"[A-Z_]+", node.get("State", ""))}
    if states & OUT or ("NOT_RESPONDING" in states and not any(state.startswith("POWER") for state in states)):
        return f"{node['State']}: " + (re.sub(r"\s*\[\w*@.*\]$", "", node.get("Reason", "")) or "no reason")
    return ""


def _shared(facts: SlurmFacts) -> Iterator[str]:
    if "CR_LLN" in facts.says("SelectTypeParameters").upper():
        yield facts.shown("SelectTypeParameters")
    for partition in facts.partitions:
        if partition.get("OverSubscribe", "NO").startswith("FORCE") or partition.get("LLN") == "YES":
            yield f"{partition['PartitionName']}: OverSubscribe={partition.get('OverSubscribe')} LLN={partition.get('LLN')}"


def _preemptable(fault: Callable[[Words, set[str]], str]) -> Judge:
    """Make a judge of partitions whose jobs can be preempted; ``fault`` gets the modes too."""
    partitions = _partitions(lambda partition: fault(partition, {*partition.get("PreemptMode", "OFF").split(",")} - {"OFF"}))
    return lambda facts: partitions(facts) if facts.says("PreemptType") not in ("", "preempt/none") else ""


def _grace(partition: Words, modes: set[str]) -> str:
    short = modes - {"SUSPEND", "GANG"} and (number(partition, "GraceTime") or 0) < GRACE_S
    return f"PreemptMode={partition['PreemptMode']} GraceTime={partition.get('GraceTime', '0')}" if short else ""


def _short(partition: Words) -> str:
    limit = partition.get("MaxTime", "UNLIMITED")
    return f"MaxTime={limit}" if re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", limit) and seconds(limit) < 3600 else ""


def _knows_none(facts: SlurmFacts) -> bool:
    """Return True if no topology is configured. With a topology.yaml, Slurm shows but ignores the plug-in in slurm.conf."""
    return facts.says("TopologyPlugin") in FLAT and not facts.tree.above


def _flat(facts: SlurmFacts) -> str:
    if facts.measured is None or not _knows_none(facts):
        return ""
    comparison = agreement(facts.tree, facts.measured)
    return f"{facts.shown('TopologyPlugin')}; {comparison.why}" if comparison.verdict == "disagrees" else ""


def _outside(facts: SlurmFacts) -> str:
    lost = [node["NodeName"] for node in facts.nodes if facts.tree.leaf(node.get("NodeName", "")) is None]
    return f"{listed(lost)}: not under a switch of the topology" if facts.tree.above and lost else ""


RULES: tuple[Rule[SlurmFacts], ...] = rules({
    "cons-tres": lambda facts: facts.shown("SelectType") if facts.gpu_nodes and facts.says("SelectType") not in (
        "", "select/cons_tres") else "",
    "memory-shared": _memory,
    "gres-file": _gres_file,
    "gres-broken": lambda facts: (f"{listed(node['NodeName'] for node in broken)}: {broken[0]['Reason']}" for broken in [
        [node for node in facts.nodes if re.search(r"gres/gpu|GRES", node.get("Reason", ""))]] if broken),
    "gres-types": _gres_type,
    "real-memory": _nodes(lambda node: "RealMemory=1" if number(node, "RealMemory") == 1 else ""),
    "few-cpus": _nodes(_few_cpus),
    "nodes-out": _broken,
    "nodes-shared": _shared,
    "grace-time": _preemptable(_grace),
    "preempt-suspend": _preemptable(
        lambda partition, modes: f"PreemptMode={partition['PreemptMode']}" if "SUSPEND" in modes else ""),
    "short-limit": _partitions(_short),
    "topology-none": _flat,
    "topology-unknown": lambda facts: facts.shown("TopologyPlugin") if (
        facts.measured is None and _knows_none(facts) and len(facts.nodes) > 1) else "",
    "topology-wrong": lambda facts: map(str, agreement(facts.tree, facts.measured).odd) if (
        facts.measured is not None and facts.topologies and not _knows_none(facts)) else "",
    "topology-outside": _outside,
    "topology-apart": lambda facts: f"no switch is above {', '.join(topology.apart[:8])}" if (
        topology := chosen(facts.topologies or ())).kind == "tree" and topology.apart else "",
    "accounting-off": has_value("AccountingStorageType", "accounting_storage/none", ""),
    "gpus-uncounted": lambda facts: facts.shown("AccountingStorageTRES") if (
        facts.says("AccountingStorageType") == "accounting_storage/slurmdbd" and facts.gpu_nodes
        and not any(word.startswith("gres/gpu") for word in facts.listed("AccountingStorageTRES"))) else "",
    "health-none": has_value("HealthCheckProgram", ""),
    "health-idle": lambda facts: f"{facts.shown('HealthCheckProgram')}, HealthCheckInterval=0" if (
        facts.says("HealthCheckProgram") and facts.seconds("HealthCheckInterval") == 0) else "",
    "task-plugin": lambda facts: facts.shown("TaskPlugin") if "TaskPlugin" in facts.config and not {
        "task/cgroup", "task/affinity", "cgroup", "affinity"} & set(facts.listed("TaskPlugin")) else "",
    "proctrack": has_value("ProctrackType", "proctrack/linuxproc", "proctrack/pgid"),
    "constrain-cores": _fence("ConstrainCores"),
    "constrain-devices": _fence("ConstrainDevices", gpus_only=True),
    "constrain-memory": _fence("ConstrainRAMSpace"),
    "memlock": _memlock,
    "kill-wait": _lasts("KillWait", lambda wait: wait < SHORT_KILL_S),
    "slurmd-timeout": _lasts("SlurmdTimeout", lambda timeout: timeout == 0 or timeout >= LATE_S),
    "return-to-service": has_value("ReturnToService", "2"),
    "no-requeue": has_value("JobRequeue", "0"),
    "prolog-late": _prolog,
    "preempt-signal": lambda facts: f"{facts.shown('PreemptType')} without send_user_signal" if (
        facts.says("PreemptType") not in ("", "preempt/none")
        and "send_user_signal" not in facts.says("PreemptParameters") + facts.says("SlurmctldParameters")) else "",
})
