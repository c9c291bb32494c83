"""From the headers and attributes of a template to its tree."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpc_mp.clouds.azure.lexer import SectionHeader, read_lines
from hpc_mp.clouds.azure.tree import Attribute, ClusterTemplate, Fault, Parsed, TemplateSection


@dataclass
class _Open:
    """A section that still grows."""

    header: SectionHeader
    attributes: list[Attribute] = field(default_factory=list)
    sections: list[TemplateSection] = field(default_factory=list)

    def close(self) -> TemplateSection:
        it = self.header
        return TemplateSection(it.kind, it.name, it.rank, it.line, tuple(self.attributes), tuple(self.sections))


def parse(text: str) -> Parsed:
    """Read a template; whatever the text, there is a tree, and faults name the lines that are not in it as written."""
    root = _Open(SectionHeader("", "", 0, 0))
    path = [root]
    faults: list[Fault] = []
    for item in read_lines(text):
        if isinstance(item, Fault):
            faults.append(item)
        elif isinstance(item, SectionHeader):
            _close_to(path, item.rank)
            path.append(_Open(item))
        elif len(path) == 1:
            faults.append(Fault("CC104", item.line, item.name))
        else:
            path[-1].attributes.append(item)
    _close_to(path, 1)
    return Parsed(ClusterTemplate(tuple(root.sections)), tuple(faults))


def _close_to(path: list[_Open], rank: int) -> None:
    """End the open sections of this rank and below."""
    while path[-1].header.rank >= rank and len(path) > 1:
        section = path.pop().close()
        path[-1].sections.append(section)
