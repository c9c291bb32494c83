"""The actions a schedule is made of.

With P ranks, global stage s (0 … P × V − 1) lives on rank s % P.

==========  ==========================================================================================
F           forward of a microbatch through a stage
B           backward of a microbatch through a stage
SEND_F      send the output of stage s to stage s + 1
RECV_F      receive the input of stage s from stage s − 1
SEND_B      send the input gradient of stage s to stage s − 1
RECV_B      receive the output gradient of stage s from stage s + 1
REDUCE      the B before it synchronises the stage's gradients over the data axis; its SEND_B has gone out already
==========  ==========================================================================================

Sends and receives are asynchronous: a RECV is posted where it stands, and the F or B that consumes it waits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal["F", "B", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "REDUCE"]


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """What a rank does next: ``kind`` on global ``stage`` for ``microbatch``."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}(stage {self.stage}, microbatch {self.microbatch})"


Schedule = tuple[tuple[Action, ...], ...]
"""One list of actions for each pipeline rank."""


def source(action: Action, stages: int) -> Action | None:
    """The F or B on the neighbouring stage whose output an F or B consumes; None at the ends of the pipeline."""
    neighbour = action.stage - 1 if action.kind == "F" else action.stage + 1
    return Action(action.kind, neighbour, action.microbatch) if 0 <= neighbour < stages else None


def destination(action: Action, stages: int) -> Action | None:
    """The F or B on the neighbouring stage that consumes the output of an F or B; None at the ends of the pipeline."""
    neighbour = action.stage + 1 if action.kind == "F" else action.stage - 1
    return Action(action.kind, neighbour, action.microbatch) if 0 <= neighbour < stages else None


def receive(action: Action, stages: int, ranks: int) -> Action | None:
    """The RECV that brings what an F or B consumes; None if that is made on the same rank or nowhere."""
    before = source(action, stages)
    if before is None or before.stage % ranks == action.stage % ranks:
        return None
    return replace(action, kind="RECV_F" if action.kind == "F" else "RECV_B")


def send(action: Action, stages: int, ranks: int) -> Action | None:
    """The SEND that takes away what an F or B makes; None if that is consumed on the same rank or nowhere."""
    after = destination(action, stages)
    if after is None or after.stage % ranks == action.stage % ranks:
        return None
    return replace(action, kind="SEND_F" if action.kind == "F" else "SEND_B")


def endpoints(message: Action) -> tuple[Action, Action]:
    """The F or B that makes what a SEND or RECV carries, and the F or B that consumes it."""
    payload: Literal["F", "B"] = "F" if message.kind.endswith("_F") else "B"
    ahead = 1 if payload == "F" else -1
    stage = message.stage if message.kind.startswith("SEND") else message.stage - ahead
    return Action(payload, stage, message.microbatch), Action(payload, stage + ahead, message.microbatch)


def compute(schedule: Schedule) -> Schedule:
    """The F and B actions alone."""
    return tuple(tuple(action for action in actions if action.kind in ("F", "B")) for actions in schedule)
