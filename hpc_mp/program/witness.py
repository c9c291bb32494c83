"""``python -I -m hpc_mp.program.witness LAUNCH COMMAND…``: the parent of one process that a script's launch has started.

The process has the launch's arguments, directory, variables and input, and the witness's process group, so that signals to the
task reach it as they would without. The witness ends as it does. If it fails, the witness records how, and what it wrote last.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

from hpc_mp.base.child import die_with
from hpc_mp.diagnosis.ends import words_of_end
from hpc_mp.rundir import TOKEN, RunDirectory
from hpc_mp.rundir.attempt import lines_of, read_attempt
from hpc_mp.rundir.failures import RankFailure, write_end
from hpc_mp.rundir.program import read_program
from hpc_mp.rundir.rank_env import identity

HEARD = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
RESTORED = (signal.SIGPIPE, signal.SIGXFSZ)  # Python ignores them
TAIL = 1 << 18  # bytes of its errors that are kept
BLOCK = 1 << 16
LAST_S = 1.0  # in which what it wrote last is copied, if a process that it leaves behind holds its errors open
RUN, LAUNCH, TASK_PID = "HPC_MP_RUN", "HPC_MP_LAUNCH", "SLURM_TASK_PID"


def main(launch: int, command: list[str]) -> int:
    """Run the command to its end, and end alike. Return 1 if the launch belongs to an earlier attempt of the run."""
    run = RunDirectory(Path(os.environ[RUN]))
    record = read_attempt(run.attempt_record)
    if record.token != os.environ.get(TOKEN):
        print(f"hpc-mp: attempt {os.environ.get(TOKEN)} is not the run's current one any more; it ends", file=sys.stderr)
        return 1
    heard: list[int] = []
    for number in HEARD:
        signal.signal(number, lambda number, frame: heard.append(number))
    read, write = os.pipe()
    parent, child = os.getpid(), os.fork()
    if child == 0:
        try:
            die_with(parent)
            os.dup2(write, 2)
            _become(command, launch)
        finally:
            os._exit(2)
    os.close(write)
    tail: deque[bytes] = deque()
    copying = threading.Thread(target=_copy, args=(read, tail), daemon=True)
    copying.start()
    _, status = os.waitpid(child, 0)
    ended, code = time.time(), os.waitstatus_to_exitcode(status)
    copying.join(LAST_S)
    if code and not heard and code not in read_program(run.program).stop_codes:
        who = identity()
        end = words_of_end(lines_of(b"".join(tail)), code, program=True)
        with suppress(OSError):  # a full disk must not change how it ends
            write_end(run, launch, RankFailure(who.rank, who.node, end.kind, end.text, ended, record.attempt,
                                               traceback=end.traceback, inner=end.inner), code)
    if code < 0:
        _die_alike(-code)
    return code


def _become(command: list[str], launch: int) -> None:
    """Replace this process by the command; a program in the directory goes first, as with srun. Return if there is none."""
    for number in (*HEARD, *RESTORED):
        signal.signal(number, signal.SIG_DFL)
    environ = {**os.environ, LAUNCH: str(launch), **({TASK_PID: str(os.getpid())} if TASK_PID in os.environ else {})}
    name, own = command[0], Path.cwd() / command[0]
    try:
        if "/" not in name and "SLURM_STEP_ID" in environ and own.is_file() and os.access(own, os.X_OK):
            os.execve(own, command, environ)
        os.execvpe(name, command, environ)
    except OSError as error:
        print(f"error: execve(): {name}: {error.strerror}", file=sys.stderr, flush=True)


def _copy(source: int, tail: deque[bytes]) -> None:
    """Copy what the process writes to its errors, and keep the last ``TAIL`` bytes."""
    size = 0
    while block := os.read(source, BLOCK):
        with suppress(OSError):  # nobody may read them any more
            view = memoryview(block)
            while view:
                view = view[os.write(2, view):]
        tail.append(block)
        size += len(block)
        while size - len(tail[0]) > TAIL:
            size -= len(tail.popleft())


def _die_alike(number: int) -> None:
    """End by the signal that ended the process, without a core dump of this one."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
