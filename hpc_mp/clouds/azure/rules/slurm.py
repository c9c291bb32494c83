"""CC4xx: settings of cyclecloud-slurm: partitions, accounting, health, memory."""

import re
from collections.abc import Callable, Iterable

from hpc_mp.base.findings import Hit, Rule
from hpc_mp.clouds.azure.case import Case, ResolvedNode

_ROLES = ("scheduler", "login", "execute")
_PROJECT = "cyclecloud/slurm:"


def _many_defaults(case: Case) -> Iterable[Hit]:
    for cluster in case.clusters:
        defaults = [(default.line, node.name) for node in cluster.partitions
                    if (default := node.get("slurm.default_partition")) and default.flag]
        yield from (Hit(line, name, f"{defaults[0][1]}, line {defaults[0][0]}") for line, name in defaults[1:])


def _no_default(case: Case) -> Iterable[Hit]:
    for cluster in case.clusters:
        settings = [node.get("slurm.default_partition") for node in cluster.partitions]
        if len(settings) > 1 and not any(default and default.flag is not False for default in settings):
            yield Hit(cluster.section.line, ", ".join(node.partition for node in cluster.partitions))


def _same_partition(case: Case) -> Iterable[Hit]:
    for cluster in case.clusters:
        first: dict[str, ResolvedNode] = {}
        for node in cluster.partitions:
            other, named = first.setdefault(node.partition.casefold(), node), node.get("slurm.partition")
            dynamic = [array.get("slurm.dynamic_feature") or array.get("slurm.dynamic_config") for array in (node, other)]
            if other is not node and not all(dynamic):
                yield Hit(named.line if named else node.section.line, node.partition, f"{other.name} and {node.name}")


def _accounting_needs(case: Case) -> Iterable[Hit]:
    for node in case.real:
        accounting = node.get("slurm.accounting.enabled")
        missing = [name for key in ("url", "user", "password") if not node.get(name := f"slurm.accounting.{key}")]
        if accounting and accounting.flag and node.role in ("", "scheduler") and missing:
            yield Hit(accounting.line, ", ".join(missing))


def _no_health(case: Case) -> Iterable[Hit]:
    for node in case.partitions:
        checks = node.get("EnableNodeHealthChecks")
        if any(size.gpus for size in node.sizes) and (checks is None or checks.flag is False):
            yield Hit(checks.line if checks else node.section.line, node.name, checks.shown if checks else "not set")


def _dampen(case: Case) -> Iterable[Hit]:
    return (Hit(setting.line, setting.raw) for setting in case.settings("slurm.dampen_memory")
            if setting.number is None or not 0 <= setting.number < 100)


def _in_config(pattern: str) -> Callable[[Case], Iterable[Hit]]:
    """Return a finder of lines in slurm.additional.config that match a pattern."""
    def find(case: Case) -> Iterable[Hit]:
        for setting in case.settings("slurm.additional.config"):
            for match in re.finditer(pattern, setting.text, re.IGNORECASE | re.MULTILINE):
                below = setting.text[:match.start()].count("\n") if "\n" in setting.raw else 0
                yield Hit(setting.line + below, match[0].strip())
    return find


def _no_execute(case: Case) -> Iterable[Hit]:
    """Find nodes without the spec execute, in clusters that get Slurm from Azure's project and not from an image."""
    for cluster in case.clusters:
        if any(name.startswith(tuple(_PROJECT + role for role in _ROLES)) for node in cluster.real for name in node.specs):
            yield from (Hit(node.section.line, node.name) for node in cluster.partitions
                        if not any(name.startswith(f"{_PROJECT}execute") for name in node.specs))


RULES: tuple[Rule[Case], ...] = (
    Rule("CC401", "error", _many_defaults,
         "{it} is a second default partition (the first is {advice}): jobs without --partition go to either of them.",
         "Set slurm.default_partition = true in one node array only."),
    Rule("CC402", "warning", _no_default, "None of the partitions {it} is the default: Slurm refuses jobs without --partition.",
         "Set slurm.default_partition = true in one of them."),
    Rule("CC403", "error", _same_partition, "Two node arrays ({advice}) have the partition {it}: cyclecloud-slurm omits both.",
         "Give each its own name; only arrays with slurm.dynamic_feature may share a partition."),
    Rule("CC406", "error", _accounting_needs,
         "Accounting is on, but {it} is missing: slurmdbd does not start, and slurmctld waits for it.", "Set what is missing."),
    Rule("CC407", "warning", _no_health,
         "EnableNodeHealthChecks of {it} is {advice}: a machine with a broken GPU or port gets jobs, and they fail.",
         "Set EnableNodeHealthChecks = true."),
    Rule("CC408", "error", _dampen, "slurm.dampen_memory = {it} is not a whole number of per cent: azslurm scale fails.",
         "Write 5 for 5 %."),
    Rule("CC410", "error", _in_config(r"^[ \t]*TopologyPlugin\s*=\s*topology/block\b"),
         "{it} without a topology.conf keeps slurmctld from starting, and autoscaling never writes that file.",
         "Delete the line; let a script switch it on once the nodes exist, for partitions of a fixed size."),
    Rule("CC421", "warning", _in_config(r"^[ \t]*(SuspendTime|ResumeTimeout)\s*=\s*\d{1,2}[ \t]*(?:#.*)?$"),
         "\"{it}\": a machine takes minutes to start, so Slurm gives it up before it is ready, or stops it between two jobs.",
         "Write SuspendTime = 300 and ResumeTimeout = 1800 or more."),
    Rule("CC423", "warning", _no_execute,
         "The nodes of {it} do not run cyclecloud/slurm:execute: without slurmd, jobs wait for them until ResumeTimeout.",
         "Add [[[cluster-init cyclecloud/slurm:execute]]] to the node array or to a node that it extends."),
)
