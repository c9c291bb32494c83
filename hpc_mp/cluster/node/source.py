"""Where facts about a machine are read: files below a root, and answers of programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_mp.base.command import CommandFailed, Runner, ask


class Unseen(Exception):
    """A fact that cannot be had here; the text says why: no such file, permission denied, a program that is absent."""


@dataclass(frozen=True, slots=True)
class Source:
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
        """A file's text without the blanks around it. Raises Unseen."""
        try:
            return self.path(name).read_text(encoding="utf-8", errors="replace").strip()
        except OSError as error:
            raise Unseen(f"{name}: {error.strerror}") from None

    def number(self, name: str) -> int:
        """A file that holds one whole number. Raises Unseen."""
        text = self.text(name)
        try:
            return int(text, 0)
        except ValueError:
            raise Unseen(f"{name} holds {text[:40]!r}, no number") from None

    def names(self, pattern: str) -> tuple[str, ...]:
        """The paths that match, as ``/sys/…``, sorted."""
        found = sorted(self.root.glob(pattern.lstrip("/")))
        return tuple(f"/{path.relative_to(self.root)}" for path in found)

    def answer(self, argv: Sequence[str]) -> str:
        """What a program says. Raises Unseen."""
        try:
            return self.ask(argv)
        except CommandFailed as error:
            raise Unseen(str(error)) from None
