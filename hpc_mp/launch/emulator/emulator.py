"""The launcher's hand on emulated ranks: starts the zygote, gives it the order, hears what becomes of the ranks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_mp.base.exit_codes import ending
from hpc_mp.launch.emulator.channel import Channel

ENTRY = "hpc_mp.train.rank.main:main"
STDERR = 2


@dataclass(frozen=True, slots=True)
class Task:
    """One rank to be started: where what it prints goes, and what its environment has beyond the shared one."""

    log: Path
    environment: Mapping[str, str]


class Emulator:
    """The zygote process; ``with`` ends it and every rank, whatever happened.

    Args:
        modules: what the ranks need, imported once before they are forked; it begins at once, beside the caller's work.
        environment: of the zygote, and so of every rank. What libraries read when they are imported
            (``OMP_NUM_THREADS``, ``HF_HUB_OFFLINE``) has an effect only here.
    """

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        # The launcher's search path, and not the current directory: a user's random.py there must not be imported.
        path = os.pathsep.join(filter(None, [environment.get("PYTHONPATH"), *sys.path]))
        with theirs:
            # A session of its own: a terminal's Ctrl-C reaches the launcher alone.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "hpc_mp.launch.emulator.zygote", *modules], stdin=theirs.fileno(), stdout=STDERR,
                env={**environment, "PYTHONPATH": path}, start_new_session=True)
        self._channel = Channel(ours)
        self._started = False

    def start(
        self, tasks: Sequence[Task], job_file: Path, listener: socket.socket, lock: int, entry: str = ENTRY
    ) -> None:
        """Fork the ranks as soon as the imports are done; if they failed, ``events`` says so.

        Args:
            tasks: rank n is the n-th.
            job_file: the entry's one argument.
            listener: a listening socket for rank 0, which finds its number in ``HPC_MP_LISTEN_FD``.
            lock: the open lock file of the run, held as long as one rank lives.
            entry: ``"module:function"``, returning the exit code.
        """
        self._started = True
        ranks = [{"log": str(task.log), "environment": dict(task.environment)} for task in tasks]
        with suppress(ConnectionError):
            self._channel.send({"entry": entry, "job_file": str(job_file), "ranks": ranks}, [listener.fileno(), lock])

    def events(self) -> list[dict[str, Any]]:
        """Wait for news (see ``hpc_mp.launch.emulator.zygote``). Raises EOFError when there will be none any more."""
        return self._channel.receive()

    def fileno(self) -> int:
        """Readable when ``events`` will not wait."""
        return self._channel.fileno()

    def command(self, name: str) -> None:
        """``"stop"``: save at the next step boundary and end; ``"kill"``: end now."""
        with suppress(ConnectionError):  # it has ended already
            self._channel.send({"command": name})

    def wait(self) -> str:
        """Once there are no more events: how the zygote ended, in words."""
        return ending(self._process.wait())

    def __enter__(self) -> Emulator:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()  # ranks that still live are killed
        if not self._started:
            self._process.kill()  # it may be importing, and there is no rank yet
        self._process.wait()
