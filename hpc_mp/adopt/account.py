"""The fate of every line of a script: kept, replaced, dropped, or not carried over."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import tomli_w


class Fate(Enum):
    """The fates of a line, the most serious last. A line that several statements share gets the most serious one."""

    DROPPED = "dropped"
    KEPT = "kept"
    REPLACED = "replaced"
    LOST = "not carried over"


_GRAVITY = list(Fate)


@dataclass(frozen=True, slots=True)
class LineFate:
    """The fate of a range of lines."""

    # first, last: the lines, counted from 1
    first: int
    last: int
    text: str  # the text of the lines, joined into one
    fate: Fate
    where: str  # the key of the job file for it or its replacement; empty without one
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


TABLES = ("job", "program", "sweep", "slurm", "environment")


def job_tree(keys: Mapping[str, Any], job_directory: Path) -> dict[str, Any]:
    """Convert dotted keys to tables, in the usual order of a job file. Keys with the value None are left out."""
    tree: dict[str, Any] = {}
    for key, value in keys.items():
        if value is None:
            continue
        parts = key.split(".", 2 if key.startswith(("slurm.extra.", "environment.set.", "program.environment.")) else 1)
        table = tree
        for part in parts[:-1]:
            table = table.setdefault(part, {})
        table[parts[-1]] = list(value) if isinstance(value, tuple) else value
    program = tree["program"]
    place = os.path.relpath(program["directory"], job_directory)
    program["directory"] = place if not place.startswith("../..") else program["directory"]
    if program["directory"] == ".":
        del program["directory"]
    program["command"] = program.pop("command")
    return {name: tree[name] for name in TABLES if tree.get(name)}


def job_text(tree: Mapping[str, Any], name: str, lost: tuple[LineFate, ...], notes: tuple[str, ...]) -> str:
    """Return the text of the job file, headed by comments on lines that were not carried over and by notes."""
    comments = [f"# Adopted from {name} by hpc-mp adopt, which accounts for every line."]
    comments += [f"# Not carried over, line {line.place}: {_comment(line.text)}: {_comment(line.why)}" for line in lost]
    comments += [f"# Note: {_comment(note)}" for note in notes]
    return "\n".join(comments) + "\n\n" + tomli_w.dumps(tree, multiline_strings=True)


def _comment(text: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in text)
