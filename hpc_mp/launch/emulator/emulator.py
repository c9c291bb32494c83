"""The launcher's side of emulated ranks: it starts the zygote, sends it the order, and receives the ends of the ranks."""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Any

from hpc_mp.base.errors import HpcMpError, RunFailed
from hpc_mp.base.exit_codes import ending

ENTRY = "hpc_mp.train.rank.main:main"
ASSEMBLY = "hpc_mp.train.rank.assemble"  # imported by ranks when they have met, unless the zygote has imported it
STDERR = 2
NOT_IMPORTED = "what ranks need cannot be imported ({why})"


@dataclass(frozen=True, slots=True)
class EmulatedRank:
    """One rank to start: the file for its output, and its environment in addition to the shared one."""

    log: Path
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Exit:
    """The end of one rank. ``code``: exit code as from ``subprocess``: negative for a signal. ``time``: unix seconds. ``ours``:
    True if a signal from the emulator killed it."""

    rank: int
    code: int
    time: float
    ours: bool


class Emulator:
    """The zygote process. ``with`` always ends it and every rank.

    Args:
        modules: modules that the ranks need, imported once before the forks. The import begins at once, in parallel with the
            caller.
        environment: environment of the zygote, and so of every rank. Variables that libraries read on import
            (``OMP_NUM_THREADS``, ``HF_HUB_OFFLINE``) have an effect only here.

    Attributes:
        exits: ends of ranks so far, in their order.
        running: True if any rank may still live.
        broken: reason why not all ranks could be started and followed; None without a failure.
    """

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        self._channel, theirs = Pipe()
        # The launcher's search path, without the current directory: a user's random.py there must not be imported.
        path = os.pathsep.join(filter(None, [environment.get("PYTHONPATH"), *sys.path]))
        with theirs:
            # A separate session: a terminal's Ctrl-C reaches only the launcher.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "hpc_mp.launch.emulator.zygote", *modules], stdin=theirs.fileno(), stdout=STDERR,
                env={**environment, "PYTHONPATH": path}, start_new_session=True)
        self._ranks = 0
        self.exits: list[Exit] = []
        self.running = True
        self.broken: str | None = None

    def call(self, function: str, *arguments: Any) -> Any:
        """Call a function in the zygote, which has imported the modules, and return its result. Only before the ranks are
        started. ``function``: ``"module:function"``; its arguments and its result must be plain values. Raises the function's own
        HpcMpError, and RunFailed if the imports or the function failed otherwise."""
        with suppress(ConnectionError):  # the zygote's end is handled below
            self._channel.send({"call": function, "arguments": arguments})
        try:
            event = self._channel.recv()
        except (EOFError, OSError):
            self.running = False
            raise RunFailed(f"the process that forks the ranks {ending(self._process.wait())}") from None
        if event["event"] == "refused":
            raise HpcMpError(event["value"], event["rule"], event["remedy"])
        if event["event"] != "answer":
            raise RunFailed(event["why"] if event["event"] == "failed" else NOT_IMPORTED.format(why=event["why"]))
        return event["value"]

    def start(self, ranks: Sequence[EmulatedRank], job_file: Path, listener: socket.socket | None, lock: int, entry: str = ENTRY,
              orderly: Sequence[int] = (os.EX_OK, os.EX_TEMPFAIL), patient: bool = False, stop: str = "SIGTERM") -> None:
        """Fork the ranks as soon as the imports are done; if they failed, ``broken`` has the reason.

        Args:
            ranks: the ranks; the n-th is rank n.
            job_file: the entry's only argument.
            listener: a listening socket for rank 0, which gets its descriptor in ``HPC_MP_LISTEN_FD``; None if rank 0 makes one.
            lock: the open lock file of the run, held as long as any rank lives.
            entry: ``"module:function"``, returning the exit code.
            orderly: exit codes of ranks that are done, or stopped by a signal after saving; if ``patient``, the others may then
                continue without a time limit.
            stop: the signal that asks ranks to save and stop.
        """
        self._ranks = len(ranks)
        order = [{"log": str(rank.log), "environment": dict(rank.environment)} for rank in ranks]
        with suppress(OSError):  # the zygote's end is handled in ``receive``
            self._channel.send({"entry": entry, "job_file": str(job_file), "ranks": order, "listens": listener is not None,
                                "orderly": orderly, "patient": patient, "stop": stop})
            for file in (lock, *([] if listener is None else [listener.fileno()])):
                send_handle(self._channel, file, self._process.pid)

    def receive(self, seconds: float | None = 0.0) -> None:
        """Record the ranks that have ended. Wait for news for ``seconds``; None waits without a limit."""
        try:
            while self.running and self._channel.poll(seconds):
                seconds, event = 0.0, self._channel.recv()  # see hpc_mp.launch.emulator.zygote
                if event["event"] == "exit":
                    self.exits.append(Exit(event["rank"], event["code"], event["time"], event["ours"]))
                else:
                    self.broken = NOT_IMPORTED.format(why=event["why"])
        except (EOFError, OSError):
            self.running = False
            if len(self.exits) < self._ranks and self.broken is None:
                self.broken = f"the process that forked the ranks {ending(self._process.wait())}"

    def fileno(self) -> int:
        """Return the descriptor that is readable when ``receive`` has news."""
        return self._channel.fileno()

    def command(self, name: str) -> None:
        """Send a command: ``"stop"``: save after this step and end; ``"abort"``: write stacks and end; ``"kill"``: end now."""
        with suppress(ConnectionError):  # it has ended already
            self._channel.send({"command": name})

    def __enter__(self) -> "Emulator":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all that is left, including the forking process, which has the run's lock open. Does nothing if already closed."""
        self.running = False
        self._channel.close()  # ranks that still live are killed
        if not self._ranks:
            self._process.kill()  # it may still be importing, and has no rank yet
        self._process.wait()
