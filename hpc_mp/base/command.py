"""Run a local program and return its answer within a time limit."""

import subprocess
from collections.abc import Callable, Mapping, Sequence

Runner = Callable[[Sequence[str]], str]  # signature of ``ask``; tests pass their own


_LONGEST = 600  # characters quoted from a program's output


class CommandFailed(Exception):
    """The program is absent, failed or took too long. The text states which, with the program's own message if it has any.
    ``code``: the exit code; None without one. ``out``: the text that it wrote on stdout nevertheless."""

    def __init__(self, message: str, code: int | None = None, out: str = "") -> None:
        super().__init__(message)
        self.code, self.out = code, out


class TimedOut(CommandFailed):
    """The program did not end within its time limit."""


def ask(argv: Sequence[str], timeout: float | None = 3.0, environ: Mapping[str, str] | None = None, stdin: str = "") -> str:
    """Run ``argv`` and return its stdout.

    Args:
        argv: the program and its arguments.
        timeout: seconds to wait for the program; None waits for ever.
        environ: the program's environment; None for that of this process.
        stdin: text for its standard input.

    Raises:
        CommandFailed: the program does not exist, exited with a code other than 0, or (``TimedOut``) did not answer in time.
    """
    try:
        process = subprocess.run(argv, input=stdin, capture_output=True, timeout=timeout, env=environ, encoding="utf-8",
                                 errors="replace", check=False)
    except FileNotFoundError:
        raise CommandFailed(f"{argv[0]} is not on PATH") from None
    except OSError as error:
        raise CommandFailed(f"{argv[0]} cannot be started ({error.strerror})") from None
    except subprocess.TimeoutExpired:
        raise TimedOut(f"{argv[0]} did not answer within {timeout:g} s") from None
    if process.returncode:
        raise failure(argv[0], process.returncode, process.stdout, process.stderr)
    return process.stdout


def failure(name: str, code: int, out: str, err: str) -> CommandFailed:
    """Return the error of a program that exited with ``code``. Some programs, like nvidia-smi, report errors on stdout."""
    return CommandFailed(err.strip() or out.strip()[:_LONGEST] or f"{name} exited with {code}", code, out)
