"""CC2xx: parameters, their defaults, and the file of values."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from hpc_mp.base.findings import Hit, Rule
from hpc_mp.clouds.azure.context import Case
from hpc_mp.clouds.azure.evaluate import Known, Unknown
from hpc_mp.clouds.azure.expression import NameRef, Unreadable
from hpc_mp.clouds.azure.parameters import Given, Parameter, is_given
from hpc_mp.clouds.azure.rules.form import evaluated
from hpc_mp.clouds.azure.tree import Attribute, TemplateSection
from hpc_mp.clouds.azure.value import names_of, read_value
from hpc_mp.clouds.azure.vocabulary import GIVEN_NAMES, PARAMETER_ATTRIBUTES, PARAMETER_TYPES, meant

_DOLLAR = re.compile(r"\$\{?([^\W\d]\w*)")
_SECRET = re.compile(r"(?i)(^|[._])(password|passwd|secret|token|accountkey|access_key|sas)$")


def _mentioned(attribute: Attribute) -> list[str]:
    """The names that a value refers to, and all words of one that cannot be read."""
    try:
        read_value(attribute)
    except Unreadable:
        return re.findall(r"[^\W\d]\w*", attribute.raw)
    return names_of(attribute)


def _references(section: TemplateSection) -> Iterator[tuple[Attribute, str]]:
    """(attribute, parameter) of what a section takes from parameters; a literal (:=) names them in conditions only."""
    for each in evaluated(section):
        if each.assign == "=" or each.key.startswith("conditions."):
            yield from ((each, name) for name in names_of(each))


def _undefined(case: Case) -> Iterable[Hit]:
    known = {each.name.casefold() for each in case.parameters} | set(GIVEN_NAMES)
    for section in case.sections:
        versions = _DOLLAR.findall(section.name) if section.kind.casefold() == "cluster-init" else ()
        named = [*((section.line, name) for name in versions), *((each.line, name) for each, name in _references(section))]
        for line, name in named:
            if "." not in name and name.casefold() not in known:  # with a dot: of a node or the cluster
                near = meant(name, [parameter.name for parameter in case.parameters], 0.7)
                yield Hit(line, name, f"Did you mean {near}? Else declare it" if near else "Declare it")


def _used(case: Case) -> set[str]:
    found = {part.casefold() for section in case.sections for each in evaluated(section) for name in _mentioned(each)
             for part in (name, name.partition(".")[0])}  # $Subnet.Name is a part of the parameter Subnet
    texts = [text for section in case.sections for text in (section.name, *(each.raw for each in section.attributes))]
    return found | {name.casefold() for text in texts for name in _DOLLAR.findall(text)}


def _unused(case: Case) -> Iterable[Hit]:
    used = _used(case)
    return (Hit(each.line, each.name) for each in case.parameters if each.name.casefold() not in used and not each.is_label)


def _declared_twice(case: Case) -> Iterable[Hit]:
    first: dict[str, int] = {}
    for each in case.parameters:
        if each.name.casefold() in first:
            yield Hit(each.line, each.name, f"line {first[each.name.casefold()]}")
        first.setdefault(each.name.casefold(), each.line)


# --- values -----------------------------------------------------------------------------------------------------------


def _whole(value: Known) -> bool:
    if isinstance(value, str):
        return bool(re.fullmatch(r"-?\d{1,18}", value))
    return isinstance(value, int) and not isinstance(value, bool)


_FITS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "boolean": (lambda value: isinstance(value, bool) or str(value).casefold() in ("true", "false"), "true or false"),
    "integer": (_whole, "a whole number"),
    "float": (lambda value: isinstance(value, float) or _whole(value), "a number"),
    "number": (lambda value: isinstance(value, float) or _whole(value), "a number"),
    "record": (lambda value: isinstance(value, dict), "a record"),
    **dict.fromkeys(("string", "text", "password"), (lambda value: not isinstance(value, dict | tuple), "one text")),
    **dict.fromkeys(("cloud.region", "cloud.image", "azure.subnet", "cloud.credentials"),
                    (lambda value: isinstance(value, str), "one text")),
    "cloud.machinetype": (lambda value: isinstance(value, str | tuple), "the name of a size"),
}


def _misfit(parameter: Parameter, value: Known) -> str:
    """What a value should be and is not; "" if it fits, or nobody can tell."""
    fits, what = _FITS.get(parameter.kind, (lambda value: True, ""))
    return "" if not is_given(value) or fits(value) else what


def _outside(parameter: Parameter, value: Known) -> str:
    """The values that are allowed, where this one is not; else ""."""
    least, most = parameter.range
    if _whole(value) and not ((least is None or least <= int(value)) and (most is None or int(value) <= most)):
        return f"{'-∞' if least is None else f'{least:g}'} to {'∞' if most is None else f'{most:g}'}"
    entries = parameter.entries
    if not is_given(value) or not entries or any(isinstance(each, Unknown) for each in entries):
        return ""
    words = value if isinstance(value, tuple) else (value,)
    allowed = {str(each).casefold() for each in entries if each is not None}
    return "" if all(str(word).casefold() in allowed for word in words) else ", ".join(sorted(allowed - {""}))


def _default(wrong: Callable[[Parameter, Known], str]) -> Callable[[Case], Iterable[Hit]]:
    def find(case: Case) -> Iterable[Hit]:
        for each in case.parameters:
            default = each.attributes.get("defaultvalue")
            value = each.known("defaultvalue")
            if default and not isinstance(value, tuple) and (what := wrong(each, value)):
                yield Hit(default.line, f"{each.name} = {default.raw[:40]}", what)
    return find


def _given(wrong: Callable[[Parameter, Known], str]) -> Callable[[Case], Iterable[Hit]]:
    def find(case: Case) -> Iterable[Hit]:
        if case.given is None:
            return
        by_name = {each.name.casefold(): each for each in case.parameters}
        for name, value in case.given.values.items():
            known = tuple(value) if isinstance(value, list) else value
            parameter = by_name.get(name.casefold())
            if parameter and (what := wrong(parameter, known)):
                yield Hit(case.given.line(name), f"{name} = {str(value)[:40]}", what, case.given.file)
    return find


def _no_such(case: Case) -> Iterable[Hit]:
    known = [each.name for each in case.parameters]
    lower = {name.casefold() for name in known}
    given = case.given
    for name in given.values if given else ():
        if given and name.casefold() not in lower:
            near = meant(name, known, 0.8)
            yield Hit(given.line(name), name, f"Did you mean {near}? Else delete it" if near else "Delete it", given.file)


def _open(case: Case) -> Iterator[Parameter]:
    """The required parameters that have no value."""
    return (each for each in case.parameters
            if each.is_required(case.values) and not is_given(case.values.get(each.name.casefold())))


def _null(given: Given) -> dict[str, str]:
    """The names that a file of values says null for, by name in lower case."""
    return {name.casefold(): name for name, value in given.values.items() if value is None}


def _not_given(case: Case) -> Iterable[Hit]:
    if case.given:
        named = _null(case.given)
        yield from (Hit(each.line, each.name, case.given.file) for each in _open(case) if each.name.casefold() not in named)


def _left_open(case: Case) -> Iterable[Hit]:
    if case.given:
        named = _null(case.given)
        yield from (Hit(case.given.line(named[each.name.casefold()]), each.name, file=case.given.file)
                    for each in _open(case) if each.name.casefold() in named)


def _again(case: Case) -> Iterable[Hit]:
    if case.given:
        yield from (Hit(case.given.line(name), name, file=case.given.file) for name in case.given.again)


# --- attributes of parameters -----------------------------------------------------------------------------------------


def _attributes(case: Case) -> Iterable[Hit]:
    for parameter in case.parameters:
        for each in parameter.section.attributes:
            dotted = "." in each.name
            alike = [name for name in PARAMETER_ATTRIBUTES if ("." in name) == dotted]
            if near := meant(each.name, alike, 0.9 if dotted else 0.82):
                yield Hit(each.line, each.name, near)


def _types(case: Case) -> Iterable[Hit]:
    for parameter in case.parameters:
        each = parameter.attributes.get("parametertype")
        if each and (near := meant(each.raw.strip("\"'"), PARAMETER_TYPES, 0.75)):
            yield Hit(each.line, each.raw, near)


def _secret_default(case: Case) -> Iterable[Hit]:
    for each in case.parameters:
        default = each.attributes.get("defaultvalue")
        if default and (each.kind == "password" or _SECRET.search(each.name)) and is_given(each.known("defaultvalue")):
            yield Hit(default.line, each.name)


def _secret_setting(case: Case) -> Iterable[Hit]:
    for section in case.sections:
        for each in section.attributes if section.kind.casefold() not in ("parameter", "parameters") else ():
            if _SECRET.search(each.name) and each.raw.strip("\"'") and not names_of(each) and each.raw.casefold() != "undefined":
                yield Hit(each.line, each.name)


def _open_password(case: Case) -> Iterable[Hit]:
    secret = {name.casefold() for section in case.sections for each in section.attributes if _SECRET.search(each.name)
              for name in _simple(each)}
    for each in case.parameters:
        if each.name.casefold() in secret and each.kind in ("string", "text"):
            yield Hit(each.line, each.name)


def _simple(attribute: Attribute) -> list[str]:
    try:
        value = read_value(attribute)
    except Unreadable:
        return []
    return [value.name] if isinstance(value, NameRef) else []


RULES: tuple[Rule[Case], ...] = (
    Rule("CC201", "error", _undefined, "{it} is no parameter of this template, so the value stays undefined.",
         "{advice} in a [[[parameter]]]."),
    Rule("CC202", "warning", _unused, "The parameter {it} is used nowhere: whoever sets it in the form changes nothing.",
         "Use it, or delete it."),
    Rule("CC203", "error", _declared_twice,
         "The parameter {it} is declared twice ({advice} is the first): only one default counts.", "Keep one of them."),
    Rule("CC204", "error", _default(_misfit),
         "The default {it} does not fit its type: it must be {advice}.",
         "Correct DefaultValue or ParameterType."),
    Rule("CC205", "error", _default(_outside),
         "The default {it} is not among the values that the form allows ({advice}), so nobody can save the form.",
         "Correct DefaultValue, or the values allowed."),
    Rule("CC206", "warning", _no_such, "{it} is no parameter of the template: its value is ignored.", "{advice}."),
    Rule("CC207", "error", _given(_misfit),
         "{it} does not fit the parameter's type: it must be {advice}.",
         "Correct the value."),
    Rule("CC208", "error", _given(_outside),
         "{it} is not among the values that the parameter allows ({advice}).",
         "Choose one of these."),
    Rule("CC209", "error", _not_given,
         "The parameter {it} is required, has no default, and {advice} does not give it: the cluster cannot start.",
         "Add it to that file."),
    Rule("CC210", "warning", _attributes, "{it} is no attribute of a parameter, and is ignored.", "Write {advice}."),
    Rule("CC211", "warning", _types, "{it} is no type of parameter: the form shows a plain text field, and anything goes.",
         "Write {advice}."),
    Rule("CC212", "error", _secret_default,
         "The default of {it} is a secret in plain text, which everybody reads who may read the template.",
         "Leave the default out; give it in a file of parameters that is not checked in."),
    Rule("CC213", "error", _secret_setting, "{it} is a secret in plain text, which everybody reads who may read the template.",
         "Take it from a parameter with ParameterType = Password and no default."),
    Rule("CC214", "warning", _open_password,
         "{it} holds a secret, but is a plain text field: the form and the cluster's page show it.",
         "Give it ParameterType = Password."),
    Rule("CC215", "info", _left_open, "{it} is null, which leaves it open: the cluster starts once somebody has chosen it.",
         "Write the value here, or choose it in the cluster's form before the first start."),
    Rule("CC216", "warning", _again,
         "{it} is given a second time (case does not count): which value is taken is a matter of luck.", "Keep one of them."),
)
