"""Exit codes in words."""

from __future__ import annotations

import signal

MEANINGS = {
    signal.SIGKILL: "the system ran out of memory, or somebody killed it",
    signal.SIGTERM: "somebody ended it",
    signal.SIGINT: "somebody interrupted it",
    signal.SIGHUP: "its terminal was closed",
    signal.SIGSEGV: "native code used memory that is not its own",
    signal.SIGBUS: "a mapped file was cut short, or /dev/shm is full",
    signal.SIGABRT: "native code gave up",
    signal.SIGILL: "a library was built for another CPU",
    signal.SIGFPE: "native code divided by zero or the like",
    signal.SIGXCPU: "the limit on CPU time was reached (ulimit -t)",
    signal.SIGXFSZ: "the limit on file size was reached (ulimit -f)",
}
NAMES = {number.value: number.name for number in signal.Signals}


def ending(code: int) -> str:
    """Return in words how a process ended, with the likely meaning. ``code``: as from ``subprocess``, negative for a signal."""
    if code >= 0:
        return f"ended with exit code {code}"
    name = NAMES.get(-code, f"signal {-code}")
    meaning = next((text for number, text in MEANINGS.items() if number == -code), None)
    return f"was killed by {name}" + (f" ({meaning})" if meaning else "")
