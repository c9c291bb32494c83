"""What this rank waits for, noted before it blocks: its part of who waits for whom (``hpc_mp.rundir.standings``).

All messages pass through the methods of torch's process groups and ``Work.wait``, whoever sends them: the engine,
the saving of a checkpoint, barriers. While ``listening``, these methods count a message before they hand it on, and note the one
that is waited in; that costs some microseconds of memory accesses and no file. (NCCL's flight recorder counts too, but neither
exists for gloo nor tells what the host waits for.) A thread writes the note down once the rank has stood still for a while.
"""

from __future__ import annotations

import functools
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

# torch's names of what all ranks of a group take part in, and of a message between two of them.
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
DIRECTED: Mapping[str, tuple[str, str]] = {"send": ("sent", "received"), "recv": ("received", "sent")}  # own and the other's part

Result = TypeVar("Result")
POLL_S = 0.5  # between two polls of whether this rank moves
PATIENCE_S = 1.0  # for which it stands still before that is written down ...
PATIENCE_STEPS = 2.0  # ... or so many times as long as its last step took, if that is more
PERIOD_S = 5.0  # after which a rank that goes on standing writes it anew


class Waits:
    """Counts the messages of this rank and notes the one that it waits in.

    Attributes:
        wait: the message; None while the rank waits for nobody. ``since``: unix seconds of the last movement.
        passed: how many messages it has come to, by channel.
        moves: grows with every message and microbatch.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.wait: Wait | None = None
        self.passed: Counter[str] = Counter()
        self.moves = 0
        self.since = time.time()
        self.step, self.microbatch = 0, -1
        self.pace = 0.0
        self._began = 0.0
        self._groups: WeakKeyDictionary[Any, tuple[str, tuple[int, ...], tuple[int, ...]]] = WeakKeyDictionary()
        self._messages: WeakKeyDictionary[Any, Wait] = WeakKeyDictionary()

    def at(self, step: int, microbatch: int = -1) -> None:
        """The rank has come to a step (from 1) or to one of its microbatches (from 0)."""
        if step != self.step:
            now = time.monotonic()
            self.pace = now - self._began if self.step else 0.0
            self._began = now
        self.step, self.microbatch = step, microbatch
        self.moves += 1

    def together(self, what: str, ranks: Sequence[int], action: Callable[[], Result]) -> Result:
        """Do something to which all ``ranks`` must come, other than by a message of a process group."""
        self.passed[what] += 1
        wait = Wait(what, tuple(rank for rank in ranks if rank != self.rank), what, self.passed[what])
        found: Result = self._in(wait, action)
        return found

    def behind(self, what: str, rank: int, action: Callable[[], Result]) -> Result:
        """Wait for what ``rank`` does once and the others wait for, ``rank`` itself when it has done it."""
        found: Result = self._in(None if rank == self.rank else Wait(what, (rank,), what, 1), action)
        self.passed[what] += 1
        return found

    def standing(self, period: float = 0.0, error: BaseException | None = None) -> Standing:
        """Where the rank stands now, or where it stood when ``error`` was raised. ``period``: as in ``Standing``."""
        raised = traceback.extract_tb(error.__traceback__) if error is not None else None
        broken_off: Wait | None = getattr(error, "waited", None)
        return Standing(self.rank, time.time(), self.since, period, self.step, self.microbatch if self.microbatch >= 0 else None,
                        place(raised or stack()), broken_off or self.wait, dict(self.passed))

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hear all messages of this process. An error that comes out of a wait carries it as ``waited``."""
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
        before, self.wait = self.wait, wait  # a communicator may be made first, for which it waits
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
        """What the action gives, in which this rank waits."""
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
        """Its channel, and its ranks with and without this one."""
        found = self._groups.get(group)
        if found is None:
            ranks = tuple(dist.get_process_group_ranks(group))
            found = f"group {group.group_name}", ranks, tuple(rank for rank in ranks if rank != self.rank)
            self._groups[group] = found
        return found


def _method(noted: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """A method that hands ``original`` and all that it is called with to ``noted``."""
    @functools.wraps(original)
    def method(*args: Any, **named: Any) -> Any:
        return noted(original, *args, **named)

    return method


@contextmanager
def noted(waits: Waits, run: RunDirectory, attempt: int, step_timeout: float) -> Iterator[None]:
    """While the block runs, a thread writes down where the rank stands when it does not move, and takes it back when it does."""
    done = threading.Event()
    thread = threading.Thread(target=_note, args=(waits, run, attempt, min(PERIOD_S, max(POLL_S, step_timeout / 20)), done),
                              name="waits", daemon=True)
    thread.start()
    try:
        yield
    finally:  # a rank that ends says in its last words where it stood
        done.set()
        thread.join()
        with suppress(OSError):
            run.standing(attempt, waits.rank).unlink(missing_ok=True)


def _note(waits: Waits, run: RunDirectory, attempt: int, period: float, done: threading.Event) -> None:
    moves, moved, written = -1, time.monotonic(), 0.0
    while not done.wait(POLL_S):
        now = time.monotonic()
        if waits.moves != moves:
            moves, moved = waits.moves, now
            if written:
                with suppress(OSError):
                    run.standing(attempt, waits.rank).unlink(missing_ok=True)
                written = 0.0
        elif now - moved >= max(PATIENCE_S, PATIENCE_STEPS * waits.pace) and now - written >= period:
            with suppress(OSError):  # a disk that is full now may not be so later
                write_standing(run, attempt, waits.standing(period))
                written = now


def stack() -> traceback.StackSummary:
    """Of the main thread, from any. Source lines are read when somebody prints them: where a rank stands can be told without."""
    frames = traceback.walk_stack(sys._current_frames()[threading.main_thread().ident or 0])
    innermost_first = traceback.StackSummary.extract(frames, lookup_lines=False)
    return traceback.StackSummary.from_list(innermost_first[::-1])


def place(frames: Sequence[traceback.FrameSummary]) -> str:
    """The innermost function of ours, with file and line."""
    own = next((entry for entry in reversed(frames) if "hpc_mp" in entry.filename and entry.filename != __file__), frames[-1])
    return f"{own.name} ({Path(own.filename).name}:{own.lineno})"
