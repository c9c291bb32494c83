"""What a Python program has said of its own end: the last traceback among the lines of a rank."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

HEAD = re.compile(r"Traceback \(most recent call last\):$")
FRAME = re.compile(r'\s*File "(?P<file>[^"]+)", line (?P<line>\d+)')
ERROR = re.compile(r"(?!Traceback )[A-Za-z_][\w.]*(?:: .*)?$")  # an exception's name, and what it says
RANK = re.compile(r"\[rank(\d+)\]: ?")  # what torch writes before every line of a traceback once ranks have met
OF_LAUNCHER = re.compile(r"torch\.distributed\.elastic\.multiprocessing\.(errors\.ChildFailedError|api\.SignalException)\b")
BLAMED = re.compile(r"\s*rank +: (\d+) \(local_rank: \d+\)")  # by torchrun, in the words of its ChildFailedError
LIBRARY = re.compile(r"/(site|dist)-packages/|/lib/python3|^<frozen ")
LONGEST = 200  # lines of a traceback that are kept
MOST = 300  # characters of what an exception says


@dataclass(frozen=True, slots=True)
class PythonError:
    """An exception that nobody has caught.

    Attributes:
        text: ``ValueError: no such column``.
        place: where it arose in the program's own files, ``train.py:12``; empty where none is known.
        traceback: all of it.
        rank: whose it is, where a launcher of ranks on a node says so.
    """

    text: str
    place: str
    traceback: str
    rank: int | None = None

    def __str__(self) -> str:
        return f"{self.text} ({self.place})" if self.place else self.text

    @property
    def words(self) -> str:
        """The same, with the rank that a launcher names."""
        return str(self) if self.rank is None else f"{self}, said by its rank {self.rank}"


def last_error(lines: Sequence[str]) -> PythonError | None:
    """The last exception that lines of one rank tell of; None where there is none."""
    marks = [RANK.match(line) for line in lines]
    plain = [line[mark.end():] if mark else line for mark, line in zip(marks, lines, strict=True)]
    for begin in reversed([number for number, line in enumerate(plain) if HEAD.search(line)]):
        found = _error(plain[begin:begin + LONGEST])
        if found is not None:
            mark = marks[begin] or next(filter(None, map(BLAMED.match, plain[begin:])), None)
            return replace(found, rank=int(mark[1]) if mark else None)
    return None


def _error(lines: Sequence[str]) -> PythonError | None:
    """What the traceback says that begins with these lines; None for one that is cut off."""
    frames = []
    for number, line in enumerate(lines[1:], 1):
        if (frame := FRAME.match(line)) is not None:
            frames.append(frame)
        elif line and not line[0].isspace():
            if not ERROR.match(line) or OF_LAUNCHER.match(line):  # that a rank has failed says nothing of why
                return None
            return PythonError(line if len(line) <= MOST else f"{line[:MOST]}…", _place(frames), "\n".join(lines[:number + 1]))
    return None


def _place(frames: Sequence[re.Match[str]]) -> str:
    own = [frame for frame in frames if not LIBRARY.search(frame["file"])] or list(frames)
    return f"{own[-1]['file'].rpartition('/')[2]}:{own[-1]['line']}" if own else ""
