"""Resolved nodes of a cluster: a node's attributes override those it extends, which override ``[[node defaults]]``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from hpc_mp.catalogue import MachineType
from hpc_mp.clouds.azure.expression import UNKNOWN, Known, Reading, Unknown, Unreadable, read
from hpc_mp.clouds.azure.offer import Offer
from hpc_mp.clouds.azure.template import NODE_KINDS, Attribute, TemplateSection

DEFAULTS = "defaults"
SCALE_SET_DEFAULT = 40  # default of Azure.MaxScalesetSize
_LONGEST_LINE = 50  # maximum length of a chain of nodes that extend each other


@dataclass(frozen=True, slots=True)
class ResolvedSetting:
    """An effective attribute of a node.

    Attributes:
        name: full name, with the prefix of its configuration.
        value: value; UNKNOWN if it depends on values that are not known before the cluster is created.
        line: line of its definition, possibly in another node.
        parameter: the parameter that is its whole value, if any.
    """

    name: str
    value: Known
    raw: str
    line: int
    parameter: str = ""

    @property
    def known(self) -> bool:
        return not isinstance(self.value, Unknown)

    @property
    def is_true(self) -> bool:
        return str(self.value).casefold() == "true"

    @property
    def is_false(self) -> bool:
        return str(self.value).casefold() == "false"

    @property
    def text(self) -> str:
        """The value as text; a list as written; "" if it is neither."""
        if isinstance(self.value, tuple):
            return self.raw.strip("\"")
        return self.value if isinstance(self.value, str) else ""

    @property
    def number(self) -> int | None:
        is_whole = re.fullmatch(r"\s*-?\d{1,17}\s*", str(self.value))
        return int(str(self.value)) if is_whole else None

    @property
    def words(self) -> tuple[str, ...]:
        """The items of a list or of a text with commas."""
        items = self.value if isinstance(self.value, tuple) else self.text.split(",")
        return tuple(str(each).strip() for each in items if str(each).strip())

    @property
    def shown(self) -> str:
        """The value as text, with its parameter."""
        value = str(self.value).lower() if isinstance(self.value, bool | int | float) else self.text or self.raw[:40]
        return value + (f" (${self.parameter})" if self.parameter else "")


@dataclass(frozen=True, slots=True)
class ResolvedNode:
    """A node or node array of a cluster.

    Attributes:
        attributes: attributes by name in lower case, without those that are ``undefined``.
        configuration: likewise for its ``[[[configuration]]]``, by full name.
        specs: names of its cluster-init sections, in lower case.
        sizes: sizes of its MachineType that are in the catalogue.
    """

    section: TemplateSection
    attributes: Mapping[str, ResolvedSetting]
    configuration: Mapping[str, ResolvedSetting]
    specs: frozenset[str]
    sizes: tuple[MachineType, ...]

    @property
    def name(self) -> str:
        return self.section.name

    @property
    def line(self) -> int:
        return self.section.line

    @property
    def is_array(self) -> bool:
        return self.section.key == "nodearray"

    @property
    def is_abstract(self) -> bool:
        own = [each for each in self.section.attributes if each.key == "abstract"]
        return self.name.casefold() == DEFAULTS or bool(own and own[-1].plain.casefold() == "true")

    @property
    def role(self) -> str:
        found = self.configured("slurm.role")
        return found.text.casefold() if found else ""

    @property
    def partition(self) -> str:
        """The name of its Slurm partition, "" if it has none: a node array with partition settings has one, unless
        slurm.autoscale is false.
        """
        of_slurm = any(self.configured(f"slurm.{key}") for key in ("partition", "hpc", "autoscale", "default_partition"))
        scaled = self.configured("slurm.autoscale")
        if not self.is_array or not of_slurm or self.role not in ("", "execute") or (scaled and scaled.is_false):
            return ""
        named = self.configured("slurm.partition")
        return named.text if named and named.text else self.name

    @property
    def is_hpc(self) -> bool:
        """True if its machines are in one placement group: slurm.hpc is true by default."""
        found = self.configured("slurm.hpc")
        return found is None or found.is_true

    @property
    def is_dynamic(self) -> bool:
        return any(self.configured(name) for name in ("slurm.dynamic_feature", "slurm.dynamic_config"))

    def get(self, name: str) -> ResolvedSetting | None:
        return self.attributes.get(name.casefold())

    def configured(self, name: str) -> ResolvedSetting | None:
        return self.configuration.get(name.casefold())


@dataclass(frozen=True, slots=True)
class ResolvedCluster:
    """A section ``[cluster name]`` with its nodes."""

    section: TemplateSection
    autoscale: ResolvedSetting | None
    nodes: tuple[ResolvedNode, ...]

    @property
    def real(self) -> tuple[ResolvedNode, ...]:
        """The nodes that can start."""
        return tuple(node for node in self.nodes if not node.is_abstract)

    @property
    def partitions(self) -> tuple[ResolvedNode, ...]:
        """The node arrays that Slurm starts and stops."""
        return tuple(node for node in self.real if node.partition)


def clusters(sections: Iterable[TemplateSection], parameters: Mapping[str, Known], offer: Offer) -> tuple[ResolvedCluster, ...]:
    """Return all clusters of a template with resolved nodes."""
    return tuple(_cluster(section, parameters, offer) for section in sections if section.key == "cluster")


def setting(attribute: Attribute, parameters: Mapping[str, Known], prefix: str = "") -> ResolvedSetting:
    name = f"{prefix}.{attribute.name}" if prefix else attribute.name
    try:
        reading = read(attribute, {} if attribute.assign == ":=" else parameters)
    except Unreadable:
        reading = Reading(UNKNOWN)
    return ResolvedSetting(name, reading.value, attribute.raw, attribute.line, reading.parameter)


def extends(section: TemplateSection) -> tuple[tuple[str, int], ...]:
    """Return the names that a node extends, with their lines."""
    return tuple((word, each.line) for each in section.attributes if each.key == "extends"
                 for word in (part.strip(" \t\"'") for part in each.raw.split(",")) if word)


def _cluster(section: TemplateSection, parameters: Mapping[str, Known], offer: Offer) -> ResolvedCluster:
    sections = [each for each in section.sections if each.key in NODE_KINDS]
    by_name = {each.name.casefold(): each for each in reversed(sections)}
    nodes = tuple(_node(each, by_name, parameters, offer) for each in sections)
    scaled = next((setting(each, parameters) for each in section.attributes if each.key == "autoscale"), None)
    return ResolvedCluster(section, scaled, nodes)


def _lineage(section: TemplateSection, by_name: Mapping[str, TemplateSection]) -> list[TemplateSection]:
    """Return the sections that define a node, in ascending precedence, without duplicates."""
    found: list[TemplateSection] = []

    def add(each: TemplateSection, path: frozenset[str]) -> None:
        for name, _ in extends(each):
            base = by_name.get(name.casefold())
            if base is not None and name.casefold() not in path and base not in found and len(path) < _LONGEST_LINE:
                add(base, path | {name.casefold()})
        found.append(each)

    if DEFAULTS in by_name and section.name.casefold() != DEFAULTS:
        found.append(by_name[DEFAULTS])
    add(section, frozenset((section.name.casefold(),)))
    return found


def _node(section: TemplateSection, by_name: Mapping[str, TemplateSection], parameters: Mapping[str, Known],
          offer: Offer) -> ResolvedNode:
    lineage = _lineage(section, by_name)
    attributes = _defined(setting(each, parameters) for part in lineage for each in part.attributes
                          if part is section or each.key not in ("abstract", "extends"))
    configuration = _defined(setting(each, parameters, part.name) for part in _parts(lineage, "configuration")
                             for each in part.attributes)
    specs = frozenset(part.name.casefold() for part in _parts(lineage, "cluster-init"))
    machine = attributes.get("machinetype")
    sizes = tuple(size for word in (machine.words if machine else ()) if (size := offer.size(word)))
    return ResolvedNode(section, attributes, configuration, specs, sizes)


def _parts(lineage: Iterable[TemplateSection], kind: str) -> Iterator[TemplateSection]:
    return (part for section in lineage for part in section.sections if part.key == kind)


def _defined(settings: Iterable[ResolvedSetting]) -> dict[str, ResolvedSetting]:
    """Return settings by name, the last of each, without those that are undefined."""
    found = {each.name.casefold(): each for each in settings}
    return {name: each for name, each in found.items() if each.value is not None}
