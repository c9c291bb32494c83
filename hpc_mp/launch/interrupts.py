"""Ctrl-C and SIGTERM as something to wait for: the handlers do nothing, a socket says which signals came."""

from __future__ import annotations

import signal
import socket

WATCHED = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """While entered (in the main thread), the watched signals only make this object readable."""

    def __init__(self) -> None:
        self._bell, self._ringer = socket.socketpair()
        self._bell.setblocking(False)
        self._ringer.setblocking(False)

    def fileno(self) -> int:
        return self._bell.fileno()

    def received(self) -> int:
        """How many watched signals came since the last call; never waits."""
        try:
            return sum(number in WATCHED for number in self._bell.recv(4096))
        except BlockingIOError:
            return 0

    def __enter__(self) -> Interrupts:
        self._old_fd = signal.set_wakeup_fd(self._ringer.fileno(), warn_on_full_buffer=False)
        self._old = {number: signal.signal(number, lambda *_: None) for number in WATCHED}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_fd)
        self._bell.close()
        self._ringer.close()
