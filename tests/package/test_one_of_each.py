"""One reader of bash, one table of launchers, one of kinds of failure, and one judge on the short walk of a failure."""

import ast
import re
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

import pytest

from hpc_mp.base.launchers import LAUNCHERS
from hpc_mp.diagnosis.texts import TEXTS
from hpc_mp.rundir.failures import KINDS

PACKAGE = Path(__file__).resolve().parents[2] / "hpc_mp"
READ_SCRIPTS = ("lint", "adopt", "launch", "program")  # rooms that read the user's scripts
A_TABLE = 3  # names in one literal from which it is a table, rather than a question about single names
OF_KINDS = {"Symptom": 0, "Cause": 0, "RankFailure": 2}  # the place of the kind among a record's arguments


@cache
def nodes_of(source: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(source)))


def nodes(package: Path, words: Collection[str], rooms: Collection[str] = (), least: int = 1) -> Iterator[tuple[str, ast.AST]]:
    """Yield every node of the files in the rooms, or in all, with the path of its file.

    Only files with ``least`` of the words are parsed: the others take seconds and have nothing.
    """
    for file in sorted(package.rglob("*.py")):
        path, source = file.relative_to(package), file.read_text(encoding="utf-8")
        if (not rooms or path.parts[0] in rooms) and sum(word in source for word in words) >= least:
            yield from ((str(path), node) for node in nodes_of(source))


def parsers_of_bash(package: Path) -> set[str]:
    """Files that import the grammar of bash."""
    return {file for file, node in nodes(package, ["tree_sitter_bash"]) if (isinstance(node, ast.Import) and any(
        name.name == "tree_sitter_bash" for name in node.names)) or (
        isinstance(node, ast.ImportFrom) and node.module == "tree_sitter_bash")}


def splitters(package: Path) -> set[str]:
    """Files of the rooms that read scripts in which ``shlex`` splits a text."""
    return {file for file, node in nodes(package, ["shlex"], READ_SCRIPTS) if isinstance(node, ast.Attribute)
            and node.attr in ("split", "shlex") and isinstance(node.value, ast.Name) and node.value.id == "shlex"}


def tables_of(names: set[str], package: Path) -> set[str]:
    """Files with a literal that has several of the names."""
    return {file for file, node in nodes(package, names, least=A_TABLE) if len(names & strings(node)) >= A_TABLE}


def strings(node: ast.AST) -> set[str]:
    elements = node.keys if isinstance(node, ast.Dict) else node.elts if isinstance(node, (ast.Set, ast.Tuple, ast.List)) else []
    return {element.value for element in elements if isinstance(element, ast.Constant) and isinstance(element.value, str)}


def callers(name: str, package: Path) -> set[str]:
    last = name.rpartition(".")[2]
    return {file for file, node in nodes(package, [last]) if isinstance(node, ast.Call)
            and getattr(node.func, "attr", getattr(node.func, "id", None)) == last and ast.unparse(node.func) == name}


def unknown_kinds(package: Path) -> set[str]:
    """Kinds that records of failures are made with, and that ``KINDS`` lacks."""
    calls = (node for _, node in nodes(package, OF_KINDS) if isinstance(node, ast.Call))
    given = (node.args[OF_KINDS[name]] for node in calls if (name := ast.unparse(node.func)) in OF_KINDS
             and len(node.args) > OF_KINDS[name])
    return {kind.value for kind in given if isinstance(kind, ast.Constant)} - KINDS.keys()


def with_field(annotation: str, package: Path) -> set[str]:
    """Classes with a field of that type."""
    return {node.name for _, node in nodes(package, [annotation]) if isinstance(node, ast.ClassDef) and any(
        isinstance(line, ast.AnnAssign) and ast.unparse(line.annotation) == annotation for line in node.body)}


def test_there_is_one_of_each() -> None:
    assert parsers_of_bash(PACKAGE) == {"lint/sbatch/shell.py"}
    assert splitters(PACKAGE) == set()
    assert tables_of(set(LAUNCHERS), PACKAGE) == {"base/launchers.py"}
    assert callers("FailureKind", PACKAGE) == {"rundir/failures.py"}
    assert unknown_kinds(PACKAGE) | {kind for kind, _ in TEXTS if kind is not None} - KINDS.keys() == set()
    assert with_field("SuspectKind", PACKAGE) == {"Suspect"}
    assert with_field("tuple[Suspect, ...]", PACKAGE) == {"Localisation"}


@pytest.mark.parametrize(("file", "source", "seen"), [
    ("launch/a.py", "import tree_sitter_bash", parsers_of_bash),
    ("launch/a.py", "from tree_sitter_bash import language", parsers_of_bash),
    ("launch/a.py", "import shlex\nwords = shlex.split(line)", splitters),
    ("launch/a.py", "MPI = ('mpirun', 'mpiexec', 'orterun')", lambda package: tables_of(set(LAUNCHERS), package)),
    ("launch/a.py", "MORE = {'torchrun': 1, 'accelerate': 2, 'srun': 3}", lambda package: tables_of(set(LAUNCHERS), package)),
    ("launch/a.py", "OTHER = {'memory': FailureKind(0)}", lambda package: callers("FailureKind", package))])
def test_a_second_one_would_be_seen(file: str, source: str, seen: object, tmp_path: Path) -> None:
    (tmp_path / "launch").mkdir()
    (tmp_path / file).write_text(source, encoding="utf-8")
    assert callable(seen) and seen(tmp_path) == {file}


def test_an_unknown_kind_and_a_second_result_would_be_seen(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("Symptom('oom', 'it is full')\nCause('memory', 'so')\nRankFailure(0, 'n1', 'sad', '')\n"
                                   "class Guess:\n    kind: SuspectKind\n    all: tuple[Suspect, ...]\n", encoding="utf-8")
    assert unknown_kinds(tmp_path) == {"oom", "sad"}
    assert with_field("SuspectKind", tmp_path) == with_field("tuple[Suspect, ...]", tmp_path) == {"Guess"}


def test_a_question_about_single_names_is_no_table(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("launcher in ('srun', 'torchrun')\ncommand.split()\n", encoding="utf-8")
    assert tables_of(set(LAUNCHERS), tmp_path) == splitters(tmp_path) == set()


ROOT = Path(__file__).resolve().parents[2]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
MOST_FILES, MOST_TYPES = 14, 6
JUDGE = "hpc_mp/diagnosis/classify.py"
Walk = list[tuple[str, list[str]]]  # (file, its types)


def walks(text: str) -> list[Walk]:
    """Return the tables under the heading "The walk of a failure"."""
    section = re.search(r"^## The walk of a failure\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    tables = re.findall(r"(?:^\|.*\n)+", section[1], re.MULTILINE) if section else []
    rows = [[line.split("|")[1:] for line in table.splitlines()[2:]] for table in tables]
    return [[(cells[0].strip(" `"), re.findall(r"`(\w+)`", cells[2])) for cells in table] for table in rows]


def faults(walk: Walk) -> list[str]:
    """Return what is wrong with a walk: a missing file, a type that its file does not define, too many of them, no judge."""
    lacking = [name for file, names in walk for name in (names if (ROOT / file).is_file() else [file])
               if not (ROOT / file).is_file() or name not in classes(ROOT / file)]
    files, types = {file for file, _ in walk}, {name for _, names in walk for name in names}
    return [*lacking, *(["files"] if len(files) > MOST_FILES else []), *(["types"] if len(types) > MOST_TYPES else []),
            *(["judge"] if JUDGE not in files else [])]


def classes(file: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, ast.ClassDef)}


def test_the_walks_lead_through_files_and_types_that_exist() -> None:
    exception, kill = walks(CONTRIBUTING)
    assert faults(exception) == faults(kill) == []
    assert exception[0][0].startswith("hpc_mp/train/") and exception[-1][0] == kill[-1][0] == "hpc_mp/cli/status.py"


@pytest.mark.parametrize(("walk", "wrong"), [
    ([(JUDGE, []), ("hpc_mp/rundir/lost.py", ["Cause"])], ["hpc_mp/rundir/lost.py"]),
    ([(JUDGE, []), ("hpc_mp/rundir/outcome.py", ["Verdict"])], ["Verdict"]),
    ([("hpc_mp/rundir/outcome.py", ["Cause"])], ["judge"]),
    ([(JUDGE, []), *((str(file.relative_to(ROOT)), []) for file in (ROOT / "hpc_mp" / "base").glob("*.py"))], ["files"])])
def test_a_walk_that_leads_nowhere_would_be_seen(walk: Walk, wrong: list[str]) -> None:
    assert faults(walk) == wrong


def test_one_judge() -> None:
    """`Cause` of ranks' evidence is made in one place: other causes are ends that no rank has a part in."""
    files = [*(ROOT / "hpc_mp").rglob("*.py")]
    texts = {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in files}
    assert [file for file, text in texts.items() if re.search(r"^def classify\(", text, re.MULTILINE)] == [JUDGE]
    assert {file for file, text in texts.items() if re.search(r"\bimport .*\bclassify\b", text)} == {
        "hpc_mp/supervisor/ending.py", "hpc_mp/launch/backends/watch.py"}
