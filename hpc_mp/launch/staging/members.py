"""The environment of a Python interpreter (a virtual environment, a conda prefix, a separate Python, or the system's), and
its files as members of a relocatable archive.

- Symbolic links inside the environment stay links and become relative; the targets of other links are copied.
- A virtual environment's Python, unless it is the system's, comes along under ``base/``.
- The checkout of an editable install comes along under ``editable/``, and its ``.pth`` file leads there.
- Files that name the environment's own place get ``PLACEHOLDER`` instead and are listed in ``.relocate``, each name ended
  by a zero byte: ``node-start.sh`` writes the new place into them.
"""

import io
import json
import os
import re
import subprocess
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from hpc_mp.base.command import CommandFailed, Runner, ask
from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.text import data_size

SYSTEM = (Path("/usr"), Path("/usr/local"))  # on every node's local disk, and too much to pack
ASK_S = 60.0  # a cold file system may take long to start Python
QUESTION = """\
import json, os, platform, sys
print(json.dumps([sys.prefix, sys.base_prefix, platform.python_version(), sys.executable,
                  *(path for path in sys.path if path.endswith("-packages") and os.path.isdir(path))]))
"""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """An installed Python."""

    prefix: Path  # the environment's directory
    base: Path  # prefix of the Python it was made with; the same if it is not a virtual environment
    version: str  # "3.11.7"
    executable: Path  # its path, as it reports it
    libraries: tuple[Path, ...]  # directories from which it imports installed packages, without the user's own (~/.local)

    @property
    def packs_base(self) -> bool:
        """True if its standard library is on a shared file system too, so that it must be packed."""
        return self.base != self.prefix and self.base not in SYSTEM

    @property
    def unseen_libraries(self) -> tuple[Path, ...]:
        """Packages installed beside the base's standard library that the environment does not import."""
        return tuple(path for path in self.base.glob("lib/python*/site-packages") if path not in self.libraries)


def interpreter(python: Sequence[str], run: Runner = lambda argv: ask(argv, ASK_S)) -> Interpreter:
    """Query the ranks' interpreter for its environment. ``python``: its command, for example its path. Raises HpcMpError if it
    does not run, or it is the system's."""
    try:
        answer = json.loads(run((*python, "-I", "-c", QUESTION)))
    except (CommandFailed, ValueError) as error:
        raise HpcMpError(f"environment.stage: the interpreter {python[0]}", f"does not say what it is ({error})",
                         "name a working one in slurm.python, slurm.venv or slurm.conda") from None
    prefix, base, version, executable, *libraries = answer
    installation = Interpreter(Path(prefix), Path(base), version, Path(executable), tuple(map(Path, libraries)))
    if installation.prefix in SYSTEM:
        raise HpcMpError(f"environment.stage with the system's Python {executable}", "cannot be packed apart from the system",
                         f"install into a virtual environment ({executable} -m venv DIRECTORY) and name it in slurm.venv")
    return installation


PLACEHOLDER = "@HPC_MP_PREFIX@"
RELOCATE = ".relocate"
SKIPPED = frozenset({".git", "pkgs", "envs"})  # in the top directory: history, and conda's other environments
MOST_CHECKOUT = 1 << 30  # bytes: a larger checkout contains data, not only code


@dataclass(frozen=True, slots=True)
class Member:
    """One file of the archive: the bytes of ``source``, or ``text`` instead, or a link. ``changed``: mtime of ``source`` in
    nanoseconds. ``link``: target of a symbolic link."""

    name: str
    size: int
    changed: int
    mode: int
    source: str | None = None
    text: bytes | None = None
    link: str | None = None


def members(python: Interpreter) -> list[Member]:
    """Return all files of the environment, sorted by name. Raises HpcMpError if one cannot be packed."""
    by_name = {member.name: member for member in _environment(python)}
    moved = sorted(name for name, member in by_name.items() if member.text is not None and PLACEHOLDER.encode() in member.text)
    by_name[RELOCATE] = _text(RELOCATE, b"".join(os.fsencode(name) + b"\0" for name in moved))
    return [by_name[name] for name in sorted(by_name)]


def write_tar(content: Sequence[Member], file: IO[bytes], show: Callable[[int], None]) -> None:
    """Write an uncompressed archive; ``show(bytes so far)`` is called repeatedly. Raises HpcMpError if a file is gone."""
    written = 0
    with tarfile.open(fileobj=file, mode="w|", format=tarfile.GNU_FORMAT, bufsize=1 << 20) as tar:
        for member in content:
            info = tarfile.TarInfo(member.name)
            info.mode, info.mtime = member.mode, member.changed // 10**9
            if member.link is not None:
                info.type, info.linkname = tarfile.SYMTYPE, member.link
                tar.addfile(info)
                continue
            with _content(member) as stream:
                info.size = stream.seek(0, os.SEEK_END)
                stream.seek(0)
                tar.addfile(info, stream)
            written += info.size
            show(written)


def _content(member: Member) -> IO[bytes]:
    if member.text is not None:
        return io.BytesIO(member.text)
    try:
        return open(_source(member), "rb")
    except OSError as error:
        raise HpcMpError(f"environment.stage: {member.source}", f"could not be packed ({error.strerror})",
                         "launch again when nothing is being installed or edited there") from None


def _environment(python: Interpreter) -> Iterator[Member]:
    yield from _adapted(_tree(python.prefix, ""), python)
    if python.packs_base:
        yield from _tree(python.base, "base/", frozenset(map(str, python.unseen_libraries)))


def _adapted(tree: Iterable[Member], python: Interpreter) -> Iterator[Member]:
    """Yield the members, with files rewritten that depend on their location."""
    libraries = {str(path.relative_to(python.prefix)) for path in python.libraries if path.is_relative_to(python.prefix)}
    editable: dict[Path, str] = {}
    for member in tree:
        folder, _, name = member.name.rpartition("/")
        if member.name == "pyvenv.cfg" and python.packs_base:
            yield _text(member.name, re.sub(rb"(?m)^[ \t]*home[ \t]*=.*$", f"home = {PLACEHOLDER}/base/bin".encode(),
                                            _source(member).read_bytes()))
        elif folder == "bin" and member.link is not None and os.path.isabs(member.link) and python.packs_base:
            yield replace(member, link=f"../base/{Path(member.link).relative_to(python.base.resolve())}")
        elif folder == "bin" and member.source is not None:
            yield _script(member, python.prefix)
        elif folder in libraries and name.endswith(".pth"):
            yield _text(member.name, _pth(member, python, editable))
        else:
            yield member
    for directory, at in editable.items():
        yield from _checkout(directory, at)


def _tree(root: Path, at: str, without: frozenset[str] = frozenset()) -> Iterator[Member]:
    """Yield the files below ``root`` as members whose names begin with ``at``, except those of some directories."""
    real = os.path.realpath(root)
    without |= {os.path.join(root, name) for name in SKIPPED}
    pending = [(str(root), at)]
    while pending:
        directory, prefix = pending.pop()
        for entry in os.scandir(directory):
            name = prefix + entry.name
            if entry.is_symlink():
                target = os.path.realpath(entry.path)
                if os.path.exists(target) and Path(target).is_relative_to(real):
                    yield _link(name, os.path.relpath(target, os.path.realpath(directory)))
                elif prefix == "bin/" and entry.name.startswith("python"):
                    yield _link(name, target)
                elif os.path.isdir(target):
                    pending.append((target, f"{name}/"))
                elif os.path.exists(target):
                    yield _file(name, target, os.stat(target))
            elif entry.is_dir():
                if entry.path not in without:
                    pending.append((entry.path, f"{name}/"))
            elif entry.is_file():
                yield _file(name, entry.path, entry.stat())


def _file(name: str, path: str, status: os.stat_result) -> Member:
    return Member(name, status.st_size, status.st_mtime_ns, status.st_mode & 0o700, source=path)


def _text(name: str, text: bytes) -> Member:
    return Member(name, len(text), 0, 0o600, text=text)


def _link(name: str, target: str) -> Member:
    return Member(name, 0, 0, 0o777, link=target)


def _source(member: Member) -> Path:
    assert member.source is not None
    return Path(member.source)


def _script(member: Member, prefix: Path) -> Member:
    """Return a script of the environment's Python that runs the copy's Python."""
    source = _source(member)
    with open(source, "rb") as file:
        first = file.read(4096).splitlines()[:2]  # a long path is in the second line, after "#!/bin/sh"
    if not first or not first[0].startswith(b"#!") or os.fsencode(prefix) not in b"".join(first):
        return member
    text = source.read_bytes().replace(os.fsencode(f"{prefix}/"), f"{PLACEHOLDER}/".encode())
    return replace(member, text=text, size=len(text))


def _pth(member: Member, python: Interpreter, editable: dict[Path, str]) -> bytes:
    """Return a ``.pth`` file with directories inside the archive; checkouts are recorded in ``editable``."""
    library = os.path.dirname(member.name)
    lines = []
    for line in _source(member).read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        if line.startswith("import __editable__"):
            raise HpcMpError(f"environment.stage: {_source(member)}", "is an editable install by an import hook",
                             "install that package without -e, or with --config-settings editable_mode=compat")
        directory = Path(line.strip())
        if not line.startswith(("import ", "import\t")) and directory.is_absolute() and directory.is_dir():
            if directory.is_relative_to(python.prefix):
                line = os.path.relpath(directory.relative_to(python.prefix), library)
            else:
                line = os.path.relpath(editable.setdefault(directory, f"editable/{len(editable)}"), library)
        lines.append(line + "\n")
    return "".join(lines).encode(errors="surrogateescape")


def _checkout(directory: Path, at: str) -> list[Member]:
    """Return the files of a checkout that git tracks or would not ignore; without git all files."""
    try:
        listed = subprocess.run(("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"), cwd=directory,
                                stdin=subprocess.DEVNULL, capture_output=True, check=True).stdout
        names = (os.fsdecode(name) for name in listed.split(b"\0") if name)
        files = [_file(f"{at}/{name}", path, os.stat(path)) for name in names if os.path.isfile(path := f"{directory}/{name}")]
    except (OSError, subprocess.CalledProcessError):
        files = list(_tree(directory, f"{at}/"))
    size = sum(member.size for member in files)
    if size > MOST_CHECKOUT:
        raise HpcMpError(f"environment.stage: the editable install {directory}",
                         f"holds {data_size(size)}, more than code does", "install that package without -e")
    return files
