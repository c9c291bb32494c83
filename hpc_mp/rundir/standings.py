"""Stalled ranks: the message that each waits in, by its own record.

Each rank counts the messages that it has reached on every channel, and records the one that it waits in.
``hpc_mp.diagnosis.waits`` derives the wait chains.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from hpc_mp.base.files import read_json
from hpc_mp.rundir.layout import RunDirectory


@dataclass(frozen=True, slots=True)
class Wait:
    """A message that a rank waits in.

    Attributes:
        operation: "all_reduce", "recv", "rendezvous" …
        ranks: the other ranks that must reach it.
        channel: its channel in the counts: a process group, or one direction between two of its ranks.
        number: number of this message on its channel, from 1.
    """

    operation: str
    ranks: tuple[int, ...]
    channel: str
    number: int

    def __str__(self) -> str:
        return f"{self.operation} (message {self.number} of {self.channel})"


@dataclass(frozen=True, slots=True)
class Standing:
    """The position of a stalled rank.

    Attributes:
        time, since: unix seconds of this record, and of the rank's last progress or the end of a later pause.
        period: seconds after which a living rank writes it again; 0 if it is the rank's last record.
        step, microbatch: from 1 and from 0; 0 and None before the first.
        place: current function of its main thread, with file and line.
        wait: the message that it waits in; None if it waits for no rank.
        passed: number of messages that it has reached, by channel.
    """

    rank: int
    time: float
    since: float
    period: float = 0.0
    step: int = 0
    microbatch: int | None = None
    place: str = ""
    wait: Wait | None = None
    passed: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        at = f" of step {self.step}" if self.step else ""
        if self.wait is not None:
            return f"it waits in {self.wait}{at}"
        return f"it is in {self.place or 'native code'}{at} and waits for no rank"


def write_standing(run: RunDirectory, attempt: int, standing: Standing) -> None:
    """Write a few hundred bytes over the previous record. Raises OSError."""
    path = run.standing(attempt, standing.rank)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(asdict(standing)), encoding="utf-8")
    temporary.replace(path)


def read_standings(run: RunDirectory, attempt: int) -> list[Standing]:
    """Return the positions of all ranks of an attempt that were stalled when last seen. Broken records are left out."""
    standings = []
    for path in run.standing.found(attempt):
        with suppress(OSError, ValueError):
            standings.append(standing_of(read_json(path)))
    return standings


def standing_of(tree: Mapping[str, Any]) -> Standing:
    """Build a position from its JSON form. Raises ValueError if it is not valid."""
    try:
        wait = tree["wait"]
        return Standing(**{**tree, "wait": Wait(**{**wait, "ranks": tuple(wait["ranks"])}) if wait else None})
    except (TypeError, KeyError) as error:
        raise ValueError(f"not a record of a rank's position ({error})") from None
