"""Is a schedule right? Every action once, on its rank, and executable without a deadlock."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

from hpc_mp.layout.schedule.actions import Action, Kind, Schedule, endpoints, receive, send, source

COMPUTE: tuple[Kind, Kind] = ("F", "B")


def validate(schedule: Schedule, stages: int, microbatches: int) -> None:
    """Check a complete schedule, communication and reductions included, over ``stages`` global stages.

    Raises:
        ValueError: naming the action that is missing, superfluous, on the wrong rank, out of order or never possible.
    """
    _check_ranks(schedule)
    _check_once(schedule, stages, microbatches)
    _check_reductions(schedule)
    _run(schedule, stages)


def peak_in_flight(actions: Sequence[Action]) -> int:
    """Largest number of forwards on one rank whose backward is still to come: the activations it holds at once."""
    held = peak = 0
    for action in actions:
        held += {"F": 1, "B": -1}.get(action.kind, 0)
        peak = max(peak, held)
    return peak


def _check_ranks(schedule: Schedule) -> None:
    for rank, actions in enumerate(schedule):
        for action in actions:
            if action.stage % len(schedule) != rank:
                raise ValueError(f"{action} is on rank {rank}, its stage on rank {action.stage % len(schedule)}")


def _check_once(schedule: Schedule, stages: int, microbatches: int) -> None:
    """Every F and B once, every message between two ranks once at either end, and nothing else but reductions."""
    ranks = len(schedule)
    computing = [Action(kind, stage, m) for kind in COMPUTE for stage in range(stages) for m in range(microbatches)]
    messages = [message(action, stages, ranks) for action in computing for message in (send, receive)]
    wanted = Counter(action for action in (*computing, *messages) if action is not None)
    given = Counter(action for actions in schedule for action in actions if action.kind != "REDUCE")
    for action in sorted(given | wanted):
        if given[action] != wanted[action]:
            raise ValueError(f"{action} stands {given[action]} times, expected {wanted[action]}")


def _check_reductions(schedule: Schedule) -> None:
    """A REDUCE directly follows its B, or the SEND_B of that, which goes first; the last B of every stage has one."""
    for actions in schedule:
        open_stages: dict[int, Action] = {}
        for before, action, after in zip((None, *actions), actions, (*actions[1:], None), strict=False):
            if action.kind == "B":
                open_stages[action.stage] = action
            elif action.kind == "REDUCE":
                if before not in (replace(action, kind="B"), replace(action, kind="SEND_B")):
                    raise ValueError(f"{action} does not directly follow its B")
                if after == replace(action, kind="SEND_B"):
                    raise ValueError(f"{action} holds up {after}, for which another rank waits")
                del open_stages[action.stage]
        for action in open_stages.values():
            raise ValueError(f"{replace(action, kind='REDUCE')} is missing after the last B of its stage")


def _run(schedule: Schedule, stages: int) -> None:
    """Execute with asynchronous messages: the n-th SEND of a channel meets its n-th RECV, and they must be one tensor.

    A channel is (sending rank, receiving rank, payload F or B). A rank stands still only before an F or B whose input
    has not arrived; nobody can move any more = deadlock.
    """
    ranks = len(schedule)
    done: set[Action] = set()
    arrived: set[Action] = set()  # the F and B whose remote input is there
    sent: dict[tuple[int, int, str], list[Action]] = defaultdict(list)
    posted: dict[tuple[int, int, str], list[Action]] = defaultdict(list)
    todo = [list(reversed(actions)) for actions in schedule]

    def ready(action: Action) -> bool:
        if action.kind == "B" and Action("F", action.stage, action.microbatch) not in done:
            return False
        before = source(action, stages)
        local = before is None or before.stage % ranks == action.stage % ranks
        return (before is None or before in done) and (local or action in arrived)

    def exchange(action: Action) -> None:
        producer, consumer = endpoints(action)
        channel = producer.stage % ranks, consumer.stage % ranks, producer.kind
        if action.kind.startswith("SEND") and producer not in done:
            raise ValueError(f"{action} stands before {producer}")
        own, other = (sent, posted) if action.kind.startswith("SEND") else (posted, sent)
        own[channel].append(consumer)
        turn = len(own[channel]) - 1
        if turn < len(other[channel]):
            if other[channel][turn] != consumer:
                raise ValueError(f"{action} meets the message for {other[channel][turn]}: "
                                 f"ranks {channel[0]} and {channel[1]} exchange in different orders")
            arrived.add(consumer)

    moved = True
    while moved:
        moved = False
        for actions in todo:
            while actions and (actions[-1].kind not in COMPUTE or ready(actions[-1])):
                action = actions.pop()
                if action.kind in COMPUTE:
                    done.add(action)
                elif action.kind != "REDUCE":
                    exchange(action)
                moved = True
    if stuck := [f"rank {rank} at {actions[-1]}" for rank, actions in enumerate(todo) if actions]:
        raise ValueError(f"deadlock: {', '.join(stuck)}")
