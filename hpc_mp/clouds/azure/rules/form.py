"""CC1xx: what CycleCloud's parser would stumble over."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from hpc_mp.base.findings import Hit, Rule
from hpc_mp.clouds.azure.context import Case
from hpc_mp.clouds.azure.expression import Call, Unreadable, calls
from hpc_mp.clouds.azure.parse import split_lines
from hpc_mp.clouds.azure.tree import Attribute, TemplateSection
from hpc_mp.clouds.azure.value import Mixed, read_value
from hpc_mp.clouds.azure.vocabulary import FUNCTIONS, NAMED, NODE_KINDS, PARENTS, RANKS, meant

_INVISIBLE = re.compile(r"[\u00a0\u00ad\u2000-\u200f\u2028\u2029\u202f\u205f\u2060\u3000\ufeff]")
_BEFORE_VALUE = re.compile(r"[^=#]*=?\s*")
_TEXTS = ("label", "description")  # shown as they are: nothing in them is evaluated


def _fault(code: str) -> Callable[[Case], Iterable[Hit]]:
    """What the parser found under this code."""
    return lambda case: (Hit(fault.line, fault.it, fault.advice) for fault in case.parsed.faults if fault.code == code)


def evaluated(section: TemplateSection) -> Iterator[Attribute]:
    """The attributes whose values are more than text for the form."""
    for each in section.attributes:
        of_form = each.key.startswith(("config.", "widget.")) and each.assign == "="
        if each.key not in _TEXTS and not of_form:
            yield each


def _unreadable(case: Case) -> Iterable[Hit]:
    for section in case.sections:
        for each in evaluated(section):
            try:
                read_value(each)
            except Unreadable as why:
                yield Hit(each.line, each.name, str(why))


def _calls(case: Case) -> Iterator[tuple[Attribute, Call]]:
    for section in case.sections:
        for each in evaluated(section):
            try:
                value = read_value(each)
            except Unreadable:
                continue
            parts = [part for part in value.parts if not isinstance(part, str)] if isinstance(value, Mixed) else [value]
            yield from ((each, call) for part in parts for call in calls(part))


def _arguments(case: Case) -> Iterable[Hit]:
    for each, call in _calls(case):
        if call.function.casefold() == "ifthenelse" and len(call.arguments) != 3:
            yield Hit(each.line, f"{call.function} with {len(call.arguments)}")


def _functions(case: Case) -> Iterable[Hit]:
    for each, call in _calls(case):
        if near := meant(call.function, FUNCTIONS):
            yield Hit(each.line, call.function, near)


def _pairs(case: Case) -> Iterator[tuple[TemplateSection, TemplateSection | None]]:
    """Each section with the one that it stands in."""
    waiting: list[tuple[TemplateSection, TemplateSection | None]] = [(section, None)
        for section in reversed(case.parsed.template.sections)]
    while waiting:
        section, parent = waiting.pop()
        yield section, parent
        waiting += [(each, section) for each in reversed(section.sections)]


def _misspelt_kind(case: Case) -> Iterable[Hit]:
    for section in case.sections:
        if near := meant(section.kind, RANKS, 0.75):
            yield Hit(section.line, section.kind, near)


def _unknown_kind(case: Case) -> Iterable[Hit]:
    for section in case.sections:
        if section.kind.casefold() not in RANKS and not meant(section.kind, RANKS, 0.75):
            yield Hit(section.line, f"[{section.kind} {section.name}]".replace(" ]", "]"))


def _skipped(case: Case) -> Iterable[Hit]:
    for section, parent in _pairs(case):
        above = "[" * parent.rank + parent.kind if parent else "nothing"
        if section.rank > (parent.rank if parent else 0) + 1:
            yield Hit(section.line, "[" * section.rank + section.kind, above)


def _wrong_place(case: Case) -> Iterable[Hit]:
    for section, parent in _pairs(case):
        kind = section.kind.casefold()
        ranks, parents = RANKS.get(kind), PARENTS.get(kind)
        skips = section.rank > (parent.rank if parent else 0) + 1
        if ranks is None or skips:
            continue
        if section.rank not in ranks:
            yield Hit(section.line, f"{'[' * section.rank}{kind}", f"as {' or '.join('[' * rank + kind for rank in ranks)}")
        elif parents and parent and parent.kind.casefold() in RANKS and parent.kind.casefold() not in parents:
            yield Hit(section.line, f"{kind} in a {parent.kind}", f"in a {' or '.join(parents)}")


def _nameless(case: Case) -> Iterable[Hit]:
    for section in case.sections:
        if not section.kind or (section.kind.casefold() in NAMED and not section.name):
            yield Hit(section.line, section.kind or "section")


def _twice(case: Case) -> Iterable[Hit]:
    for section in case.sections:
        of_node = section.kind.casefold() in NODE_KINDS
        configured = [(f"{part.name}.{each.name}".lstrip("."), each) for part in section.sections if of_node
                      for each in part.attributes if part.kind.casefold() == "configuration"]
        own = [(each.name, each) for each in section.attributes if section.kind.casefold() != "configuration"]
        yield from (*_repeated(own), *_repeated(configured))


def _repeated(named: Iterable[tuple[str, Attribute]]) -> Iterable[Hit]:
    first: dict[str, int] = {}
    for name, each in named:
        if name.casefold() in first:
            yield Hit(each.line, name, f"line {first[name.casefold()]}")
        first.setdefault(name.casefold(), each.line)


def _same_sections(case: Case) -> Iterable[Hit]:
    for section in case.sections:
        if section.kind.casefold() in NODE_KINDS:
            yield from _again(section.sections)


def _again(sections: Iterable[TemplateSection]) -> Iterable[Hit]:
    first: dict[tuple[str, str], int] = {}
    for each in sections:
        key = (each.kind.casefold(), each.name.casefold())
        if key in first and key[0] != "configuration" and each.name:
            yield Hit(each.line, f"{each.kind} {each.name}", f"line {first[key]}")
        first.setdefault(key, each.line)


def _empty(case: Case) -> Iterable[Hit]:
    for section in case.sections:
        if section.kind.casefold() in NODE_KINDS:
            yield from (Hit(each.line, each.name) for each in section.attributes if not each.raw)


def _no_cluster(case: Case) -> Iterable[Hit]:
    if not case.clusters:
        yield Hit(1)


def _bytes(case: Case) -> Iterable[Hit]:
    for number, line in enumerate(split_lines(case.text), 1):
        if "\ufffd" in line or "\0" in line:
            yield Hit(number)


def _invisible(case: Case) -> Iterable[Hit]:
    """In front of a value: inside of it such a sign may be meant."""
    lines = split_lines(case.text)
    starts = {line for section in case.sections for line in (section.line, *(each.line for each in section.attributes))}
    starts |= {fault.line for fault in case.parsed.faults}
    for number in sorted(starts):
        if found := _INVISIBLE.search(_BEFORE_VALUE.findall(lines[number - 1])[0]):
            yield Hit(number, f"U+{ord(found[0]):04X}")


def _same_clusters(case: Case) -> Iterable[Hit]:
    names = Counter(cluster.name.casefold() for cluster in case.clusters)
    seen: set[str] = set()
    for cluster in case.clusters:
        if names[cluster.name.casefold()] > 1 and cluster.name.casefold() in seen:
            yield Hit(cluster.line, cluster.name)
        seen.add(cluster.name.casefold())


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
    Rule("CC104", "error", _fault("CC104"),
         "{it} stands before the first section, where it belongs to nothing.",
         "Move it under the [cluster], [[node]] or [[[section]]] that it is for."),
    Rule("CC105", "error", _unreadable, "The expression of {it} cannot be read: {advice}.",
         "Mend it; names are bare inside of ${…}, text is in double quotes."),
    Rule("CC106", "error", _misspelt_kind, "\"{it}\" is no kind of section: what stands under it is lost.", "Write {advice}."),
    Rule("CC107", "warning", _unknown_kind,
         "{it} is no section of a template that is documented, and may be ignored without a word.",
         "Look its name up, or leave it out."),
    Rule("CC108", "error", _skipped, "{it} under {advice} skips a rank: it belongs to no section.",
         "Give it one bracket more than the section that it is in, and put it under that."),
    Rule("CC109", "error", _wrong_place, "{it} has no meaning at this place.", "Write it {advice}."),
    Rule("CC110", "error", _nameless, "This {it} has no name, so nothing can refer to it and the import fails.",
         "Write a name behind the kind: [[nodearray gpu]]."),
    Rule("CC111", "info", _fault("CC111"),
         "\"{it}\" behind the value is taken for a comment, not for a part of the value.",
         "Put a comment on a line of its own, and a value that has a # in double quotes."),
    Rule("CC112", "error", _fault("CC112"),
         "The value {it} begins with a quotation mark of a text processor, which becomes part of it.",
         "Use \" or no quotes at all."),
    Rule("CC113", "warning", _fault("CC113"),
         "\"{it}\" stands behind the end of the value or header, and may be lost.",
         "Move it into the quotes, escape the quote before it (\\\"), or delete it."),
    Rule("CC114", "error", _bytes, "The line holds bytes that are no text in UTF-8, which the import refuses or garbles.",
         "Save the file as UTF-8."),
    Rule("CC115", "warning", _twice,
         "{it} is set twice in one section or configuration ({advice} is the first): only one of them counts.",
         "Keep one of them."),
    Rule("CC116", "warning", _same_sections,
         "{it} stands twice in one node ({advice} is the first): the second replaces or repeats the first.",
         "Merge them, or give the second another name."),
    Rule("CC117", "warning", _empty, "{it} has no value, which is an empty text and not the inherited or the default one.",
         "Delete the line, or write := undefined to cancel an inherited value."),
    Rule("CC118", "error", _no_cluster, "There is no [cluster], the one section that a template must have.",
         "Begin with [cluster NAME]."),
    Rule("CC119", "error", _arguments, "{it} arguments: it takes three (condition, value if true, value if false).",
         "Give it three; undefined stands for no value."),
    Rule("CC120", "error", _functions, "{it} is no function of CycleCloud, and the expression has no value.", "Write {advice}."),
    Rule("CC121", "error", _same_clusters, "A second cluster is called {it}: import_cluster -c cannot tell which one is meant.",
         "Give it another name."),
    Rule("CC122", "warning", _invisible,
         "The sign {it} before the value looks like a blank or like nothing, and may be taken for a part of the name.",
         "Delete it, and write blanks anew; it comes from a web page or a text processor."),
)
