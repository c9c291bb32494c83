"""CC1xx and CC2xx: the form of a template, its parameters, and the file of values."""

import re
from collections.abc import Callable, Iterable, Iterator

from cyclecloud_lint.case import Case, misspelt
from cyclecloud_lint.expression import UNKNOWN, Unreadable, read, worth
from cyclecloud_lint.tables import rules_of
from cyclecloud_lint.template import Attribute, TemplateSection
from hpc_mp.base.findings import Hit, Rule

_KINDS = ("cluster", "environment", "noderef", "node", "nodearray", "configuration", "volume", "network-interface",
          "cluster-init", "input-endpoint", "parameters", "parameter", "list", "record")
_OF_FORM = re.compile(r"label|description|(config|widget)\..*")  # text and choices that the form shows
_SECRET = re.compile(r"(?i)(^|[._])(password|passwd|secret|token|accountkey|access_key|sas)$")


def _fault(code: str) -> Callable[[Case], Iterable[Hit]]:
    return lambda case: (Hit(fault.line, fault.text) for fault in case.parsed.faults if fault.code == code)


def _evaluated(section: TemplateSection) -> Iterator[Attribute]:
    return (attribute for attribute in section.attributes if not _OF_FORM.fullmatch(attribute.key))


def _unreadable(case: Case) -> Iterable[Hit]:
    for attribute in (attribute for section in case.sections for attribute in _evaluated(section)):
        try:
            read(attribute, {})
        except Unreadable as expression:
            yield Hit(attribute.line, str(expression), attribute.name)


def _undeclared(case: Case) -> Iterable[Hit]:
    names = {name.casefold() for name in case.parameters}
    for line, name in (reference for section in case.sections for reference in _references(section)):
        if "." not in name and name.casefold() not in {*names, "clustername"}:  # with a dot: an attribute of a node
            near = misspelt(name, case.parameters, 0.7)
            yield Hit(line, name, f"Did you mean {near}? Otherwise declare it" if near else "Declare it")


def _references(section: TemplateSection) -> Iterator[tuple[int, str]]:
    """Yield (line, parameter) of a section's references to parameters; in a literal (:=) only conditions have them."""
    yield from ((section.line, name) for name in re.findall(r"\$\{?([^\W\d]\w*)", section.name) if section.key == "cluster-init")
    for attribute in _evaluated(section):
        if attribute.assign == "=" or attribute.key.startswith("conditions."):
            yield from ((attribute.line, name) for name in worth(attribute, {}).names)


def _no_such_parameter(case: Case) -> Iterable[Hit]:
    names, file = {name.casefold() for name in case.parameters}, case.file
    for name in file.values if file else ():
        if file and name.casefold() not in names:
            near = misspelt(name, case.parameters, 0.8)
            yield Hit(file.line(name), name, f"Did you mean {near}? Otherwise delete it" if near else "Delete it", file.file)


def _secret(case: Case) -> Iterable[Hit]:
    for section in case.sections:
        is_parameter = section.key == "parameter"
        is_password = bool(_SECRET.search(section.name)) or any(
            attribute.key == "parametertype" and attribute.plain.casefold() == "password" for attribute in section.attributes)
        for attribute in section.attributes:
            is_secret = is_password and attribute.key == "defaultvalue" if is_parameter else _SECRET.search(attribute.name)
            if is_secret and worth(attribute, {}).value not in (None, UNKNOWN, ""):
                yield Hit(attribute.line, f"The default of {section.name}" if is_parameter else attribute.name)


RULES: tuple[Rule[Case], ...] = rules_of({
    "CC101": _fault("CC101"),
    "CC102": _fault("CC102"),
    "CC103": _fault("CC103"),
    "CC105": _unreadable,
    "CC106": lambda case: (Hit(section.line, section.kind, near) for section in case.sections
                           if (near := misspelt(section.kind, _KINDS, 0.75))),
    "CC201": _undeclared,
    "CC206": _no_such_parameter,
    "CC213": _secret,
})
