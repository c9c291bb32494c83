"""The elements of a schedule: actions, messages, and the assignment of stages to ranks.

==========  ==========================================================================================
F           forward of a microbatch through a stage
B           backward of a microbatch through a stage, whole
I           the part of a backward that makes the gradient of the stage's input
W           the part of a backward that makes the gradients of the stage's weights, some time after its I
SEND_F      send the output of stage s to stage s + 1
RECV_F      receive the input of stage s from stage s − 1
SEND_B      send the input gradient of stage s to stage s − 1
RECV_B      receive the output gradient of stage s from stage s + 1
REDUCE      synchronise the stage's gradients over the data axis, after the B or W of that microbatch, and after its SEND_B
==========  ==========================================================================================

Every (stage, microbatch) has one F, and either one B or one I and later one W. A B is an I and a W together, and an I makes what
a B sends. Sends and receives are asynchronous: a RECV is posted at its place in the list, and the F, B or I that consumes it
waits.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "REDUCE"]
Payload = Literal["F", "B"]  # an activation, or the gradient of one
Channel = tuple[int, int, Payload]  # sending rank of a pipeline, receiving rank, payload

COMPUTE: tuple[Kind, ...] = ("F", "B", "I", "W")
PRECEDING: dict[Kind, Kind] = {"B": "F", "I": "F", "W": "I"}
"""Computation → the computation that it needs first, on its own stage for the same microbatch."""
PAYLOADS: dict[Kind, Payload] = {"F": "F", "B": "B", "I": "B", "SEND_F": "F", "RECV_F": "F", "SEND_B": "B", "RECV_B": "B"}
"""Action → its data: outputs of forwards (F) or input gradients (B)."""
SENDS: dict[Payload, Kind] = {"F": "SEND_F", "B": "SEND_B"}
RECEIVES: dict[Payload, Kind] = {"F": "RECV_F", "B": "RECV_B"}


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One action of a rank: ``kind`` on global ``stage`` for ``microbatch``."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}(stage {self.stage}, microbatch {self.microbatch})"


@dataclass(frozen=True, slots=True)
class Schedule:
    """One list of actions for each pipeline rank."""

    ranks: tuple[tuple[Action, ...], ...]
    placement: tuple[int, ...]  # global stage → the pipeline rank that holds it; one entry per stage
    microbatches: int  # microbatches per replica and optimizer step

    @property
    def stages(self) -> int:
        """Number of global stages."""
        return len(self.placement)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that a pipeline rank holds, ascending."""
        return tuple(stage for stage, holder in enumerate(self.placement) if holder == rank)


@dataclass(frozen=True, slots=True)
class Message:
    """A tensor between neighbouring stages. If one rank holds both, nothing is sent."""

    payload: Payload
    sender: int
    receiver: int
    microbatch: int

    @property
    def send(self) -> Action:
        return Action(SENDS[self.payload], self.sender, self.microbatch)

    @property
    def receive(self) -> Action:
        return Action(RECEIVES[self.payload], self.receiver, self.microbatch)

    def travels(self, placement: tuple[int, ...]) -> bool:
        return placement[self.sender] != placement[self.receiver]


def consumed(action: Action, stages: int) -> Message | None:
    """Return the message that an F, B or I needs from the neighbouring stage, or a RECV receives; None for others and at ends."""
    payload = PAYLOADS.get(action.kind)
    if payload is None:
        return None
    neighbour = action.stage - 1 if payload == "F" else action.stage + 1
    return Message(payload, neighbour, action.stage, action.microbatch) if 0 <= neighbour < stages else None


def produced(action: Action, stages: int) -> Message | None:
    """Return the message that an F, B or I makes for the neighbouring stage, or a SEND sends; None for others and at ends."""
    payload = PAYLOADS.get(action.kind)
    if payload is None:
        return None
    neighbour = action.stage + 1 if payload == "F" else action.stage - 1
    return Message(payload, action.stage, neighbour, action.microbatch) if 0 <= neighbour < stages else None


def needs(action: Action, stages: int) -> list[Action | Message]:
    """Return what a computation needs: the one before it on its stage, and the message of the neighbouring stage."""
    before, message = PRECEDING.get(action.kind), consumed(action, stages)
    own = [Action(before, action.stage, action.microbatch)] if before else []
    return [*own, message] if message else [*own]


def run(todo: Sequence[deque[Action]], ready: Callable[[Action], bool]) -> Iterator[tuple[int, Action]]:
    """Yield (rank, action) as ranks execute their lists, each as far as an action that is not ready yet. Actions are taken out of
    ``todo``. In the end it has those that can never run."""
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(todo):
            while actions and ready(actions[0]):
                moved = True
                yield rank, actions.popleft()


def compute(schedule: Schedule) -> tuple[tuple[Action, ...], ...]:
    """Return the computations of each rank, in order, without messages and reductions."""
    return tuple(tuple(action for action in actions if action.kind in COMPUTE) for actions in schedule.ranks)
