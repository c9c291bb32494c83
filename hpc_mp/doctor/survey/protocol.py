"""Messages between the coordinator and the agents: JSON, one per line, over the standard streams of what started them.

No port of the coordinator needs to be reachable, and a node whose links are bad still answers if Slurm reaches it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

Message = dict[str, Any]

PIECE = 900
"""srun passes on at most 1,024 bytes of a task's line at once, and another task's line may come between two parts."""
MARK = "hpc-mp-survey"  # a site's prolog may write to the same stream


def encode(message: Message) -> str:
    """One line for all agents."""
    return json.dumps(message, separators=(",", ":")) + "\n"


def pieces(rank: int, message: Message) -> Iterator[str]:
    """The lines with which an agent sends a message; all but the last are marked with ``+``."""
    text = json.dumps(message, separators=(",", ":"))
    for begin in range(0, len(text), PIECE):
        more = "+" if begin + PIECE < len(text) else "."
        yield f"{MARK} {rank} {more}{text[begin : begin + PIECE]}\n"


class Joiner:
    """Puts the agents' messages together again, whatever else is written between their lines."""

    def __init__(self) -> None:
        self._parts: dict[int, str] = {}

    def add(self, line: str) -> tuple[int, Message] | None:
        """The rank and its message, when ``line`` completes one."""
        mark, _, rest = line.rstrip("\n").partition(" ")
        number, _, payload = rest.partition(" ")
        if mark != MARK or not number.isdigit() or payload[:1] not in ("+", "."):
            return None
        rank = int(number)
        text = self._parts.pop(rank, "") + payload[1:]
        if payload[0] == "+":
            self._parts[rank] = text
            return None
        try:
            return rank, json.loads(text)
        except ValueError:  # a torn line: the node died in the middle of it
            return None
