"""CC3xx and CC7xx: required attributes of each node after inheritance, and the files of its project."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from hpc_mp.base.findings import Hit, Rule
from hpc_mp.clouds.azure.context import Case, meant
from hpc_mp.clouds.azure.project import InitScript, Project, Reference, reference
from hpc_mp.clouds.azure.resolve import ResolvedSetting, extends
from hpc_mp.clouds.azure.template import NODE_KINDS

REQUIRED = ("MachineType", "SubnetId", "Credentials", "Region")
IMAGES = ("ImageName", "Image", "ImageId", "Azure.ImageId", "Azure.Publisher")
_COUNTS = ("MaxCount", "MaxCoreCount", "InitialCount", "InitialCoreCount", "Azure.MaxScalesetSize")
_SUBNET = re.compile(r"[^/\s]+/[^/\s]+/[^/\s]+|/subscriptions/[^/]+/resourceGroups/[^/]+/providers/Microsoft\.Network/"
                     r"virtualNetworks/[^/]+/subnets/[^/]+", re.IGNORECASE)


def _where(name: str, wrong: Callable[[ResolvedSetting], bool]) -> Callable[[Case], Iterable[Hit]]:
    """Return a finder of an attribute with a wrong value, once per line even if several nodes inherit it."""
    def find(case: Case) -> Iterable[Hit]:
        found = {each.line: each for node in case.nodes if (each := node.get(name)) and each.known}
        return (Hit(each.line, each.shown, each.text.replace(" ", "").lower()) for each in found.values() if wrong(each))
    return find


def _missing(case: Case) -> Iterable[Hit]:
    return (Hit(node.line, name, f"{node.section.kind} {node.name}")
            for node in case.real for name in REQUIRED if node.get(name) is None)


def _no_image(case: Case) -> Iterable[Hit]:
    return (Hit(node.line, f"{node.section.kind} {node.name}") for node in case.real if not any(map(node.get, IMAGES)))


def _unknown_base(case: Case) -> Iterable[Hit]:
    for cluster in case.clusters:
        names = {node.name.casefold(): node.name for node in cluster.nodes}
        for name, line in (each for node in cluster.nodes for each in extends(node.section)):
            if name.casefold() not in names and not name.startswith("$"):
                near = meant(name, names.values(), 0.7)
                yield Hit(line, name, f"write {near}" if near else "name a node of this cluster")


def _misspelt(case: Case) -> Iterable[Hit]:
    for section in case.sections:
        known = case.offer.names.get("node" if section.key in NODE_KINDS else section.key, ())
        for each in section.attributes:
            if near := meant(each.name, [name for name in known if ("." in name) == ("." in each.name)], 0.85):
                yield Hit(each.line, each.name, near)


def _no_count(case: Case) -> Iterable[Hit]:
    for node in case.nodes:
        for each in filter(None, map(node.get, _COUNTS)):
            if each.known and not isinstance(each.value, bool) and (each.number is None or each.number < 0):
                yield Hit(each.line, f"{each.name} = {each.shown}")


def _never_scales(case: Case) -> Iterable[Hit]:
    for cluster in case.clusters:
        found = cluster.autoscale
        scaled = [node.partition for node in cluster.partitions if (each := node.configured("slurm.autoscale")) and each.is_true]
        if scaled and (found is None or found.is_false):
            yield Hit(found.line if found else cluster.section.line, ", ".join(scaled))


def _computer_name(case: Case) -> Iterable[Hit]:
    for node in case.real:
        each = node.get("ComputerName")
        if node.is_array and each:
            yield Hit(each.line if any(own.line == each.line for own in node.section.attributes) else node.line, node.name)


def _same_name(case: Case) -> Iterable[Hit]:
    for cluster in case.clusters:
        first: dict[str, int] = {}
        for node in cluster.nodes:
            if node.name and first.setdefault(node.name.casefold(), node.line) != node.line:
                yield Hit(node.line, node.name, f"line {first[node.name.casefold()]}")


def _init_form(case: Case) -> Iterable[Hit]:
    return (Hit(section.line, section.name) for section in case.sections if section.key == "cluster-init"
            and any(sign in section.name for sign in ":/ ") and reference(section) is None)  # a bare name has attributes instead


def _unconfigured(case: Case) -> Iterable[Hit]:
    return (Hit(each.line, each.name) for node in case.nodes for each in node.section.attributes
            if each.key.startswith(("slurm.", "cyclecloud.")))


# --- the project ------------------------------------------------------------------------------------------------------


def _own(case: Case) -> Iterator[tuple[int, Project, Reference]]:
    """Yield the references to specs of this project, with their lines."""
    for section in case.sections:
        found = reference(section) if section.key == "cluster-init" else None
        if case.project and case.project.name and found and found.project.casefold() == case.project.name.casefold():
            yield section.line, case.project, found


def _no_spec(case: Case) -> Iterable[Hit]:
    return (Hit(line, found.spec, ", ".join(project.specs) or "none") for line, project, found in _own(case)
            if found.spec not in project.specs)


def _version(case: Case) -> Iterable[Hit]:
    return (Hit(line, f"{found.project}:{found.spec}:{found.version}", project.version) for line, project, found in _own(case)
            if found.version[:1].isalnum() and project.version and found.version != project.version)


def _of_scripts(wrong: Callable[[InitScript], bool]) -> Callable[[Case], Iterable[Hit]]:
    return lambda case: (Hit(1, script.name, file=script.file) for script in (case.project.scripts if case.project else ())
                         if wrong(script))


def _no_shebang(script: InitScript) -> bool:
    return not script.name.endswith((".bat", ".ps1", ".cmd")) and not re.match(r"#![ \t]*/\S", script.text)


RULES: tuple[Rule[Case], ...] = (
    Rule("CC301", "error", _missing, "{advice} has no {it}, neither of its own nor inherited: it cannot start.",
         "Set {it} here or in [[node defaults]]."),
    Rule("CC302", "error", _no_image, "{it} has no image: it cannot start.",
         "Set ImageName to a cycle.image.… name, a URN (publisher:offer:sku:version) or an image's id."),
    Rule("CC303", "error", _unknown_base,
         "Extends names {it}, and this cluster has no such node: nothing is inherited, or the import fails.", "{advice}."),
    Rule("CC305", "error", _where("SubnetId", lambda each: bool(each.text) and not _SUBNET.fullmatch(each.text)),
         "SubnetId {it} has not the form of a subnet, and no node gets an address.",
         "Write resource-group/virtual-network/subnet, or the subnet's full id."),
    Rule("CC307", "warning", _misspelt,
         "{it} looks like a misspelling: an attribute that CycleCloud does not know is ignored.", "Write {advice}."),
    Rule("CC308", "error", _no_count, "{it} is no number of nodes.", "Write a whole number, 0 or more."),
    Rule("CC312", "warning", _never_scales,
         "{it} asks for autoscaling (slurm.autoscale), and the cluster's Autoscale is off: nodes start by hand only.",
         "Set Autoscale = true in [cluster]."),
    Rule("CC314", "warning", _computer_name, "The node array {it} has a ComputerName: all its machines would get the same one.",
         "Write ComputerName := undefined in it; ComputerNamePrefix is for arrays."),
    Rule("CC321", "error", _same_name, "A second node is called {it} ({advice} is the first): one of them is lost.",
         "Give it another name."),
    Rule("CC322", "error", _init_form, "cluster-init {it} is no reference to a spec.",
         "Write project:spec or project:spec:version, with LOCKER/ in front where it is needed."),
    Rule("CC323", "error", _where("Region", lambda each: bool(each.text) and not re.fullmatch(r"[a-z0-9]+", each.text)),
         "Region {it} is not the name of a region as Azure's interfaces take it.", "Write {advice}."),
    Rule("CC324", "warning", _unconfigured,
         "{it} stands in the node itself, where it is no setting of the software: nothing reads it.",
         "Put it under [[[configuration]]]."),
    Rule("CC704", "error", _no_spec, "The project has no spec {it} (it has: {advice}): the node stops while it starts.",
         "Make specs/{it}/cluster-init, or name a spec that exists."),
    Rule("CC705", "warning", _version,
         "{it} is asked for, and the project here is version {advice}: the node runs other scripts than these, or finds none.",
         "Write {advice}, or leave the version out for the newest."),
    Rule("CC708", "error", _of_scripts(_no_shebang),
         "{it} does not begin with #! and the path of a program, so the kernel does not know what to run it with.",
         "Begin it with #!/bin/bash, with nothing before it, no mark of the byte order either."),
    Rule("CC710", "error", _of_scripts(lambda script: "\r\n" in script.text),
         "{it} has line ends of Windows: the kernel looks for an interpreter called \"bash\\r\".",
         "Save it with Unix line ends (sed -i 's/\\r$//')."),
)
