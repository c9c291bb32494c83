"""CC1xx and CC2xx: the form of a template, its parameters, and the file of values."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator

from hpc_mp.base.findings import Hit, Rule
from hpc_mp.clouds.azure.context import Case, evaluated, meant
from hpc_mp.clouds.azure.expression import Unreadable, names_of, read
from hpc_mp.clouds.azure.parameters import is_given
from hpc_mp.clouds.azure.template import TemplateSection

_KINDS = ("cluster", "environment", "noderef", "node", "nodearray", "configuration", "volume", "network-interface",
          "cluster-init", "input-endpoint", "parameters", "parameter", "list", "record")
_DOLLAR = re.compile(r"\$\{?([^\W\d]\w*)")
_SECRET = re.compile(r"(?i)(^|[._])(password|passwd|secret|token|accountkey|access_key|sas)$")


def _fault(code: str) -> Callable[[Case], Iterable[Hit]]:
    """Return a finder of the parser's faults with this code."""
    return lambda case: (Hit(fault.line, fault.it) for fault in case.parsed.faults if fault.code == code)


def _unreadable(case: Case) -> Iterable[Hit]:
    for section in case.sections:
        for each in evaluated(section):
            try:
                read(each, {})
            except Unreadable as why:
                yield Hit(each.line, each.name, str(why))


def _misspelt_kind(case: Case) -> Iterable[Hit]:
    return (Hit(section.line, section.kind, near) for section in case.sections if (near := meant(section.kind, _KINDS, 0.75)))


def _undefined(case: Case) -> Iterable[Hit]:
    known = {each.name.casefold() for each in case.parameters} | {"clustername"}
    for section in case.sections:
        for line, name in _references(section):
            if "." not in name and name.casefold() not in known:  # with a dot: an attribute of a node or the cluster
                near = meant(name, [parameter.name for parameter in case.parameters], 0.7)
                yield Hit(line, name, f"Did you mean {near}? Else declare it" if near else "Declare it")


def _references(section: TemplateSection) -> Iterator[tuple[int, str]]:
    """Yield (line, parameter) of a section's references to parameters; in a literal (:=) only conditions have them."""
    yield from ((section.line, name) for name in _DOLLAR.findall(section.name) if section.key == "cluster-init")
    for each in evaluated(section):
        if each.assign == "=" or each.key.startswith("conditions."):
            yield from ((each.line, name) for name in names_of(each))


_FITS: dict[str, tuple[str, str]] = {  # by type of parameter: pattern of its JSON, and the pattern in words
    "boolean": (r'"?(?i:true|false)"?', "true or false"), "integer": (r'"?-?\d{1,18}"?', "a whole number"),
    **dict.fromkeys(("float", "number"), (r'"?-?\d+(\.\d+)?(e[+-]?\d+)?"?', "a number")),
    **dict.fromkeys(("string", "text", "password"), (r"[^\[{].*", "one text")),
    **dict.fromkeys(("cloud.region", "cloud.image", "azure.subnet", "cloud.credentials"), (r'".*', "one text")),
    "cloud.machinetype": (r'["\[].*', "the name of a size"),
}


def _misfit(case: Case) -> Iterable[Hit]:
    kinds = {each.name.casefold(): each.kind for each in case.parameters}
    for name, value in case.given.values.items() if case.given else ():
        form, what = _FITS.get(kinds.get(name.casefold(), ""), ("", ""))
        if case.given and form and is_given(value) and not re.fullmatch(form, json.dumps(value)):
            yield Hit(case.given.line(name), f"{name} = {str(value)[:40]}", what, case.given.file)


def _no_such(case: Case) -> Iterable[Hit]:
    known, given = {each.name.casefold(): each.name for each in case.parameters}, case.given
    for name in given.values if given else ():
        if given and name.casefold() not in known:
            near = meant(name, known.values(), 0.8)
            yield Hit(given.line(name), name, f"Did you mean {near}? Else delete it" if near else "Delete it", given.file)


def _open(in_file: bool) -> Callable[[Case], Iterable[Hit]]:
    """Return a finder of required parameters without a value; ``in_file``: only those that are null in the file of values."""
    def find(case: Case) -> Iterable[Hit]:
        given = case.given
        null = {name.casefold(): name for name, value in given.values.items() if value is None} if given else {}
        for each in case.parameters if given else ():
            name = each.name.casefold()
            is_open = each.is_required(case.values) and not is_given(case.values.get(name))
            if given and is_open and (name in null) is in_file:
                line, advice, file = (given.line(null[name]), "", given.file) if in_file else (each.line, given.file, None)
                yield Hit(line, each.name, advice, file)
    return find


def _secret_default(case: Case) -> Iterable[Hit]:
    return (Hit(each.attributes["defaultvalue"].line, each.name) for each in case.parameters
            if (each.kind == "password" or _SECRET.search(each.name)) and is_given(each.known("defaultvalue")))


def _secret_setting(case: Case) -> Iterable[Hit]:
    for section in case.sections:
        for each in section.attributes if section.key not in ("parameter", "parameters") else ():
            if _SECRET.search(each.name) and each.plain and not names_of(each) and each.raw.casefold() != "undefined":
                yield Hit(each.line, each.name)


RULES: tuple[Rule[Case], ...] = (
    Rule("CC101", "error", _fault("CC101"),
         "The brackets of \"{it}\" do not match: the section, and all that stands under it, goes elsewhere or nowhere.",
         "Close with as many brackets as open; one pair for a cluster, two for a node, three for what is in it."),
    Rule("CC102", "error", _fault("CC102"),
         "\"{it}\" is neither a header, an attribute (Name = value) nor a comment, and the import fails on it.",
         "Put # in front, or add what is missing; only text in '''…''' or \"…\" may go on on the next line."),
    Rule("CC103", "error", _fault("CC103"),
         "What begins at {it} is never closed: the value swallows what follows it, or the import fails.",
         "Close the quote or bracket; write a quote inside of \"…\" as \\\"."),
    Rule("CC105", "error", _unreadable, "The expression of {it} cannot be read: {advice}.",
         "Mend it; names are bare inside of ${…}, text is in double quotes."),
    Rule("CC106", "error", _misspelt_kind, "\"{it}\" is no kind of section: what stands under it is lost.", "Write {advice}."),
    Rule("CC118", "error", lambda case: () if case.clusters else (Hit(1),),
         "There is no [cluster], the one section that a template must have.", "Begin with [cluster NAME]."),
    Rule("CC201", "error", _undefined, "{it} is no parameter of this template, so the value stays undefined.",
         "{advice} in a [[[parameter]]]."),
    Rule("CC206", "warning", _no_such, "{it} is no parameter of the template: its value is ignored.", "{advice}."),
    Rule("CC207", "error", _misfit, "{it} does not fit the parameter's type: it must be {advice}.", "Correct the value."),
    Rule("CC209", "error", _open(in_file=False),
         "The parameter {it} is required, has no default, and {advice} does not give it: the cluster cannot start.",
         "Add it to that file."),
    Rule("CC212", "error", _secret_default,
         "The default of {it} is a secret in plain text, which everybody reads who may read the template.",
         "Leave the default out; give it in a file of parameters that is not checked in."),
    Rule("CC213", "error", _secret_setting, "{it} is a secret in plain text, which everybody reads who may read the template.",
         "Take it from a parameter with ParameterType = Password and no default."),
    Rule("CC215", "info", _open(in_file=True),
         "{it} is null, which leaves it open: the cluster starts once somebody has chosen it.",
         "Write the value here, or choose it in the cluster's form before the first start."),
)
