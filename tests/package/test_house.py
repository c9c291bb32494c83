"""The rules of the house: no circle of imports, one name for one thing, no old word, and a table that leads to files."""

import ast
import re
import sys
import sysconfig
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib.machinery import PathFinder
from pathlib import Path

import grimp
import pytest
from prose import PACKAGES, docstrings, identifiers
from tables import table

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def length_of_longest(files: Iterable[Path]) -> dict[str, int]:
    lengths = {str(file.relative_to(ROOT)): len(file.read_text(encoding="utf-8").splitlines()) for file in files}
    return {name: length for name, length in lengths.items() if length >= 500}


def test_every_file_reads_in_one_sitting() -> None:
    assert length_of_longest(FILES) == {}


# --- imports ---------------------------------------------------------------------------------------------------------


def circle(imports: Mapping[str, Iterable[str]]) -> list[str]:
    """Modules of which each imports the next one and the last one the first; empty where there is none."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as found:
        return list(found.args[1])
    return []


def test_no_module_imports_itself_by_any_way() -> None:
    """Imports inside functions and those for types only count too: they are a circle in the reader's head."""
    graph = grimp.build_graph(*(Path(package).name for package in PACKAGES), cache_dir=None)
    assert len(graph.modules) > 300 and {"hpc_mp_lab.command", "cyclecloud_lint.case"} <= graph.modules
    assert circle({module: graph.find_modules_directly_imported_by(module) for module in graph.modules}) == []


def test_a_circle_would_be_seen() -> None:
    found = circle({"a": ["b"], "b": ["c"], "c": ["a"], "d": ["a"]})
    assert found[0] == found[-1] and set(found) == {"a", "b", "c"} and len(found) == 4
    assert circle({"a": ["b", "c"], "b": ["c"]}) == []


# --- names -----------------------------------------------------------------------------------------------------------


@cache
def nodes(file: Path) -> tuple[ast.AST, ...]:
    """Every node of a file that no test changes."""
    return tuple(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))


def classes(files: Iterable[Path]) -> dict[str, list[str]]:
    """The files of every class name."""
    places: dict[str, list[str]] = defaultdict(list)
    for file in files:
        for node in nodes(file):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(file.relative_to(file.parents[1])))
    return places


def test_no_class_name_stands_twice_and_one_that_does_would_be_seen(tmp_path: Path) -> None:
    assert {name: files for name, files in classes(FILES).items() if len(files) > 1} == {}
    for name in ("one.py", "other.py"):
        (tmp_path / name).write_text("class Finding:\n    class Inner: ...\n")
    assert {name: len(files) for name, files in classes(tmp_path.glob("*.py")).items()} == {"Finding": 2, "Inner": 2}


# "words": those that the house had before, and those of the glossary that took their place; "talk": words of talk that functions,
# constants and arguments were named by, and the field's words for what each of them did.
OLD = tomllib.loads(Path(__file__).with_name("old_words.toml").read_text(encoding="utf-8"))


def words(name: str) -> set[str]:
    """``BadNodes`` and ``bad_nodes`` in words."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def old_words(names: Iterable[str], old: Mapping[str, str] = OLD["words"]) -> dict[str, str]:
    """Each name with an old word in it, and what it is to be called."""
    return {name: f"{word} is now {old[word]}" for name in names for word in sorted(words(name) & old.keys())}


def given_names(tree: Iterable[ast.AST]) -> Iterator[str]:
    """Of functions, classes, arguments, attributes and variables."""
    for node in tree:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name


def test_no_file_and_no_class_is_called_by_an_old_word_and_one_would_be_seen() -> None:
    assert old_words(classes(FILES)) == {}
    tests = [file for file in (ROOT / "tests").rglob("*.py") if "golden" not in file.parts]
    assert old_words(file.stem for file in (*FILES, *tests)) == {}
    assert old_words(["IncarnationRecord", "bad_ledger", "Resettled", "Node"]) == {
        "IncarnationRecord": "incarnation is now attempt", "bad_ledger": "ledger is now bad nodes"}


def test_nothing_is_named_by_words_of_talk_and_one_would_be_seen() -> None:
    talk = {str(file.relative_to(ROOT)): old_words(given_names(nodes(file)), OLD["talk"]) for file in FILES}
    assert {file: names for file, names in talk.items() if names} == {}
    source = "LOOK_S = 1\ndef hear(told): self._ways = looks_like"
    assert old_words(given_names(ast.walk(ast.parse(source))), OLD["talk"]).keys() == {"LOOK_S", "hear", "told", "_ways"}


# --- where is it decided? --------------------------------------------------------------------------------------------


def decided(text: str) -> dict[str, list[str]]:
    """The questions of the table under the heading "Where is … decided?", and the files that the last column names."""
    section = re.search(r"^#+ Where is … decided\?\n(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^\|(.+)\|\s*$", section[1], re.MULTILINE)[2:] if section else []  # without the head and its line
    cells = [[cell.strip() for cell in row.split("|")] for row in rows]
    return {first: re.findall(r"`([\w./-]+)`", " ".join(rest)) for first, *rest in cells}


def lost(answers: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Questions without an answer, with too many, or with one that is not there."""
    return {question: files for question, files in answers.items()
            if not 1 <= len(files) <= 2 or not all((ROOT / file).exists() for file in files)}


def test_the_table_of_decisions_leads_to_files() -> None:
    answers = decided(CONTRIBUTING)
    assert len(answers) >= 20
    assert lost(answers) == {}


@pytest.mark.parametrize(("row", "found"), table(__file__, "house.toml", "rows"))
def test_a_row_that_leads_nowhere_would_be_seen(row: str, found: dict[str, list[str]]) -> None:
    assert lost(decided(f"# A\n\n## Where is … decided?\n| question | file |\n|---|---|\n{row}\n\n## B\n| x | y |\n")) == found


# --- programs beside the package --------------------------------------------------------------------------------------

BESIDE = ("benchmarks", "demo", "docs", "examples")  # no test runs all of them, so that a name may leave without a sound


def imported_from(source: str) -> Iterator[tuple[str, str]]:
    """(module, name) of every import of ours, wherever in the source it stands."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "hpc_mp":
            yield from ((node.module, each.name) for each in node.names)


def offered(module: str, name: str) -> bool:
    """Whether a module, found without importing it, has a name: one of its own, one that it imports, or a module in it."""
    place = ROOT.joinpath(*module.split("."))
    if (place / f"{name}.py").exists() or (place / name / "__init__.py").exists():
        return True
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    if not file.exists():
        return False
    return any(
        (isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name)
        or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == name)
        or (isinstance(node, ast.alias) and (node.asname or node.name) == name) for node in nodes(file))


def test_programs_beside_the_package_import_what_it_has() -> None:
    files = [file for folder in BESIDE for file in (ROOT / folder).rglob("*.py")]
    assert len(files) > 10
    assert [f"{file.relative_to(ROOT)}: {module}.{name}" for file in files
            for module, name in imported_from(file.read_text(encoding="utf-8")) if not offered(module, name)] == []


def test_an_import_of_nothing_would_be_seen() -> None:
    (found,) = imported_from("def f():\n    from hpc_mp.planner.order import settle_order")
    assert not offered(*found) and offered("hpc_mp.planner.order", "OrderCost") and offered("hpc_mp.planner", "order")


def unimportable(file: Path, text: str) -> list[str]:
    """Modules at the head of a program that are neither installed nor on a path that it has set by then."""
    paths, missing, insert = [str(file.parent), sysconfig.get_path("purelib")], [], "sys.path.insert(0, "
    for node in ast.parse(text).body:
        if (source := ast.unparse(node)).startswith(insert):
            paths.append(eval(source[len(insert):-1], {"Path": Path, "__file__": str(file), "ROOT": ROOT}))
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [name.name for name in node.names] if isinstance(node, ast.Import) else []
        known = {*sys.stdlib_module_names, "hpc_mp", "deepspeed"}
        missing += [name for name in names if name.partition(".")[0] not in known
                    and PathFinder.find_spec(name.partition(".")[0], paths) is None]
    return missing


def test_programs_find_their_helpers() -> None:
    """Under pytest they always do: all folders of helpers are on its path."""
    programs = {file: text for folder in (*BESIDE, "tests/end_to_end", "tests/support") for file in (ROOT / folder).rglob("*.py")
                if "__main__" in (text := file.read_text(encoding="utf-8"))}
    assert len(programs) > 20
    assert [f"{file}: {missing}" for file, text in programs.items() if (missing := unimportable(file, text))] == []
    later = "import sys\nimport tables\nsys.path.insert(0, str(Path(__file__).parents[1] / 'support'))\nimport tables"
    assert unimportable(ROOT / "tests" / "package" / "program.py", later) == ["tables"]


@pytest.mark.parametrize(("text", "seen"), table(__file__, "house.toml", "openers"))
def test_an_opener_that_names_nothing_is_seen(tmp_path: Path, text: str, seen: bool) -> None:
    """`make lint` runs ``tests/support/prose.py`` over the package."""
    (tmp_path / "one.py").write_text(f'def f():\n    """{text}"""\n')
    assert list(docstrings(tmp_path / "one.py")) == ([(1, text)] if seen else [])


@pytest.mark.parametrize(("text", "names"), table(__file__, "house.toml", "names"))
def test_a_name_that_could_name_anything_is_seen(tmp_path: Path, text: str, names: list[str]) -> None:
    (tmp_path / "one.py").write_text(f"{text}\n")
    assert sorted(name for _, name in identifiers(tmp_path / "one.py")) == sorted(names)
