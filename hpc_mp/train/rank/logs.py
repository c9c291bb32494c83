"""What ranks say: a log per rank or, under Slurm, one per node that srun writes; and a main log of rank 0 and of failures."""

from __future__ import annotations

import faulthandler
import io
import logging
import math
import os
import sys
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from hpc_mp.base.text import loss_number
from hpc_mp.rundir import LineFile, RunDirectory
from hpc_mp.rundir.rank_env import RankEnv
from hpc_mp.rundir.records import StepMetrics

LONGEST = 64 << 20  # bytes of a node's log; beyond it ...
KEPT = 16 << 20  # ... so many of its last ones are put aside and the others dropped
STEP_LINE_S = 10.0  # between two lines about steps


class Standard:
    """Lines on standard output, where srun puts the rank in front and collects them by node."""

    def __init__(self) -> None:
        self.stream: TextIO = sys.stdout

    def write(self, line: str) -> None:
        with suppress(OSError):  # a full disk must not stop training
            print(line, file=self.stream, flush=True)

    def flush(self) -> None:
        pass

    def dump(self) -> None:
        """Where every thread of this process stands."""
        faulthandler.dump_traceback(self.stream)


class Own(LineFile):
    """A file for this rank alone. Lines that a full disk refuses wait in memory (bounded) and are written when they can be."""

    def dump(self) -> None:
        """Where every thread of this process stands."""
        with open(self.path, "ab") as file:
            faulthandler.dump_traceback(file)


class Log:
    """A rank's log. ``collected``: whether the launcher collects what ranks print, as srun does."""

    def __init__(self, run: RunDirectory, who: RankEnv, collected: bool) -> None:
        self.own: Standard | Own = Standard() if collected else Own(run.rank_log(who.rank))
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
        # No level is set where it would change nothing: that makes Python forget what it knows of each of a thousand loggers.
        logging.basicConfig(handlers=[handler], force=True)
        logging.getLogger("transformers").handlers = []
        # Launch has shown this one's warnings.
        logging.getLogger("transformers.configuration_utils").addFilter(lambda record: record.levelno >= logging.ERROR)
        logging.getLogger("transformers").propagate = True


class StepWords:
    """Lines of the log about steps: the first, the last, and between them one now and then.

    Args:
        first, last: steps, from 1.
        seconds: between two lines.
    """

    def __init__(self, log: Log, first: int, last: int, seconds: float = STEP_LINE_S) -> None:
        self._log, self._ends, self._last, self._seconds = log, (first, last), last, seconds
        self._said = -math.inf
        self._unsaid: StepMetrics | None = None

    def __call__(self, metrics: StepMetrics) -> None:
        if metrics.step in self._ends or time.monotonic() - self._said >= self._seconds:
            self._say(metrics)
        else:
            self._unsaid = metrics

    def close(self) -> None:
        """The last step of a training that was stopped has its line too."""
        if self._unsaid is not None:
            self._say(self._unsaid)

    def _say(self, metrics: StepMetrics) -> None:
        self._said, self._unsaid = time.monotonic(), None
        loss = f"loss {loss_number(metrics.loss)}" if math.isfinite(metrics.loss) else "no loss"
        self._log.say(f"step {metrics.step}/{self._last}: {loss}, {metrics.tokens_per_s:,.0f} tokens/s")


def cap(log: Path, longest: int = LONGEST, kept: int = KEPT) -> None:
    """When ``log`` is too long, put its last whole lines aside as ``LOG.1`` and empty it.

    It is emptied in place, for its writer holds it open (for appending); lines written in between are lost, as with
    logrotate's copytruncate. Nothing is done about a file system that refuses.
    """
    with suppress(OSError):
        size = log.stat().st_size
        if size <= longest:
            return
        with open(log, "rb") as file:
            file.seek(size - kept)
            tail = file.read(kept)
        log.with_name(f"{log.name}.1").write_bytes(tail.partition(b"\n")[2])
        os.truncate(log, 0)


class _Lines(io.TextIOBase):
    """A text stream that writes whole lines to a log; descriptors stay those of the original stream."""

    def __init__(self, target: Standard | Own, original: TextIO) -> None:
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
