"""Ctrl-C, SIGTERM and a closed terminal as events to wait for: the handlers do nothing, a socket receives the numbers."""

import signal
import socket
import threading
from contextlib import suppress
from typing import Any

WATCHED = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
MEANINGS = ("saving at the next step, then stopping; once more (Ctrl-C or SIGTERM) kills",
            "killed: steps since the last checkpoint are lost")  # at the first interrupt, and at the second


class Interrupts:
    """A readable object that collects the watched signals while entered; they have no other effect. Python delivers signals only
    to the main thread: in another thread, this object receives none. A SIGHUP that was ignored before stays ignored, since that
    is the purpose of nohup."""

    def __init__(self) -> None:
        self._bell, self._ringer = socket.socketpair()
        self._bell.setblocking(False)
        self._ringer.setblocking(False)
        self._count = 0

    def fileno(self) -> int:
        return self._bell.fileno()

    def received(self) -> int:
        """Return the number of interrupts since the last call; never waits. A SIGHUP after another one does not count: kernel and
        shell each send it when a terminal closes, which is not meant as "kill"."""
        before = self._count
        with suppress(BlockingIOError):
            for number in self._bell.recv(4096):
                self._count += number in WATCHED and not (number == signal.SIGHUP and self._count)
        return self._count - before

    def __enter__(self) -> "Interrupts":
        self._old: dict[int, Any] = {}
        if threading.current_thread() is not threading.main_thread():
            return self
        self._old_fd = signal.set_wakeup_fd(self._ringer.fileno(), warn_on_full_buffer=False)
        ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
        self._old = {number: signal.signal(number, lambda *_: None) for number in WATCHED - ignored}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        if self._old:
            signal.set_wakeup_fd(self._old_fd)
        self._bell.close()
        self._ringer.close()
