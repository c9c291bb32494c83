"""Records of rank failures: ``failures/attempt-K-rank-RRRRR.json``, the rank's log, and the first failure in the main log."""

import errno
import json
import os
import resource
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.distributed as dist

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.line_file import append_lines
from hpc_mp.diagnosis.texts import kind_of
from hpc_mp.layout.placement import Placement, RankPlace
from hpc_mp.rundir import AttemptRecord, RunDirectory
from hpc_mp.rundir.failures import RankFailure, coordinates, read_failures, write_failure
from hpc_mp.rundir.rank_env import RankEnv
from hpc_mp.train.parallel.groups import Tree
from hpc_mp.train.rank.fencing import Fence, RunRemoved
from hpc_mp.train.rank.flight_recorder import recorded
from hpc_mp.train.rank.logs import Log
from hpc_mp.train.rank.waits import Waits

LAST_FILES = 16  # descriptors that a rank reserves for its last words
LAST_WORDS_S = 5.0  # time limit to write them: a file system behind a lost link never answers


@dataclass(frozen=True)
class RankContext:
    """A rank's context in a run. ``attempt``: number of this start of the run, from 1. ``record``: the launcher's record of this
    attempt; None if the launcher does not distinguish attempts. ``host``: all ranks; None until they are connected."""

    who: RankEnv
    run: RunDirectory
    attempt: int
    placement: Placement
    fence: Fence
    record: AttemptRecord | None
    log: Log
    waits: Waits
    host: Tree | None = None

    @property
    def everyone(self) -> Tree:
        """All ranks, which must be connected."""
        assert self.host is not None
        return self.host

    @property
    def place(self) -> RankPlace:
        """Node and coordinates."""
        return self.placement.ranks[self.who.rank]


class NodeLost(Exception):
    """A node gives no sign of life, or its process ended without taking leave. ``nodes``: the nodes to blame. ``silent``: True if
    their heartbeats stopped; otherwise connections broke while their hosts' kernels still answered."""

    def __init__(self, message: str, nodes: tuple[str, ...], silent: bool) -> None:
        super().__init__(message)
        self.facts = {"nodes": nodes, "silent": silent}


class Hung(Exception):
    """A phase of a rank's work did not end in time."""


class Unwritable(Exception):
    """This rank's node cannot write checkpoints, and other nodes can."""


class PeerGone(Exception):
    """Another rank has ended, and its failure is known to all ranks."""


MISUSE = "enforce fail"  # gloo: the ranks disagree about a message
# Kinds by the class of an error or its cause; the first match counts.
ERRORS: tuple[tuple[type[BaseException], str], ...] = (
    (NodeLost, "lost"),
    (Hung, "hang"),
    (Unwritable, "unwritable"),
    (PeerGone, "peer"),
    (RunRemoved, "removed"),
    (MemoryError, "memory"),
    (torch.OutOfMemoryError, "memory"),
    (dist.DistError, "peer"),
)


def failure_kind(error: BaseException) -> str:
    """Return a key of ``rundir.failures.KINDS``: by the class of an error or its cause, else by message, else by origin."""
    if isinstance(error, HpcMpError):
        return "user"
    chain = [e for e in (error, error.__cause__, error.__context__) if e is not None]
    for types, category in ERRORS:
        if any(isinstance(e, types) for e in chain):
            return category
    named = next((kind for e in chain if (kind := kind_of(str(e))) is not None), None)
    if named is None and any(hasattr(e, "waited") for e in chain) and not any(MISUSE in str(e) for e in chain):
        return "peer"  # any error that breaks off a wait
    return named or "error"


def record_failure(context: RankContext, error: BaseException) -> str:
    """Record why this rank ends. Return the kind of failure. A stale rank writes only to its own log."""
    limit_files(0)
    who, run, log = context.who, context.run, context.log
    trace = "".join(traceback.format_exception(error))
    if any(os.strerror(errno.EMFILE) in str(e) for e in (error, error.__cause__, error.__context__) if e is not None):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        error = HpcMpError(f"the limit of open files on {who.node} (ulimit -Hn = {limit})", f"is too small: {error}",
                           "raise it (limits.conf, LimitNOFILE of slurmd), or use fewer ranks")
    kind = failure_kind(error)
    message = str(error) if kind == "user" else f"{type(error).__name__}: {error}"
    log.own.write(trace)
    if not context.fence.holds():
        return kind
    place = context.place
    failure = RankFailure(
        who.rank, who.node, kind, message, time.time(), context.attempt, os.uname().nodename, os.getpid(), coordinates(place),
        trace, standing=context.waits.standing(error=error), **getattr(error, "facts", {}))
    try:
        write_failure(run, failure)
    except OSError as full:
        log.own.write(f"the failure could not be recorded: {full}")
    if kind != "peer" and _first(run, context.attempt):
        append_lines(run.main_log, [f"{time.strftime('%H:%M:%S')} rank {who.rank} on {who.node} (dp {place.dp}, pp {place.pp}, "
                                    f"tp {place.tp}) failed: {message}"])
    log.flush()
    return kind


def cause_known(run: RunDirectory, attempt: int) -> bool:
    """Return True if a rank has recorded its own failure: the consequences that other ranks notice are then no news."""
    return any(failure.kind != "peer" for failure in read_failures(run, attempt))


def die(context: RankContext, error: Exception) -> NoReturn:
    """End this process from any thread, even if other threads wait. It has ``LAST_WORDS_S`` to record the error."""
    def speak() -> None:
        limit_files(0)
        with suppress(OSError):  # the cause is recorded anyway
            context.log.own.dump()
            if isinstance(error, Hung):
                context.run.flight(context.who.rank).write_text(json.dumps(recorded()), encoding="utf-8")
        record_failure(context, error)

    speaker = threading.Thread(target=speak, daemon=True)
    speaker.start()
    speaker.join(LAST_WORDS_S)
    os._exit(1)


def _first(run: RunDirectory, attempt: int) -> bool:
    try:
        os.close(os.open(run.first_failure(attempt), os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        return False
    except OSError:
        pass  # better twice than never
    return True


def limit_files(reserve: int) -> None:
    """Raise this process's limit of open files to its hard limit minus ``reserve``."""
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit - reserve if limit > reserve else limit, limit))
