"""The parsed form of a cluster template: nested sections, attributes as text, each with its line; and the files beside it:
values of its parameters, and the project whose specs it uses."""

import json
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.files import text_of

DEEPEST = 9  # brackets; templates use four
TRIPLE = ("'''", '"""')
NODE_KINDS = ("node", "nodearray")

_NEWLINE = re.compile(r"\r\n|\n|\r")
_HEADER = re.compile(r"(\[+)([^\[\]]*)(\]+)\s*(?:#.*)?", re.DOTALL)
_ATTRIBUTE = re.compile(r"(\w[\w.\-]*)\s*(:?=)\s*(.*)", re.DOTALL)
_UP_TO_COMMENT = re.compile(r'(?:"(?:[^"\\]|\\.)*"|(?!\s#)[^"\n])*', re.DOTALL)


@dataclass(frozen=True, slots=True)
class Attribute:
    """An attribute ``name = raw`` or ``name := raw``. Lines are ignored when attributes are compared."""

    name: str
    assign: str  # ``=``, or ``:=`` before a literal
    raw: str  # the value as written, including quotes and line breaks, without a trailing comment
    line: int = field(compare=False)

    @property
    def key(self) -> str:
        """The name in lower case: names are compared without case."""
        return self.name.casefold()

    @property
    def plain(self) -> str:
        return self.raw.strip("\"'")


@dataclass(frozen=True, slots=True)
class TemplateSection:
    """A section ``[[kind name]]`` with its content; ``rank`` is the number of brackets, ``key`` the kind in lower case."""

    kind: str
    name: str
    rank: int
    line: int = field(compare=False)
    attributes: tuple[Attribute, ...] = ()
    sections: "tuple[TemplateSection, ...]" = ()

    @property
    def key(self) -> str:
        return self.kind.casefold()

    def walk(self) -> "Iterator[TemplateSection]":
        """Yield this section and all below it, in the order of the file."""
        yield self
        for section in self.sections:
            yield from section.walk()


class Fault(NamedTuple):
    """A line that the parser cannot parse; ``code`` is the code of the rule that reports it."""

    code: str
    line: int
    text: str


class Parsed(NamedTuple):
    """A parsed template and the faults of its syntax."""

    sections: tuple[TemplateSection, ...]
    faults: tuple[Fault, ...] = ()

    def walk(self) -> Iterator[TemplateSection]:
        return (section for root in self.sections for section in root.walk())


def parse(text: str) -> Parsed:
    """Parse a template. Any text gives a tree; faults name the lines that are not in it as written."""
    lines = _NEWLINE.split(text.removeprefix("\ufeff"))
    flat = [TemplateSection("", "", 0, 0)]
    attributes: list[list[Attribute]] = [[]]  # of each section
    faults: list[Fault] = []
    at = 0
    while at < len(lines):
        line, at = lines[at].strip(), at + 1
        if line.startswith("["):
            flat.append(_header(line, at, faults))
            attributes.append([])
        elif match := _ATTRIBUTE.fullmatch(line):
            raw, closed = _value(match[2], match[3], lines[at:])
            attributes[-1].append(Attribute(match[1], match[2], raw, at))
            faults += [] if closed else [Fault("CC103", at, match[3][:40])]
            at += raw.count("\n")
        elif line and not line.startswith("#"):
            faults.append(Fault("CC102", at, line[:40]))
    roots: deque[TemplateSection] = deque()
    for section, own in zip(reversed(flat[1:]), reversed(attributes[1:]), strict=True):
        below = []
        while roots and roots[0].rank > section.rank:
            below.append(roots.popleft())
        roots.appendleft(replace(section, attributes=tuple(own), sections=tuple(below)))
    return Parsed(tuple(roots), tuple(faults))


def _header(line: str, number: int, faults: list[Fault]) -> TemplateSection:
    """Return the section that a line opens; note a fault if its brackets do not match."""
    match = _HEADER.fullmatch(line)
    rank = max(len(match[1]), len(match[3])) if match else len(line) - len(line.lstrip("["))
    content = match[2] if match else re.sub(r"[\[\]]", " ", line)
    if match is None or len(match[1]) != len(match[3]) or rank > DEEPEST:
        faults.append(Fault("CC101", number, line[:60]))
    kind, name = [*content.strip().split(None, 1), "", ""][:2]
    return TemplateSection(kind, name, min(rank, DEEPEST), number)


def _value(assign: str, rest: str, below: Sequence[str]) -> tuple[str, bool]:
    """Return the value that begins with ``rest``, and True if its quotes are closed. Text in quotes may span lines."""
    if rest[:3] in TRIPLE:
        text = "\n".join((rest, *below))
        end = text.find(rest[:3], 3)
        return (text[:end + 3], True) if end > 0 else (f"{rest[:3]}{rest.strip(rest[0])}{rest[:3]}", False)
    quoted = assign == ":=" or rest.startswith('"')
    text = "\n".join((rest, *takewhile(lambda line: not line.lstrip().startswith("["), below))) if quoted else rest
    match = _UP_TO_COMMENT.match(text)
    end = match.end() if match else 0
    if text[end:end + 1] != '"':
        return text[:end].rstrip(), True
    return ('"' + re.sub(r'["\\]', "", rest) + '"', False) if quoted else (rest, True)


@dataclass(frozen=True, slots=True)
class ParameterFile:
    """A file of values for ``cyclecloud import_cluster -p``."""

    file: str
    text: str
    values: Mapping[str, Any]

    def line(self, name: str) -> int:
        """Return the line of a value, the last of several; 1 if it is not found."""
        matches = [*re.finditer(rf"{re.escape(json.dumps(name))}\s*:", self.text)]
        return self.text[:matches[-1].end()].count("\n") + 1 if matches else 1


def read_parameters(path: Path) -> ParameterFile:
    """Read a file of values. Raises HpcMpError if the file cannot be read, or is not a JSON object."""
    text = text_of(path, "JSON file of parameters")
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        values = error
    if not isinstance(values, dict):
        reason = f" ({values})" if isinstance(values, Exception) else ""
        raise HpcMpError(f"--params {path}", f"must be a JSON object{reason}", 'write {"Region": "westeurope"}')
    return ParameterFile(str(path), text, values)


@dataclass(frozen=True, slots=True)
class Project:
    """A CycleCloud project."""

    name: str
    version: str
    specs: tuple[str, ...]  # names in their original case, because they are parts of paths on the node
    scripts: Mapping[Path, bytes]  # the first line of each script, by its path as shown in findings


def read_project(directory: Path) -> Project:
    """Read ``project.ini`` and the names and scripts of the specs in ``specs/NAME/cluster-init``. Raises HpcMpError if
    ``directory`` is not a directory, or cannot be read."""
    ini = directory / "project.ini"
    if not directory.is_dir():
        raise HpcMpError(f"--project {directory}", "must be a directory", "name the directory that holds project.ini")
    try:
        sections = parse(ini.read_bytes().decode("utf-8", "replace") if ini.is_file() else "").sections
        specs = {path.name for path in directory.glob("specs/*") if path.is_dir()}
        files = sorted(directory.glob("specs/*/cluster-init/scripts/*"))
        scripts = {path: path.read_bytes().partition(b"\n")[0] for path in files
                   if path.is_file() and not path.name.casefold().startswith(("readme", "."))}
    except OSError as error:
        raise HpcMpError(f"--project {directory}", f"cannot be read ({error.strerror}: {error.filename})",
                         "make it readable") from None
    specs |= {section.name for section in sections if section.key == "spec" for attribute in section.attributes
              if attribute.key == "run_list"}
    own = {attribute.key: attribute.plain for section in sections if section.key == "project" for attribute in section.attributes}
    return Project(own.get("name", ""), own.get("version", ""), tuple(sorted(specs)), scripts)
