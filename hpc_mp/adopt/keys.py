"""The text of a job file from dotted keys."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from hpc_mp.adopt.account import LineFate

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
