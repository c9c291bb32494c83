"""Completion of an order of computations to a whole schedule: messages, then reductions. ``build`` makes the named schedules."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Literal

from hpc_mp.layout.schedule.actions import COMPUTE, Action, Schedule, consumed, produced
from hpc_mp.layout.schedule.generators import ordered
from hpc_mp.layout.schedule.names import check_sizes, stages_per_rank

Reduce = Literal["last", "each"]


@lru_cache(maxsize=16)  # a planner needs it for every rank of a layout
def build(name: str, pipeline: int, microbatches: int, virtual_stages: int = 1, reduce: Reduce = "last") -> Schedule:
    """Return a complete schedule by its name: one list of actions for each of ``pipeline`` ranks. Raises HpcMpError for an
    unknown name, a size below 1, or microbatches or virtual stages that the schedule does not support. ``virtual_stages``: stages
    per rank, if the schedule leaves that open. ``reduce``: synchronise a stage's gradients after its ``last`` backward, or after
    ``each`` (for ZeRO-2 and 3)."""
    check_sizes(name, pipeline, microbatches, virtual_stages)
    return complete(ordered(name, pipeline, microbatches, stages_per_rank(name, virtual_stages)), reduce)


def complete(order: Schedule, reduce: Reduce) -> Schedule:
    """Return an order of computations with its messages and reductions."""
    return replace(order, ranks=tuple(
        tuple(_with_reductions(_with_messages(actions, order.placement), reduce)) for actions in order.ranks))


def _with_messages(actions: tuple[Action, ...], placement: tuple[int, ...]) -> Iterator[Action]:
    """Put a SEND after each computation that makes a message for another rank, and a RECV directly before each that needs one.

    So a host that has to wait at a posted receive has launched everything before it, and no rank waits for what is still to come
    (``validate.check_hosts``). A host launches ahead of its GPU: there the receive is posted while earlier computations run.
    Neighbouring stages on one rank need neither.
    """
    for action in actions:
        needed, result = consumed(action, len(placement)), produced(action, len(placement))
        if needed and needed.travels(placement):
            yield needed.receive
        yield action
        if result and result.travels(placement):
            yield result.send


def posted_ahead(actions: Sequence[Action]) -> list[Action]:
    """Return a rank's actions with each RECV before the computation that precedes it, so that it is in flight meanwhile. For
    messages through host memory: their host computes what it calls, and bytes flow only when both sides have posted."""
    ahead: list[Action] = []
    for action in actions:
        place = len(ahead)
        if action.kind.startswith("RECV"):
            place = next((place for place in reversed(range(len(ahead))) if ahead[place].kind in COMPUTE), 0)
        ahead.insert(place, action)
    return ahead


def _with_reductions(messages: Iterable[Action], reduce: Reduce) -> Iterator[Action]:
    """Put a REDUCE after ``each`` B and W, or the ``last`` one of every stage: after a SEND_B, for which another rank waits."""
    actions = list(messages)
    finished = [action for action in actions if action.kind in ("B", "W")]
    synchronising = set(finished if reduce == "each" else {action.stage: action for action in finished}.values())
    waiting: list[Action] = []
    for action in actions:
        if action.kind != "SEND_B":
            yield from waiting
            waiting.clear()
        yield action
        if action in synchronising:
            waiting.append(replace(action, kind="REDUCE"))
    yield from waiting
