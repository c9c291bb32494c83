"""A CycleCloud project in a directory: ``project.ini`` and ``specs/NAME/cluster-init/scripts``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from hpc_mp.base.errors import HpcMpError
from hpc_mp.clouds.azure.template import TemplateSection, parse

LARGEST = 1 << 20  # read at most this many bytes of a script


@dataclass(frozen=True, slots=True)
class InitScript:
    """A file in ``scripts`` of a spec; ``file``: its path, as shown in findings."""

    name: str
    file: str
    text: str


@dataclass(frozen=True, slots=True)
class Project:
    """A CycleCloud project. ``specs``: names in their original case, because they are parts of paths on the node."""

    name: str
    version: str
    specs: tuple[str, ...]
    scripts: tuple[InitScript, ...]


def read_project(directory: Path) -> Project:
    """Read a project.

    Raises:
        HpcMpError: ``directory`` is not a directory, or cannot be read.
    """
    if not directory.is_dir():
        raise HpcMpError(f"--project {directory}", "is no directory", "name the directory that holds project.ini")
    ini = directory / "project.ini"
    try:
        sections = parse(ini.read_bytes().decode("utf-8", "replace") if ini.is_file() else "").sections
        folders = [path for path in directory.glob("specs/*") if path.is_dir()]
        scripts = tuple(_script(path) for path in sorted(directory.glob("specs/*/cluster-init/scripts/*"))
                        if path.is_file() and not path.name.casefold().startswith(("readme", ".")))
    except OSError as error:
        raise HpcMpError(f"--project {directory}", f"cannot be read ({error.strerror}: {error.filename})",
                         "make it readable") from None
    own = {each.key: each.plain for section in sections if section.key == "project" for each in section.attributes}
    recipes = {section.name for section in sections if section.key == "spec"
               if any(each.key == "run_list" and each.raw for each in section.attributes)}
    return Project(own.get("name", ""), own.get("version", ""), tuple(sorted({path.name for path in folders} | recipes)), scripts)


def _script(path: Path) -> InitScript:
    with path.open("rb") as file:
        return InitScript(path.name, str(path), file.read(LARGEST).decode("utf-8", "replace"))


@dataclass(frozen=True, slots=True)
class Reference:
    """A section ``[[[cluster-init locker/project:spec:version]]]``; version "" is the newest."""

    project: str
    spec: str
    version: str


def reference(section: TemplateSection) -> Reference | None:
    """Return the spec to which a cluster-init section refers; None if its name has another form."""
    found = re.fullmatch(r"(?:[\w.\-]+/)*([\w.\-]+):(?!\d+\.\d)([\w.\-]+)(?::(\$?[\w.\-]+))?", section.name)
    return Reference(found[1], found[2], found[3] or "") if found else None
