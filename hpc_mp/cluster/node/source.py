"""The source of a node's facts: files below a root and outputs of programs, of this node or of a recorded one; and the parsing of
facts that may be missing."""

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from hpc_mp.base.command import CommandFailed, Runner, ask, failure


class Unavailable(Exception):
    """A fact that is unavailable here; the text states the reason: no such file, permission denied, an absent program. ``code``
    and ``out`` are from a program that failed (``CommandFailed``)."""

    def __init__(self, message: str, code: int | None = None, out: str = "") -> None:
        super().__init__(message)
        self.code, self.out = code, out


@dataclass(frozen=True, slots=True)
class NodeSource:
    """A machine. Tests pass the root of a recorded tree, and recorded outputs of programs."""

    root: Path = Path("/")  # the directory that replaces ``/``
    ask: Runner = ask  # runs a program

    def path(self, name: str) -> Path:
        """Return the path of ``/proc/…``, ``/sys/…`` below the root."""
        return self.root / name.lstrip("/")

    def text(self, name: str) -> str:
        """Return a file's text without surrounding blanks. Raises Unavailable."""
        try:
            return self.path(name).read_text(encoding="utf-8", errors="replace").strip()
        except OSError as error:
            raise Unavailable(f"{name}: {error.strerror}") from None

    def number(self, name: str) -> int:
        """Return the whole number in a file. Raises Unavailable."""
        text = self.text(name)
        try:
            return int(text, 0)
        except ValueError:
            raise Unavailable(f"{name} holds {text[:40]!r}, not a number") from None

    def names(self, pattern: str) -> tuple[str, ...]:
        """Return the paths that match, as ``/sys/…``, sorted."""
        paths = sorted(self.root.glob(pattern.lstrip("/")))
        return tuple(f"/{path.relative_to(self.root)}" for path in paths)

    def answer(self, argv: Sequence[str]) -> str:
        """Return the output of a program. Raises Unavailable."""
        try:
            return self.ask(argv)
        except CommandFailed as error:
            raise Unavailable(str(error), error.code, error.out) from None


SHARED = "/run/hpc-mp"  # written by root's health check, read by all users


def own() -> str:
    """Return the directory of this user."""
    return SHARED if os.geteuid() == 0 else f"/tmp/hpc-mp-{os.geteuid()}"


def keep(source: NodeSource, name: str) -> Path | None:
    """Return the path of a file to keep data in, its directory made; None if nothing can be kept, and for a recorded machine."""
    if source.root != Path("/"):
        return None
    folder = Path(own())
    try:
        folder.mkdir(mode=0o755, exist_ok=True)
        mine = folder.lstat().st_uid == os.geteuid() and not folder.is_symlink()
    except OSError:
        return None
    return folder / name if mine and os.access(folder, os.W_OK) else None


def recorded(root: Path, commands: Mapping[str, Mapping[str, Any]]) -> NodeSource:
    """Return a recorded machine. ``commands``: the joined argv to ``{"code": 0, "out": "…", "err": "…"}``, or ``{"hangs":
    true}``. A program without an entry is not on PATH there."""
    def ask(argv: Sequence[str]) -> str:
        answer = commands.get(" ".join(argv))
        if answer is None:
            raise CommandFailed(f"{argv[0]} is not on PATH")
        if answer.get("hangs"):
            time.sleep(3600)
        if answer.get("code", 0):
            raise failure(argv[0], int(answer["code"]), str(answer.get("out", "")), str(answer.get("err", "")))
        return str(answer["out"])

    return NodeSource(root, ask)


_PLACES = ("/usr/local/sbin", "/usr/sbin", "/sbin", "/usr/local/bin", "/usr/bin", "/bin", "/opt/slurm/bin")


@dataclass(frozen=True, slots=True)
class OwnProgram:
    """A program of hpc-mp: its argv, and its timeout in seconds."""

    argv: tuple[str, ...]
    timeout: float


def here(environ: Mapping[str, str] = os.environ, timeout: float = 3.0,
         own: Mapping[str, OwnProgram] = MappingProxyType({})) -> NodeSource:
    """Return this machine. Programs are also searched in root's directories (ethtool, lspci, nft), run in English, and have
    ``timeout`` seconds. ``own``: hpc-mp's own programs by the name in requests, which is also their key among recorded
    outputs."""
    path = os.pathsep.join(dict.fromkeys([*filter(None, environ.get("PATH", "").split(os.pathsep)), *_PLACES]))
    environment = {**environ, "PATH": path, "LC_ALL": "C"}

    def answer(argv: Sequence[str]) -> str:
        program = own.get(argv[0], OwnProgram((argv[0],), timeout))
        return ask([*program.argv, *argv[1:]], program.timeout, environment)

    return NodeSource(Path("/"), answer)


S = TypeVar("S")
T = TypeVar("T")


class Readings(dict[str, T]):
    """The values of a file by name. A lookup of a missing name raises Unavailable."""

    def __init__(self, file: str, values: Mapping[str, T]) -> None:
        super().__init__(values)
        self.file = file

    def __missing__(self, name: str) -> T:
        raise Unavailable(f"{self.file} of this kernel does not show {name}")


def maybe(read: Callable[[S], T], name: S) -> T | None:
    """Return ``read(name)``; None if it is unavailable."""
    try:
        return read(name)
    except Unavailable:
        return None


def uptime(source: NodeSource) -> float:
    """Return the seconds since boot. Raises Unavailable."""
    text = source.text("/proc/uptime")
    try:
        return float(text.split()[0])
    except (ValueError, IndexError):
        raise Unavailable(f"/proc/uptime holds {text[:40]!r}") from None


def firmware(source: NodeSource) -> tuple[str, str]:
    """Return the vendor and the product that the firmware names; empty if it names none."""
    vendor, product = (maybe(source.text, f"/sys/class/dmi/id/{name}") or "" for name in ("sys_vendor", "product_name"))
    return vendor, product


def fields(text: str, separator: str = ":") -> Mapping[str, str]:
    """Return ``Name: value`` lines as a mapping; the first of equal names counts."""
    values: dict[str, str] = {}
    for line in text.splitlines():
        name, colon, value = line.partition(separator)
        if colon:
            values.setdefault(name.strip(), value.strip())
    return values


def members(text: str) -> tuple[int, ...]:
    """Return the numbers of a kernel list such as ``0-3,8``; none of an empty list."""
    numbers: list[int] = []
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        numbers += range(int(first), int(last or first) + 1)
    return tuple(numbers)


def real(source: NodeSource, name: str) -> str:
    """Return the target of a link in the tree, as ``/sys/devices/…``; ``name`` itself if it is not a link."""
    path, root = source.path(name).resolve(), source.root.resolve()
    return f"/{path.relative_to(root)}" if path.is_relative_to(root) else name
