"""Arrival of messages, known from the schedule alone: the sender need not ask, nor keep them to the end of the step.

Messages are sent during computation, and a sent tensor must stay unchanged until it has arrived. A rank that waited for that
would wait for its receiver, which may be busy with something else. A rank that asks the back end frees memory at moments that
depend on the network, if it is notified at all: a send of gloo is complete only after a wait for it. But a rank also gets
messages, and each of them proves that its sender had done everything before it in its list of actions:

    rank 0    F0  F1  F2  F3          B0          rank 1's B0 is after its F0, which has consumed what rank 0 sent: when
    rank 1        F0  B0  F1  B1                  the gradient is there for rank 0's B0, the output of its F0 has arrived

So a computation that consumes another rank's message proves the arrival of everything that its rank has sent there and that was
consumed before the message was made. Outputs are known to have arrived at the latest when their gradient comes. Gradients are
known to have arrived with the next outputs; the last gradients of a step have no outputs after them, and are kept until the step
ends. Under 1F1B a rank keeps as many sent messages as chunks, or one or two more, whatever the number of microbatches.
"""

from collections import defaultdict
from collections.abc import Mapping

from hpc_mp.layout.schedule.actions import COMPUTE, Action, Message, Schedule, compute, consumed, produced


def arrivals(schedule: Schedule, rank: int) -> Mapping[Action, tuple[Action, ...]]:
    """Return which sends of a rank are proved to have arrived, and when. ``schedule``: complete and valid. The result also holds
    for the forwards of an evaluation, which has no backwards. Returns computation of the rank -> the rank's sends whose arrival
    is first proved when the computation's input arrives. Sends without a proof are left out."""
    placement, stages = schedule.placement, schedule.stages
    production: dict[Message | None, int] = {}  # message -> place of the computation that makes it, in its sender's list
    consumption: dict[Message | None, int] = {}  # message -> place of the computation that consumes it, in its receiver's list
    for computations in compute(schedule):
        for place, action in enumerate(computations):
            production[produced(action, stages)] = consumption[consumed(action, stages)] = place
    under_way: defaultdict[int, list[tuple[int, Action]]] = defaultdict(list)  # receiving rank -> (place of its use, send)
    proofs: dict[Action, tuple[Action, ...]] = {}
    for action in schedule.ranks[rank]:
        if action.kind.startswith("SEND") and (sent := produced(action, stages)):
            under_way[placement[sent.receiver]].append((consumption[sent], action))
        elif action.kind in COMPUTE and (needed := consumed(action, stages)) and needed.travels(placement):
            waiting, limit = under_way[placement[needed.sender]], production[needed]
            under_way[placement[needed.sender]] = [(place, send) for place, send in waiting if place > limit]
            if proved := tuple(send for place, send in waiting if place <= limit):
                proofs[action] = proved
    return proofs
