"""The message that this rank waits for, noted before it blocks: its part of the wait graph (``hpc_mp.rundir.standings``).

All messages pass through the methods of torch's process groups and ``Work.wait``, whether the sender is the engine, the saving of
a checkpoint or a barrier. While ``listening``, these methods count a message before they pass it on, and note the current wait.
This costs some microseconds of memory accesses and no file. A host does not wait for messages on devices: which of them are not
finished is in torch's flight recorder. A thread writes the note to a file once the rank has not moved for a while.
"""

import functools
import math
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

from hpc_mp.rundir import RunDirectory
from hpc_mp.rundir.standings import Standing, Wait, write_standing
from hpc_mp.train.pipeline.stage import Microbatches
from hpc_mp.train.rank.flight_recorder import recorded, under_way
from hpc_mp.train.rank.stall_clock import StallAwareClock

# torch's names of operations of all ranks of a group, and of messages between two of them.
COLLECTIVES: Mapping[str, str] = {
    "allreduce": "all_reduce", "allreduce_coalesced": "all_reduce", "allgather": "all_gather",
    "allgather_coalesced": "all_gather", "_allgather_base": "all_gather",
    "all_gather_single": "all_gather", "all_gather_single_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather", "reduce": "reduce", "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter", "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_single_coalesced": "reduce_scatter", "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "alltoall": "all_to_all", "alltoall_base": "all_to_all", "all_to_all_single": "all_to_all", "barrier": "barrier",
    "broadcast": "broadcast", "gather": "gather", "scatter": "scatter",
}
DIRECTED: Mapping[str, tuple[str, str]] = {"send": ("sent", "received"), "recv": ("received", "sent")}  # own and the peer's part

Result = TypeVar("Result")
POLL_S = 0.5  # between two checks that this rank moves
PATIENCE_S = 1.0  # stillness after which the rank's standing is written ...
PATIENCE_STEPS = 2.0  # ... or that many times the duration of its last step, if that is longer
PERIOD_S = 5.0  # after which a rank that still does not move writes it again


class Waits:
    """Counters of this rank's messages, and the message that it waits in.

    Attributes:
        wait: the message; None while the rank does not wait. ``since``: unix time in seconds of the last movement, or of
            the end of a later pause of the process.
        passed: number of messages that the rank has reached, by channel.
        moves: a counter that grows with every message.
        work: the microbatches of the newest step; None until its samples have been read.
        devices: True if messages run on devices, as those of NCCL do, so that the host does not wait for them.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.wait: Wait | None = None
        self.passed: Counter[str] = Counter()
        self.moves = 0
        self.since = time.time()
        self.step = 0
        self.work: Microbatches | None = None
        self.devices = False
        self.pace = 0.0
        self._began = 0.0
        self._groups: WeakKeyDictionary[Any, tuple[str, tuple[int, ...], tuple[int, ...]]] = WeakKeyDictionary()
        self._messages: WeakKeyDictionary[Any, Wait] = WeakKeyDictionary()

    @property
    def microbatch(self) -> int:
        """The microbatch that the rank has reached, from 0; -1: none."""
        return -1 if self.work is None else self.work.begun

    def at(self, step: int, work: Microbatches | None = None) -> None:
        """Note that the rank has reached a step (from 1)."""
        if step != self.step:
            now = time.monotonic()
            self.pace = now - self._began if self.step else 0.0
            self._began = now
        self.step, self.work = step, work
        self.moves += 1

    def together(self, what: str, ranks: Sequence[int], action: Callable[[], Result]) -> Result:
        """Run an action in which all ``ranks`` must take part, and which is not a message of a process group."""
        self.passed[what] += 1
        wait = Wait(what, tuple(rank for rank in ranks if rank != self.rank), what, self.passed[what])
        result: Result = self._in(wait, action)
        return result

    def behind(self, what: str, rank: int, action: Callable[[], Result]) -> Result:
        """Wait for an action of ``rank``. The other ranks call this to wait for it, ``rank`` calls it after the action."""
        result: Result = self._in(None if rank == self.rank else Wait(what, (rank,), what, 1), action)
        self.passed[what] += 1
        return result

    def standing(self, period: float = 0.0, error: BaseException | None = None) -> Standing:
        """Return the rank's standing now, or when ``error`` was raised. ``period``: as in ``Standing``."""
        raised = traceback.extract_tb(error.__traceback__) if error is not None else None
        broken_off: Wait | None = getattr(error, "waited", None)
        wait = broken_off or self.wait or (self._on_device() if self.devices else None)
        return Standing(self.rank, time.time(), self.since, period, self.step, self.microbatch if self.microbatch >= 0 else None,
                        place(raised or stack()), wait, dict(self.passed))

    def _on_device(self) -> Wait | None:
        """Return the oldest message that the rank's device has not finished."""
        members = {channel.removeprefix("group "): ranks for channel, ranks, _ in self._groups.values()}
        return under_way(recorded(), members, self.rank)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Observe all messages of this process. An error that breaks off a wait carries the wait as ``waited``."""
        groups, works = dist.ProcessGroup, dist.Work
        noted = {**{name: functools.partial(self._collective, spoken) for name, spoken in COLLECTIVES.items()},
                 **{name: functools.partial(self._directed, name, *parts) for name, parts in DIRECTED.items()}}
        originals: list[tuple[type, str, Any]] = [(groups, name, vars(groups)[name]) for name in noted if name in vars(groups)]
        for kind, name, _ in originals:
            setattr(kind, name, _method(noted[name], getattr(kind, name)))
        originals.append((works, "wait", vars(works)["wait"]))
        works.wait = _method(self._wait, works.wait)  # type: ignore[method-assign]
        try:
            yield
        finally:
            for kind, name, original in originals:
                setattr(kind, name, original)

    def _collective(self, operation: str, original: Callable[..., Any], group: Any, *args: Any, **named: Any) -> Any:
        channel, _, others = self._group(group)
        self.passed[channel] += 1
        return self._hand_on(Wait(operation, others, channel, self.passed[channel]), original, group, *args, **named)

    def _directed(
        self, operation: str, own: str, other: str, original: Callable[..., Any], group: Any, tensors: Any, peer: int, *args: Any,
        **named: Any,
    ) -> Any:
        channel, ranks, _ = self._group(group)
        partner = ranks[peer]
        sender, receiver = (self.rank, partner) if operation == "send" else (partner, self.rank)
        direction = f"{channel}, rank {sender} to {receiver}"
        self.passed[f"{direction}, {own}"] += 1
        wait = Wait(operation, (partner,), f"{direction}, {other}", self.passed[f"{direction}, {own}"])
        return self._hand_on(wait, original, group, tensors, peer, *args, **named)

    def _hand_on(self, wait: Wait, original: Callable[..., Any], *args: Any, **named: Any) -> Any:
        before, self.wait = self.wait, wait  # a communicator may have to be made first, which waits too
        self.since = time.time()
        self.moves += 1
        try:
            work = original(*args, **named)
        finally:
            self.wait = before
        if work is not None:
            self._messages[work] = wait
        return work

    def _wait(self, original: Callable[..., Any], work: Any, *args: Any, **named: Any) -> Any:
        return self._in(self._messages.get(work), original, work, *args, **named)

    def _in(self, wait: Wait | None, action: Callable[..., Any], *args: Any, **named: Any) -> Any:
        before, self.wait = self.wait, wait
        self.since = time.time()
        self.moves += 1
        try:
            return action(*args, **named)
        except Exception as error:
            if wait is not None and not hasattr(error, "waited"):
                error.waited = wait  # type: ignore[attr-defined]
            raise
        finally:
            self.wait = before
            self.moves += 1

    def _group(self, group: Any) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        """Return a group's channel, and its ranks with and without this one."""
        entry = self._groups.get(group)
        if entry is None:
            ranks = tuple(dist.get_process_group_ranks(group))
            entry = f"group {group.group_name}", ranks, tuple(rank for rank in ranks if rank != self.rank)
            self._groups[group] = entry
        return entry


def _method(noted: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that passes ``original`` and all its arguments to ``noted``."""
    @functools.wraps(original)
    def method(*args: Any, **named: Any) -> Any:
        return noted(original, *args, **named)

    return method


@contextmanager
def noted(waits: Waits, run: RunDirectory, attempt: int, step_timeout: float) -> Iterator[None]:
    """Run a thread during the block that writes the rank's standing when it stops moving, and removes it when it moves again."""
    done = threading.Event()
    thread = threading.Thread(target=_note, args=(waits, run, attempt, min(PERIOD_S, max(POLL_S, step_timeout / 20)), done),
                              name="waits", daemon=True)
    thread.start()
    try:
        yield
    finally:  # a rank that ends reports its standing in its failure record
        done.set()
        thread.join()
        with suppress(OSError):
            run.standing(attempt, waits.rank).unlink(missing_ok=True)


def _note(waits: Waits, run: RunDirectory, attempt: int, period: float, done: threading.Event) -> None:
    """Keep the rank's standing written while it does not move. A pause of the process is not a wait for others."""
    clock = StallAwareClock(POLL_S)
    moves, moved, written = (-1, -1), clock.now(), -math.inf
    ended = False
    while not ended:
        ended = done.wait(POLL_S)
        now = clock.now()
        if clock.paused:  # meanwhile the others waited for this rank
            waits.since = time.time()
        if (waits.moves, waits.microbatch) != moves:
            moves, moved = (waits.moves, waits.microbatch), now
            if written > -math.inf:
                with suppress(OSError):
                    run.standing(attempt, waits.rank).unlink(missing_ok=True)
                written = -math.inf
        elif now - moved >= max(PATIENCE_S, PATIENCE_STEPS * waits.pace) and now - written >= period:
            with suppress(OSError):  # a full disk may have room later
                write_standing(run, attempt, waits.standing(period))
                written = now


def stack() -> traceback.StackSummary:
    """Return the stack of the main thread, from any thread. Source lines are read only when printed: a standing needs none."""
    frames = traceback.walk_stack(sys._current_frames()[threading.main_thread().ident or 0])
    innermost_first = traceback.StackSummary.extract(frames, lookup_lines=False)
    return traceback.StackSummary.from_list(innermost_first[::-1])


def place(frames: Sequence[traceback.FrameSummary]) -> str:
    """Return the innermost function of hpc_mp, with file and line."""
    own = next((entry for entry in reversed(frames) if "hpc_mp" in entry.filename and entry.filename != __file__), frames[-1])
    return f"{own.name} ({Path(own.filename).name}:{own.lineno})"
