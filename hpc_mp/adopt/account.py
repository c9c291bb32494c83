"""The fate of every line of a script: kept, replaced, dropped, or not carried over."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum


class Fate(Enum):
    """The fates of a line, the most serious last. A line that several statements share gets the most serious one."""

    DROPPED = "dropped"
    KEPT = "kept"
    REPLACED = "replaced"
    LOST = "not carried over"


_GRAVITY = list(Fate)


@dataclass(frozen=True, slots=True)
class LineFate:
    """The fate of a range of lines.

    Attributes:
        first, last: the lines, counted from 1.
        text: the text of the lines, joined into one.
        where: the key of the job file for it or its replacement; empty without one.
        why: the reason.
    """

    first: int
    last: int
    text: str
    fate: Fate
    where: str
    why: str

    @property
    def place(self) -> str:
        return f"{self.first}" if self.first == self.last else f"{self.first}-{self.last}"


def joined(fates: Iterable[LineFate], lines: Sequence[str]) -> tuple[LineFate, ...]:
    """Merge entries that share a line, and sort them by line. Every non-blank line is in exactly one entry."""
    groups: list[list[LineFate]] = []
    for fate in sorted(fates, key=lambda fate: (fate.first, fate.last)):
        if groups and fate.first <= max(member.last for member in groups[-1]):
            groups[-1].append(fate)
        else:
            groups.append([fate])
    merged = [_together(group, lines) for group in groups]
    covered = {number for fate in merged for number in range(fate.first, fate.last + 1)}
    unused = "not a statement: the end of the previous one, or without effect"
    rest = [LineFate(number, number, _short(line), Fate.DROPPED, "", unused)
            for number, line in enumerate(lines, start=1) if line.strip() and number not in covered]
    return tuple(sorted((*merged, *rest), key=lambda fate: fate.first))


def _together(group: Sequence[LineFate], lines: Sequence[str]) -> LineFate:
    first, last = min(fate.first for fate in group), max(fate.last for fate in group)
    gravest = max((fate.fate for fate in group), key=_GRAVITY.index)
    text = " ".join(line.strip() for line in lines[first - 1:last] if line.strip())
    if len({fate.fate for fate in group}) == 1:
        why = "; ".join(dict.fromkeys(fate.why for fate in group if fate.why))
    else:
        why = "; ".join(dict.fromkeys(f"{_short(fate.text, 40)}: {fate.fate.value}{f', {fate.why}' if fate.why else ''}"
                                      for fate in group))
    return LineFate(first, last, _short(text), gravest,
                    ", ".join(dict.fromkeys(part for fate in group for part in fate.where.split(", ") if part)), why)


def _short(text: str, limit: int = 100) -> str:
    plain = " ".join(text.split())
    return plain if len(plain) <= limit else f"{plain[:limit - 1]}…"
