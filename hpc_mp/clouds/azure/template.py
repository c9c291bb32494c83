"""The parsed form of a cluster template: nested sections, attributes as text, each with its line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile

DEEPEST = 9  # brackets; templates use four
TRIPLE = ("'''", '"""')
NODE_KINDS = ("node", "nodearray")

_NEWLINE = re.compile(r"\r\n|\n|\r")
_HEADER = re.compile(r"(\[+)([^\[\]]*)(\]+)\s*(?:#.*)?", re.DOTALL)
_ATTRIBUTE = re.compile(r"(\w[\w.\-]*)\s*(:?=)\s*(.*)", re.DOTALL)
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_COMMENT = re.compile(r"\s#.*", re.DOTALL)
_CLOSER = {"{": "}", "[": "]", "(": ")"}


@dataclass(frozen=True, slots=True)
class Attribute:
    """An attribute ``name = raw`` or ``name := raw``.

    Attributes:
        assign: ``=``, or ``:=`` before a literal.
        raw: the value as written, including quotes and line breaks, without a trailing comment.
        line: line of the name, counted from 1. It is ignored when attributes are compared.
    """

    name: str
    assign: str
    raw: str
    line: int = field(compare=False)

    @property
    def key(self) -> str:
        """The name for comparisons, which ignore case."""
        return self.name.casefold()

    @property
    def plain(self) -> str:
        """The value without quotes."""
        return self.raw.strip("\"'")


@dataclass(frozen=True, slots=True)
class TemplateSection:
    """A section ``[[kind name]]`` with its content; ``rank`` is the number of brackets."""

    kind: str
    name: str
    rank: int
    line: int = field(compare=False)
    attributes: tuple[Attribute, ...] = ()
    sections: tuple[TemplateSection, ...] = ()

    @property
    def key(self) -> str:
        """The kind for comparisons, which ignore case."""
        return self.kind.casefold()

    def walk(self) -> Iterator[TemplateSection]:
        """Yield this section and all below it, in the order of the file."""
        yield self
        for section in self.sections:
            yield from section.walk()


@dataclass(frozen=True, slots=True)
class Fault:
    """A line that the parser cannot parse; ``code`` is the code of the rule that reports it."""

    code: str
    line: int
    it: str


@dataclass(frozen=True, slots=True)
class Parsed:
    """A parsed template and the faults of its syntax."""

    sections: tuple[TemplateSection, ...]
    faults: tuple[Fault, ...] = ()

    def walk(self) -> Iterator[TemplateSection]:
        for section in self.sections:
            yield from section.walk()


@dataclass
class _Open:
    """A section that is not closed yet."""

    kind: str
    name: str
    rank: int
    line: int
    attributes: list[Attribute] = field(default_factory=list)
    sections: list[TemplateSection] = field(default_factory=list)

    def close(self) -> TemplateSection:
        return TemplateSection(self.kind, self.name, self.rank, self.line, tuple(self.attributes), tuple(self.sections))


def parse(text: str) -> Parsed:
    """Parse a template. Any text gives a tree; faults name the lines that are not in it as written."""
    lines = _NEWLINE.split(text.removeprefix("\ufeff"))
    path = [_Open("", "", 0, 0)]
    faults: list[Fault] = []
    at = 0
    while at < len(lines):
        line, number = lines[at].strip(), at + 1
        at += 1
        if not line or line.startswith("#"):
            continue
        if line.startswith("["):
            header, sound = _header(line, number)
            faults += [] if sound else [Fault("CC101", number, line[:60])]
            _close_to(path, header.rank)
            path.append(header)
        elif found := _ATTRIBUTE.fullmatch(line):
            raw, closed = _value(found[2], found[3], lines, number)
            at += raw.count("\n")
            faults += [] if closed else [Fault("CC103", number, found[3][:40])]
            path[-1].attributes.append(Attribute(found[1], found[2], raw, number))
        else:
            faults.append(Fault("CC102", number, line[:40]))
    _close_to(path, 1)
    return Parsed(tuple(path[0].sections), tuple(faults))


def _close_to(path: list[_Open], rank: int) -> None:
    """Close the open sections with at least this many brackets."""
    while len(path) > 1 and path[-1].rank >= rank:
        section = path.pop().close()
        path[-1].sections.append(section)


def _header(line: str, number: int) -> tuple[_Open, bool]:
    """Return the section that a line opens, and True if its brackets match."""
    found = _HEADER.fullmatch(line)
    rank = max(len(found[1]), len(found[3])) if found else len(line) - len(line.lstrip("["))
    content = found[2] if found else re.sub(r"[\[\]]", " ", line)
    kind, name = [*content.strip().split(None, 1), "", ""][:2]
    sound = found is not None and len(found[1]) == len(found[3]) <= DEEPEST
    return _Open(kind, name, min(rank, DEEPEST), number), sound


def _value(assign: str, rest: str, lines: Sequence[str], number: int) -> tuple[str, bool]:
    """Return the value after the sign on line ``number``, and True if all its quotes and brackets are closed."""
    if rest[:3] in TRIPLE:
        text = "\n".join((rest, *lines[number:]))
        end = text.find(rest[:3], 3)
        return (text[:end + 3], True) if end > 0 else (_closed(rest, rest[:3]), False)
    if assign == ":=" or rest.startswith('"'):
        header, closers = ("[[", _CLOSER) if assign == ":=" else ("[", {})
        below = takewhile(lambda line: not line.lstrip().startswith(header), islice(lines, number, None))
        text = "\n".join((rest, *below))
        closed = _end(text, closers)
        return (text[:closed].rstrip(), True) if closed is not None else (_closed('"' + rest.replace("\\", ""), '"'), False)
    comment = _COMMENT.search(rest, rest.rfind("}") + 1 if rest.startswith(("$", "=")) else 0)
    return (rest[:comment.start()].rstrip() if comment and comment.start() else rest), True


def _closed(text: str, quote: str) -> str:
    """Return a substitute for a value with an unclosed quote, so that it can be parsed as one line."""
    return quote + text[len(quote):].replace(quote, "").rstrip("\\" + quote[0]) + quote


def _end(text: str, closers: dict[str, str]) -> int | None:
    """Return the index of the value's end: a comment or line end outside quotes and brackets; None if one is unclosed."""
    at = 0
    waiting: list[str] = []
    while at < len(text):
        sign = text[at]
        if sign == '"':
            found = _STRING.match(text, at)
            if not found:
                return None
            at = found.end()
            continue
        if sign in closers:
            waiting.append(closers[sign])
        elif waiting and sign == waiting[-1]:
            waiting.pop()
        elif not waiting and (sign == "\n" or (sign == "#" and (not at or text[at - 1].isspace()))):
            return at
        at += 1
    return None if waiting else len(text)
