"""CC3xx, CC4xx and CC7xx: required attributes of each node after inheritance, settings of cyclecloud-slurm, and the files of
its project."""

import re
from collections.abc import Callable, Iterable, Iterator

from cyclecloud_lint.case import SOFTWARE, Case, ResolvedNode, extends, misspelt
from cyclecloud_lint.tables import rules_of, table
from cyclecloud_lint.template import Project
from hpc_mp.base.findings import Hit, Rule

_IMAGES = ("ImageName", "Image", "ImageId", "Azure.ImageId", "Azure.Publisher")  # one of them
_REQUIRED = {name: (name,) for name in ("MachineType", "SubnetId", "Credentials", "Region")} | {"image (ImageName)": _IMAGES}
_NAMES = {"nodearray": "node", "configuration": "slurm"}  # table of valid names, if it is not called like the section


def _unknown_base(case: Case) -> Iterable[Hit]:
    for cluster in case.clusters:
        names = {node.name.casefold(): node.name for node in cluster.nodes}
        for name, line in (base for node in cluster.nodes for base in extends(node.section)):
            if name.casefold() not in names and not name.startswith("$"):
                near = misspelt(name, names.values(), 0.7)
                yield Hit(line, name, f"write {near}" if near else "name a node of this cluster")


def _misspelt(case: Case) -> Iterable[Hit]:
    for section in case.sections:
        names = table("names.toml").get(_NAMES.get(section.key, section.key), ())
        prefix = f"{section.name}." if section.key == "configuration" and section.name else ""
        for name, line in ((prefix + attribute.name, attribute.line) for attribute in section.attributes):
            near = misspelt(name, [other for other in names if ("." in other) == ("." in name)], 0.87)
            if near and (section.key != "configuration" or name.casefold().startswith("slurm")):
                yield Hit(line, name, near)


def _never_scales(case: Case) -> Iterable[Hit]:
    for cluster in case.clusters:
        autoscale = cluster.autoscale
        scaled = [node.partition for node in cluster.partitions if (own := node.get("slurm.autoscale")) and own.flag]
        if scaled and (autoscale is None or autoscale.flag is False):
            yield Hit(autoscale.line if autoscale else cluster.section.line, ", ".join(scaled))


def _own(case: Case) -> Iterator[tuple[int, Project, str, str]]:
    """Yield (line, project, spec, version) of the sections ``[[[cluster-init LOCKER/project:spec:version]]]`` of this project."""
    for section in case.sections if case.project else ():
        match = re.fullmatch(r"(?:[\w.\-]+/)*([\w.\-]+):(?!\d+\.\d)([\w.\-]+)(?::(\$?[\w.\-]+))?", section.name)
        if case.project and section.key == "cluster-init" and match and match[1].casefold() == case.project.name.casefold():
            yield section.line, case.project, match[2], match[3] or ""


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


RULES: tuple[Rule[Case], ...] = rules_of({
    "CC301": lambda case: (Hit(node.section.line, what, f"{node.section.kind} {node.name}") for node in case.real
                           for what, names in _REQUIRED.items() if not any(map(node.get, names))),
    "CC303": _unknown_base,
    "CC307": _misspelt,
    "CC312": _never_scales,
    "CC324": lambda case: (Hit(attribute.line, attribute.name) for cluster in case.clusters for node in cluster.nodes
                           for attribute in node.section.attributes if attribute.key.startswith(SOFTWARE)),
    "CC704": lambda case: (Hit(line, spec, ", ".join(project.specs) or "none") for line, project, spec, _ in _own(case)
                           if spec not in project.specs),
    "CC705": lambda case: (Hit(line, f"{spec}:{version}", project.version) for line, project, spec, version in _own(case)
                           if version[:1].isalnum() and project.version and version != project.version),
    "CC708": lambda case: (Hit(1, path.name, file=str(path)) for path, line in (
        case.project.scripts if case.project else {}).items() if path.suffix not in (".bat", ".ps1", ".cmd")
                           and not re.fullmatch(rb"#![ \t]*/\S[^\r]*", line)),
    "CC401": _many_defaults,
    "CC402": _no_default,
    "CC403": _same_partition,
    "CC406": _accounting_needs,
    "CC407": _no_health,
    "CC408": lambda case: (Hit(setting.line, setting.raw) for setting in case.settings("slurm.dampen_memory")
                           if setting.number is None or not 0 <= setting.number < 100),
    "CC410": _in_config(r"^[ \t]*TopologyPlugin\s*=\s*topology/block\b"),
    "CC421": _in_config(r"^[ \t]*(SuspendTime|ResumeTimeout)\s*=\s*\d{1,2}[ \t]*(?:#.*)?$"),
    "CC423": _no_execute,
})
