"""Where ranks stand: what each rank that stands still waits for, as it writes it down itself.

Each rank counts the messages that it has come to on every channel and notes the one that it waits in. Who waits for whom is found
in ``hpc_mp.diagnosis.waits``.
"""

from __future__ import annotations

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
        ranks: the others that must come to it.
        channel: on which the others count it: a process group, or one direction between two of its ranks.
        number: of this message on its channel, from 1.
    """

    operation: str
    ranks: tuple[int, ...]
    channel: str
    number: int

    def __str__(self) -> str:
        return f"{self.operation} (message {self.number} of {self.channel})"


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a rank stands.

    Attributes:
        time, since: unix seconds: when this was written, and since when the rank has not moved.
        period: seconds after which a living rank writes it anew; 0: it is the rank's last word.
        step, microbatch: from 1 and from 0; 0 and None before the first.
        place: the function in which its main thread stands, with file and line.
        wait: None: it waits for nobody.
        passed: how many messages it has come to, by channel.
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
        return f"it stands in {self.place or 'native code'}{at} and waits for nobody"


def write_standing(run: RunDirectory, attempt: int, standing: Standing) -> None:
    """A few hundred bytes over those that were there. Raises OSError."""
    path = run.standing(attempt, standing.rank)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(asdict(standing)), encoding="utf-8")
    temporary.replace(path)


def read_standings(run: RunDirectory, attempt: int) -> list[Standing]:
    """Of all ranks of an attempt that stood still when they were last seen; what is broken is left out."""
    found = []
    for path in run.standing.found(attempt):
        with suppress(OSError, ValueError):
            found.append(standing_of(read_json(path)))
    return found


def standing_of(tree: Mapping[str, Any]) -> Standing:
    """From its JSON form. Raises ValueError when it is none."""
    try:
        wait = tree["wait"]
        return Standing(**{**tree, "wait": Wait(**{**wait, "ranks": tuple(wait["ranks"])}) if wait else None})
    except (TypeError, KeyError) as error:
        raise ValueError(f"no record of where a rank stands ({error})") from None
