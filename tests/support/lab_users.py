"""Tests that use the Slurm of the lab: they request its fixture, directly or through another fixture."""

import ast
import re
from functools import cache
from pathlib import Path


@cache
def lab_users(file: Path) -> frozenset[str]:
    """Return the names of a file's test functions that use the common fixture ``lab``."""
    source = file.read_text(encoding="utf-8")
    if not re.search(r"\blab\b", source):  # most files: to parse all of them takes seconds in every worker
        return frozenset()
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    fixtures = {each.name: _asked_for(each) for each in functions
                if any("attr='fixture'" in ast.dump(mark) for mark in each.decorator_list)}
    users = set() if "lab" in fixtures else {"lab"}  # a file with its own lab
    while grown := {name for name, asked in fixtures.items() if asked & users} - users:
        users |= grown
    return frozenset(each.name for each in functions if each.name.startswith("test_") and _asked_for(each) & users)


def uses_the_lab(root: Path, nodeid: str) -> bool:
    file, _, name = nodeid.partition("::")
    return name.partition("[")[0] in lab_users(root / file)


def _asked_for(function: ast.FunctionDef) -> set[str]:
    """Return the fixtures of a test or a fixture: its arguments, and those that ``usefixtures`` names."""
    marked = {node.value for mark in function.decorator_list if "usefixtures" in ast.dump(mark) for node in ast.walk(mark)
              if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)} | marked
