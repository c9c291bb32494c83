"""The input of the linter's rules: a template with the values of its parameters and its nodes after inheritance.

A node's attributes override those of the nodes that it extends, which override ``[[node defaults]]``.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cyclecloud_lint.expression import UNKNOWN, Value, worth
from cyclecloud_lint.template import NODE_KINDS, Attribute, ParameterFile, Parsed, Project, TemplateSection, parse
from hpc_mp.base.text import nearest
from hpc_mp.catalogue import MachineType
from hpc_mp.clouds.azure.offer import Offer, load_offer

DEFAULTS = "defaults"
SOFTWARE = ("slurm.", "cyclecloud.")  # prefixes of settings that count in [[[configuration]]] only
_DEEPEST = 50  # nodes that extend each other


@dataclass(frozen=True, slots=True)
class ResolvedSetting:
    """An effective attribute of a node."""

    name: str  # full name, with the prefix of its configuration
    value: Value  # value; UNKNOWN if it depends on values that are not known before the cluster is created
    raw: str
    line: int  # line of its definition, possibly in another node
    parameter: str  # the parameter that is its whole value, if any

    @property
    def flag(self) -> bool | None:
        """The value as a boolean; None if it is not one."""
        return {"true": True, "false": False}.get(str(self.value).casefold())

    @property
    def text(self) -> str:
        """The value as text; a list as written; "" if it is neither."""
        return self.raw.strip("\"") if isinstance(self.value, tuple) else self.value if isinstance(self.value, str) else ""

    @property
    def number(self) -> int | None:
        return int(str(self.value)) if re.fullmatch(r"\s*-?\d{1,17}\s*", str(self.value)) else None

    @property
    def words(self) -> tuple[str, ...]:
        """The items of a list or of a text with commas."""
        items = self.value if isinstance(self.value, tuple) else self.text.split(",")
        return tuple(str(item).strip() for item in items if str(item).strip())

    @property
    def shown(self) -> str:
        """The value as text, with its parameter."""
        value = str(self.value).lower() if isinstance(self.value, bool | int | float) else self.text or self.raw[:40]
        return value + (f" (${self.parameter})" if self.parameter else "")


@dataclass(frozen=True, slots=True)
class ResolvedNode:
    """A node or node array of a cluster."""

    section: TemplateSection
    # attributes and settings of ``[[[configuration]]]`` by name in lower case, without those that are ``undefined``
    settings: Mapping[str, ResolvedSetting]
    specs: frozenset[str]  # names of its cluster-init sections, in lower case
    sizes: tuple[MachineType, ...]  # sizes of its MachineType that are in the catalogue

    @property
    def name(self) -> str:
        return self.section.name

    @property
    def is_abstract(self) -> bool:
        own = [attribute.plain.casefold() for attribute in self.section.attributes if attribute.key == "abstract"]
        return self.name.casefold() == DEFAULTS or own[-1:] == ["true"]

    @property
    def role(self) -> str:
        role = self.get("slurm.role")
        return role.text.casefold() if role else ""

    @property
    def partition(self) -> str:
        """The name of its Slurm partition, "" if it has none: a node array with partition settings has one, unless
        slurm.autoscale is false.
        """
        scaled, named = self.get("slurm.autoscale"), self.get("slurm.partition")
        of_slurm = scaled or named or self.get("slurm.hpc") or self.get("slurm.default_partition")
        if self.section.key == "node" or not of_slurm or self.role not in ("", "execute") or (scaled and scaled.flag is False):
            return ""
        return named.text if named and named.text else self.name

    @property
    def is_hpc(self) -> bool:
        """True if its machines are in one placement group: slurm.hpc is true by default."""
        hpc = self.get("slurm.hpc")
        return hpc is None or hpc.flag is True

    def get(self, name: str) -> ResolvedSetting | None:
        return self.settings.get(name.casefold())


@dataclass(frozen=True, slots=True)
class ResolvedCluster:
    """A section ``[cluster name]``. ``real``: nodes that can start; ``partitions``: node arrays that Slurm starts and stops."""

    section: TemplateSection
    autoscale: ResolvedSetting | None
    nodes: tuple[ResolvedNode, ...]
    real: tuple[ResolvedNode, ...]
    partitions: tuple[ResolvedNode, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """A template to check."""

    parsed: Parsed
    sections: tuple[TemplateSection, ...]  # all sections, in the order of the file
    parameters: tuple[str, ...]  # names of the declared parameters; ``values``: their values, by name in lower case
    values: Mapping[str, Value]
    clusters: tuple[ResolvedCluster, ...]
    offer: Offer
    # file, project: the file of parameters and the project's directory; None without one
    file: ParameterFile | None
    project: Project | None

    @property
    def real(self) -> tuple[ResolvedNode, ...]:
        return tuple(node for cluster in self.clusters for node in cluster.real)

    @property
    def partitions(self) -> tuple[ResolvedNode, ...]:
        return tuple(node for cluster in self.clusters for node in cluster.partitions)

    def settings(self, name: str) -> Iterable[ResolvedSetting]:
        """Return the known values of a setting, once per line even if several nodes inherit it."""
        settings = (node.get(name) for cluster in self.clusters for node in cluster.nodes)
        return {setting.line: setting for setting in settings if setting and setting.value is not UNKNOWN}.values()


def read_case(text: str, file: ParameterFile | None, project: Project | None) -> Case:
    """Return the case; a parameter has the value of the file, else its default, else UNKNOWN."""
    parsed, offer = parse(text), load_offer()
    sections = tuple(parsed.walk())
    parameters = [section for section in sections if section.key == "parameter"]
    values = dict.fromkeys((section.name.casefold() for section in parameters), UNKNOWN)
    values |= {section.name.casefold(): worth(attribute, {}).value for section in parameters for attribute in section.attributes
               if attribute.key == "defaultvalue"}
    values |= {name.casefold(): tuple(value) if isinstance(value, list) else value
               for name, value in (file.values if file else {}).items() if value is not None}
    values = {name: UNKNOWN if value == "" else value for name, value in values.items()}
    clusters = tuple(_cluster(section, values, offer) for section in parsed.sections if section.key == "cluster")
    return Case(parsed, sections, tuple(section.name for section in parameters), values, clusters, offer, file, project)


def misspelt(word: str, names: Iterable[str], likeness: float = 0.82) -> str:
    """Return the name that this word probably misspells; "" if there is none, or if the word itself is a name."""
    near = nearest(word, names, likeness)
    return near[0] if near and near[0].casefold() != word.casefold() else ""


def _cluster(section: TemplateSection, values: Mapping[str, Value], offer: Offer) -> ResolvedCluster:
    sections = [node for node in section.sections if node.key in NODE_KINDS]
    by_name = {node.name.casefold(): node for node in reversed(sections)}
    nodes = tuple(_node(node, _lineage(node, by_name), values, offer) for node in sections)
    real = tuple(node for node in nodes if not node.is_abstract)
    autoscale = next((_setting(attribute, values) for attribute in section.attributes if attribute.key == "autoscale"), None)
    return ResolvedCluster(section, autoscale, nodes, real, tuple(node for node in real if node.partition))


def extends(section: TemplateSection) -> tuple[tuple[str, int], ...]:
    """Return the names that a node extends, with their lines."""
    return tuple((word, attribute.line) for attribute in section.attributes if attribute.key == "extends"
                 for word in (part.strip(" \t\"'") for part in attribute.raw.split(",")) if word)


def _lineage(section: TemplateSection, by_name: Mapping[str, TemplateSection]) -> list[TemplateSection]:
    """Return the sections that define a node, in ascending precedence, without duplicates."""
    lineage = [by_name[DEFAULTS]] if DEFAULTS in by_name and section.name.casefold() != DEFAULTS else []

    def add(part: TemplateSection, path: tuple[TemplateSection, ...]) -> None:
        for base in (by_name.get(name.casefold()) for name, _ in extends(part)):
            if base is not None and base not in path and base not in lineage and len(path) < _DEEPEST:
                add(base, (*path, base))
        lineage.append(part)

    add(section, (section,))
    return lineage


def _node(section: TemplateSection, lineage: list[TemplateSection], values: Mapping[str, Value], offer: Offer) -> ResolvedNode:
    parts = [part for base in lineage for part in base.sections]
    settings = [_setting(attribute, values) for base in lineage for attribute in base.attributes
                if not attribute.key.startswith(SOFTWARE)]
    settings += [_setting(attribute, values, part.name) for part in parts if part.key == "configuration"
                 for attribute in part.attributes]
    by_name = {name: setting for name, setting in {setting.name.casefold(): setting for setting in settings}.items()
               if setting.value is not None}
    machine = by_name.get("machinetype")
    sizes = tuple(size for word in (machine.words if machine else ()) if (size := offer.size(word)))
    return ResolvedNode(section, by_name, frozenset(part.name.casefold() for part in parts if part.key == "cluster-init"), sizes)


def _setting(attribute: Attribute, values: Mapping[str, Value], prefix: str = "") -> ResolvedSetting:
    value, _, parameter = worth(attribute, {} if attribute.assign == ":=" else values)
    return ResolvedSetting(f"{prefix}.{attribute.name}".lstrip("."), value, attribute.raw, attribute.line, parameter)
