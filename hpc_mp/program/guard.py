"""A rank that mpirun has started: it stays beside its program, passes on what mpirun sends, and writes down how that ended.

Slurm says of every task when and how it ended. mpirun says it of one process in words of its own, and ends the others: so each
rank has somebody who saw it.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType

from hpc_mp.base.child import die_with, redirect
from hpc_mp.diagnosis.ends import unsaid_end
from hpc_mp.rundir import RunDirectory
from hpc_mp.rundir.attempt import AttemptReader
from hpc_mp.rundir.failures import RankFailure, write_failure
from hpc_mp.rundir.program import ProgramCommand
from hpc_mp.rundir.rank_env import RankEnv

STOP = signal.SIGUSR2  # asks ranks to stop; mpirun passes it on
END = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # by which mpirun ends the others, after one has failed
PASSED = (STOP, *END, signal.SIGUSR1)


def guards(environ: Mapping[str, str]) -> Path:
    """Where in a job of Slurm the guards of a node are noted, by their process ids, and what ranks have ended with."""
    return Path(environ["HPC_MP_LOCAL"]) / "ends"


def first_code(directory: Path) -> int:
    """With which a rank of this node has ended by itself or as it was asked to, the first of them; 0 where none has, or well. Of
    mpirun some end with it, some with the number of a signal, some with a code of their own, and some with 0."""
    found = sorted(directory.glob("ended.*"), key=lambda path: path.stat().st_mtime_ns)
    return int(found[0].suffix[1:]) if found else 0


def guard(program: ProgramCommand, run: RunDirectory, who: RankEnv, attempt: int, become: Callable[[], int],
          noted: Path) -> int:
    """Run the program as a child to its end, and end as it did: with its exit code, or by its signal.

    Args:
        become: turns a process into the program; an exit code where that cannot be.
        noted: the directory in which to note that there is a guard, and how its rank has ended.
    """
    noted.mkdir(mode=0o700, exist_ok=True)
    redirect(run.rank_log(who.rank))
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED)
    parent, pid = os.getpid(), os.fork()
    if pid == 0:
        code = 2
        try:
            die_with(parent)
            os.setpgid(0, 0)  # mpirun sends to the whole group of its process: the program is to get what is passed on alone
            signal.pthread_sigmask(signal.SIG_SETMASK, ())  # those that mpirun is not to see are kept back around it
            code = become()
        finally:
            os._exit(code)
    passed = _passed_on(pid, signal.Signals[f"SIG{program.signal}"])
    (noted / str(os.getpid())).touch()
    _, status = os.waitpid(pid, 0)
    ended, code = time.time(), os.waitstatus_to_exitcode(status)  # others notice it in a moment, and end too
    (noted / str(os.getpid())).unlink(missing_ok=True)
    if code and not any(number in END for number in passed):  # else mpirun has ended it, for another one
        with suppress(FileExistsError):  # the first of them is told by its time
            (noted / f"ended.{code if code > 0 else 128 - code}").touch(exist_ok=False)
    if code:
        with suppress(ProcessLookupError):  # what it has started, mostly loaders of data
            os.killpg(pid, signal.SIGKILL)
    if code not in (0, *program.stop_codes) and not passed and not _said(run, who.rank, attempt):
        with suppress(OSError):  # a full disk is no reason to hide it: mpirun says it too
            write_failure(run, _failure(run, who, attempt, code, ended))
    if code < 0:
        _die_alike(-code)
    return code


def _passed_on(pid: int, stop: signal.Signals) -> list[int]:
    """What has been passed on to the program from here on; a request to stop only once."""
    passed: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        if number != STOP or number not in passed:
            passed.append(number)
            with suppress(ProcessLookupError):
                os.kill(pid, stop if number == STOP else number)

    for number in PASSED:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    return passed


def _said(run: RunDirectory, rank: int, attempt: int) -> bool:
    """Whether the child could not become the program, and has said why."""
    return run.failure(attempt, rank).exists()


def _failure(run: RunDirectory, who: RankEnv, attempt: int, code: int, ended: float) -> RankFailure:
    return unsaid_end(AttemptReader(run, attempt), who.rank, who.node, code, ended, program=True)


def _die_alike(number: int) -> None:
    """By the program's signal, and without a core of this process."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
