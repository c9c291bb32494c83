"""CC3xx and CC7xx: required attributes of each node after inheritance, and the files of its project."""

import re
from collections.abc import Iterable, Iterator

from hpc_mp.base.findings import Hit, Rule
from hpc_mp.base.rule_table import rules_of
from hpc_mp.clouds.azure.case import SOFTWARE, Case, extends, misspelt
from hpc_mp.clouds.azure.files import Project

_IMAGES = ("ImageName", "Image", "ImageId", "Azure.ImageId", "Azure.Publisher")  # one of them
_REQUIRED = {name: (name,) for name in ("MachineType", "SubnetId", "Credentials", "Region")} | {"image (ImageName)": _IMAGES}
_NAMES = {"nodearray": "node", "configuration": "slurm"}  # table of valid names, if it is not called like the section


def _missing(case: Case) -> Iterable[Hit]:
    return (Hit(node.section.line, what, f"{node.section.kind} {node.name}")
            for node in case.real for what, names in _REQUIRED.items() if not any(map(node.get, names)))


def _unknown_base(case: Case) -> Iterable[Hit]:
    for cluster in case.clusters:
        names = {node.name.casefold(): node.name for node in cluster.nodes}
        for name, line in (base for node in cluster.nodes for base in extends(node.section)):
            if name.casefold() not in names and not name.startswith("$"):
                near = misspelt(name, names.values(), 0.7)
                yield Hit(line, name, f"write {near}" if near else "name a node of this cluster")


def _misspelt(case: Case) -> Iterable[Hit]:
    for section in case.sections:
        names = case.offer.names.get(_NAMES.get(section.key, section.key), ())
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


def _unconfigured(case: Case) -> Iterable[Hit]:
    return (Hit(attribute.line, attribute.name) for cluster in case.clusters for node in cluster.nodes
            for attribute in node.section.attributes if attribute.key.startswith(SOFTWARE))


def _own(case: Case) -> Iterator[tuple[int, Project, str, str]]:
    """Yield (line, project, spec, version) of the sections ``[[[cluster-init LOCKER/project:spec:version]]]`` of this project."""
    for section in case.sections if case.project else ():
        match = re.fullmatch(r"(?:[\w.\-]+/)*([\w.\-]+):(?!\d+\.\d)([\w.\-]+)(?::(\$?[\w.\-]+))?", section.name)
        if case.project and section.key == "cluster-init" and match and match[1].casefold() == case.project.name.casefold():
            yield section.line, case.project, match[2], match[3] or ""


def _no_spec(case: Case) -> Iterable[Hit]:
    return (Hit(line, spec, ", ".join(project.specs) or "none") for line, project, spec, _ in _own(case)
            if spec not in project.specs)


def _version(case: Case) -> Iterable[Hit]:
    return (Hit(line, f"{spec}:{version}", project.version) for line, project, spec, version in _own(case)
            if version[:1].isalnum() and project.version and version != project.version)


def _cannot_run(case: Case) -> Iterable[Hit]:
    return (Hit(1, path.name, file=str(path)) for path, line in (case.project.scripts if case.project else {}).items()
            if path.suffix not in (".bat", ".ps1", ".cmd") and not re.fullmatch(rb"#![ \t]*/\S[^\r]*", line))


RULES: tuple[Rule[Case], ...] = rules_of("cyclecloud/template-rules.toml", {
    "CC301": _missing,
    "CC303": _unknown_base,
    "CC307": _misspelt,
    "CC312": _never_scales,
    "CC324": _unconfigured,
    "CC704": _no_spec,
    "CC705": _version,
    "CC708": _cannot_run,
})
