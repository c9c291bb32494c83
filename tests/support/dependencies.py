"""The files that a file of tests depends on, and a digest of their contents.

A test depends on its own file, on the helpers and package modules that it imports, directly or indirectly, and on the data of
their rooms. Processes that it starts are recognized by the verbs that it names: ``"launch"`` stands for
``hpc_mp.cli.launch`` and for the rooms in which a job then runs.
"""

import ast
import hashlib
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[2]
OF_ALL = ROOT / "tests/conftest.py"
# Packages -> where they lie. Those beside hpc_mp are distributions of their own: rooms like others, not data of the folder.
PACKAGES = {"hpc_mp": ROOT, "cyclecloud_lint": ROOT / "cyclecloud/lint", "hpc_mp_lab": ROOT / "slurm/lab"}
STARTING = ("launch", "run", "train")  # verbs whose processes start others
OF_A_JOB = ("diagnosis", "launch", "program", "rundir", "supervisor", "train")
# Folders of data beside the package -> the rooms that read them.
DATA = {"env": ("doctor", "environment", "program"), "slurm": ("launch", "lint", "supervisor", "hpc_mp_lab"),
        "cyclecloud": ("clouds", "lint"), "examples": ("adopt", "program", "lint")}
# Modules whose functions run for some inputs only -> words: a test with such an input has one in its texts.
ON_INPUT = {"hpc_mp.train.data.chat_template": ('"messages"', "'messages'", "chat", "conversations", "alpaca", "examples")}


@cache
def graph() -> grimp.ImportGraph:
    return grimp.build_graph(*PACKAGES, cache_dir=None)


def place(module: str) -> Path:
    """Return the path of a module, without a suffix."""
    return PACKAGES[module.partition(".")[0]] / module.replace(".", "/")


def room_of(module: str) -> str:
    """Return the room of a module; of the packages beside hpc_mp, the package."""
    package, _, rest = module.partition(".")
    return rest.partition(".")[0] if package == "hpc_mp" else package


@cache
def verbs() -> dict[str, str]:
    """Return a dict from verb to its module: in the package, or in the lab."""
    sys.path.insert(0, str(ROOT))
    from hpc_mp.cli.main import VERBS

    return {verb: f"hpc_mp.cli.{row[0]}" if row[0] else "hpc_mp_lab.command" for verb, row in VERBS.items()}


@cache
def imported(text: str) -> set[str]:
    """Return the names of modules, and of objects in them, that a source text imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def helper(name: str, folder: Path) -> Path | None:
    """Return the file of a module outside the package, looked up where pytest does; None for a module from elsewhere."""
    for place in (folder, ROOT / "tests/support", ROOT / "tests", ROOT):
        for file in (place / f"{name.replace('.', '/')}.py", place / name.replace(".", "/") / "__init__.py"):
            if file.is_file():
                return file
    return None


def helpers_of(test: Path) -> set[Path]:
    """Return the test's file, its ``conftest.py`` files, and the helpers that these import, except helpers of all tests: a test
    that uses the lab imports it itself."""
    beside = {folder / "conftest.py" for folder in test.parents if folder.is_relative_to(ROOT / "tests")}
    waiting, reached = [test, *(file for file in beside if file.is_file())], set[Path]()
    while waiting:
        file = waiting.pop()
        if file not in reached:
            reached.add(file)
            names = set() if file == OF_ALL else imported(file.read_text(encoding="utf-8"))
            waiting += filter(None, (helper(name, test.parent) for name in names if not name.startswith("hpc_mp")))
    return reached


@cache
def upstream(module: str) -> frozenset[str]:
    """Return all modules that a module of the package imports, directly or indirectly."""
    return frozenset(graph().find_upstream_modules(module))


def modules_of(helpers: Iterable[Path]) -> set[str]:
    """Return the modules of the package that these files reach."""
    texts = [file.read_text(encoding="utf-8") for file in helpers if file != OF_ALL]
    named = {name for text in texts for name in imported(text)} & graph().modules
    starts = any(word in text for text in texts for word in ('"hpc_mp"', "hpc-mp", "hpc_mp.cli"))
    started = {verb for verb in verbs() if starts and any(f'"{verb}"' in text for text in texts)}
    named |= {verbs()[verb] for verb in started} & graph().modules
    if started & set(STARTING):
        named |= {module for module in graph().modules if room_of(module) in OF_A_JOB}
    reached = named.union(*map(upstream, named))
    return reached | {module[:end] for module in reached for end in range(len(module)) if module[end] == "."}


class Prose(ast.NodeTransformer):
    """The removal of each statement that is only a string: docstrings, and the description of a field below it."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if text else node


def without_prose(text: str) -> str:
    """Return the source text of a module without its comments, its layout, its docstrings and its descriptions of fields."""
    return ast.dump(Prose().visit(ast.parse(text)))


@cache
def digest_of(file: Path) -> str:
    """Return a digest that changes if the file's behaviour can change. Docstrings of verbs count: click shows them."""
    content = file.read_bytes()
    if file.suffix == ".py" and not file.is_relative_to(ROOT / "hpc_mp/cli"):
        content = without_prose(content.decode()).encode()
    return hashlib.sha256(content).hexdigest()


@cache
def data_of(room: str) -> tuple[Path, ...]:
    """Return the files of a room that are not modules, and the files beside the package that it reads."""
    own = (file for file in place(room if room in PACKAGES else f"hpc_mp.{room}").rglob("*") if file.suffix != ".py")
    beside = (file for folder, rooms in DATA.items() if room in rooms for file in (ROOT / folder).rglob("*")
              if not any(file.is_relative_to(folder) for folder in PACKAGES.values() if folder != ROOT))
    return tuple(sorted(file for file in (*own, *beside) if file.is_file() and file.suffix != ".pyc"))


def data_beside(helpers: Iterable[Path]) -> set[Path]:
    """Return the files of data that helpers name, in their own folders. ``tests/conftest.py`` has those of all tests."""
    texts = {helper: helper.read_text(encoding="utf-8") for helper in helpers if helper != OF_ALL}
    return {file for helper, text in texts.items() for file in helper.parent.iterdir()
            if file.is_file() and file.suffix != ".py" and file.name in text}


def files_of(test: Path) -> list[Path]:
    helpers = helpers_of(test)
    modules = modules_of(helpers)
    rooms = {*map(room_of, modules)} - {""}
    paths = {place(module).with_suffix(".py") for module in modules}
    packages = {place(module) / "__init__.py" for module in modules}
    texts = [file.read_text(encoding="utf-8", errors="ignore") for file in (helpers - {OF_ALL}) | data_beside(helpers)]
    idle = {module for module, words in ON_INPUT.items() if not any(word in text for word in words for text in texts)}
    paths -= {place(module).with_suffix(".py") for module in idle}
    golden = (ROOT / "tests/golden").rglob("*") if any("golden" in text for text in texts) else ()
    data = {file for room in rooms for file in data_of(room)}
    return sorted(file for file in helpers | data_beside(helpers) | paths | packages | data | {*golden} if file.is_file())


@cache
def state_of(test: Path) -> str:
    """Return a digest of all files that a file of tests depends on."""
    lines = (f"{file.relative_to(ROOT)} {digest_of(file)}" for file in files_of(test))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
