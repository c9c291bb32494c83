"""Slurm's programs are named, and so started, in one room."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tables import table

import hpc_mp

ROOT = Path(hpc_mp.__file__).parent
PROGRAMS = ("sacct", "sacctmgr", "salloc", "sattach", "sbatch", "sbcast", "scancel", "scontrol", "scrontab", "sdiag", "sinfo",
            "sprio", "squeue", "sreport", "srun", "sshare", "sstat", "strigger")
ROOM = "cluster/slurm/"
OTHERS = table(__file__, "slurm_programs.toml", "others")
NAMED = re.compile("|".join(PROGRAMS))
COMMAND = re.compile(rf"(?:^|[;&|]|\$\(|\bexec\s)\s*(?:[\w./-]*/)?({'|'.join(PROGRAMS)})(?=\s|$)")


def commands(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of the strings that name one of Slurm's programs as a command: alone, with arguments, or in a shell's line."""
    tree = ast.parse(source)
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings: they are for people
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in texts and COMMAND.search(node.value):
            yield node.lineno, node.value


def test_only_one_room_names_slurms_programs() -> None:
    found: dict[str, list[str]] = {place: [] for place in (ROOM, *OTHERS, "")}
    for path in sorted(ROOT.rglob("*.py")):
        name = str(path.relative_to(ROOT))
        place = next((place for place in (ROOM, *OTHERS) if name.startswith(place)), "")
        source = path.read_text(encoding="utf-8")
        if NAMED.search(source):  # all others would take seconds to parse
            found[place] += [f"{name}:{line}: {text!r}" for line, text in commands(source)]
    assert not found[""], "ask hpc_mp.cluster.slurm instead:\n" + "\n".join(found[""])
    assert all(found[place] for place in (ROOM, *OTHERS)), "an exception without a use"


@pytest.mark.parametrize("spelling", table(__file__, "slurm_programs.toml", "spellings"))
def test_every_spelling_is_seen(spelling: str) -> None:
    assert list(commands(f"it = {spelling}"))


@pytest.mark.parametrize("text", table(__file__, "slurm_programs.toml", "no_commands"))
def test_what_people_read_is_no_command(text: str) -> None:
    assert not list(commands(text if text.startswith("def") else f"it = {text}"))
