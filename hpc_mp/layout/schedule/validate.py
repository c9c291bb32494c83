"""Validation of a schedule: every action once, on its rank, after its inputs, and executable without a deadlock between ranks.

NCCL's rule: both sides wait at a message. A message is put into a stream when the computations before it in the list have ended,
and only the first message of a stream is in flight; it ends when it is also the first one at its other side. The engine has a
stream for every (sending rank, receiving rank, payload), in which messages delay only later ones of their own channel and the
computations that consume them. With one stream for all messages of a rank, a receive that is posted early would precede every
later send, and two ranks that post ahead of each other would wait forever. The replicas of the data axis run the same lists, and
so meet at their reductions in the same order.

On a GPU a posted receive is a kernel that spins. Now and then a rank's host has to wait until its whole device is idle: while a
module is loaded, at a retry of the allocator, when pinned memory is allocated. ``check_hosts`` proves that then too the message
comes, because nothing on which it depends stands behind the receive in the rank's list.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

from hpc_mp.layout.schedule.actions import COMPUTE, Action, Channel, Message, Schedule, compute, consumed, needs, produced, run

Streams = Callable[[Channel], Hashable]  # the stream of a rank that contains a channel's messages


def own_stream(channel: Channel) -> Hashable:
    return channel


def validate(schedule: Schedule) -> None:
    """Check a complete schedule, communication and reductions included. Raises ValueError, naming the action that is missing,
    superfluous, on the wrong rank, out of order or never possible."""
    _check_ranks(schedule)
    _check_computations(schedule)
    _check_messages(schedule)
    _check_reductions(schedule)
    check_streams(schedule, own_stream)
    check_hosts(schedule)


def peak_in_flight(actions: Sequence[Action]) -> int:
    """Return the largest number of forwards on one rank whose B or W is still to come: the activations it holds at once."""
    held = peak = 0
    for action in actions:
        held += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
        peak = max(peak, held)
    return peak


def _check_ranks(schedule: Schedule) -> None:
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            if not 0 <= action.stage < schedule.stages:
                raise ValueError(f"{action} is on a stage that does not exist: there are {schedule.stages}")
            if schedule.placement[action.stage] != rank:
                raise ValueError(f"{action} is on rank {rank}, its stage on rank {schedule.placement[action.stage]}")
        if rank not in schedule.placement:
            raise ValueError(f"rank {rank} holds no stage")


def _check_computations(schedule: Schedule) -> None:
    """Check that every (stage, microbatch) has one F, and either one B or one I and one W."""
    counts = Counter(action for actions in compute(schedule) for action in actions)
    for stage in range(schedule.stages):
        for microbatch in range(schedule.microbatches):
            split = counts.keys() & {Action("I", stage, microbatch), Action("W", stage, microbatch)}
            for kind in ("F", "I", "W") if split else ("F", "B"):
                action = Action(kind, stage, microbatch)
                if counts.pop(action, 0) != 1:
                    raise ValueError(f"{action} appears {_times(schedule, action)}, expected once")
    for action in counts:
        raise ValueError(f"{action} appears {_times(schedule, action)}, expected 0 times")


def _check_messages(schedule: Schedule) -> None:
    """Check that every message between two ranks appears once at either end, and no other message appears."""
    messages = [produced(action, schedule.stages) for actions in compute(schedule) for action in actions]
    travelling = [message for message in messages if message and message.travels(schedule.placement)]
    expected = {action for message in travelling for action in (message.send, message.receive)}
    counts = Counter(action for actions in schedule.ranks for action in actions if action.kind not in (*COMPUTE, "REDUCE"))
    for action in expected - counts.keys():
        raise ValueError(f"{action} appears 0 times, expected once")
    for action, times in counts.items():
        if times != 1 or action not in expected:
            raise ValueError(f"{action} appears {times} times, expected {'once' if action in expected else '0 times'}")


def _times(schedule: Schedule, action: Action) -> str:
    return f"{sum(actions.count(action) for actions in schedule.ranks)} times"


def _check_reductions(schedule: Schedule) -> None:
    """Check that a REDUCE directly follows its B or W, or the SEND_B of that, which goes first; and that the last B or W of
    every stage has one."""
    for actions in schedule.ranks:
        open_stages: dict[int, Action] = {}
        for before, action, after in zip((None, *actions), actions, (*actions[1:], None), strict=False):
            if action.kind in ("B", "W"):
                open_stages[action.stage] = action
            elif action.kind == "REDUCE":
                done, sent = open_stages.pop(action.stage, None), replace(action, kind="SEND_B")
                if done is None or done.microbatch != action.microbatch or before not in (done, sent):
                    raise ValueError(f"{action} does not directly follow its B or W")
                if after == sent:
                    raise ValueError(f"{action} delays {after}, for which another rank waits")
        for action in open_stages.values():
            raise ValueError(f"{replace(action, kind='REDUCE')} is missing after the last {action.kind} of its stage")


def check_streams(schedule: Schedule, stream_of: Streams) -> None:
    """Execute with messages under NCCL's rule, put into streams by ``stream_of``. A rank stops only before a computation that
    lacks its input. If no rank can continue, the ranks are in a deadlock. Raises ValueError, naming the computation at which each
    rank stops and the messages that have not met, or the two messages of a channel that its sides have in different orders."""
    placement, stages = schedule.placement, schedule.stages
    done: set[Action | Message] = set()  # computations, and messages made on the same rank, or received
    outbox: set[Message] = set()  # messages that must still be sent
    streams: dict[tuple[int, Hashable], deque[Message]] = defaultdict(deque)  # (rank, stream) → messages not yet through
    todo = [deque(actions) for actions in schedule.ranks]

    def channel_of(message: Message) -> Channel:
        return placement[message.sender], placement[message.receiver], message.payload

    def post(action: Action, rank: int) -> None:
        sending = action.kind.startswith("SEND")
        message = produced(action, stages) if sending else consumed(action, stages)
        assert message is not None  # a computation makes or needs it
        if sending and message not in outbox:
            raise ValueError(f"{action} precedes the computation of its message")
        place = rank, stream_of(channel_of(message))
        streams[place].append(message)
        waiting = deque([place])
        while waiting:
            waiting += meet(waiting.popleft())

    def meet(place: tuple[int, Hashable]) -> list[tuple[int, Hashable]]:
        """Finish the first message of a stream if it is also the first at its other side: both streams may then continue."""
        if not streams[place]:
            return []
        message = streams[place][0]
        channel = channel_of(message)
        sides = [(rank, stream_of(channel)) for rank in channel[:2]]
        if not all(streams[side] for side in sides):
            return []
        sent, received = (streams[side][0] for side in sides)
        if sent != received:
            if channel_of(sent) == channel_of(received):
                raise ValueError(f"{received.receive} meets {sent.send}: ranks {channel[0]} and {channel[1]} exchange in "
                                 "different orders")
            return []
        for side in sides:
            streams[side].popleft()
        done.add(message)
        return sides

    for rank, action in run(todo, lambda action: action.kind not in COMPUTE or done.issuperset(needs(action, stages))):
        if action.kind not in (*COMPUTE, "REDUCE"):
            post(action, rank)
        elif action.kind in COMPUTE:
            done.add(action)
            if result := produced(action, stages):
                (outbox if result.travels(placement) else done).add(result)
    if stuck := [f"rank {rank} at {actions[0]}" for rank, actions in enumerate(todo) if actions]:
        waiting = [(rank, stream[0]) for (rank, _), stream in streams.items() if stream]
        halves = [f"rank {rank} in {message.send if placement[message.sender] == rank else message.receive}"
                  for rank, message in sorted(waiting, key=lambda half: half[0])]
        raise ValueError(f"deadlock: {', '.join(stuck)}; under way: {', '.join(halves) or 'no message'}")


def check_hosts(schedule: Schedule) -> None:
    """Execute with a host that waits at one of its receives until the message has come, whichever that is. Raises ValueError,
    naming the receive, and what its rank launches behind it although the message depends on it."""
    placement, stages = schedule.placement, schedule.stages
    places = [{action: place for place, action in enumerate(actions)} for actions in schedule.ranks]
    todo = [deque(actions) for actions in compute(schedule)]
    latest = [[-1] * len(todo) for _ in todo]  # of each rank: the place in every rank's list up to which its result depends on it
    needed_for: dict[Message | None, list[int]] = {None: []}  # the same of a message; None: what needs none
    for rank, action in run(todo, lambda action: consumed(action, stages) in needed_for):
        if message := consumed(action, stages):
            needed = needed_for[message]
            if message.travels(placement) and needed[rank] > (place := places[rank][message.receive]):
                raise ValueError(f"a host that waits at {message.receive} of rank {rank} waits for ever: the message depends on "
                                 f"{schedule.ranks[rank][needed[rank]]}, {needed[rank] - place} actions later")
            latest[rank] = [max(pair) for pair in zip(latest[rank], needed, strict=True)]
        latest[rank][rank] = places[rank][action]
        if sent := produced(action, stages):
            needed_for[sent] = [*latest[rank]]
