"""Follow emulated ranks to their end."""

from __future__ import annotations

import selectors
from dataclasses import dataclass

from hpc_mp.launch.backends.interrupts import Interrupts
from hpc_mp.launch.emulator.emulator import Emulator, Exit
from hpc_mp.launch.listener import Listener
from hpc_mp.rundir.follow import AttemptReader

ON_INTERRUPT = (
    ("stop", "saving at the next step, then stopping; once more (Ctrl-C or SIGTERM) kills"),
    ("kill", "killed: steps since the last checkpoint are lost"),
)


@dataclass(frozen=True, slots=True)
class RanksEnd:
    """How all ranks ended.

    Attributes:
        asked: whether the user asked for the end.
        broken: why the emulator itself failed; None when it did not.
    """

    exits: tuple[Exit, ...]
    asked: bool = False
    broken: str | None = None


def watch(emulator: Emulator, attempt: AttemptReader, interrupts: Interrupts, listener: Listener) -> RanksEnd:
    """Show progress, pass interrupts on (the first saves and stops, the second kills), return when nothing runs."""
    pressed = 0
    with selectors.DefaultSelector() as selector:
        selector.register(emulator, selectors.EVENT_READ)
        selector.register(interrupts, selectors.EVENT_READ)
        while emulator.running:
            selector.select(listener.interval)
            for _ in range(interrupts.received()):
                command, meaning = ON_INTERRUPT[min(pressed, 1)]
                pressed += 1
                listener.note(meaning)
                emulator.command(command)
            emulator.hear()
            if emulator.running:
                listener.update(attempt.status(), attempt.steps())
    return RanksEnd(tuple(emulator.exits), pressed > 0, emulator.broken)
