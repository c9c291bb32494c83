"""Clusters that outlive the command that made them: a background process, the keeper, holds a cluster until it is stopped.

A cluster called NAME is the directory /var/lib/hpc-mp-NAME. It is up while a process holds a lock on that directory, which the
keeper holds until it ends. When the keeper ends, for any reason, the cluster ends too. When the cluster ends, the keeper removes
its remains. If both are killed at once, for example by a power cut, the next `start` clears the directory.
"""

import fcntl
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from hpc_mp_lab.cluster import LabCluster, LabError, first_process, wait_until
from hpc_mp_lab.lab import Lab

STATE = Path("/var/lib")
PREFIX = "hpc-mp-"
ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def directory_of(name: str) -> Path:
    return STATE / f"{PREFIX}{name}"


def names() -> list[str]:
    """Return the names of all clusters that are up."""
    return sorted(path.name.removeprefix(PREFIX) for path in STATE.glob(f"{PREFIX}*") if _held(path))


def start(lab: Lab, say_progress: Callable[[str], None]) -> bool:
    """Start a cluster that stays up after this process ends, and return when all its nodes are idle; return False if there is a
    cluster in that directory already. Nothing is left if it cannot start, or if this process is interrupted or killed before
    that. Raises LabError with the daemons' logs if the cluster did not start."""
    lock = _claim(lab.directory)
    if lock is None:
        return False
    reader, writer = os.pipe()
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)  # until both processes can handle signals
    keeper = os.fork()
    if keeper == 0:
        os.close(reader)  # else the keeper would not get a broken pipe
        _keep(lab, writer)
    os.close(writer)
    os.close(lock)  # the keeper has it too
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS)
        with open(reader, encoding="utf-8") as messages:
            _listen(messages, say_progress)
    except BaseException:
        with suppress(ProcessLookupError):
            os.kill(keeper, signal.SIGTERM)
        os.waitpid(keeper, 0)
        raise
    return True


def stop(directory: Path) -> None:
    """Stop a cluster and wait until nothing is left of it. Raises LabError on timeout."""
    try:
        lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)  # locked until the keeper ends, even after its removal
    except FileNotFoundError:
        return
    traces = [directory]
    with suppress(OSError, ValueError):  # a cluster that is just starting has no number yet
        traces.append(Path("/sys/class/net", Lab.interface(LabCluster(directory).number)))
    try:
        first = first_process(directory)
        if first is not None:
            os.kill(first, signal.SIGKILL)
        wait_until(lambda: not _locked(lock) and first_process(directory) is None, f"{directory} released by all its processes")
    finally:
        os.close(lock)
    shutil.rmtree(directory, ignore_errors=True)  # the keeper has done it, unless it was killed too
    wait_until(lambda: not any(trace.exists() for trace in traces), f"gone: {', '.join(map(str, traces))}")


def _held(directory: Path) -> bool:
    try:
        lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return False
    try:
        return _locked(lock) or first_process(directory) is not None  # its keeper was killed, and it is about to end
    finally:
        os.close(lock)


def _locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(lock, fcntl.LOCK_UN)
    return False


def _claim(directory: Path) -> int | None:
    """Lock and empty the directory. Return the lock's descriptor; None if the cluster is up."""
    while True:
        directory.mkdir(exist_ok=True)
        lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            claimed = first_process(directory) is None
        except BlockingIOError:
            claimed = False
        if not claimed:
            os.close(lock)
            return None
        with suppress(FileNotFoundError):  # a cluster that was just ending may have removed it meanwhile
            if os.stat(directory).st_ino == os.fstat(lock).st_ino:
                for leftover in directory.iterdir():
                    shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
                directory.chmod(0o755)
                return lock
        os.close(lock)


def _listen(lines: Iterable[str], say_progress: Callable[[str], None]) -> None:
    """Read the keeper's messages, a JSON object per line, until the cluster is up. Raises LabError if it fails."""
    for line in lines:
        message = json.loads(line)
        if "up" in message:
            return
        if "failed" in message:
            raise LabError(message["failed"])
        say_progress(message["say_progress"])
    raise LabError("the process that was to keep the cluster was killed")


def _keep(lab: Lab, writer: int) -> NoReturn:
    """Run the keeper: in a separate session, without a terminal and without the parent's standard streams."""
    try:
        os.setsid()
        os.chdir("/")
        os.umask(0o022)
        for key in set(os.environ) - {"PATH"}:
            del os.environ[key]
        devnull = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(devnull, descriptor)
        signal.signal(signal.SIGTERM, _end)
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, _pass)  # not SIG_IGN: all programs of the cluster would inherit that
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS)
        try:
            lab.up(lambda what: _say(writer, say_progress=what))
            _say(writer, up=True)
            os.close(writer)
            lab.process.wait()
        except Exception as error:  # also a broken pipe: the process that waited for this cluster has ended
            with suppress(OSError):
                _say(writer, failed="\n".join([str(error), *getattr(error, "__notes__", ())]))
        finally:
            signal.signal(signal.SIGTERM, _pass)
            lab.down()
            shutil.rmtree(lab.directory, ignore_errors=True)
    finally:
        os._exit(0)


def _say(writer: int, **message: object) -> None:
    os.write(writer, json.dumps(message).encode() + b"\n")


def _end(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit


def _pass(number: int, frame: FrameType | None) -> None:
    pass
