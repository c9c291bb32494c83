"""A machine that is not here: a tree of its files, and what its programs answered."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpc_mp.base.command import CommandFailed
from hpc_mp.cluster.node.source import Source


def recorded(root: Path, commands: Mapping[str, Mapping[str, Any]]) -> Source:
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
            raise CommandFailed(str(answer.get("err", "")).strip() or f"{argv[0]} exited with {answer['code']}")
        return str(answer["out"])

    return Source(root, ask)
