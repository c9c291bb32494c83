"""The parser of cluster templates: sections, values, expressions; a printed tree parses to itself, and no text breaks it."""

import tomllib
from pathlib import Path

import pytest
from cyclecloud_cases import CASES, CLEAN, planted
from hypothesis import example, given
from hypothesis import strategies as st
from tables import table

from cyclecloud_lint.expression import UNKNOWN, Unreadable, read
from cyclecloud_lint.rules import lint
from cyclecloud_lint.template import Attribute, Parsed, TemplateSection, parse

EXPRESSIONS = tomllib.loads(Path(__file__).with_name("expressions.toml").read_text(encoding="utf-8"))
TEXTS = [CLEAN, *(planted(case) for case in CASES if "find" in case)]


def value(line: str) -> object:
    """Return the value of a written attribute; P is 4, Yes is true, Text is "a b"."""
    (section,) = parse(f"[cluster c]\n{line}\n").sections
    return read(section.attributes[0], {"p": 4, "yes": True, "text": "a b"}).value


def to_text(template: Parsed) -> str:
    """Print a tree: each section under its header, indented by rank; comments are not part of a tree."""
    return "\n".join(map(section_text, template.walk()))


def section_text(section: TemplateSection) -> str:
    margin = "    " * (section.rank - 1)
    header = f"{'[' * section.rank}{f'{section.kind} {section.name}'.strip()}{']' * section.rank}"
    lines = [header, *(f"{attribute.name} {attribute.assign} {attribute.raw}" for attribute in section.attributes)]
    return "".join(f"{margin}{line}\n" for line in lines)


def test_sections_lie_in_each_other_by_rank_and_keep_their_lines() -> None:
    text = ("# head\n[cluster C]\nA = 1\n\n\t[[node one]] # first\n\t\t[[[configuration]]]\n\t\tx.y = 2\n"
            "[[nodearray two]]\n[parameters P]\n")
    parsed = parse(text)
    assert parsed.faults == ()
    assert [(section.kind, section.name, section.rank, section.line) for section in parsed.walk()] == [
        ("cluster", "C", 1, 2), ("node", "one", 2, 5), ("configuration", "", 3, 6), ("nodearray", "two", 2, 8),
        ("parameters", "P", 1, 9)]
    assert parsed.sections[0].sections[0].sections[0].attributes == (Attribute("x.y", "=", "2", 0),)
    assert parsed.sections[0].sections[0].sections[0].attributes[0].line == 7


@pytest.mark.parametrize(("written", "raw", "below"), table(__file__, "cyclecloud_parse.toml", "values"))
def test_a_value_and_the_line_of_the_next_attribute(written: str, raw: str, below: int) -> None:
    parsed = parse(f"[c]\n{written}\nB = 1\n")
    first, second = parsed.sections[0].attributes
    assert (first.raw, second.name, second.line) == (raw, "B", below + 1)
    assert parsed.faults == ()


@pytest.mark.parametrize("written", ["A = \"one", "A = '''one", "A := {\"one", "A := \"one"])
def test_text_that_is_never_closed_swallows_nothing(written: str) -> None:
    parsed = parse(f"[c]\n{written}\nB = 1\n[[d]]\nC = 2\n")
    assert [fault.code for fault in parsed.faults] == ["CC103"]
    assert [attribute.name for section in parsed.walk() for attribute in section.attributes] == ["A", "B", "C"]


EXPECTED = [(row["line"], row["is"]) for row in EXPRESSIONS["known"]]
EXPECTED += [(line, None) for line in EXPRESSIONS["undefined"]] + [(line, UNKNOWN) for line in EXPRESSIONS["unknown"]]


@pytest.mark.parametrize(("line", "expected"), EXPECTED)
def test_the_value_of_an_attribute(line: str, expected: object) -> None:
    result, expected = value(line), tuple(expected) if isinstance(expected, list) else expected
    assert result == expected and type(result) is type(expected)


@pytest.mark.parametrize("line", [
    *EXPRESSIONS["unreadable"], "A = ${" + "(" * 600 + "1" + ")" * 600 + "}", "A = ${" + "!" * 2000 + "P}"])
def test_text_that_is_no_expression(line: str) -> None:
    with pytest.raises(Unreadable):
        value(line)


def test_the_names_of_a_value_and_the_parameter_that_it_is() -> None:
    (section,) = parse("[c]\nA = x-${P}-${f(\"Q\", $R)}\nB = $P\nC = ${P}\nD = $P, x, $Q\n").sections
    readings = [read(attribute, {"p": 4}) for attribute in section.attributes]
    assert [(reading.names, reading.parameter) for reading in readings] == [
        (("P", "R"), ""), (("P",), "P"), (("P",), "P"), (("P", "Q"), "")]


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_templates_survive_printing(text: str) -> None:
    template = Parsed(parse(text).sections)
    assert parse(to_text(template)).sections == template.sections
    assert parse(to_text(template).replace("slurm.role = scheduler", "slurm.role = s")).sections != template.sections


PIECES = (
    "[", "]", "[[", "]]", "[[[", "]]]", "[[[[", "[cluster", "[[node", "[[nodearray", "[[[configuration", "[[[parameter",
    "[parameters", "=", ":=", "'''", "\"", "\\", "${", "}", "{", "(", ")", "$", "#", ",", ";", "\n", "\r", "\t", " ",
    "\x00", "\u2028", "\x85", "x", "1", "Extends", "Abstract = true", "defaults", "MachineType",
    "Standard_ND96isr_H100_v5", "slurm.hpc = true", "MaxCount", "DefaultValue", "ifThenElse(", "isnt", "?", ":", "||",
    "undefined", "9" * 30, "ü", "\ud800", "Config.Entries := {[Value=1]}", "slurm.dampen_memory = ",
    "slurm.default_partition = true", "slurm.accounting.enabled = true", "Azure.MaxScalesetSize = 64", '"""')


def check(text: str) -> None:
    """Assert that a text is linted without a traceback, and that lines are lines of the text."""
    for finding in lint(text):
        assert finding.line is not None and 1 <= finding.line <= text.count("\n") + text.count("\r") + 1


@given(st.one_of(st.text(), st.lists(st.sampled_from(PIECES), max_size=40).map("".join),
                 st.lists(st.sampled_from(PIECES), max_size=60).map("\n".join)))
@example("[" * 5000)
@example("".join(f"{'[' * rank}a{']' * rank}\n" for rank in range(1, 300)))
@example("[cluster c]\n" + "".join(f"[[node n{at}]]\nExtends = n{at + 1}\n" for at in range(400)))
@example("[cluster c]\nA = ${" + "ifThenElse(" * 3000)
@example("[cluster c]\nA = ${" + "-" * 5000 + "1}")
@example("[cluster c]\nA = ${" + "P && " * 400 + "(" * 99 + "P" + ")" * 99 + "}")
@example("[cluster c]\nA = \"" + "x\n" * 5000)
@example("[cluster c]\n" + "A = '''\n" * 301)
def test_any_text_is_linted_without_a_traceback(text: str) -> None:
    check(text)


@given(st.data())
def test_a_damaged_template_is_linted_without_a_traceback(data: st.DataObject) -> None:
    """A real template whose lines are in another order, with a piece cut out and another put in."""
    lines = data.draw(st.sampled_from(TEXTS)).split("\n")
    at, other = data.draw(st.integers(0, len(lines) - 1)), data.draw(st.integers(0, len(lines) - 1))
    lines[at], lines[other] = lines[other], lines[at].replace("[[", "[", data.draw(st.integers(0, 1)))
    text = "\n".join(lines)
    start = data.draw(st.integers(0, len(text)))
    check(text[:start] + data.draw(st.sampled_from(PIECES)) + text[start + data.draw(st.sampled_from((0, 1, 5, 40, 400))):])
