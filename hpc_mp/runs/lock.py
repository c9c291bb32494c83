"""The lock that lets only one launch have a run, and the process that holds it."""

import fcntl
import os
import platform
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import psutil

from hpc_mp.base.errors import HpcMpError
from hpc_mp.rundir import RunDirectory

TOLERANCE_S = 1.0  # psutil rounds the time at which a process began


@dataclass(frozen=True, slots=True)
class RunHolder:
    """The launcher that holds a run: its host, its process number there, and the unix time at which the process began."""

    host: str
    pid: int
    began: float

    def process(self) -> psutil.Process | None:
        """Return the process; None if it has ended, or runs on another host."""
        with suppress(psutil.Error):
            process = psutil.Process(self.pid)
            if self.host == platform.node() and abs(process.create_time() - self.began) < TOLERANCE_S:
                return process
        return None


@contextmanager
def hold(run: RunDirectory) -> Iterator[int]:
    """Hold the run exclusively, and write down who does. Yield the open lock file, which all emulated ranks inherit: it is held
    while any of them lives. Raises HpcMpError if another launch holds it, or ranks of one still live."""
    lock = os.open(run.lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise HpcMpError(f"run {run.path}", "is still going on, or another launch resumes it",
                             f"wait for its end, or end it with `hpc-mp cancel {run.path}`") from None
        except OSError as error:  # Lustre, for example, may be mounted without locks
            warnings.warn(f"no lock on {run.path} ({error.strerror}): do not resume it twice at once", stacklevel=3)
        os.ftruncate(lock, 0)
        with suppress(psutil.Error):  # /proc may be that of another process namespace, which does not know this process
            os.pwrite(lock, f"{platform.node()} {os.getpid()} {psutil.Process().create_time():.2f}\n".encode(), 0)
        yield lock
    finally:
        os.close(lock)


def held(run: RunDirectory) -> bool:
    """Return True if a launcher or a rank on emulated nodes holds the run."""
    try:
        with open(run.lock, "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def holder(run: RunDirectory) -> RunHolder | None:
    """Return the launcher that holds, or held, the run; None if no launcher of this release did."""
    with suppress(OSError, ValueError):
        host, pid, began = run.lock.read_text(encoding="utf-8").split()
        return RunHolder(host, int(pid), float(began))
    return None
