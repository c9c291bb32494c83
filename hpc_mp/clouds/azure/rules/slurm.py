"""CC4xx: settings of cyclecloud-slurm: partitions, accounting, health, memory."""

import re
from collections.abc import Callable, Iterable

from hpc_mp.base.findings import Hit, Rule
from hpc_mp.base.rule_table import rules_of
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


RULES: tuple[Rule[Case], ...] = rules_of("cyclecloud/template-rules.toml", {
    "CC401": _many_defaults,
    "CC402": _no_default,
    "CC403": _same_partition,
    "CC406": _accounting_needs,
    "CC407": _no_health,
    "CC408": _dampen,
    "CC410": _in_config(r"^[ \t]*TopologyPlugin\s*=\s*topology/block\b"),
    "CC421": _in_config(r"^[ \t]*(SuspendTime|ResumeTimeout)\s*=\s*\d{1,2}[ \t]*(?:#.*)?$"),
    "CC423": _no_execute,
})
