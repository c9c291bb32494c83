"""CC4xx: settings of cyclecloud-slurm: partitions, accounting, health, memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from hpc_mp.base.findings import Hit, Rule
from hpc_mp.clouds.azure.context import Case, meant
from hpc_mp.clouds.azure.project import reference
from hpc_mp.clouds.azure.resolve import ResolvedNode, ResolvedSetting

_ROLES = ("scheduler", "login", "execute")
_SPECS = ("default", *_ROLES)
_PAST_SPECS = {"master": ("1.", "2.0.", "2.1."), "pyxis": ("4.0.0", "4.0.1", "4.0.2")}  # former specs and their releases
_PROJECT = "cyclecloud/slurm:"
_UIDS = ("slurm.user.uid", "slurm.user.gid", "munge.user.uid", "munge.user.gid")
_GPUS = re.compile(r"(?i)gres=gpu(?::[a-z][\w.\-]*)?:(\d{1,4})|/dev/nvidia\[0-(\d{1,4})\]")


def _each(case: Case, name: str) -> Iterable[ResolvedSetting]:
    """Return all known values of a setting, once per line."""
    return {each.line: each for node in case.nodes if (each := node.configured(name)) and each.known}.values()


def _many_defaults(case: Case) -> Iterable[Hit]:
    for cluster in case.clusters:
        found = [(each.line, node.name) for node in cluster.partitions
                 if (each := node.configured("slurm.default_partition")) and each.is_true]
        yield from (Hit(line, name, f"{found[0][1]}, line {found[0][0]}") for line, name in found[1:])


def _no_default(case: Case) -> Iterable[Hit]:
    for cluster in case.clusters:
        found = cluster.partitions
        given = [node.configured("slurm.default_partition") for node in found]
        if len(found) > 1 and not any(each and (each.is_true or not each.known) for each in given):
            yield Hit(cluster.section.line, ", ".join(node.partition for node in found))


def _line(node: ResolvedNode) -> int:
    """Return the line of the partition's name, else of the node."""
    named = node.configured("slurm.partition")
    return named.line if named else node.line


def _same_partition(case: Case) -> Iterable[Hit]:
    for cluster in case.clusters:
        first: dict[str, ResolvedNode] = {}
        for node in cluster.partitions:
            other = first.setdefault(node.partition.casefold(), node)
            if other is not node and not (node.is_dynamic and other.is_dynamic):
                yield Hit(_line(node), node.partition, f"{other.name} and {node.name}")


def _accounting_needs(case: Case) -> Iterable[Hit]:
    for node in case.real:
        found = node.configured("slurm.accounting.enabled")
        missing = [name for key in ("url", "user", "password") if not node.configured(name := f"slurm.accounting.{key}")]
        if found and found.is_true and node.role in ("", "scheduler") and missing:
            yield Hit(found.line, ", ".join(missing))


def _no_health(case: Case) -> Iterable[Hit]:
    for node in case.partitions:
        found = node.get("EnableNodeHealthChecks")
        if any(size.gpus for size in node.sizes) and (found is None or found.is_false):
            yield Hit(found.line if found else node.line, node.name, found.shown if found else "not set")


def _dampen(case: Case) -> Iterable[Hit]:
    return (Hit(each.line, each.raw) for each in _each(case, "slurm.dampen_memory")
            if each.number is None or not 0 <= each.number < 100)


def _in_config(pattern: str) -> Callable[[Case], Iterable[Hit]]:
    """Return a finder of lines in slurm.additional.config that match a pattern."""
    def find(case: Case) -> Iterable[Hit]:
        for each in _each(case, "slurm.additional.config"):
            for found in re.finditer(pattern, each.text, re.IGNORECASE | re.MULTILINE):
                below = each.text[:found.start()].count("\n") if "\n" in each.raw else 0
                yield Hit(each.line + below, found[0].strip())
    return find


def _misspelt(case: Case) -> Iterable[Hit]:
    for part in (part for node in case.nodes for part in node.section.sections if part.key == "configuration"):
        for each in part.attributes:
            name = f"{part.name}.{each.name}".lstrip(".")
            if name.casefold().startswith("slurm") and (near := meant(name, case.offer.names["slurm"], 0.9)):
                yield Hit(each.line, name, near)


def _gres(case: Case) -> Iterable[Hit]:
    for node in case.partitions:
        for found in filter(None, map(node.configured, ("slurm.gpu_device_config", "slurm.dynamic_config"))):
            given = _GPUS.search(found.text)
            count = int(given[1]) if given and given[1] else int(given[2]) + 1 if given else None
            yield from (Hit(found.line, str(count), f"{size.name} has {size.gpus}") for size in node.sizes[:1]
                        if count is not None and count != size.gpus)


def _role(case: Case) -> Iterable[Hit]:
    return (Hit(each.line, each.raw, meant(each.text, _ROLES, 0.6) or "scheduler, login or execute")
            for each in _each(case, "slurm.role") if each.text.casefold() not in _ROLES)


def _slurm_spec(case: Case) -> Iterable[Hit]:
    for section in case.sections:
        found = reference(section) if section.key == "cluster-init" else None
        spec = found.spec.casefold() if found and section.name.casefold().startswith(_PROJECT) else "default"
        if found and spec not in _SPECS and not found.version.startswith(_PAST_SPECS.get(spec, ())):
            yield Hit(section.line, found.spec, meant(spec, _SPECS, 0.6) or "default, scheduler, login or execute")


def _no_execute(case: Case) -> Iterable[Hit]:
    """Find nodes without the spec execute, in clusters that get Slurm from Azure's project and not from an image or another
    project.
    """
    for cluster in case.clusters:
        brings = any(re.match(rf"{_PROJECT}(scheduler|login|execute)\b", name) for node in cluster.real for name in node.specs)
        yield from (Hit(node.line, node.name) for node in cluster.partitions
                    if brings and not any(re.match(rf"{_PROJECT}execute\b", name) for name in node.specs))


RULES: tuple[Rule[Case], ...] = (
    Rule("CC401", "error", _many_defaults,
         "{it} is a second default partition ({advice} is the first): where a job without --partition goes is an accident.",
         "Set slurm.default_partition = true in one node array only."),
    Rule("CC402", "warning", _no_default, "None of the partitions {it} is the default: every job without --partition is refused.",
         "Set slurm.default_partition = true in one of them."),
    Rule("CC403", "error", _same_partition,
         "The partition {it} belongs to two node arrays ({advice}): cyclecloud-slurm leaves both out.",
         "Name each its own; only arrays with slurm.dynamic_feature may share a partition."),
    Rule("CC406", "error", _accounting_needs,
         "Accounting is on, and {it} is missing: slurmdbd does not start, and slurmctld waits for it.", "Set what is missing."),
    Rule("CC407", "warning", _no_health,
         "EnableNodeHealthChecks of {it} is {advice}: a machine with a broken GPU or port takes jobs, and takes them down.",
         "Set EnableNodeHealthChecks = true."),
    Rule("CC408", "error", _dampen, "slurm.dampen_memory = {it} is no whole number of per cent: azslurm scale fails on it.",
         "Write 5 for 5 %."),
    Rule("CC410", "error", _in_config(r"^[ \t]*TopologyPlugin\s*=\s*topology/block\b"),
         "{it} before there is a topology.conf keeps slurmctld from starting, and autoscaling never writes one.",
         "Leave it out; switch it on by a script once the nodes exist, for partitions of a fixed size."),
    Rule("CC413", "warning", _misspelt, "{it} is no setting of cyclecloud-slurm, and is ignored.", "Write {advice}."),
    Rule("CC417", "error", _gres,
         "{it} GPUs are written down, and {advice}: slurmd finds another number and the node is drained.",
         "Correct the count, or leave the setting out: it is derived from the size."),
    Rule("CC421", "warning", _in_config(r"^[ \t]*(SuspendTime|ResumeTimeout)\s*=\s*(-1|\d{1,2})[ \t]*(?:#.*)?$"),
         "\"{it}\": machines take minutes to start, so they are given up before they are there, or paid for for ever.",
         "Keep SuspendTime = 300 and ResumeTimeout = 1800 or more."),
    Rule("CC422", "error", _role, "slurm.role = {it} is no role: the node is neither scheduler nor login nor execute node.",
         "Write {advice}."),
    Rule("CC423", "warning", _no_execute,
         "The nodes of {it} do not run cyclecloud/slurm:execute: they get no slurmd, and jobs wait for them until ResumeTimeout.",
         "Add [[[cluster-init cyclecloud/slurm:execute]]] to the node array or to what it extends."),
    Rule("CC424", "error", _slurm_spec, "cyclecloud/slurm has no spec {it}: the node stops while it starts.", "Write {advice}."),
)
