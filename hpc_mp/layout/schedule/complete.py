"""Completion of an order of computations to a whole schedule: messages, then reductions. ``build`` makes the named schedules."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest
from typing import Literal

from hpc_mp.layout.schedule.actions import Action, Schedule, consumed, produced
from hpc_mp.layout.schedule.generators import ORDERS
from hpc_mp.layout.schedule.names import check_sizes, stages_per_rank

Reduce = Literal["last", "each"]


def build(name: str, pipeline: int, microbatches: int, virtual_stages: int = 1, reduce: Reduce = "last") -> Schedule:
    """Return a complete schedule of a name in ``ORDERS``: one list of actions for each of ``pipeline`` ranks. Raises HpcMpError
    for an unknown name, a size below 1, or microbatches or virtual stages that the schedule does not support.

    Args:
        virtual_stages: stages per rank, if the schedule leaves that open.
        reduce: synchronise a stage's gradients after its ``last`` backward, or after ``each`` (for ZeRO-2 and 3).
    """
    check_sizes(name, pipeline, microbatches, virtual_stages)
    return complete(ORDERS[name](pipeline, microbatches, stages_per_rank(name, virtual_stages)), reduce)


def complete(order: Schedule, reduce: Reduce) -> Schedule:
    """Return an order of computations with its messages and reductions."""
    return replace(order, ranks=tuple(
        tuple(_with_reductions(_with_messages(actions, order.placement), reduce)) for actions in order.ranks))


def _with_messages(actions: tuple[Action, ...], placement: tuple[int, ...]) -> list[Action]:
    """Put a SEND after each computation that makes a message for another rank, and post each RECV one computation early.

    A RECV precedes the computation before its consumer, so that it is in flight while that computation runs. Neighbouring stages
    on one rank need neither.
    """
    def receive(action: Action | None) -> Iterator[Action]:
        message = action and consumed(action, len(placement))
        if message and message.travels(placement):
            yield message.receive

    sequence = [*receive(actions[0] if actions else None)]
    for action, following in zip_longest(actions, actions[1:]):
        sequence += [*receive(following), action]
        message = produced(action, len(placement))
        if message and message.travels(placement):
            sequence.append(message.send)
    return sequence


def _with_reductions(actions: list[Action], reduce: Reduce) -> Iterator[Action]:
    """Put a REDUCE after ``each`` B and W, or the ``last`` one of every stage: after a SEND_B, for which another rank waits."""
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
