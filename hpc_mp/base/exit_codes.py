"""Exit codes in words."""

import signal

MEANINGS = {
    signal.SIGKILL: "the system ran out of memory, or another process killed it",
    signal.SIGTERM: "another process asked it to end",
    signal.SIGINT: "it was interrupted, for example with Ctrl-C",
    signal.SIGHUP: "its terminal was closed",
    signal.SIGSEGV: "native code accessed invalid memory",
    signal.SIGBUS: "a mapped file was cut short, or /dev/shm is full",
    signal.SIGABRT: "native code aborted",
    signal.SIGILL: "a library was built for another CPU",
    signal.SIGFPE: "an arithmetic error in native code, such as a division by zero",
    signal.SIGXCPU: "the limit on CPU time was reached (ulimit -t)",
    signal.SIGXFSZ: "the limit on file size was reached (ulimit -f)",
}
NAMES = {number.value: number.name for number in signal.Signals}
SIGNALS = {text: number for number in signal.Signals if (text := signal.strsignal(number))}  # by the C library's words


def ending(code: int) -> str:
    """Return in words how a process ended, with the likely meaning. ``code``: as from ``subprocess``, negative for a signal."""
    if code >= 0:
        return f"ended with exit code {code}"
    name = NAMES.get(-code, f"signal {-code}")
    meaning = next((text for number, text in MEANINGS.items() if number == -code), None)
    return f"was killed by {name}" + (f" ({meaning})" if meaning else "")
