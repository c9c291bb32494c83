"""Machines that are not here: trees of files and recorded answers of programs, healthy and broken.

``tests/machines/KIND/`` holds ``machine.toml`` (kind, where its facts are from; ``on = "linux"``: what the folder ``linux`` holds
comes first), and any number of

- tables of its hardware, in ``machine.toml``: the templates of the folder ``hardware`` make of them the two kinds of files below;
- ``files*.toml``: ``"/sys/class/net/ib{0..7}/mtu" = "2044"``, ``"/sys/…/device" = {link = "../../0000:c6:00.0"}``. Braces mean
  what they mean in a shell, and braces with as many members in a text or link give each path its own: ``"/a{1,2}" = "x{7,8}"``;
- ``commands*.json``: ``{"nvidia-smi -q": {"code": 0, "out": "…", "err": "…"}}``, keyed by the joined argv. A program that has no
  entry is not on PATH; one with ``"hangs": true`` never answers.
"""

import atexit
import functools
import json
import os
import re
import shutil
import tempfile
import tomllib
import uuid
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from hpc_mp.cluster.node.source import NodeSource, recorded

MACHINES = Path(__file__).parent
KINDS = tuple(sorted(path.parent.name for path in MACHINES.glob("*/machine.toml")))
MEMORY = "/dev/shm"  # a tree is thousands of small files
HANGS = object()  # as an edit: whoever reads this file, or asks this program, waits for ever
BRACES = re.compile(r"\{([^{}]*)\}")

# What an edit makes of a file ("/…") or of a program's answer (the joined argv): its new text, None = gone, (old, new) = replace,
# a number = the program's exit code, (number, text) = that and what it prints, HANGS.
Edit = str | int | tuple[str | int, str] | object | None


def tree(kind: str) -> NodeSource:
    """A healthy machine. Its files are shared by all callers: do not write into them."""
    return recorded(_healthy(kind), _commands(kind))


def broken(kind: str, edits: Mapping[str, Edit]) -> NodeSource:
    """A copy of that machine with these changes, while it is in use. Paths may have braces; what an edit needs must be there."""
    root = _scratch()
    shutil.copytree(_healthy(kind), root, symlinks=True, dirs_exist_ok=True, copy_function=_share)
    commands = dict(_commands(kind))
    for name, edit in edits.items():
        if name.startswith("/"):
            for path, text in _expanded(name, edit):
                _edit_file(root / path.lstrip("/"), text)
        else:
            _edit_answer(commands, name, edit)
    source = recorded(root, commands)
    weakref.finalize(source.ask, _remove, root, os.getpid())  # a function of its own; the source itself cannot be watched
    return source


def row(name: str, value: str | dict[str, str]) -> str:
    written = json.dumps(value) if isinstance(value, str) else f"{{link = {json.dumps(value['link'])}}}"
    return f"{json.dumps(name)} = {written}\n"


def machine(kind: str) -> dict[str, Any]:
    return tomllib.loads((MACHINES / kind / "machine.toml").read_text(encoding="utf-8"))


@functools.cache
def _healthy(kind: str) -> Path:
    root = _scratch()
    common, own = ([file.read_text(encoding="utf-8") for file in files] for files in _files_of(kind, "files*.toml"))
    for text in (*common, *_of_hardware(kind, "files.toml.j2"), *own):
        for name, value in tomllib.loads(text).items():
            for path, content in _expanded(name, value):
                _write(root / path.lstrip("/"), content)
    return root


@functools.cache
def _commands(kind: str) -> dict[str, dict[str, Any]]:
    answers = {argv: answer for files in _files_of(kind, "commands*.json") for file in files
               for argv, answer in json.loads(file.read_text(encoding="utf-8")).items()}
    printed = {argv: out for text in _of_hardware(kind, "commands.toml.j2") for argv, out in tomllib.loads(text).items()}
    return answers | {argv: {"code": 0, "out": out} for argv, out in printed.items()}


def _files_of(kind: str, pattern: str) -> tuple[list[Path], list[Path]]:
    """Return the files of a tree, the common ones and its own."""
    common = machine(kind).get("on")
    return sorted((MACHINES / common).glob(pattern)) if common else [], sorted((MACHINES / kind).glob(pattern))


def _of_hardware(kind: str, template: str) -> list[str]:
    """Fill a template with the hardware of a machine. A recorded machine has no such tables."""
    tables = {"adapters": [], "gpus": None} | machine(kind)
    return [_templates().get_template(template).render(tables)] if "host" in tables else []


@functools.cache
def _templates() -> Environment:
    templates = Environment(loader=FileSystemLoader(MACHINES / "hardware"), trim_blocks=True, keep_trailing_newline=True,
                            undefined=StrictUndefined)
    templates.globals |= {"members": _alternatives, "numbers": _numbers,
                          "uuid": lambda name: uuid.uuid5(uuid.NAMESPACE_DNS, name)}
    templates.filters["members"] = _alternatives
    return templates


def _alternatives(name: str) -> list[str]:
    """Return all that the braces of a name mean."""
    return [path for path, _ in _expanded(name, None)]


def _numbers(form: str, first: int, count: int) -> str:
    """Return braces with so many numbers in a format; a single number stands alone."""
    found = [format(number, form) for number in range(first, first + count)]
    return "{" + ",".join(found) + "}" if count > 1 else found[0]


def _share(one: str, other: str) -> None:
    """Instead of a copy: whoever edits a file takes it away first."""
    os.link(one, other, follow_symlinks=False)


def _scratch() -> Path:
    return Path(tempfile.mkdtemp(dir=_home()))


@functools.cache
def _home() -> Path:
    """The folder of this process's trees, gone when it ends. Those of processes that were killed go now."""
    memory = Path(MEMORY if os.access(MEMORY, os.W_OK) else tempfile.gettempdir())
    owner = os.getpid()
    for other in memory.glob("machines-*"):
        if not Path("/proc", other.name.rpartition("-")[2]).exists():
            shutil.rmtree(other, ignore_errors=True)
    home = memory / f"machines-{owner}"
    home.mkdir(exist_ok=True)
    atexit.register(_remove, home, owner)
    return home


def _remove(folder: Path, owner: int) -> None:
    """Unless this is a fork of its owner."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


def _expanded(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Every path that the braces mean, each with its own text."""
    counts = [len(_members(part)) for part in BRACES.findall(name)]
    if not counts:
        yield name, value
        return
    for at in range(counts[0]):
        yield from _expanded(_nth(name, at, counts[0]), _nth_value(value, at, counts[0]))


def _nth_value(value: Any, at: int, count: int) -> Any:
    if isinstance(value, str):
        return _nth(value, at, count)
    if isinstance(value, dict):
        return {key: _nth(text, at, count) for key, text in value.items()}
    return value


def _nth(text: str, at: int, count: int) -> str:
    """With its first braces replaced by their member ``at``, if they have as many members as the path's."""
    found = BRACES.search(text)
    members = _members(found[1]) if found else []
    return text[:found.start()] + members[at] + text[found.end():] if found and len(members) == count else text


def _members(inside: str) -> list[str]:
    span = re.fullmatch(r"(\d+)\.\.(\d+)", inside)
    return [str(number) for number in range(int(span[1]), int(span[2]) + 1)] if span else inside.split(",")


def _write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink() or path.is_file():
        path.unlink()
    if isinstance(value, dict):
        path.symlink_to(value["link"])
    else:
        path.write_text(value, encoding="utf-8")


def _edit_file(path: Path, edit: Any) -> None:
    if isinstance(edit, tuple):
        edit = _replaced(path.read_text(encoding="utf-8"), edit)
    elif edit is None or edit is HANGS:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=edit is HANGS)
    if edit is HANGS:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(path)  # opening it waits for a writer who never comes
    elif edit is not None:
        _write(path, edit)


def _edit_answer(commands: dict[str, dict[str, Any]], argv: str, edit: Any) -> None:
    if edit is None:
        del commands[argv]
    elif isinstance(edit, int):
        commands[argv] = {"code": edit, "out": ""}
    elif isinstance(edit, tuple) and isinstance(edit[0], int):
        commands[argv] = {"code": edit[0], "out": edit[1]}
    elif isinstance(edit, tuple):
        commands[argv] = {**commands[argv], "out": _replaced(commands[argv]["out"], edit)}
    elif edit is HANGS:
        commands[argv] = {"hangs": True}
    else:
        commands[argv] = {"code": 0, "out": edit}


def _replaced(text: str, edit: tuple[str, str]) -> str:
    assert edit[0] in text, f"{edit[0]!r} is not in {text[:200]!r}"
    return text.replace(*edit)
