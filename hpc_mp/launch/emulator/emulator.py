"""The launcher's side of emulated ranks: starts the zygote, sends it the order, receives what becomes of the ranks."""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpc_mp.base.errors import HpcMpError, RunFailed
from hpc_mp.base.exit_codes import ending
from hpc_mp.launch.emulator.channel import EventChannel

ENTRY = "hpc_mp.train.rank.main:main"
STDERR = 2
NOT_IMPORTED = "what ranks need cannot be imported ({why})"


@dataclass(frozen=True, slots=True)
class EmulatedRank:
    """One rank to be started: where what it prints goes, and what its environment has beyond the shared one."""

    log: Path
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Exit:
    """How one rank ended.

    Attributes:
        code: as ``subprocess`` gives it: negative for a signal.
        time: unix seconds.
        ours: killed by a signal that the emulator sent.
    """

    rank: int
    code: int
    time: float
    ours: bool


@dataclass(frozen=True, slots=True)
class Patience:
    """When a rank's end is no failure, and what follows.

    Attributes:
        orderly: codes of ranks that are done, or stopped by a signal after saving.
        patient: whether the others may then go on for as long as they like.
        stop: the signal that asks ranks to save and stop.
    """

    orderly: tuple[int, ...] = (os.EX_OK, os.EX_TEMPFAIL)
    patient: bool = False
    stop: str = "SIGTERM"


class Emulator:
    """The zygote process; ``with`` ends it and every rank, whatever happened.

    Args:
        modules: what the ranks need, imported once before they are forked; it begins at once, beside the caller's work.
        environment: of the zygote, and so of every rank. What libraries read when they are imported
            (``OMP_NUM_THREADS``, ``HF_HUB_OFFLINE``) has an effect only here.

    Attributes:
        exits: the ranks that have ended so far, in the order in which they did.
        running: whether any rank may still live.
        broken: why not all ranks could be started and followed; None as long as all is well.
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
        self._channel = EventChannel(ours)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._channel, selectors.EVENT_READ)
        self._ranks = 0
        self.exits: list[Exit] = []
        self.running = True
        self.broken: str | None = None

    def call(self, function: str, *arguments: Any) -> Any:
        """What a function returns that the zygote calls, beside all that it has imported; before the ranks are started.

        Args:
            function: ``"module:function"``; its arguments and its result are what JSON can hold.

        Raises:
            HpcMpError: the function's own.
            RunFailed: the imports failed, or the function did otherwise.
        """
        with suppress(ConnectionError):  # what became of the zygote is found below
            self._channel.send({"call": function, "arguments": arguments})
        try:
            while not (events := self._channel.receive()):
                pass
        except EOFError:
            self.running = False
            raise RunFailed(f"the process that forks the ranks {ending(self._process.wait())}") from None
        (event,) = events  # nothing else has been asked
        if event["event"] == "refused":
            raise HpcMpError(event["value"], event["rule"], event["remedy"])
        if event["event"] != "answer":
            raise RunFailed(event["why"] if event["event"] == "failed" else NOT_IMPORTED.format(why=event["why"]))
        return event["value"]

    def start(
        self, ranks: Sequence[EmulatedRank], job_file: Path, listener: socket.socket | None, lock: int, entry: str = ENTRY,
        patience: Patience | None = None,
    ) -> None:
        """Fork the ranks as soon as the imports are done; if they failed, ``broken`` says so.

        Args:
            ranks: rank n is the n-th.
            job_file: the entry's one argument.
            listener: a listening socket for rank 0, which finds its number in ``HPC_MP_LISTEN_FD``; None: it makes one.
            lock: the open lock file of the run, held as long as one rank lives.
            entry: ``"module:function"``, returning the exit code.
            patience: what is other with somebody's program.
        """
        self._ranks = len(ranks)
        order = [{"log": str(rank.log), "environment": dict(rank.environment)} for rank in ranks]
        with suppress(ConnectionError):
            self._channel.send({"entry": entry, "job_file": str(job_file), "ranks": order, **asdict(patience or Patience())},
                               [lock, *([listener.fileno()] if listener is not None else [])])

    def receive(self, seconds: float | None = 0.0) -> None:
        """Take note of the ranks that have ended since; wait for news for so many seconds, None: until there are some."""
        try:
            while self.running and self._selector.select(seconds):
                seconds = 0.0
                for event in self._channel.receive():  # see hpc_mp.launch.emulator.zygote
                    if event["event"] == "exit":
                        self.exits.append(Exit(event["rank"], event["code"], event["time"], event["ours"]))
                    else:
                        self.broken = NOT_IMPORTED.format(why=event["why"])
        except EOFError:
            self.running = False
            if len(self.exits) < self._ranks and self.broken is None:
                self.broken = f"the process that forked the ranks {ending(self._process.wait())}"

    def fileno(self) -> int:
        """Readable when there is news for ``receive``."""
        return self._channel.fileno()

    def command(self, name: str) -> None:
        """``"stop"``: save at the next step boundary and end; ``"abort"``: write the stacks and end; ``"kill"``: end now."""
        with suppress(ConnectionError):  # it has ended already
            self._channel.send({"command": name})

    def __enter__(self) -> Emulator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End what is left, the process that forks ranks too, which has the run's lock open; nothing when it is closed."""
        self.running = False
        self._selector.close()
        self._channel.close()  # ranks that still live are killed
        if not self._ranks:
            self._process.kill()  # it may be importing, and there is no rank yet
        self._process.wait()
