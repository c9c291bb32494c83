"""How a rank's failure is written down: ``failures/attempt-K-rank-RRRRR.json``, its log, and the first one in the main log."""

from __future__ import annotations

import os
import threading
import time
import traceback
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from hpc_mp.base.errors import HpcMpError
from hpc_mp.layout.placement import Placement, RankPlace
from hpc_mp.rundir import AttemptRecord, LineFile, RunDirectory, read_json, write_json
from hpc_mp.train.rank.fencing import Claim
from hpc_mp.train.rank.logs import Log
from hpc_mp.train.rank.rank_env import Identity

LAST_WORDS = 5.0  # seconds in which a file system must take them: one behind a lost link never does


@dataclass(frozen=True)
class Seat:
    """A rank's seat in a run.

    Attributes:
        attempt: counts the starts of the run, from 1.
        record: what a launcher that tells starts apart wrote down for this one; None without such a launcher.
    """

    who: Identity
    run: RunDirectory
    attempt: int
    placement: Placement
    claim: Claim
    record: AttemptRecord | None
    log: Log

    @property
    def place(self) -> RankPlace:
        """Node and coordinates."""
        return self.placement.ranks[self.who.rank]


class NodeLost(Exception):
    """A node gives no sign of life, or its process has gone without a word.

    Args:
        nodes: the nodes to blame.
        silent: whether nothing was heard; else connections broke, and their hosts' kernels still answered.
        ambiguous: whether the reporting node may be the lost one as well.
    """

    def __init__(self, message: str, nodes: tuple[str, ...], silent: bool, ambiguous: bool = False) -> None:
        super().__init__(message)
        self.facts = {"nodes": list(nodes), "silent": silent, "ambiguous": ambiguous}


class Hung(Exception):
    """No step was finished in time."""


# What an error or its cause is, else what it says; of several the first one holds.
KINDS: tuple[tuple[type[BaseException], str], ...] = (
    (NodeLost, "lost"),
    (Hung, "hang"),
    (MemoryError, "memory"),
    (torch.OutOfMemoryError, "memory"),
    (dist.DistError, "peer"),
)
SIGNS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("can't allocate memory", "not enough memory", "CUDA out of memory"), "memory"),
    (("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting",
      "NCCL communicator was aborted", "remote process exited", "Socket closed", "failed to recv, got 0 bytes",
      "Connection refused", "Read error"), "peer"),
)


def failure_kind(error: BaseException) -> str:
    """``user``: the input is wrong; ``lost``, ``hang``, ``memory``; ``peer``: another rank went away; else ``error``."""
    if isinstance(error, HpcMpError):
        return "user"
    chain = [e for e in (error, error.__cause__, error.__context__) if e is not None]
    for types, kind in KINDS:
        if any(isinstance(e, types) for e in chain):
            return kind
    for signs, kind in SIGNS:
        if any(sign in str(e) for sign in signs for e in chain):
            return kind
    return "error"


def record_failure(seat: Seat, error: BaseException) -> str:
    """Write down why this rank ends; returns the kind. A stale rank writes to its own log alone."""
    who, run, log = seat.who, seat.run, seat.log
    kind = failure_kind(error)
    message = str(error) if kind == "user" else f"{type(error).__name__}: {error}"
    trace = "".join(traceback.format_exception(error))
    log.own.write(trace)
    if not seat.claim.holds():
        return kind
    place = seat.place
    coordinates = {axis: getattr(place, axis) for axis in ("dp", "pp", "cp", "tp")}
    record: dict[str, Any] = {
        "attempt": seat.attempt, "rank": who.rank, "node": who.node, "host": os.uname().nodename, "pid": os.getpid(),
        "time": time.time(), "kind": kind, "message": message, "traceback": trace, **coordinates, **getattr(error, "facts", {}),
    }
    try:
        write_json(run.failure(seat.attempt, who.rank), record)
    except OSError as full:
        log.own.write(f"the failure could not be recorded: {full}")
    if kind != "peer" and _first(run, seat.attempt):
        main = LineFile(run.main_log)
        main.write(f"{time.strftime('%H:%M:%S')} rank {who.rank} on {who.node} (dp {place.dp}, pp {place.pp}, tp {place.tp}) "
                   f"failed: {message}")
        main.close()
    log.flush()
    return kind


def cause_known(run: RunDirectory, attempt: int) -> bool:
    """Whether a rank has written down a failure of its own: what others notice of it is then no news."""
    for path in run.failure.found(attempt):
        try:
            if read_json(path)["kind"] != "peer":
                return True
        except (OSError, ValueError):
            continue  # it is being written
    return False


def die(seat: Seat, error: Exception) -> NoReturn:
    """End this process from any of its threads, whatever the others wait for, with what can be said in ``LAST_WORDS``."""
    def speak() -> None:
        seat.log.own.dump()
        record_failure(seat, error)

    words = threading.Thread(target=speak, daemon=True)
    words.start()
    words.join(LAST_WORDS)
    os._exit(1)


def _first(run: RunDirectory, attempt: int) -> bool:
    try:
        os.close(os.open(run.first_failure(attempt), os.O_CREAT | os.O_EXCL, 0o600))
    except OSError:
        return False
    return True
