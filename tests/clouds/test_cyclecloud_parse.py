"""The parser of cluster templates: what it reads, that printing a tree is its inverse, and that no text breaks it."""

from __future__ import annotations

import random

import pytest
from cyclecloud_cases import CASES, CLEAN, planted
from hypothesis import example, given
from hypothesis import strategies as st

from hpc_mp.clouds.azure import lint
from hpc_mp.clouds.azure.expression import UNKNOWN, Unreadable, read
from hpc_mp.clouds.azure.offer import load_offer
from hpc_mp.clouds.azure.resolve import clusters
from hpc_mp.clouds.azure.template import Attribute, Parsed, TemplateSection, parse

TEXTS = [CLEAN, *(planted(case) for case in CASES if "find" in case)]


def value(line: str) -> object:
    """What an attribute, as it is written, comes to where P is 4, Yes is true, Text is "a b" and R a record."""
    (section,) = parse(f"[cluster c]\n{line}\n").sections
    return read(section.attributes[0], {"p": 4, "yes": True, "text": "a b", "r": {"B": 7}}).value


def to_text(template: Parsed) -> str:
    """The template, each section under its header, indented by rank; comments are not part of a tree."""
    return "\n".join(map(section_text, template.walk()))


def section_text(section: TemplateSection) -> str:
    margin = "    " * (section.rank - 1)
    header = f"{'[' * section.rank}{f'{section.kind} {section.name}'.strip()}{']' * section.rank}"
    lines = [header, *(f"{attribute.name} {attribute.assign} {attribute.raw}" for attribute in section.attributes)]
    return "".join(f"{margin}{line}\n" for line in lines)


# --- sections and attributes ------------------------------------------------------------------------------------------


def test_sections_lie_in_each_other_by_rank_and_keep_their_lines() -> None:
    text = ("# head\n[cluster C]\nA = 1\n\n\t[[node one]] # first\n\t\t[[[configuration]]]\n\t\tx.y = 2\n"
            "[[nodearray two]]\n[parameters P]\n")
    parsed = parse(text)
    assert parsed.faults == ()
    assert [(each.kind, each.name, each.rank, each.line) for each in parsed.walk()] == [
        ("cluster", "C", 1, 2), ("node", "one", 2, 5), ("configuration", "", 3, 6), ("nodearray", "two", 2, 8),
        ("parameters", "P", 1, 9)]
    cluster, _ = parsed.sections
    assert cluster.sections[0].sections[0].attributes == (Attribute("x.y", "=", "2", 0),)
    assert cluster.sections[0].sections[0].attributes[0].line == 7


@pytest.mark.parametrize(("written", "raw", "below"), [
    ("A = plain text, with 'marks' = and \"so on\"", "plain text, with 'marks' = and \"so on\"", 2),
    ("A = '''one\n  [[two]]\n# three'''", "'''one\n  [[two]]\n# three'''", 4),
    ('A = """one "two"\n\nthree"""', '"""one "two"\n\nthree"""', 4),
    ('A = "one\ntwo \\" three"', '"one\ntwo \\" three"', 3),
    ("A := {[Label=\"x\";\n  Value=1],\n [Value=2]}", "{[Label=\"x\";\n  Value=1],\n [Value=2]}", 4),
    ("A = =undefined", "=undefined", 2),
    ("A := b # why", "b", 2),
    ("A =", "", 2),
    ("A = #fff", "#fff", 2),
    ('A = "x # y" # why', '"x # y"', 2),
    ('A = "x", "y"  # why', '"x", "y"', 2),
    ("A = ${strcat(\"#\", \" #\")}  # why", "${strcat(\"#\", \" #\")}", 2),
])
def test_a_value_and_where_the_next_attribute_begins(written: str, raw: str, below: int) -> None:
    parsed = parse(f"[c]\n{written}\nB = 1\n")
    first, second = parsed.sections[0].attributes
    assert (first.raw, second.name, second.line) == (raw, "B", below + 1)
    assert parsed.faults == ()


@pytest.mark.parametrize("written", ["A = \"one", "A = '''one", "A := {\"one\"", "A := \"one"])
def test_what_is_never_closed_swallows_nothing(written: str) -> None:
    parsed = parse(f"[c]\n{written}\nB = 1\n[[d]]\nC = 2\n")
    assert [fault.code for fault in parsed.faults] == ["CC103"]
    assert [each.name for section in parsed.walk() for each in section.attributes] == ["A", "B", "C"]


# --- values and expressions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("line", "known"), [
    ("A = 12", 12), ("A = -1", -1), ("A = 1.5", 1.5), ("A = True", True), ("A = false", False), ("A = rack 1", "rack 1"),
    ('A = "12"', "12"), ("A = 'x'", "x"), ("A = '''x\ny'''", "x\ny"), ('A = "a \\"b\\""', 'a "b"'),
    ("A = a, 2, true", ("a", 2, True)), ('A = "a, b", c', ("a, b", "c")), ("A = $P, $Yes", (4, True)),
    ("A = $p", 4), ("A = $Nobody", UNKNOWN), ("A = =undefined", None), ("A := undefined", None),
    ("A := \"x\"", "x"), ("A :=", None),
    ("A = ${P}", 4), ("A = ${P}-of-${P / 2}", "4-of-2"), ("A = x${Nobody}", UNKNOWN), ("A = ${Yes}x", "truex"),
    ("A = ${P + 2 * 3 - 1}", 9), ("A = ${(P + 2) * 3}", 18), ("A = ${P / 8}", 0.5), ("A = ${P % 3}", 1),
    ("A = ${P / 0}", UNKNOWN),
    ("A = ${-P}", -4), ("A = ${P > 3 && !false || Nobody}", True), ("A = ${Nobody && false}", False), ("A = ${!Nobody}", UNKNOWN),
    ("A = ${P >= 4 == true}", True), ("A = ${Text == \"A B\"}", True), ("A = ${P isnt 4}", False), ("A = ${P is 4}", True),
    ("A = ${P !== undefined}", True), ("A = ${P === 4}", True), ("A = ${1 == true}", False), ("A = ${$P < 5}", True),
    ("A = ${P in {1, 4}}", True), ("A = ${P in {1, Nobody}}", UNKNOWN), ("A = ${Yes ? \"a\" : \"b\"}", "a"),
    ("A = ${ifThenElse(P > 5, 1, undefined)}", None), ("A = ${IFTHENELSE(Nobody, 1, 1)}", 1),
    ("A = ${ifThenElse(Nobody, 1, 2)}", UNKNOWN),
    ("A = ${StrJoin(\"-\", \"x\", P, \"y\")}", "x-4-y"), ("A = ${strcat(Text, P)}", "a b4"), ("A = ${toLower(\"ABC\")}", "abc"),
    ("A = ${toUpper(Trim(\" a \"))}", "A"), ("A = ${Size(Text)}", 3), ("A = ${regexps(\"(a+)+b\", Text, \"\")}", UNKNOWN),
    ("A = ${[a=1; B=7][\"b\"]}", 7), ("A = ${R[\"b\"]}", 7), ("A = ${R[Text]}", UNKNOWN), ("A = ${(R).B + 1}", 8),
    ("A = ${Nobody[1]}", UNKNOWN), ("A = ${Cluster().Name =!= true}", UNKNOWN), ("A = ${P =?= 4}", True),
    ("A = ${someday(P)}", UNKNOWN), ("A = ${Text + 1}", UNKNOWN), ("A = ${Yes + 1}", UNKNOWN),
    ("A := {[Label=\"Any\"; Value=undefined], [Value=1]}", ({"Label": "Any", "Value": None}, {"Value": 1})), ("A := []", {}),
])
def test_what_a_value_comes_to(line: str, known: object) -> None:
    found = value(line)
    assert found == known and type(found) is type(known)


@pytest.mark.parametrize("line", [
    "A = ${", "A = ${P", "A = ${}", "A = ${P +}", "A = ${f(P}", "A = ${(P}", "A = ${P P}", "A = ${P ? 1}", "A = ${@}",
    "A = ${\"x}", "A = x${P", "A := a b", "A := [1]", "A := [a=1 b=2]",
    "A = ${" + "(" * 60 + "1" + ")" * 60 + "}", "A = ${" + "!" * 200 + "P}",
    "A = ${a.}", "A = ${a[1}", "A = ${a[]}", "A = ${a.1}",
    "A = $!P", "A = $(P)", "A = $",
])
def test_what_is_no_expression(line: str) -> None:
    with pytest.raises(Unreadable):
        value(line)


@pytest.mark.parametrize(("short", "known"), [
    ("${P - 1 - 1}", 2), ("${false && false || true}", True), ("${P + 2 == 6 && P < 3 + 2}", True),
    ("${!Yes || P > 2 * 1}", True),
    ("${2 + P * 2 - 6 / 3}", 8),
])
def test_what_binds_closer_is_worked_out_first(short: str, known: object) -> None:
    assert value(f"A = {short}") == known


def test_the_names_of_a_value_and_the_parameter_that_it_is() -> None:
    (section,) = parse("[c]\nA = x-${P}-${f(\"Q\", $R)}\nB = $P\nC = ${P}\nD = $P, x, $Q\n").sections
    found = [read(each, {"p": 4}) for each in section.attributes]
    assert [(each.names, each.parameter) for each in found] == [(("P", "R"), ""), (("P",), "P"), (("P",), "P"), (("P", "Q"), "")]


# --- the printer ------------------------------------------------------------------------------------------------------

_NAME = st.from_regex(r"[A-Za-z][A-Za-z0-9_.\-]{0,10}", fullmatch=True)
_WORD = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Zs", "Zl", "Zp", "Cs"],
                              exclude_characters="[]\"'#$={}():,\\“”„‘’"), min_size=1, max_size=10)
_RAW = st.one_of(_WORD, _WORD.map(lambda word: f"${word}"), _WORD.map(lambda word: f"'''{word}\n  [[{word}]]\n'''"),
                 _WORD.map(lambda word: f"\"{word}\n{word}\""),
                 st.sampled_from(["", "${ifThenElse(A > 1, \"x # y\", undefined)}", "=undefined"]))
_LITERAL = st.sampled_from(["undefined", '{[Value="a b"],\n [Value=2]}', "A isnt true"])
_ATTRIBUTE = (st.builds(Attribute, _NAME, st.just("="), _RAW, st.just(1))
              | st.builds(Attribute, _NAME, st.just(":="), _LITERAL, st.just(1)))


def _section(rank: int) -> st.SearchStrategy[TemplateSection]:
    attributes = st.lists(_ATTRIBUTE, max_size=3).map(tuple)
    below = st.lists(_section(rank + 1), max_size=2).map(tuple) if rank < 4 else st.just(())
    return st.builds(TemplateSection, _NAME, _WORD | st.just(""), st.just(rank), st.just(1), attributes, below)


@given(st.lists(_section(1), max_size=3).map(tuple).map(Parsed))
def test_a_printed_tree_parses_to_the_same(template: Parsed) -> None:
    assert parse(to_text(template)) == template


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_templates_survive_printing(text: str) -> None:
    template = Parsed(parse(text).sections)
    assert parse(to_text(template)).sections == template.sections


def test_a_printer_that_loses_something_would_be_seen() -> None:
    template = parse(CLEAN)
    assert parse(to_text(template).replace("MaxCount = 10", "MaxCount = 11")) != template
    assert parse(to_text(template).replace("    [[nodearray htc]]", "    [nodearray htc]")) != template


# --- any text ---------------------------------------------------------------------------------------------------------

PIECES = (
    "[", "]", "[[", "]]", "[[[", "]]]", "[[[[", "[cluster", "[[node", "[[nodearray", "[[[configuration", "[[[parameter",
    "[parameters", "=", ":=", "'''", "\"", "\\", "${", "}", "{", "(", ")", "$", "#", ",", ";", "\n", "\r", "\t", " ",
    "\x00", "\u2028", "\x85", "x", "1", "Extends", "Abstract = true", "defaults", "MachineType",
    "Standard_ND96isr_H100_v5", "slurm.hpc = true", "MaxCount", "DefaultValue", "ifThenElse(", "isnt", "?", ":", "||",
    "undefined", "9" * 30, "ü", "\ud800", "Config.Entries := {[Value=1]}", "slurm.dampen_memory = ",
    "slurm.default_partition = true", "slurm.accounting.enabled = true", "Interruptible = true", "Azure.MaxScalesetSize = 64",
    '"""',
)


def check(text: str) -> None:
    """No traceback; lines are lines of the text; what was read survives printing."""
    for finding in lint(text):
        assert 1 <= finding.line <= text.count("\n") + text.count("\r") + 1
    template = Parsed(parse(text).sections)
    assert parse(to_text(template)).sections == template.sections


@given(st.one_of(st.text(), st.lists(st.sampled_from(PIECES), max_size=40).map("".join),
                 st.lists(st.sampled_from(PIECES), max_size=60).map("\n".join)))
@example("")
@example("[" * 5000)
@example("".join(f"{'[' * rank}a{']' * rank}\n" for rank in range(1, 300)))
@example("[cluster c]\n" + "".join(f"[[node n{at}]]\nExtends = n{at + 1}\n" for at in range(400)))
@example("[cluster c]\nA = ${" + "ifThenElse(" * 3000)
@example("[cluster c]\nA = ${" + "-" * 5000 + "1}")
@example("[cluster c]\nA = \"" + "x\n" * 5000)
@example("[cluster c]\n" + "A := {\n" * 300)
@example("[cluster c]\n" + "A = '''\n" * 301)
def test_any_text_is_linted_without_a_traceback(text: str) -> None:
    check(text)


def damaged(dice: random.Random) -> str:
    """A template with a few lines or pieces cut out, moved or put in."""
    lines = dice.choice(TEXTS).split("\n")
    for _ in range(dice.randint(0, 8)):
        at, other = dice.randrange(len(lines)), dice.randrange(len(lines))
        change = dice.randrange(4)
        if change == 0:
            lines[at] = ""
        elif change == 1:
            lines[at], lines[other] = lines[other], lines[at]
        elif change == 2:
            lines.insert(at, lines[other])
        else:
            lines[at] = lines[at].replace("[[", "[") if dice.random() < 0.5 else lines[at].partition("=")[0] + lines[other]
    text = "\n".join(lines)
    for _ in range(dice.randint(0, 6)):
        start = dice.randrange(len(text) + 1)
        end = min(len(text), start + dice.choice((0, 0, 1, 5, 40, 400)))
        piece = dice.choice((*PIECES, text[end:end + dice.choice((10, 100))], "".join(dice.choices(PIECES, k=5))))
        text = text[:start] + piece + text[end:]
    return text


@pytest.mark.parametrize("seed", range(10))
def test_a_damaged_template_is_linted_without_a_traceback(seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(30):
        check(damaged(dice))


@pytest.mark.prove
@pytest.mark.parametrize("seed", range(100, 150))
def test_five_thousand_damaged_templates(seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(90):
        check(damaged(dice))
    for _ in range(10):
        check("".join(dice.choices(PIECES, k=dice.randint(0, 300))))


def test_names_and_nodes_are_resolved_in_a_damaged_template_too() -> None:
    (cluster,) = clusters(parse(CLEAN.replace("[[node base]]", "[[node base]")).sections, {}, load_offer())
    assert [node.name for node in cluster.nodes] == ["defaults", "scheduler", "login", "base", "gpu", "htc"]
    assert cluster.nodes[4].get("Azure.MaxScalesetSize").number == 64  # type: ignore[union-attr]
