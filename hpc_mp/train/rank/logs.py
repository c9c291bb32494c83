"""Logs of the ranks: one per rank or, under Slurm, one per node written by srun; and a main log of rank 0 and of failures."""

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

from hpc_mp.base.text import loss_number, speed
from hpc_mp.rundir import LineFile, RunDirectory
from hpc_mp.rundir.rank_env import RankEnv
from hpc_mp.rundir.records import StepMetrics

LONGEST = 64 << 20  # bytes of a node's log; above this limit ...
KEPT = 16 << 20  # ... that many of its last bytes are put aside and the others dropped
STEP_LINE_S = 10.0  # between two lines about steps


class Standard:
    """Lines on standard output. srun prefixes them with the rank and collects them by node."""

    def __init__(self) -> None:
        self.stream: TextIO = sys.stdout

    def write(self, line: str) -> None:
        with suppress(OSError):  # a full disk must not stop training
            print(line, file=self.stream, flush=True)

    def flush(self) -> None:
        pass

    def dump(self) -> None:
        """Write the stack of every thread of this process."""
        faulthandler.dump_traceback(self.stream)


class Own(LineFile):
    """A file only for this rank. Lines that a full disk refuses wait in memory (bounded) and are written later."""

    def dump(self) -> None:
        """Write the stack of every thread of this process."""
        with open(self.path, "ab") as file:
            faulthandler.dump_traceback(file)


class Log:
    """A rank's log. ``collected``: True if the launcher collects the ranks' output, as srun does."""

    def __init__(self, run: RunDirectory, who: RankEnv, collected: bool) -> None:
        self.own: Standard | Own = Standard() if collected else Own(run.rank_log(who.rank))
        self.main = LineFile(run.main_log) if who.rank == 0 else None
        self.said: set[str] = set()

    def say(self, text: str) -> None:
        """Write a line to the rank's log and, on rank 0, to the main log."""
        line = f"{time.strftime('%H:%M:%S')} {text}"
        self.own.write(line)
        if self.main is not None:
            self.main.write(line)

    def warn(self, text: str) -> None:
        """Write a warning, unless it was written before."""
        if text not in self.said:
            self.said.add(text)
            self.say(f"warning: {text}")

    def flush(self) -> None:
        self.own.flush()
        if self.main is not None:
            self.main.flush()

    def capture(self) -> None:
        """Redirect prints, Python warnings and library logging to this log."""
        sys.stdout = _Lines(self.own, sys.stdout)
        sys.stderr = _Lines(self.own, sys.stderr)
        warnings.showwarning = lambda message, category, *rest, **more: self.warn(f"{category.__name__}: {message}")
        handler = _Handler(self)
        # No level is set if it would change nothing: setting it clears the caches of about a thousand loggers.
        logging.basicConfig(handlers=[handler], force=True)


def capture_transformers() -> None:
    """Pass transformers' messages on to whoever has captured logging. Its import has given it a handler of its own."""
    logging.getLogger("transformers").handlers = []
    # Launch has already shown the warnings of this logger.
    logging.getLogger("transformers.configuration_utils").addFilter(lambda record: record.levelno >= logging.ERROR)
    logging.getLogger("transformers").propagate = True


class StepWords:
    """Log lines about steps: the first, the last, and some between them. ``first``, ``last``: steps, from 1. ``seconds``: between
    two lines."""

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
        """Write the line of the last step of a training that was stopped."""
        if self._unsaid is not None:
            self._say(self._unsaid)

    def _say(self, metrics: StepMetrics) -> None:
        self._said, self._unsaid = time.monotonic(), None
        loss = f"loss {loss_number(metrics.loss)}" if math.isfinite(metrics.loss) else "no loss"
        self._log.say(f"step {metrics.step}/{self._last}: {loss}, {speed(metrics.tokens_per_s, metrics.mfu)}")


def cap(log: Path, longest: int = LONGEST, remainder: int = KEPT) -> None:
    """If ``log`` is too long, put its last whole lines aside as ``LOG.1`` and empty it. It is emptied in place, because its
    writer holds it open (for appending). Lines written in between are lost, as with logrotate's copytruncate. Errors of the file
    system are ignored."""
    with suppress(OSError):
        size = log.stat().st_size
        if size <= longest:
            return
        with open(log, "rb") as file:
            file.seek(size - remainder)
            tail = file.read(remainder)
        log.with_name(f"{log.name}.1").write_bytes(tail.partition(b"\n")[2])
        os.truncate(log, 0)


class _Lines(io.TextIOBase):
    """A text stream that writes whole lines to a log. Its descriptor is the original stream's."""

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
