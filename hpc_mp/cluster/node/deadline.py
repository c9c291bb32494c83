"""Concurrent tasks with a deadline, each in a child process that can be abandoned if it hangs.

A process that waits for a dead file server or a dead GPU cannot be killed, and a thread in that state would keep us from ever
ending. A child is abandoned instead, with none of our descriptors. Abandoned children are recorded in a file, and a task that
still hangs is not tried again: a reading every minute leaves one such child, not a thousand.
"""

import contextlib
import json
import os
import pickle
import selectors
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from hpc_mp.cluster.node.source import Unavailable

T = TypeVar("T")
_GRACE_S, _POLL_S = 1.0, 0.01  # killed processes are gone within this grace period, even on a busy node
_START_TIME = 19  # field of /proc/PID/stat, counted after the name


def in_time(tasks: Mapping[str, Callable[[], T]], seconds: float, ledger: Path | None = None) -> dict[str, T | Unavailable]:
    """Return each task's result, or Unavailable with the reason: it raised, or did not end within ``seconds`` for all tasks.
    ``tasks``: name to function; its result must be picklable. ``ledger``: the file that records abandoned children; None records
    none."""
    before = _read(ledger)
    hung = {name: child for name, child in before.items() if name in tasks and _is_there(*child)}
    stuck = {name: Unavailable(f"an earlier reading still hangs in process {pid}") for name, (pid, _) in hung.items()}
    results = stuck | _collect({name: task for name, task in tasks.items() if name not in hung}, seconds, hung)
    abandoned = {name: child for name, child in before.items() if name not in tasks} | hung
    if ledger is not None and abandoned != before:
        _write(ledger, abandoned)
    return {name: results[name] for name in tasks}


def _collect(tasks: Mapping[str, Callable[[], T]], seconds: float,
             hung: dict[str, tuple[int, str]]) -> dict[str, T | Unavailable]:
    """Start all tasks and collect results until the deadline. Children that are then abandoned are added to ``hung``."""
    end = time.monotonic() + seconds
    results: dict[str, T | Unavailable] = {}
    running: dict[str, int] = {}
    outputs: dict[str, bytes] = {}
    with selectors.DefaultSelector() as ready:
        try:
            for name, task in tasks.items():
                running[name], pipe = _start(task)
                outputs[name] = b""
                ready.register(pipe, selectors.EVENT_READ, name)
            while running and (remaining := end - time.monotonic()) > 0:
                for key, _ in ready.select(remaining):
                    name, data = key.data, os.read(key.fd, 1 << 16)
                    outputs[name] += data
                    if not data:
                        ready.unregister(key.fd)
                        os.close(key.fd)
                        os.waitpid(running.pop(name), 0)
                        answer = outputs[name]
                        results[name] = pickle.loads(answer) if answer else Unavailable("it ended without an answer")
        finally:
            for key in list(ready.get_map().values()):
                os.close(key.fd)
            for name, pid in _kill(running).items():
                hung[name] = (pid, _born(pid))
    return results | {name: Unavailable(f"no answer within {seconds:g} s") for name in running}


def _start(task: Callable[[], object]) -> tuple[int, int]:
    """Return a child process and the pipe for its result. The child leads a session, to be killed with all it started."""
    out, into = os.pipe()
    pid = os.fork()
    if pid:
        os.close(into)
        return pid, out
    try:
        os.setsid()
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(nowhere, stream)
        with open(into, "wb") as pipe:
            pipe.write(pickle.dumps(_result(task)))
    finally:
        os._exit(0)


def _result(task: Callable[[], object]) -> object:
    try:
        return task()
    except Unavailable as error:
        return error
    except Exception as error:  # the child has no screen to print it on
        return Unavailable(f"{type(error).__name__}: {error}")


def _kill(running: Mapping[str, int]) -> dict[str, int]:
    """Kill these children. Return the children that remain, because the kernel holds them or something they started."""
    for pid in running.values():
        for kill in (os.killpg, os.kill):  # a child that does not lead its session yet has no group of this number
            with contextlib.suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)
    end = time.monotonic() + _GRACE_S
    while (hung := {name: pid for name, pid in running.items() if _stays(pid)}) and time.monotonic() < end:
        time.sleep(_POLL_S)
    return hung


def _stays(pid: int) -> bool:
    """Return True if this child, or a program that it started, still exists. If the child has ended, it is reaped."""
    with contextlib.suppress(ChildProcessError):
        if os.waitpid(pid, os.WNOHANG) == (0, 0):
            return True
    return _is_there(pid, _born(pid))


def _is_there(session: int, born: str) -> bool:
    """Return True if a child, or a program that it started, still exists. A later process of the same number does not count."""
    try:
        os.killpg(session, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return False  # another user's process: the number has been reused
    return _born(session) in ("", born)


def _born(pid: int) -> str:
    """Return the start time of a process in the kernel's ticks since boot; empty if it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[_START_TIME]
    return ""


def _read(ledger: Path | None) -> dict[str, tuple[int, str]]:
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):  # no such file, or not our format
        return {name: (int(pid), str(born)) for name, (pid, born) in json.loads(ledger.read_bytes()).items()} if ledger else {}
    return {}


def _write(ledger: Path, children: Mapping[str, tuple[int, str]]) -> None:
    with contextlib.suppress(OSError):  # a full disk must not cost the findings
        new = ledger.with_suffix(".new")
        new.write_text(json.dumps(children), encoding="utf-8")
        new.replace(ledger)
