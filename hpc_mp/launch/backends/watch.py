"""Follow emulated ranks to their end."""

from __future__ import annotations

import selectors
from dataclasses import dataclass

from hpc_mp.launch.backends.interrupts import Interrupts
from hpc_mp.launch.emulator.emulator import Emulator
from hpc_mp.launch.listener import Listener
from hpc_mp.rundir.follow import AttemptReader

ON_INTERRUPT = (
    ("stop", "saving at the next step, then stopping; once more (Ctrl-C or SIGTERM) kills"),
    ("kill", "killed: steps since the last checkpoint are lost"),
)


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
class Ended:
    """How all ranks ended.

    Attributes:
        asked: whether the user asked for the end.
        broken: why the emulator itself failed; None when it did not.
    """

    exits: tuple[Exit, ...]
    asked: bool = False
    broken: str | None = None


def watch(emulator: Emulator, ranks: int, attempt: AttemptReader, interrupts: Interrupts, listener: Listener) -> Ended:
    """Show progress, pass interrupts on (the first saves and stops, the second kills), return when nothing runs."""
    exits: list[Exit] = []
    pressed = 0
    broken: str | None = None
    with selectors.DefaultSelector() as selector:
        selector.register(emulator, selectors.EVENT_READ)
        selector.register(interrupts, selectors.EVENT_READ)
        while True:
            ready = {key.fileobj for key, _ in selector.select(listener.interval)}
            if interrupts in ready:
                for _ in range(interrupts.received()):
                    command, meaning = ON_INTERRUPT[min(pressed, 1)]
                    pressed += 1
                    listener.note(meaning)
                    emulator.command(command)
            if emulator in ready:
                try:
                    events = emulator.events()
                except EOFError:
                    break
                exits += [Exit(e["rank"], e["code"], e["time"], e["ours"]) for e in events if e["event"] == "exit"]
                for event in events:
                    if event["event"] == "broken":
                        broken = f"what ranks need cannot be imported ({event['why']})"
            listener.update(attempt.status(), attempt.steps())
    if len(exits) < ranks and broken is None:
        broken = f"the process that forked the ranks {emulator.wait()}"
    return Ended(tuple(exits), pressed > 0, broken)
