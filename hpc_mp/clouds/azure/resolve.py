"""What each node of a cluster comes to: its own attributes over those it extends over ``[[node defaults]]``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hpc_mp.clouds.azure.evaluate import UNKNOWN, Known, Unknown, evaluate
from hpc_mp.clouds.azure.expression import NameRef, Unreadable
from hpc_mp.clouds.azure.tree import Attribute, ClusterTemplate, TemplateSection
from hpc_mp.clouds.azure.value import read_value
from hpc_mp.clouds.azure.vocabulary import NODE_KINDS

DEFAULTS = "defaults"

_LONGEST_LINE = 50  # nodes that extend each other


@dataclass(frozen=True, slots=True)
class ResolvedSetting:
    """An attribute as it counts for a node.

    Attributes:
        name: in full, with the prefix of its configuration.
        value: UNKNOWN where it depends on what is not known before the cluster is made.
        line: where it was written, be it in another node.
        parameter: the parameter that it takes its value from, if it is just that.
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
        return self.value is True or (isinstance(self.value, str) and self.value.casefold() == "true")

    @property
    def is_false(self) -> bool:
        return self.value is False or (isinstance(self.value, str) and self.value.casefold() == "false")

    @property
    def text(self) -> str:
        """The value as text, "" where it is none."""
        return self.value if isinstance(self.value, str) else ""

    @property
    def written(self) -> str:
        """The value as text; a list as it was written, a number in digits."""
        if isinstance(self.value, tuple):
            return self.raw.strip("\"")
        is_number = isinstance(self.value, int | float) and not isinstance(self.value, bool)
        return str(self.value) if is_number else self.text

    @property
    def number(self) -> int | None:
        if isinstance(self.value, str) and self.value.strip().lstrip("-").isdecimal() and len(self.value) < 18:
            return int(self.value)
        return self.value if isinstance(self.value, int) and not isinstance(self.value, bool) else None

    @property
    def words(self) -> tuple[str, ...]:
        """The texts in it: of a list, of a text with commas, or the one."""
        if isinstance(self.value, tuple):
            return tuple(str(each).strip() for each in self.value if isinstance(each, str | int))
        return tuple(part.strip() for part in self.text.split(",") if part.strip())

    def line_at(self, at: int) -> int:
        """The line of a place in the text: below the first where the value spans lines, not where \\n stands in it."""
        return self.line + (self.written[:at].count("\n") if "\n" in self.raw else 0)

    @property
    def via(self) -> str:
        """" ($P)" where it is the value of a parameter."""
        return f" (${self.parameter})" if self.parameter else ""


@dataclass(frozen=True, slots=True)
class ResolvedNode:
    """A node or node array of a cluster.

    Attributes:
        attributes: by name in lower case; what is ``undefined`` is left out.
        configuration: the same for its ``[[[configuration]]]``, names in full.
        parts: its other sections of rank 3 by kind and name in lower case, the nearest of each.
    """

    kind: str
    name: str
    line: int
    section: TemplateSection
    extends: tuple[str, ...]
    attributes: Mapping[str, ResolvedSetting]
    configuration: Mapping[str, ResolvedSetting]
    parts: Mapping[tuple[str, str], TemplateSection]

    @property
    def is_array(self) -> bool:
        return self.kind == "nodearray"

    @property
    def is_abstract(self) -> bool:
        own = [each for each in self.section.attributes if each.key == "abstract"]
        return self.name.casefold() == DEFAULTS or bool(own and own[-1].raw.strip("\"'").casefold() == "true")

    def get(self, name: str) -> ResolvedSetting | None:
        return self.attributes.get(name.casefold())

    def configured(self, name: str) -> ResolvedSetting | None:
        return self.configuration.get(name.casefold())

    def is_true(self, name: str) -> bool:
        """Whether a setting of the configuration is true."""
        found = self.configured(name)
        return found is not None and found.is_true

    def is_false(self, name: str) -> bool:
        found = self.configured(name)
        return found is not None and found.is_false


@dataclass(frozen=True, slots=True)
class ResolvedCluster:
    """``[cluster name]``; ``cycles``: nodes that extend themselves, each with the way round."""

    name: str
    line: int
    section: TemplateSection
    attributes: Mapping[str, ResolvedSetting]
    nodes: tuple[ResolvedNode, ...]
    cycles: tuple[tuple[TemplateSection, str], ...]

    @property
    def real(self) -> tuple[ResolvedNode, ...]:
        """The nodes that can start."""
        return tuple(node for node in self.nodes if not node.is_abstract)


def clusters(template: ClusterTemplate, parameters: Mapping[str, Known]) -> tuple[ResolvedCluster, ...]:
    """Every cluster of the template with its nodes resolved."""
    return tuple(_cluster(section, parameters) for section in template.sections if section.kind.casefold() == "cluster")


def setting(attribute: Attribute, parameters: Mapping[str, Known], prefix: str = "") -> ResolvedSetting:
    name = f"{prefix}.{attribute.name}" if prefix else attribute.name
    try:
        value = read_value(attribute)
    except Unreadable:
        return ResolvedSetting(name, UNKNOWN, attribute.raw, attribute.line)
    known = evaluate(value, {} if attribute.assign == ":=" else parameters)
    return ResolvedSetting(name, known, attribute.raw, attribute.line, value.name if isinstance(value, NameRef) else "")


def extends(section: TemplateSection) -> tuple[tuple[str, int], ...]:
    """The names that a node extends, with their line."""
    return tuple((word, each.line) for each in section.attributes if each.key == "extends"
                 for word in (part.strip(" \t\"'") for part in each.raw.split(",")) if word)


def _cluster(section: TemplateSection, parameters: Mapping[str, Known]) -> ResolvedCluster:
    sections = [each for each in section.sections if each.kind.casefold() in NODE_KINDS]
    by_name = {each.name.casefold(): each for each in reversed(sections)}
    cycles = [(each, way) for each in sections if (way := _way_round(each, by_name))]
    nodes = tuple(_node(each, by_name, parameters) for each in sections)
    own = {each.key: setting(each, parameters) for each in section.attributes}
    return ResolvedCluster(section.name, section.line, section, own, nodes, tuple(cycles))


def _way_round(start: TemplateSection, by_name: Mapping[str, TemplateSection]) -> str:
    """"a → b → a" if a node extends itself, else ""."""
    waiting, seen = [(start, start.name)], set[str]()
    while waiting:
        section, way = waiting.pop()
        for name, _ in extends(section):
            if name.casefold() == start.name.casefold():
                return f"{way} → {start.name}"
            if name.casefold() in by_name and name.casefold() not in seen:
                seen.add(name.casefold())
                waiting.append((by_name[name.casefold()], f"{way} → {name}"))
    return ""


def _lineage(section: TemplateSection, by_name: Mapping[str, TemplateSection]) -> list[TemplateSection]:
    """The sections that make a node, the one that counts least first, each once."""
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


def _node(section: TemplateSection, by_name: Mapping[str, TemplateSection], parameters: Mapping[str, Known]) -> ResolvedNode:
    attributes: dict[str, ResolvedSetting] = {}
    configuration: dict[str, ResolvedSetting] = {}
    parts: dict[tuple[str, str], TemplateSection] = {}
    for each in _lineage(section, by_name):
        attributes |= {attribute.key: setting(attribute, parameters) for attribute in each.attributes
                       if each is section or attribute.key not in ("abstract", "extends")}
        configuration |= {found.name.casefold(): found for found in _configured(each, parameters)}
        parts |= {(part.kind.casefold(), part.name.casefold()): part
                  for part in each.sections if part.kind.casefold() != "configuration"}
    return ResolvedNode(section.kind.casefold(), section.name, section.line, section, tuple(name for name, _ in extends(section)),
                _defined(attributes), _defined(configuration), parts)


def _configured(section: TemplateSection, parameters: Mapping[str, Known]) -> Iterator[ResolvedSetting]:
    for part in section.sections:
        if part.kind.casefold() == "configuration":
            yield from (setting(attribute, parameters, part.name) for attribute in part.attributes)


def _defined(settings: Mapping[str, ResolvedSetting]) -> dict[str, ResolvedSetting]:
    return {name: each for name, each in settings.items() if each.value is not None}
