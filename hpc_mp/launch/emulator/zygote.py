"""The process that imports once and forks every emulated rank.

Importing torch and transformers takes seconds, a fork milliseconds. Before the forks only imports happen here: threads of
OpenMP, rayon and CUDA do not survive a fork.

Run as ``python -m hpc_mp.launch.emulator.zygote MODULE …`` with one end of a ``Pipe`` as standard input. It sends

    {"event": "broken", "why"}                            a module could not be imported
    {"event": "answer", "value"}                          the result of a requested call
    {"event": "refused", "value", "rule", "remedy"}       the HpcMpError that the call raised
    {"event": "failed", "why"}                            the call failed otherwise
    {"event": "exit", "rank", "code", "time", "ours"}     code -9: killed by signal 9; ours: by a signal sent from here

First, it may receive requests to call functions, ``{"call", "arguments"}``, so that the launcher need not import the ranks'
modules. It then receives ``{"entry", "job_file", "ranks": [{"log", "environment"}, …], "orderly", "patient", "stop"}`` (see
``Emulator.start``), and behind it the lock on the run and, if it ``listens``, rank 0's listening socket. Later it receives
``{"command": "stop"}`` (that signal to every rank), ``{"command": "abort"}`` (SIGABRT) or ``{"command": "kill"}``. If the
channel closes, the launcher is dead and every rank is killed; if this process dies, the kernel kills them.
"""

import gc
import importlib
import math
import os
import pkgutil
import selectors
import signal
import socket
import sys
import time
import traceback
import warnings
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path
from typing import Any

from hpc_mp.base.child import die_with, redirect
from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.exit_codes import ending

GRACE_S = 2.0  # after an abnormal exit, for the others to end by themselves: their exits are echoes
LAG_S = 60.0  # after an orderly exit, until the others count as hanging, as with srun's --wait=60
ENDING = (signal.SIGTERM, signal.SIGKILL)  # signals for the others then, a second apart


def main(modules: Sequence[str]) -> int:
    channel = Connection(0)
    gc.disable()  # objects made by imports stay: collecting garbage among them takes a fifth of their time
    try:
        for module in modules:
            importlib.import_module(module)
    except Exception as error:
        if os.environ.get("HPC_MP_DEBUG") == "1":
            traceback.print_exc()
        channel.send({"event": "broken", "why": f"{type(error).__name__}: {error}"})
        return 1
    # The only threads are those of an idle OpenBLAS pool, which is recreated in a child.
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    try:
        while "call" in (order := channel.recv()):
            answer(channel, order)
        _ = recv_handle(channel)  # the lock: it stays open here and in every rank as long as one lives
        listener = recv_handle(channel) if order["listens"] else None
    except (EOFError, OSError):
        return 0  # the launcher refused the job, or gave up
    gc.freeze()  # else a collection in a rank would touch, and so copy, all shared memory: 90 MB per rank
    gc.enable()
    ranks = Ranks(channel, [fork_rank(rank, order, listener) for rank in range(len(order["ranks"]))], order)
    if listener is not None:
        os.close(listener)  # rank 0 has it
    ranks.watch()
    return 0


def answer(channel: Connection, question: dict[str, Any]) -> None:
    """Call a function in a separate process, so that it leaves no state in the process that forks the ranks."""
    zygote = os.getpid()
    pid = os.fork()
    if pid:
        _, status = os.waitpid(pid, 0)
        if status:
            channel.send({"event": "failed", "why": f"{question['call']} {ending(os.waitstatus_to_exitcode(status))}"})
        return
    code = 1
    try:
        die_with(zygote)
        try:
            reply = {"event": "answer", "value": pkgutil.resolve_name(question["call"])(*question["arguments"])}
        except HpcMpError as error:
            reply = {"event": "refused", "value": error.value, "rule": error.rule, "remedy": error.remedy}
        except Exception as error:
            reply = {"event": "failed", "why": f"{question['call']}: {type(error).__name__}: {error}"}
        channel.send(reply)
        code = 0
    finally:
        os._exit(code)


def show_as(words: str, path: str) -> None:
    """Make ``ps`` show this process with these words and the end of a path, in place of its command line."""
    with suppress(OSError, ValueError), open("/proc/self/mem", "r+b", buffering=0) as memory:
        begin, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])  # arg_start, arg_end
        head, room = words.encode(), end - begin - 1 - len(words.encode())
        memory.seek(begin)
        memory.write((head + path.encode()[-room:]).ljust(end - begin, b"\0") if room > 0 else b"")


def fork_rank(rank: int, order: dict[str, Any], listener: int | None) -> int:
    """Fork a process that runs ``rank`` and return its pid."""
    zygote = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        die_with(zygote)
        task = order["ranks"][rank]
        redirect(Path(task["log"]))
        os.environ.update(task["environment"])
        show_as(f"hpc-mp rank {rank} of ", str(Path(order["job_file"]).parent))
        if listener is not None and rank == 0:
            os.environ["HPC_MP_LISTEN_FD"] = str(listener)
        elif listener is not None:
            os.close(listener)
        code = pkgutil.resolve_name(order["entry"])(Path(order["job_file"]))
        sys.stdout.flush()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)  # never back into the zygote's own loop


class Ranks:
    """The living ranks: this reports their ends, forwards commands, and ends the others after an abnormal exit."""

    def __init__(self, channel: Connection, pids: Sequence[int], order: dict[str, Any]) -> None:
        self.channel, self.orderly = channel, order["orderly"]
        self.lag = math.inf if order["patient"] else LAG_S
        self.commands = {"stop": signal.Signals[order["stop"]], "abort": signal.SIGABRT, "kill": signal.SIGKILL}
        self.alive = {pid: rank for rank, pid in enumerate(pids)}
        self.sent: set[int] = set()
        self.ending = deque(ENDING)
        self.due = math.inf  # time of the next signal of the ending
        self.selector = selectors.DefaultSelector()
        self.bell, self.ringer = socket.socketpair()

    def watch(self) -> None:
        """Return when no rank lives any more."""
        self.ringer.setblocking(False)
        signal.set_wakeup_fd(self.ringer.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # only to wake the selector
        self._reap()  # ranks that ended before the bell was installed
        self.selector.register(self.bell, selectors.EVENT_READ, self._answer)
        self.selector.register(self.channel, selectors.EVENT_READ, self._listen)
        while self.alive:
            timeout = None if self.due == math.inf else max(0.0, self.due - time.monotonic())
            for key, _ in self.selector.select(timeout):
                key.data()
            if time.monotonic() >= self.due:
                self._signal(self.ending.popleft())
                self.due = time.monotonic() + 1.0 if self.ending else math.inf

    def _answer(self) -> None:
        self.bell.recv(4096)
        self._reap()

    def _reap(self) -> None:
        while self.alive:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            self._say(event="exit", rank=self.alive.pop(pid), code=code, time=time.time(), ours=-code in self.sent)
            if self.ending:
                self.due = min(self.due, time.monotonic() + (self.lag if code in self.orderly else GRACE_S))

    def _listen(self) -> None:
        try:
            self._signal(self.commands[self.channel.recv()["command"]])
        except (EOFError, OSError):
            self.selector.unregister(self.channel)
            self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        self.sent.add(number)
        for pid in self.alive:
            os.kill(pid, number)  # not reaped, so the pid still belongs to it

    def _say(self, **event: Any) -> None:
        try:
            self.channel.send(event)
        except OSError:
            self._signal(signal.SIGKILL)  # the launcher is gone


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
