"""The guard of a rank that mpirun started: the parent of the program, which forwards mpirun's signals and records the program's
end.

Slurm reports the end of every task, with its time. mpirun reports only one process, in its own format, and ends the others. So
each rank has its own guard.
"""

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
from hpc_mp.rundir.failures import write_failure
from hpc_mp.rundir.program import ProgramCommand
from hpc_mp.rundir.rank_env import RankEnv

STOP = signal.SIGUSR2  # asks ranks to stop; mpirun forwards it
END = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # mpirun ends the other ranks by these after a rank has failed
PASSED = (STOP, *END, signal.SIGUSR1)


def guards(environ: Mapping[str, str]) -> Path:
    """Return the directory in a Slurm job that lists the guards of a node, by process id, and the exit codes of its ranks."""
    return Path(environ["HPC_MP_LOCAL"]) / "ends"


def first_code(directory: Path) -> int:
    """Return the exit code of the first rank of this node that ended by itself or as requested; 0 without one, or if it
    succeeded. mpirun itself may end with that code, with the number of a signal, with its own code, or with 0."""
    ends = sorted(directory.glob("ended.*"), key=lambda path: path.stat().st_mtime_ns)
    return int(ends[0].suffix[1:]) if ends else 0


def guard(program: ProgramCommand, run: RunDirectory, who: RankEnv, attempt: int, become: Callable[[], int],
          noted: Path) -> int:
    """Run the program as a child to its end, and end in the same way: with its exit code, or by its signal. ``become``: turns a
    process into the program; returns an exit code if that fails. ``noted``: directory in which to record the guard's existence
    and its rank's end."""
    noted.mkdir(mode=0o700, exist_ok=True)
    redirect(run.rank_log(who.rank))
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED)
    parent, pid = os.getpid(), os.fork()
    if pid == 0:
        code = 2
        try:
            die_with(parent)
            os.setpgid(0, 0)  # mpirun signals its whole process group: the program must get only what is forwarded
            signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the guard blocks the signals that mpirun must not see
            code = become()
        finally:
            os._exit(code)
    passed = _passed_on(pid, signal.Signals[f"SIG{program.signal}"])
    (noted / str(os.getpid())).touch()
    _, status = os.waitpid(pid, 0)
    ended, code = time.time(), os.waitstatus_to_exitcode(status)  # before other ranks notice the end and end too
    (noted / str(os.getpid())).unlink(missing_ok=True)
    if code and not any(number in END for number in passed):  # otherwise mpirun ended it because another rank had failed
        with suppress(FileExistsError):  # the time of the file shows which rank ended first
            (noted / f"ended.{code if code > 0 else 128 - code}").touch(exist_ok=False)
    if code:
        with suppress(ProcessLookupError):  # its children, mostly data loaders
            os.killpg(pid, signal.SIGKILL)
    recorded = run.failure(attempt, who.rank).exists()  # the child could not become the program, and has said why
    if code not in (0, *program.stop_codes) and not passed and not recorded:
        with suppress(OSError):  # a full disk must not hide the end: mpirun reports it too
            write_failure(run, unsaid_end(AttemptReader(run, attempt), who.rank, who.node, code, ended, program=True))
    if code < 0:
        die_alike(-code)
    return code


def _passed_on(pid: int, stop: signal.Signals) -> list[int]:
    """Return the list of signals forwarded to the program from now on. A request to stop is forwarded only once."""
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


def die_alike(number: int) -> None:
    """End by the program's signal, without a core dump of this process."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
