"""A cluster template as it stands in its file: sections within sections, attributes as text, each with its line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

Assign = Literal["=", ":="]


@dataclass(frozen=True, slots=True)
class Attribute:
    """``name = raw`` or ``name := raw``.

    Attributes:
        raw: the value as written, quotes and line breaks included, without a comment behind it.
        line: counted from 1; where the name stands. Two attributes are equal wherever they stand.
    """

    name: str
    assign: Assign
    raw: str
    line: int = field(compare=False)

    @property
    def key(self) -> str:
        """The name as it is compared: case does not count."""
        return self.name.casefold()


@dataclass(frozen=True, slots=True)
class TemplateSection:
    """``[[kind name]]`` and what stands under it; ``rank`` is the number of brackets."""

    kind: str
    name: str
    rank: int
    line: int = field(compare=False)
    attributes: tuple[Attribute, ...] = ()
    sections: tuple[TemplateSection, ...] = ()

    def walk(self) -> Iterator[TemplateSection]:
        """This section and all below, in the order of the file."""
        yield self
        for section in self.sections:
            yield from section.walk()


@dataclass(frozen=True, slots=True)
class ClusterTemplate:
    """A whole file."""

    sections: tuple[TemplateSection, ...] = ()

    def walk(self) -> Iterator[TemplateSection]:
        for section in self.sections:
            yield from section.walk()


@dataclass(frozen=True, slots=True)
class Fault:
    """What the parser could not make sense of; ``code`` is that of the rule that reports it."""

    code: str
    line: int
    it: str = ""
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Parsed:
    """A template and what was wrong with its form."""

    template: ClusterTemplate
    faults: tuple[Fault, ...] = ()
