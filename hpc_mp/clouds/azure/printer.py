"""A tree as text: what is printed parses to the same tree."""

from __future__ import annotations

from hpc_mp.clouds.azure.tree import ClusterTemplate, TemplateSection

INDENT = "    "


def to_text(template: ClusterTemplate) -> str:
    """The template, each section under its header, indented by rank; comments are not part of a tree."""
    return "\n".join(_section(section) for section in template.walk())


def _section(section: TemplateSection) -> str:
    margin = INDENT * (section.rank - 1)
    header = f"{'[' * section.rank}{f'{section.kind} {section.name}'.strip()}{']' * section.rank}"
    lines = [header, *(f"{attribute.name} {attribute.assign} {attribute.raw}" for attribute in section.attributes)]
    return "".join(f"{margin}{line}\n" for line in lines)
