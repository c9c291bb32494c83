"""What ranks say: one log per rank, and a main log with rank 0's lines, warnings once, and the first failure."""

from __future__ import annotations

import io
import logging
import os
import sys
import time
import traceback
import warnings
from typing import TextIO

import torch.distributed as dist

from hpc_mp.engine.identity import Identity
from hpc_mp.errors import HpcMpError
from hpc_mp.rundir import LineFile, RunDirectory, write_json


class Log:
    """A rank's log. Lines that a full disk refuses wait in memory (bounded) and are written when they can be."""

    def __init__(self, run: RunDirectory, who: Identity) -> None:
        self.own = LineFile(run.rank_log(who.rank))
        self.main = LineFile(run.main_log) if who.rank == 0 else None
        self.said: set[str] = set()

    def say(self, text: str) -> None:
        """A line for the rank's log, and for the main log on rank 0."""
        line = f"{time.strftime('%H:%M:%S')} {text}"
        self.own.write(line)
        if self.main is not None:
            self.main.write(line)

    def warn(self, text: str) -> None:
        """A warning; repeated ones are left out."""
        if text not in self.said:
            self.said.add(text)
            self.say(f"warning: {text}")

    def flush(self) -> None:
        self.own.flush()
        if self.main is not None:
            self.main.flush()

    def capture(self) -> None:
        """Send prints, Python warnings and library logging here."""
        sys.stdout = _Lines(self.own, sys.stdout)
        sys.stderr = _Lines(self.own, sys.stderr)
        warnings.showwarning = lambda message, category, *rest, **more: self.warn(f"{category.__name__}: {message}")
        handler = _Handler(self)
        logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
        logging.getLogger("transformers").handlers = []
        logging.getLogger("transformers.configuration_utils").setLevel(logging.ERROR)  # launch has shown its warnings
        logging.getLogger("transformers").propagate = True


class _Lines(io.TextIOBase):
    """A text stream that writes whole lines to a LineFile; descriptors stay those of the original stream."""

    def __init__(self, target: LineFile, original: TextIO) -> None:
        self.target, self.original, self.rest = target, original, ""

    def write(self, text: str) -> int:
        *lines, self.rest = (self.rest + text).split("\n")
        for line in lines:
            self.target.write(line)
        return len(text)

    def fileno(self) -> int:
        return self.original.fileno()

    def writable(self) -> bool:
        return True


class _Handler(logging.Handler):
    def __init__(self, log: Log) -> None:
        super().__init__()
        self.log = log

    def emit(self, record: logging.LogRecord) -> None:
        self.log.warn(f"{record.name}: {record.getMessage()}")


PEER_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting",
             "NCCL communicator was aborted", "remote process exited", "Socket closed",
             "failed to recv, got 0 bytes", "Connection refused", "Read error")


def failure_kind(error: BaseException) -> str:
    """``user``: the input is wrong; ``peer``: another rank went away; ``error``: anything else."""
    if isinstance(error, HpcMpError):
        return "user"
    chain = [error, error.__cause__, error.__context__]
    if any(isinstance(e, dist.DistError) or any(sign in str(e) for sign in PEER_LOST) for e in chain if e is not None):
        return "peer"
    return "error"


def record_failure(run: RunDirectory, attempt: int, who: Identity, log: Log, error: BaseException) -> str:
    """Write ``failures/…``, the traceback to the rank's log and an attempt's first failure to the main log; returns its kind."""
    kind = failure_kind(error)
    message = str(error) if kind == "user" else f"{type(error).__name__}: {error}"
    trace = "".join(traceback.format_exception(error))
    log.own.write(trace)
    try:
        write_json(run.failure(attempt, who.rank), {
            "attempt": attempt, "rank": who.rank, "node": who.node, "host": os.uname().nodename, "pid": os.getpid(),
            "time": time.time(), "kind": kind, "message": message, "traceback": trace,
        })
    except OSError as full:
        log.own.write(f"the failure could not be recorded: {full}")
    if kind != "peer" and _first(run, attempt):
        main = LineFile(run.main_log)
        main.write(f"{time.strftime('%H:%M:%S')} rank {who.rank} on {who.node} failed: {message}")
        main.close()
    log.flush()
    return kind


def _first(run: RunDirectory, attempt: int) -> bool:
    try:
        os.close(os.open(run.path / "failures" / f"attempt-{attempt}-first", os.O_CREAT | os.O_EXCL, 0o600))
    except OSError:
        return False
    return True
