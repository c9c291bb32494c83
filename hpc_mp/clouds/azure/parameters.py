"""The parameters of a template: what is declared, what it comes to by default, and what a file of values says."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_mp.base.errors import HpcMpError
from hpc_mp.clouds.azure.evaluate import UNKNOWN, Known, Unknown, evaluate
from hpc_mp.clouds.azure.expression import Unreadable
from hpc_mp.clouds.azure.tree import Attribute, ClusterTemplate, TemplateSection
from hpc_mp.clouds.azure.value import read_value

_PLAIN = (str, int, float, bool, dict)


@dataclass(frozen=True, slots=True)
class Parameter:
    """``[[[parameter name]]]``; ``attributes`` by name in lower case, the last of each."""

    name: str
    line: int
    attributes: Mapping[str, Attribute]
    section: TemplateSection

    def text(self, attribute: str) -> str:
        """A plain value in lower case, "" where there is none."""
        found = self.attributes.get(attribute)
        return found.raw.strip("\"'").casefold() if found else ""

    def known(self, attribute: str, values: Mapping[str, Known] | None = None) -> Known:
        """What an attribute comes to, by itself or with these parameters; UNKNOWN where it is left out or cannot be told."""
        found = self.attributes.get(attribute)
        try:
            return evaluate(read_value(found), values or {}) if found else UNKNOWN
        except Unreadable:
            return UNKNOWN

    @property
    def kind(self) -> str:
        """Its ParameterType in lower case; a check box makes it Boolean, an integer's text box Integer."""
        boxed = "boolean" if self.text("widget.plugin").endswith("booleancheckbox") else ""
        whole = "integer" if self.text("config.integeronly") == "true" else ""
        return self.text("parametertype") or self.text("config.parametertype") or boxed or whole or "string"

    def is_required(self, values: Mapping[str, Known]) -> bool:
        """Whether it has to have a value where the others have these."""
        return self.text("required") == "true" or self.known("conditions.required", values) is True

    @property
    def is_label(self) -> bool:
        """Whether it only shows text in the form, and has no value."""
        return "htmltemplate" in self.text("config.plugin") + self.kind

    @property
    def entries(self) -> tuple[Known, ...]:
        """The values to choose from; none where any may be written."""
        if self.text("config.freeform") == "true":
            return ()
        listed = [{each.key: each.raw.strip("\"'") for each in part.attributes}
                  for part in self.section.sections if part.name.casefold() == "config.entries"]
        found = self.known("config.entries")
        records = listed + [{key.casefold(): value for key, value in each.items()}
                            for each in (found if isinstance(found, tuple) else ()) if isinstance(each, dict)]
        return tuple(each.get("value", each.get("name")) for each in records)

    @property
    def range(self) -> tuple[float | None, float | None]:
        """The least and the largest number."""
        least, most = (self.text(key).replace(",", "") for key in ("config.minvalue", "config.maxvalue"))
        return _number(least), _number(most)


@dataclass(frozen=True, slots=True)
class Given:
    """A file of values, as ``cyclecloud import_cluster -p`` takes it; ``again``: names that stood before, whatever their case."""

    file: str
    text: str
    values: Mapping[str, Any]
    again: tuple[str, ...] = ()

    def line(self, name: str) -> int:
        """Where a value stands, the last of several; 1 if that cannot be seen."""
        key = rf"{re.escape(json.dumps(name))}\s*:"
        found = [*re.finditer(rf"^\s*{key}", self.text, re.MULTILINE)] or [*re.finditer(key, self.text)]
        return self.text[:found[-1].end()].count("\n") + 1 if found else 1


def _number(text: str) -> float | None:
    return float(text) if re.fullmatch(r"-?\d{1,15}(\.\d{1,15})?", text) else None


def declared(template: ClusterTemplate) -> tuple[Parameter, ...]:
    """Every parameter, in the order of the file."""
    return tuple(Parameter(section.name, section.line, {each.key: each for each in section.attributes}, section)
                 for section in template.walk() if section.kind.casefold() == "parameter" and section.name)


def values(parameters: tuple[Parameter, ...], given: Given | None) -> dict[str, Known]:
    """What each parameter comes to, by name in lower case: what is given, else its default, else UNKNOWN."""
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
    """
    Raises:
        HpcMpError: it cannot be read, or is no JSON object.
    """
    remedy = 'write parameters as {"Region": "westeurope", "Autoscale": true}'
    try:
        text = path.read_bytes().decode("utf-8")
        found = json.loads(text, object_pairs_hook=_Object)
    except OSError as error:
        raise HpcMpError(f"--params {path}", f"cannot be read ({error.strerror})", "name a JSON file of parameters") from None
    except UnicodeDecodeError:
        raise HpcMpError(f"--params {path}", "is not UTF-8", remedy) from None
    except json.JSONDecodeError as error:
        raise HpcMpError(f"--params {path}, line {error.lineno}", f"is no JSON ({error.msg})", remedy) from None
    except RecursionError:
        raise HpcMpError(f"--params {path}", "is nested too deeply", remedy) from None
    if not isinstance(found, _Object):
        raise HpcMpError(f"--params {path}", "is no JSON object", remedy)
    return Given(str(path), text, found, found.again)


class _Object(dict[str, Any]):
    """A JSON object that knows which names stood in it before."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        folded = [name.casefold() for name, _ in pairs]
        first = {name: at for at, name in reversed([*enumerate(folded)])}
        self.again = tuple(dict.fromkeys(pairs[at][0] for at, name in enumerate(folded) if first[name] != at))
