"""Python programs as forks of this process, which saves each the CPU seconds of importing torch and transformers.

They are separate processes with their own environment, arguments, output and exit code. The processes that they start are real,
except for the emulator's zygote, which is forked from them in the same way.
"""

import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import ranks  # noqa: F401  (imports the shared modules)

from hpc_mp.launch.emulator import emulator, zygote

POLL_S = 0.01


class Fork:
    """A function in a fork of this process, with the part of the ``subprocess.Popen`` interface that is needed here.

    Args:
        streams: open files that become its standard input, output and error.
    """

    def __init__(self, function: Callable[[], int | None], streams: Sequence[int], env: Mapping[str, str]) -> None:
        self.pid = os.fork()
        self.returncode: int | None = None
        if self.pid == 0:
            _become(function, streams, env)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float = 300.0) -> int:
        """Return the exit code, negative for a signal. After the timeout, kill it and raise subprocess.TimeoutExpired."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                self.kill()
                raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout)
            time.sleep(POLL_S)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def _become(function: Callable[[], int | None], streams: Sequence[int], env: Mapping[str, str]) -> None:
    code = 1
    try:
        for number, stream in enumerate([os.dup(stream) for stream in streams]):
            os.dup2(stream, number)
            os.close(stream)
        _let_go()
        sys.stdin, sys.stdout, sys.stderr = (os.fdopen(n, "w" if n else "r", buffering=1, closefd=False) for n in range(3))
        os.environ.clear()
        os.environ.update(env)
        for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0)  # the timer of pytest-timeout must not fire here
        code = function() or 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _let_go() -> None:
    """Close all files but the standard streams, as ``exec`` does. Their numbers stay taken: surviving objects may close them."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # the descriptor of the directory itself
            if number > 2 and number != nothing and not os.get_inheritable(number):
                os.dup2(nothing, number, inheritable=False)


class Program:
    """A warm ``python ARGUMENTS`` (``-m MODULE …`` or ``FILE …``); ``end`` reads its output."""

    def __init__(self, arguments: Sequence[str | Path], env: Mapping[str, str]) -> None:
        words = list(map(str, arguments))

        def program() -> None:
            emulator.subprocess = _Subprocess()  # type: ignore[assignment]
            path = env.get("PYTHONPATH", "").split(os.pathsep)
            sys.path[:0] = [each for each in path if each not in sys.path]
            if words[0] == "-m":
                sys.argv = words[1:]
                runpy.run_module(words[1], run_name="__main__", alter_sys=True)
            else:
                sys.argv = words
                runpy.run_path(words[0], run_name="__main__")

        self._said = [os.memfd_create(name) for name in ("output", "errors")]
        with open(os.devnull) as nothing:
            self.process = Fork(program, [nothing.fileno(), *self._said], env)

    def outcome(self, *signals: signal.Signals) -> tuple[int, str, str]:
        """Send the signals, wait for the end, and return the exit code, the output and the errors."""
        for number in signals:
            os.kill(self.process.pid, number)
        done = self.end(120)
        return done.returncode, done.stdout, done.stderr

    def end(self, timeout: float) -> subprocess.CompletedProcess[str]:
        """Wait for the program and return its result. Raises subprocess.TimeoutExpired."""
        code = self.process.wait(timeout)
        said = []
        for number in self._said:
            with os.fdopen(number, "rb") as file:
                file.seek(0)
                said.append(file.read().decode())
        return subprocess.CompletedProcess([], code, *said)


def warm_zygotes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give warm zygotes to emulated nodes of this process from now on."""
    monkeypatch.setattr(emulator, "subprocess", _Subprocess())


class _Subprocess:
    """A stand-in for the module in which the emulator finds ``Popen``."""

    @staticmethod
    def Popen(argv: Sequence[str], *, stdin: int, stdout: int, env: Mapping[str, str], **_: Any) -> Fork:
        modules = argv[argv.index("hpc_mp.launch.emulator.zygote") + 1:]

        def begin() -> int:
            os.setsid()
            return zygote.main(modules)

        return Fork(begin, [stdin, stdout, 2], env)
