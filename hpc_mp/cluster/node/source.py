"""Where the facts of a node are read: files below a root and answers of programs, of this node or of a recorded one."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hpc_mp.base.command import CommandFailed, Runner, ask, failure


class Unavailable(Exception):
    """A fact that cannot be had here; the text says why: no such file, permission denied, a program that is absent.

    ``code`` and ``out`` are those of a program that failed (``CommandFailed``).
    """

    def __init__(self, words: str, code: int | None = None, out: str = "") -> None:
        super().__init__(words)
        self.code, self.out = code, out


@dataclass(frozen=True, slots=True)
class NodeSource:
    """A machine. Tests hand in the root of a recorded tree, and the recorded answers of programs.

    Attributes:
        root: what stands for ``/``.
        ask: runs a program.
    """

    root: Path = Path("/")
    ask: Runner = ask

    def path(self, name: str) -> Path:
        """Where ``/proc/…``, ``/sys/…`` lie."""
        return self.root / name.lstrip("/")

    def text(self, name: str) -> str:
        """A file's text without the blanks around it. Raises Unavailable."""
        try:
            return self.path(name).read_text(encoding="utf-8", errors="replace").strip()
        except OSError as error:
            raise Unavailable(f"{name}: {error.strerror}") from None

    def number(self, name: str) -> int:
        """A file that holds one whole number. Raises Unavailable."""
        text = self.text(name)
        try:
            return int(text, 0)
        except ValueError:
            raise Unavailable(f"{name} holds {text[:40]!r}, no number") from None

    def names(self, pattern: str) -> tuple[str, ...]:
        """The paths that match, as ``/sys/…``, sorted."""
        found = sorted(self.root.glob(pattern.lstrip("/")))
        return tuple(f"/{path.relative_to(self.root)}" for path in found)

    def answer(self, argv: Sequence[str]) -> str:
        """What a program says. Raises Unavailable."""
        try:
            return self.ask(argv)
        except CommandFailed as error:
            raise Unavailable(str(error), error.code, error.out) from None


SHARED = "/run/hpc-mp"  # written by root's health check, read by everybody


def own() -> str:
    """The directory of this user."""
    return SHARED if os.geteuid() == 0 else f"/tmp/hpc-mp-{os.geteuid()}"


def keep(source: NodeSource, name: str) -> Path | None:
    """The path of a file to keep things in, its directory made. None where nothing can be kept, and for a recorded machine."""
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
    """``commands``: the joined argv to ``{"code": 0, "out": "…", "err": "…"}``, or ``{"hangs": true}``.

    A program that has no entry is not on PATH there.
    """
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
    """A program of ours: its argv, and how many seconds it has."""

    argv: tuple[str, ...]
    timeout: float


def here(environ: Mapping[str, str] = os.environ, timeout: float = 3.0,
         own: Mapping[str, OwnProgram] = MappingProxyType({})) -> NodeSource:
    """Programs are looked for where root's lie, too (ethtool, lspci, nft), answer in English, and have ``timeout`` seconds.

    Args:
        own: programs of ours by the name that they are asked for, which is their key among recorded answers too.
    """
    path = os.pathsep.join(dict.fromkeys([*filter(None, environ.get("PATH", "").split(os.pathsep)), *_PLACES]))
    given = {**environ, "PATH": path, "LC_ALL": "C"}

    def answer(argv: Sequence[str]) -> str:
        program = own.get(argv[0], OwnProgram((argv[0],), timeout))
        return ask([*program.argv, *argv[1:]], program.timeout, given)

    return NodeSource(Path("/"), answer)
