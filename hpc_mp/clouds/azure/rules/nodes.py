"""CC3xx: what each node needs after inheritance, and what does not go together."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from hpc_mp.base.findings import Hit, Rule
from hpc_mp.clouds.azure.context import Case
from hpc_mp.clouds.azure.partitions import partitions
from hpc_mp.clouds.azure.project import reference
from hpc_mp.clouds.azure.resolve import DEFAULTS, ResolvedCluster, ResolvedNode, ResolvedSetting, extends, setting
from hpc_mp.clouds.azure.value import names_of
from hpc_mp.clouds.azure.vocabulary import ARRAY_ATTRIBUTES, BOOLEANS, NODE_ATTRIBUTES, NODE_KINDS, SECTION_ATTRIBUTES, meant

REQUIRED = ("MachineType", "SubnetId", "Credentials", "Region")
IMAGES = ("ImageName", "Image", "ImageId", "Azure.ImageId", "Azure.Publisher")
_COUNTS = ("MaxCount", "MaxCoreCount", "InitialCount", "InitialCoreCount", "Azure.MaxScalesetSize")
_SUBNET = re.compile(r"[^/\s]+/[^/\s]+/[^/\s]+|/subscriptions/[^/]+/resourceGroups/[^/]+/providers/Microsoft\.Network/"
                     r"virtualNetworks/[^/]+/subnets/[^/]+", re.IGNORECASE)
_URN = re.compile(r"[^:\s/]+:[^:\s/]+:[^:\s/]+:[^:\s/]+")
_ID = re.compile(r"/(subscriptions|sharedGalleries|communityGalleries)/\S+", re.IGNORECASE)
_PLAIN = re.compile(r"[^:/\s]+")


def _missing(case: Case) -> Iterable[Hit]:
    return (Hit(node.line, name, f"{node.kind} {node.name}")
            for node in case.real for name in REQUIRED if node.get(name) is None)


def _no_image(case: Case) -> Iterable[Hit]:
    return (Hit(node.line, f"{node.kind} {node.name}") for node in case.real if not any(node.get(name) for name in IMAGES))


def _unknown_base(case: Case) -> Iterable[Hit]:
    for cluster in case.clusters:
        names = [node.name for node in cluster.nodes]
        lower = {name.casefold() for name in names}
        for node in cluster.nodes:
            for name, line in extends(node.section):
                if name.casefold() not in lower and not name.startswith("$"):
                    near = meant(name, names, 0.7)
                    yield Hit(line, name, f"write {near}" if near else "name a node of this cluster")


def _cycle(case: Case) -> Iterable[Hit]:
    for cluster in case.clusters:
        for section, way in cluster.cycles:
            yield Hit(extends(section)[0][1], way)


def _own(node: ResolvedNode, name: str) -> ResolvedSetting | None:
    """An attribute that the node itself sets."""
    found = node.get(name)
    return found if found and any(each.key == name.casefold() for each in node.section.attributes) else None


def _once(hits: Iterable[Hit]) -> Iterator[Hit]:
    """One hit a line: what several nodes inherit is said once."""
    seen: set[int] = set()
    for hit in hits:
        if hit.line not in seen:
            yield hit
        seen.add(hit.line)


def _subnet(case: Case) -> Iterable[Hit]:
    found = (node.get("SubnetId") for node in case.nodes)
    return _once(Hit(each.line, f"{each.text}{each.via}") for each in found
                 if each and each.text and not _SUBNET.fullmatch(each.text))


def _image_form(case: Case) -> Iterable[Hit]:
    for node in case.nodes:
        for name in IMAGES:
            each = node.get(name)
            if each and each.text and not any(form.fullmatch(each.text) for form in (_URN, _ID, _PLAIN)):
                yield Hit(each.line, f"{each.text}{each.via}")


def _misspelt(case: Case) -> Iterable[Hit]:
    known = SECTION_ATTRIBUTES | dict.fromkeys(NODE_KINDS, (*NODE_ATTRIBUTES, *ARRAY_ATTRIBUTES))
    for section in case.sections:
        for each in section.attributes:
            alike = [name for name in known.get(section.kind.casefold(), ()) if ("." in name) == ("." in each.name)]
            if near := meant(each.name, alike, 0.85):
                yield Hit(each.line, each.name, near)


def _no_boolean(case: Case) -> Iterable[Hit]:
    """The value of a parameter that is to be true or false is judged where it is given."""
    judged = {each.name.casefold() for each in case.parameters if each.kind == "boolean"}
    for section in case.sections:
        kind = section.kind.casefold()
        prefix = section.name if kind == "configuration" else ""
        for each in section.attributes if kind in (*NODE_KINDS, *SECTION_ATTRIBUTES, "configuration") else ():
            found = setting(each, case.values, prefix)
            said = found.known and found.value is not None and each.raw and found.parameter.casefold() not in judged
            if found.name.casefold() in BOOLEANS and said and not found.is_true and not found.is_false:
                yield Hit(each.line, f"{found.name} = {each.raw[:30]}{found.via}")


def _stored(case: Case) -> Iterable[Hit]:
    """A literal of a node that names a parameter."""
    known = {each.name.casefold() for each in case.parameters}
    for node in case.nodes:
        for section in (node.section, *node.section.sections):
            for each in section.attributes:
                named = [name for name in names_of(each) if name.casefold() in known] if each.assign == ":=" else []
                if named:
                    yield Hit(each.line, f"{each.name} := {each.raw[:40]}", named[0])


def _no_count(case: Case) -> Iterable[Hit]:
    for node in case.nodes:
        for name in _COUNTS:
            each = node.get(name)
            is_count = each and ((each.number is not None and each.number >= 0) or isinstance(each.value, bool))
            if each and each.known and not is_count:
                yield Hit(each.line, f"{each.name} = {each.raw[:30]}{each.via}")


def _more_than_most(case: Case) -> Iterable[Hit]:
    for node in case.real:
        first, most = node.get("InitialCount"), node.get("MaxCount")
        if first and most and first.number is not None and most.number is not None and first.number > most.number:
            yield Hit(first.line, f"InitialCount = {first.number}", f"MaxCount = {most.number} of line {most.line}")


def _unlimited(case: Case) -> Iterable[Hit]:
    for cluster in case.clusters:
        scaled = cluster.attributes.get("autoscale")
        for node in cluster.real if scaled and not scaled.is_false else ():
            open_ended = not node.get("MaxCount") and not node.get("MaxCoreCount")
            if node.is_array and open_ended and not node.is_false("autoscale.enabled"):
                yield Hit(node.line, node.name)


def _nothing_to_scale(case: Case) -> Iterable[Hit]:
    for cluster in case.clusters:
        found = cluster.attributes.get("autoscale")
        if found and found.is_true and not any(node.is_array for node in cluster.real):
            yield Hit(found.line)


def _never_scales(case: Case) -> Iterable[Hit]:
    for cluster in case.clusters:
        found = cluster.attributes.get("autoscale")
        scaled = [each for each in partitions(cluster, case.offer) if each.node.is_true("slurm.autoscale")]
        if scaled and (found is None or found.is_false):
            yield Hit(found.line if found else cluster.line, ", ".join(each.name for each in scaled))


def _of_arrays(case: Case) -> Iterable[Hit]:
    for node in case.nodes:
        for name in ARRAY_ATTRIBUTES if not node.is_array and not node.is_abstract else ():
            if each := _own(node, name):
                yield Hit(each.line, each.name)


def _computer_name(case: Case) -> Iterable[Hit]:
    for node in case.real:
        each = node.get("ComputerName")
        if node.is_array and each:
            yield Hit(each.line if _own(node, "ComputerName") else node.line, node.name)


def _idle_base(case: Case) -> Iterable[Hit]:
    for cluster in case.clusters:
        bases = {name.casefold() for node in cluster.nodes for name in node.extends}
        for node in cluster.nodes:
            if node.is_abstract and node.name.casefold() not in bases | {DEFAULTS}:
                yield Hit(node.line, node.name)


def _price(case: Case) -> Iterable[Hit]:
    for node in case.real:
        each, spot = node.get("MaxPrice"), node.get("Interruptible")
        value = each.value if each and isinstance(each.value, int | float) else None
        if each and value is not None and spot and spot.is_true and value <= 0 and value != -1:
            yield Hit(each.line, f"{each.raw}{each.via}")


def _price_alone(case: Case) -> Iterable[Hit]:
    for node in case.real:
        each, spot = node.get("MaxPrice"), node.get("Interruptible")
        if each and each.known and spot is None:
            yield Hit(each.line, node.name)


def _public(case: Case) -> Iterable[Hit]:
    open_: dict[int, list[str]] = {}
    for node in case.real:
        for (kind, _), part in node.parts.items() if node.is_array and not _is_head(node) else ():
            for each in part.attributes if kind == "network-interface" else ():
                if each.key == "associatepublicipaddress" and setting(each, case.values).is_true:
                    open_.setdefault(each.line, []).append(node.name)
    return (Hit(line, ", ".join(nodes)) for line, nodes in open_.items())


def _no_scheduler(case: Case) -> Iterable[Hit]:
    for cluster in case.clusters:
        if partitions(cluster, case.offer) and not any(map(_schedules, cluster.real)):
            yield Hit(cluster.line, cluster.name)


def _schedules(node: ResolvedNode) -> bool:
    """By its role, or by the spec that it runs, as older templates have it."""
    role = node.configured("slurm.role")
    specs = [name.split(":") for kind, name in node.parts if kind == "cluster-init"]
    named = any("scheduler" in spec or "master" in spec for spec in specs)
    return named or (role is not None and (not role.known or role.text == "scheduler"))


def _is_head(node: ResolvedNode) -> bool:
    """Whether users are meant to reach it: a second scheduler, or a login node."""
    role = node.configured("slurm.role")
    return _schedules(node) or (role is not None and role.text == "login") or node.name.casefold() == "login"


def _no_nodes(case: Case) -> Iterable[Hit]:
    return (Hit(cluster.line, cluster.name) for cluster in case.clusters if not cluster.real)


def _same_name(case: Case) -> Iterable[Hit]:
    for cluster in case.clusters:
        yield from _names(cluster)


def _names(cluster: ResolvedCluster) -> Iterable[Hit]:
    first: dict[str, int] = {}
    for section in cluster.section.sections:
        if section.kind.casefold() in NODE_KINDS and section.name:
            if section.name.casefold() in first:
                yield Hit(section.line, section.name, f"line {first[section.name.casefold()]}")
            first.setdefault(section.name.casefold(), section.line)


def _init_form(case: Case) -> Iterable[Hit]:
    for section in case.sections:
        said = any(sign in section.name for sign in ":/ ")  # a bare name is one that attributes describe
        if section.kind.casefold() == "cluster-init" and said and reference(section) is None:
            yield Hit(section.line, section.name)


def _unconfigured(case: Case) -> Iterable[Hit]:
    for node in case.nodes:
        for each in node.section.attributes:
            if each.key.startswith(("slurm.", "cyclecloud.")):
                yield Hit(each.line, each.name)


def _region_name(case: Case) -> Iterable[Hit]:
    found = (node.get("Region") for node in case.nodes)
    return _once(Hit(each.line, f"{each.text}{each.via}", each.text.replace(" ", "").lower()) for each in found
                 if each and each.text and not re.fullmatch(r"[a-z0-9]+", each.text))


RULES: tuple[Rule[Case], ...] = (
    Rule("CC301", "error", _missing, "{advice} has no {it}, neither of its own nor inherited: it cannot start.",
         "Set {it} here or in [[node defaults]]."),
    Rule("CC302", "error", _no_image, "{it} has no image: it cannot start.",
         "Set ImageName to a cycle.image.… name, a URN (publisher:offer:sku:version) or an image's id."),
    Rule("CC303", "error", _unknown_base,
         "Extends names {it}, and this cluster has no such node: nothing is inherited, or the import fails.", "{advice}."),
    Rule("CC304", "error", _cycle, "Inheritance goes in a circle: {it}.",
         "Let one of them extend nothing; put what they share into an Abstract node."),
    Rule("CC305", "error", _subnet, "SubnetId {it} has not the form of a subnet, and no node gets an address.",
         "Write resource-group/virtual-network/subnet, or the subnet's full id."),
    Rule("CC306", "error", _image_form, "{it} is neither a name (cycle.image.ubuntu22), a URN of four parts nor an image's id.",
         "Write publisher:offer:sku:version, or /subscriptions/…."),
    Rule("CC307", "warning", _misspelt,
         "{it} looks like a misspelling: an attribute that CycleCloud does not know is ignored without a word.",
         "Write {advice}."),
    Rule("CC308", "error", _no_count, "{it} is no number of nodes.", "Write a whole number, 0 or more."),
    Rule("CC309", "error", _more_than_most, "{it} is more than {advice}: the nodes beyond it never start.",
         "Raise MaxCount or lower InitialCount."),
    Rule("CC310", "warning", _unlimited,
         "{it} has neither MaxCount nor MaxCoreCount: one wrong job may start as many nodes as the quota allows.",
         "Set MaxCount."),
    Rule("CC311", "warning", _nothing_to_scale, "Autoscale is on, and there is no node array that could grow.",
         "Make a [[nodearray]], or leave Autoscale out."),
    Rule("CC312", "warning", _never_scales,
         "{it} asks for autoscaling (slurm.autoscale), and the cluster's Autoscale is off: nodes start by hand only.",
         "Set Autoscale = true in [cluster]."),
    Rule("CC313", "warning", _of_arrays, "{it} has no effect on a [[node]], which is one machine.",
         "Make it a [[nodearray]], or delete the line."),
    Rule("CC314", "warning", _computer_name, "The node array {it} has a ComputerName: all its machines would get the same one.",
         "Write ComputerName := undefined in it; ComputerNamePrefix is for arrays."),
    Rule("CC315", "info", _idle_base, "{it} is Abstract, and nobody extends it: it does nothing.",
         "Delete it, or write Extends = {it} where it is meant."),
    Rule("CC316", "error", _price, "MaxPrice {it} is no price that Azure takes: no Spot machine is ever granted.",
         "Write -1 (pay up to the normal price) or a price per hour above 0."),
    Rule("CC317", "info", _price_alone, "{it} has a MaxPrice and is not Interruptible: the price has no effect.",
         "Set Interruptible = true, or delete MaxPrice."),
    Rule("CC318", "warning", _public, "Every machine of {it} gets a public address and can be reached from the internet.",
         "Set AssociatePublicIpAddress = false; only the login or scheduler node needs one, if any."),
    Rule("CC319", "warning", _no_scheduler,
         "{it} has partitions, and no node with slurm.role = scheduler: unless it runs elsewhere, there is no slurmctld.",
         "Add a [[node scheduler]] with slurm.role = scheduler and cyclecloud/slurm:scheduler."),
    Rule("CC320", "warning", _no_nodes, "The cluster {it} has no node that could start.",
         "Add a [[node]] or [[nodearray]] that is not Abstract."),
    Rule("CC321", "error", _same_name, "A second node is called {it} ({advice} is the first): one of them is lost.",
         "Give it another name."),
    Rule("CC322", "error", _init_form, "cluster-init {it} is no reference to a spec.",
         "Write project:spec or project:spec:version, with LOCKER/ in front where it is needed."),
    Rule("CC323", "error", _region_name, "Region {it} is not the name of a region as Azure's interfaces take it.",
         "Write {advice}."),
    Rule("CC324", "warning", _unconfigured,
         "{it} stands in the node itself, where it is no setting of the software: nothing reads it.",
         "Put it under [[[configuration]]]."),
    Rule("CC325", "error", _no_boolean,
         "{it} is neither true nor false: CycleCloud and cyclecloud-slurm take some of such words for true and some for false.",
         "Write true or false; an expression stands in ${…}."),
    Rule("CC326", "error", _stored,
         "{it} stores these words in the node, and not the parameter's value: a literal is not worked out.",
         "Write = ${advice}, or = ${…} for an expression."),
)
