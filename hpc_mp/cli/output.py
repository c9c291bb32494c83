"""Standard output and error that outlive their readers: no run may end because a pager or a terminal has gone."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO

GONE = (errno.EPIPE, errno.EIO)  # nobody reads the pipe any more; the terminal was closed


class Lasting(io.FileIO):
    """An open descriptor that takes whatever is written; ``lost`` is the first reason why something was dropped."""

    lost: OSError | None = None

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.lost = self.lost or error
            return memoryview(data).nbytes

    @property
    def incomplete(self) -> str | None:
        """Why somebody who still reads has not got everything (a full disk, for one); None when all is well."""
        return self.lost.strerror if self.lost is not None and self.lost.errno not in GONE else None


@contextmanager
def lasting_output() -> Iterator[Lasting]:
    """While entered, standard output (whose descriptor is given) and standard error take whatever is written."""
    out, error = (_descriptor(stream) for stream in (sys.stdout, sys.stderr))
    with redirect_stdout(_text(out, sys.stdout)), redirect_stderr(_text(error, sys.stderr)):
        yield out


def _descriptor(stream: TextIO | None) -> Lasting:
    """Of ``stream``; of /dev/null for one that was closed before we began (``>&-``), which so gets its number."""
    return Lasting(stream.fileno() if stream else os.open(os.devnull, os.O_WRONLY), "w", closefd=False)


def _text(raw: Lasting, like: TextIO | None) -> io.TextIOWrapper:
    """Text as ``like`` encodes it; what its encoding lacks is written as a question mark."""
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding=like.encoding if like else "utf-8", errors="replace",
                            line_buffering=True)
