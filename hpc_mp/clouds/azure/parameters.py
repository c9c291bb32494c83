"""The parameters of a template: their declarations, their resolved values, and a file of values."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_mp.base.errors import HpcMpError
from hpc_mp.clouds.azure.expression import UNKNOWN, Known, Unknown, Unreadable, read
from hpc_mp.clouds.azure.template import Attribute, TemplateSection

_PLAIN = (str, int, float, bool, dict)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A section ``[[[parameter name]]]``; ``attributes`` by name in lower case, the last of each."""

    name: str
    line: int
    attributes: Mapping[str, Attribute]

    def text(self, attribute: str) -> str:
        """Return the plain value of an attribute in lower case, "" if it does not exist."""
        found = self.attributes.get(attribute)
        return found.plain.casefold() if found else ""

    def known(self, attribute: str, values: Mapping[str, Known] | None = None) -> Known:
        """Return the value of an attribute, evaluated with these parameters; UNKNOWN if it is missing or cannot be evaluated."""
        found = self.attributes.get(attribute)
        try:
            return read(found, values or {}).value if found else UNKNOWN
        except Unreadable:
            return UNKNOWN

    @property
    def kind(self) -> str:
        """The ParameterType in lower case; a check box implies Boolean, an integer text box Integer."""
        boxed = "boolean" if self.text("widget.plugin").endswith("booleancheckbox") else ""
        whole = "integer" if self.text("config.integeronly") == "true" else ""
        return self.text("parametertype") or self.text("config.parametertype") or boxed or whole or "string"

    def is_required(self, values: Mapping[str, Known]) -> bool:
        """Return True if the parameter needs a value, given the values of the others."""
        return self.text("required") == "true" or self.known("conditions.required", values) is True

    @property
    def is_label(self) -> bool:
        """True if the parameter only shows text in the form and has no value."""
        return "htmltemplate" in self.text("config.plugin") + self.kind


@dataclass(frozen=True, slots=True)
class Given:
    """A file of values for ``cyclecloud import_cluster -p``."""

    file: str
    text: str
    values: Mapping[str, Any]

    def line(self, name: str) -> int:
        """Return the line of a value, the last of several; 1 if it is not found."""
        key = rf"{re.escape(json.dumps(name))}\s*:"
        found = [*re.finditer(rf"^\s*{key}", self.text, re.MULTILINE)] or [*re.finditer(key, self.text)]
        return self.text[:found[-1].end()].count("\n") + 1 if found else 1


def declared(sections: Iterable[TemplateSection]) -> tuple[Parameter, ...]:
    """Return all parameters among these sections, in the order of the file."""
    return tuple(Parameter(section.name, section.line, {each.key: each for each in section.attributes})
                 for section in sections if section.key == "parameter" and section.name)


def values(parameters: tuple[Parameter, ...], given: Given | None) -> dict[str, Known]:
    """Return the value of each parameter by name in lower case: the given value, else its default, else UNKNOWN."""
    found = {each.name.casefold(): each.known("defaultvalue") for each in parameters}
    found |= {name.casefold(): _from_json(value) for name, value in (given.values if given else {}).items() if value is not None}
    return {name: UNKNOWN if isinstance(value, str) and not value else value for name, value in found.items()}


def _from_json(value: Any) -> Known:
    if isinstance(value, list):
        return tuple(each if isinstance(each, _PLAIN) else UNKNOWN for each in value)
    return value if isinstance(value, _PLAIN) else UNKNOWN


def is_given(value: Known) -> bool:
    return not isinstance(value, Unknown) and value not in (None, "")


def read_given(path: Path) -> Given:
    """Read a file of values.

    Raises:
        HpcMpError: the file cannot be read, or is not a JSON object.
    """
    remedy = 'write parameters as {"Region": "westeurope", "Autoscale": true}'
    try:
        text = path.read_bytes().decode("utf-8")
        found = json.loads(text)
    except OSError as error:
        raise HpcMpError(f"--params {path}", f"cannot be read ({error.strerror})", "name a JSON file of parameters") from None
    except UnicodeDecodeError:
        raise HpcMpError(f"--params {path}", "is not UTF-8", remedy) from None
    except json.JSONDecodeError as error:
        raise HpcMpError(f"--params {path}, line {error.lineno}", f"is no JSON ({error.msg})", remedy) from None
    except RecursionError:
        raise HpcMpError(f"--params {path}", "is nested too deeply", remedy) from None
    if not isinstance(found, dict):
        raise HpcMpError(f"--params {path}", "is no JSON object", remedy)
    return Given(str(path), text, found)
