"""CC1xx and CC2xx: the form of a template, its parameters, and the file of values."""

import re
from collections.abc import Callable, Iterable, Iterator

from hpc_mp.base.findings import Hit, Rule
from hpc_mp.clouds.azure.case import Case, misspelt
from hpc_mp.clouds.azure.expression import UNKNOWN, Unreadable, read, worth
from hpc_mp.clouds.azure.template import Attribute, TemplateSection

_KINDS = ("cluster", "environment", "noderef", "node", "nodearray", "configuration", "volume", "network-interface",
          "cluster-init", "input-endpoint", "parameters", "parameter", "list", "record")
_OF_FORM = re.compile(r"label|description|(config|widget)\..*")  # text and choices that the form shows
_SECRET = re.compile(r"(?i)(^|[._])(password|passwd|secret|token|accountkey|access_key|sas)$")


def _fault(code: str) -> Callable[[Case], Iterable[Hit]]:
    """Return a finder of the parser's faults with this code."""
    return lambda case: (Hit(fault.line, fault.text) for fault in case.parsed.faults if fault.code == code)


def _evaluated(section: TemplateSection) -> Iterator[Attribute]:
    return (attribute for attribute in section.attributes if not _OF_FORM.fullmatch(attribute.key))


def _unreadable(case: Case) -> Iterable[Hit]:
    for attribute in (attribute for section in case.sections for attribute in _evaluated(section)):
        try:
            read(attribute, {})
        except Unreadable as expression:
            yield Hit(attribute.line, str(expression), attribute.name)


def _misspelt_kind(case: Case) -> Iterable[Hit]:
    return (Hit(section.line, section.kind, near) for section in case.sections if (near := misspelt(section.kind, _KINDS, 0.75)))


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


RULES: tuple[Rule[Case], ...] = (
    Rule("CC101", "error", _fault("CC101"),
         "The brackets of \"{it}\" do not match: CycleCloud puts the section and its content elsewhere, or drops them.",
         "Close with as many brackets as you open: one pair for a cluster, two for a node, three for the sections of a node."),
    Rule("CC102", "error", _fault("CC102"), "\"{it}\" is not a header, an attribute (Name = value) or a comment.",
         "Write # in front of it, or complete it; only text in '''…''' or \"…\" may continue on the next line."),
    Rule("CC103", "error", _fault("CC103"),
         "The text that begins with {it} is never closed: the value includes the lines that follow, or the import fails.",
         "Close the quote; write a quote inside \"…\" as \\\"."),
    Rule("CC105", "error", _unreadable, "The expression {it} of {advice} cannot be parsed.",
         "Check its brackets, quotes and operators; text in ${…} is in double quotes."),
    Rule("CC106", "error", _misspelt_kind, "\"{it}\" is not a kind of section: CycleCloud ignores its content.",
         "Write {advice}."),
    Rule("CC201", "error", _undeclared, "{it} is not a parameter of this template: the value is undefined.",
         "{advice} in a [[[parameter]]]."),
    Rule("CC206", "warning", _no_such_parameter, "{it} is not a parameter of the template: its value is ignored.", "{advice}."),
    Rule("CC213", "error", _secret, "{it} is a secret in plain text: everyone who may read the template can read it.",
         "Use a parameter with ParameterType = Password and no default; its value belongs in a file that is not checked in."),
)
