"""From the text of a template to its headers and attributes, one after the other, and from these to its tree."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile

from hpc_mp.clouds.azure.tree import Assign, Attribute, ClusterTemplate, Fault, Parsed, TemplateSection

DEEPEST = 9  # brackets; templates use four
TRIPLE = ("'''", '"""')

_NEWLINE = re.compile(r"\r\n|\n|\r")
_HEADER = re.compile(r"(\[+)([^\[\]]*)(\]+)\s*(.*)", re.DOTALL)
_ATTRIBUTE = re.compile(r"(\w[\w.\-]*)\s*(:?=)\s*(.*)", re.DOTALL)
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_COMMENT = re.compile(r"\s#.*", re.DOTALL)
_CLOSER = {"{": "}", "[": "]", "(": ")"}
_MARKS = "“”„‘’"


@dataclass(frozen=True, slots=True)
class SectionHeader:
    """``[[kind name]]``."""

    kind: str
    name: str
    rank: int
    line: int


Item = SectionHeader | Attribute | Fault
Taken = tuple[str, int, list[Fault]]  # a value, how many lines below its first one it takes, what is wrong with it


def split_lines(text: str) -> list[str]:
    """The lines, whichever their ends, without a mark of the byte order."""
    return _NEWLINE.split(text.removeprefix("\ufeff"))


def read_lines(text: str) -> Iterator[Item]:
    """Headers and attributes in their order, with a fault before what it spoils."""
    lines = split_lines(text)
    at = 0
    while at < len(lines):
        line, number = lines[at].strip(), at + 1
        at += 1
        if not line or line.startswith("#"):
            continue
        if line.startswith("["):
            yield from _header(line, number)
        elif found := _ATTRIBUTE.fullmatch(line):
            assign: Assign = ":=" if found[2] == ":=" else "="
            raw, used, faults = _value(assign, found[3], lines, number)
            at += used
            yield from faults
            yield Attribute(found[1], assign, raw, number)
        else:
            yield Fault("CC102", number, line[:40])


def _header(line: str, number: int) -> Iterator[Item]:
    found = _HEADER.fullmatch(line)
    if found is None or len(found[1]) != len(found[3]) or len(found[1]) > DEEPEST:
        yield Fault("CC101", number, line[:60])
    rank = min(max(len(found[1]), len(found[3])) if found else len(line) - len(line.lstrip("[")), DEEPEST)
    content = found[2] if found else re.sub(r"[\[\]]", " ", line)
    if found and found[4] and not found[4].startswith("#"):
        yield Fault("CC113", number, found[4][:40])
    kind, name = [*content.strip().split(None, 1), "", ""][:2]
    yield SectionHeader(kind, name, rank, number)


def _value(assign: Assign, rest: str, lines: Sequence[str], number: int) -> Taken:
    """What stands behind the sign on line ``number``."""
    if rest[:3] in TRIPLE:
        return _triple(_joined(rest, lines, number, None), number)
    if rest.startswith('"') and assign == "=":
        return _quoted(_joined(rest, lines, number, "["), number)
    if assign == ":=":
        return _expression(_joined(rest, lines, number, "[["), number)
    faults = [Fault("CC112", number, rest[:40])] if rest[:1] and rest[0] in _MARKS else []
    brace = rest.rfind("}") + 1 if rest.startswith(("$", "=")) else 0
    comment = _COMMENT.search(rest, brace)
    if comment and comment.start():
        faults.append(Fault("CC111", number, comment[0].strip()[:40]))
        rest = rest[:comment.start()].rstrip()
    return rest, 0, faults


def _closed(text: str, quote: str) -> str:
    """The value that is put in place of one whose quote stays open, so that it can be read as one line."""
    body = text[len(quote):].replace(quote, "").rstrip("\\" + quote[0])
    return quote + body + quote


def _joined(rest: str, lines: Sequence[str], number: int, until: str | None) -> str:
    """``rest`` and the lines below line ``number``, up to one that begins with ``until``."""
    if until is None:
        return "\n".join((rest, *lines[number:]))
    below = takewhile(lambda line: not line.lstrip().startswith(until), islice(lines, number, None))
    return "\n".join((rest, *below))


def _first(text: str) -> str:
    return text.partition("\n")[0]


def _triple(text: str, number: int) -> Taken:
    quote = text[:3]
    end = text.find(quote, 3)
    if end < 0:
        return _closed(_first(text), quote), 0, [Fault("CC103", number, _first(text)[:40])]
    raw, behind = text[:end + 3], _first(text[end + 3:]).strip()
    used = raw.count("\n")
    wrong = behind and not behind.startswith("#")
    return raw, used, [Fault("CC113", number + used, behind[:40])] if wrong else []


def _quoted(text: str, number: int) -> Taken:
    """A string in quotes, or a list that begins with one."""
    found = _STRING.match(text)
    behind = _first(text[found.end():]).strip() if found else ""
    used = found[0].count("\n") if found else 0
    if found and behind.startswith(","):
        return found[0] + _COMMENT.sub("", _first(text[found.end():])).rstrip(), used, []
    if found and (not behind or behind.startswith("#")):
        return found[0], used, []
    if found and not used:
        return found[0], 0, [Fault("CC113", number, behind[:40])]
    return _closed(_first(text), '"'), 0, [Fault("CC103", number, _first(text)[:40])]


def _expression(text: str, number: int) -> Taken:
    """What stands behind ``:=``: it goes on while a string or a bracket is open."""
    end = _end(text)
    if end is not None:
        raw = text[:end].rstrip()
        return raw, raw.count("\n"), []
    first = _first(text)
    return _closed('"' + first.replace("\\", ""), '"'), 0, [Fault("CC103", number, first[:40])]


def _end(text: str) -> int | None:
    """Where the value ends: at a comment or a line's end where nothing is open; None if something stays open."""
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
        if sign in _CLOSER:
            waiting.append(_CLOSER[sign])
        elif waiting and sign == waiting[-1]:
            waiting.pop()
        elif not waiting and (sign == "\n" or (sign == "#" and (not at or text[at - 1].isspace()))):
            return at
        at += 1
    return None if waiting else len(text)


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
