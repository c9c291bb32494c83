"""A CycleCloud project in a directory: ``project.ini`` and ``specs/NAME/cluster-init/{scripts,files,tests}``."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hpc_mp.base.errors import HpcMpError
from hpc_mp.clouds.azure.parse import parse
from hpc_mp.clouds.azure.tree import TemplateSection

LARGEST = 1 << 20  # bytes of a script that are read


@dataclass(frozen=True, slots=True)
class InitScript:
    """A file in ``scripts``; ``file``: its path, as it is shown."""

    name: str
    file: str
    text: str
    executable: bool


@dataclass(frozen=True, slots=True)
class Spec:
    """``specs/NAME``.

    Attributes:
        is_empty: its ``cluster-init`` and ``chef`` hold no file but tests.
        folders: those in ``cluster-init``.
        files: the paths below ``cluster-init/files``.
    """

    name: str
    file: str
    is_empty: bool
    folders: tuple[str, ...]
    scripts: tuple[InitScript, ...]
    files: frozenset[str]


@dataclass(frozen=True, slots=True)
class Project:
    """``ini``: the sections of project.ini, None where there is none; ``blobs``: the paths below ``blobs/``."""

    directory: Path
    ini_file: str
    ini: tuple[TemplateSection, ...] | None
    specs: tuple[Spec, ...]
    blobs: frozenset[str] = field(default=frozenset())

    def section(self, kind: str) -> TemplateSection | None:
        return next((each for each in self.ini or () if each.kind.casefold() == kind), None)

    def value(self, name: str) -> str:
        """Of ``[project]``, "" where it is not given."""
        found = self.section("project")
        given: Mapping[str, str] = {each.key: each.raw.strip("\"'") for each in found.attributes} if found else {}
        return given.get(name, "")

    @property
    def declared(self) -> frozenset[str]:
        """The specs of project.ini that a run_list makes, with a directory or without."""
        return frozenset(each.name for each in self.ini or () if each.kind.casefold() == "spec"
                         and any(attribute.key == "run_list" and attribute.raw for attribute in each.attributes))

    @property
    def names(self) -> tuple[str, ...]:
        """All its specs; letter by letter, for they are parts of paths on the node."""
        return tuple(sorted({spec.name for spec in self.specs} | self.declared))


def read_project(directory: Path) -> Project:
    """
    Raises:
        HpcMpError: it is no directory, or cannot be read.
    """
    if not directory.is_dir():
        raise HpcMpError(f"--project {directory}", "is no directory", "name the directory that holds project.ini")
    ini = directory / "project.ini"
    try:
        text = ini.read_bytes().decode("utf-8", "replace") if ini.is_file() else None
        specs = tuple(_spec(path) for path in _entries(directory / "specs") if path.is_dir())
        blobs = frozenset(_below(directory / "blobs"))
    except OSError as error:
        raise HpcMpError(f"--project {directory}", f"cannot be read ({error.strerror}: {error.filename})",
                         "make it readable") from None
    sections = None if text is None else parse(text).template.sections
    return Project(directory, str(ini), sections, specs, blobs)


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _spec(path: Path) -> Spec:
    init = path / "cluster-init"
    scripts = tuple(_script(each) for each in _entries(init / "scripts") if each.is_file())
    folders = tuple(each.name for each in _entries(init) if each.is_dir())
    used = (each for folder in ("cluster-init", "chef") for each in _below(path / folder) if (path / folder / each).is_file())
    is_empty = all(each.startswith("tests/") or each.rpartition("/")[2].startswith(".") for each in used)
    return Spec(path.name, str(path), is_empty, folders, scripts, frozenset(_below(init / "files")))


def _below(folder: Path) -> Iterator[str]:
    for path in sorted(folder.rglob("*")) if folder.is_dir() else ():
        yield path.relative_to(folder).as_posix()


def _script(path: Path) -> InitScript:
    with path.open("rb") as file:
        text = file.read(LARGEST).decode("utf-8", "replace")
    return InitScript(path.name, str(path), text, os.access(path, os.X_OK))


@dataclass(frozen=True, slots=True)
class Reference:
    """``[[[cluster-init locker/project:spec:version]]]``; version "" is the newest."""

    project: str
    spec: str
    version: str
    line: int


def reference(section: TemplateSection) -> Reference | None:
    """What a section of that kind refers to; None if its name has another form, such as a version in the place of the spec."""
    found = re.fullmatch(r"(?:[\w.\-]+/)*([\w.\-]+):(?!\d+\.\d)([\w.\-]+)(?::(\$?[\w.\-]+))?", section.name)
    return Reference(found[1], found[2], found[3] or "", section.line) if found else None
