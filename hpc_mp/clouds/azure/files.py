"""The files beside a template: values of its parameters, and the project whose specs it uses."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.files import text_of
from hpc_mp.clouds.azure.template import parse


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
