"""``python -PE -m hpc_mp.program.witness RUN TOKEN ATTEMPT LAUNCH FAMILY FORWARDS COMMAND…``: the parent of a script's process.

The process has the arguments, directory, variables and input of its launch, and the witness's process group. The witness
forwards signals and ends in the same way as the process. After a failure, it records the end with the last output. The script
itself has a witness too.
"""

import json
import os
import shutil
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from hpc_mp.base.child import die_with
from hpc_mp.diagnosis.ends import words_of_end
from hpc_mp.program.guard import die_alike
from hpc_mp.rundir import RunDirectory
from hpc_mp.rundir.attempt import TOKEN, lines_of, read_attempt
from hpc_mp.rundir.failures import RankFailure, write_end
from hpc_mp.rundir.program import read_program
from hpc_mp.rundir.rank_env import node_name

RUN, ATTEMPT, LAUNCH, TASK_PID = "HPC_MP_RUN", "HPC_MP_ATTEMPT", "HPC_MP_LAUNCH", "SLURM_TASK_PID"
PASSED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
RESTORED = (signal.SIGPIPE, signal.SIGXFSZ)  # Python ignores them
TAIL = 1 << 18  # last bytes of its stderr that are stored
BLOCK = 1 << 16
LAST_S = 1.0  # for copying its last output, if a leftover child process holds its stderr open
ASKED_S = 120.0  # after a signal to end, during which an end counts as requested
# Variables with a task's number, by launcher. A task of mpirun below srun has srun's variables too.
NUMBERS = {"srun": ("SLURM_PROCID",), "other": ("SLURM_PROCID",),
           "mpi": ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK")}
THE_SCRIPT = "script"  # the family of the script itself


@dataclass(frozen=True, slots=True)
class Witness:
    """The identity of a watched process. It is passed in arguments, because `srun --export=NONE` clears variables. ``launch``:
    number of the launch; 0 for the script itself. ``family``: the launcher's family. ``forwards``: True if signals to the task
    reach only the witness."""

    run: str
    token: str
    attempt: int
    launch: int
    family: str
    forwards: bool

    def of(self, launch: int, family: str) -> list[str]:
        """Return the command of a witness for a task of a launch; the command of the task follows it."""
        forwards = self.forwards and family != "mpi"  # mpirun's daemons signal the process group
        words = (self.run, self.token, str(self.attempt), str(launch), family, str(int(forwards)))
        return [sys.executable, "-PE", "-m", "hpc_mp.program.witness", *words]


def main(witness: Witness, command: list[str]) -> int:
    """Run the command to its end, and end in the same way. Return 1 if the launch belongs to an earlier attempt of the run."""
    run = RunDirectory(Path(witness.run))
    if read_attempt(run.attempt_record).token != witness.token:
        print(f"hpc-mp: attempt {witness.token} is no longer the run's current one; it ends", file=sys.stderr)
        return 1
    ignored: set[int] = {number for number in PASSED if signal.getsignal(number) == signal.SIG_IGN}
    tee = witness.family != THE_SCRIPT
    read, write = os.pipe() if tee else (-1, 2)
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED)
    parent, child = os.getpid(), os.fork()
    if child == 0:
        code = 2
        try:
            die_with(parent)
            os.dup2(write, 2)
            code = _become(command, witness, ignored)
        finally:
            os._exit(code)
    received = _passed_on(child, witness.forwards)
    tail: deque[bytes] = deque()
    if tee:
        os.close(write)
        copying = threading.Thread(target=_copy, args=(read, tail), daemon=True)
        copying.start()
    _, status = os.waitpid(child, 0)
    ended, code = time.time(), os.waitstatus_to_exitcode(status)
    with suppress(Exception):  # an error here must not change the end
        if not tee:
            run.script_end.write_text(json.dumps({"code": code, "time": ended}), encoding="utf-8")
        elif code and not any(ended - moment < ASKED_S for moment in received) \
                and code not in read_program(run.program).stop_codes:
            copying.join(LAST_S)
            _record(run, witness, code, ended, b"".join(tail))
        else:
            copying.join(LAST_S)
    if code < 0:
        die_alike(-code)
    return code


def _record(run: RunDirectory, witness: Witness, code: int, ended: float, errors: bytes) -> None:
    rank = next((int(os.environ[name]) for name in NUMBERS[witness.family] if os.environ.get(name, "").isdecimal()), 0)
    end = words_of_end(lines_of(errors), code, program=True)
    write_end(run, witness.launch, RankFailure(rank, node_name(), end.kind, end.text, ended, witness.attempt,
                                               traceback=end.traceback, inner=end.inner), code)


def _passed_on(child: int, forwards: bool) -> list[float]:
    """Return the list of the times of signals from now on. Each signal is forwarded if ``forwards``."""
    received: list[float] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        received.append(time.time())
        if forwards:
            with suppress(ProcessLookupError):
                os.kill(child, number)

    for number in PASSED:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED)
    return received


def _variables(witness: Witness, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the process's variables: those of its launch, with its own process id in place of the task's."""
    variables = {name: value for name, value in environ.items() if name != "HPC_MP_STARTING"}
    if witness.launch and TOKEN in environ:
        variables[LAUNCH] = str(witness.launch)
    if TASK_PID in environ and witness.family != THE_SCRIPT:
        variables[TASK_PID] = str(os.getpid())
    return variables


def _become(command: list[str], witness: Witness, ignored: set[int]) -> int:
    """Replace this process by the command; return srun's code on failure. As with srun, a program in the directory has
    precedence, one on PATH gets its whole path as its name, and without PATH there is none; errors are slurmstepd's."""
    for number in (*PASSED, *RESTORED):
        signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED)
    variables, name, own = _variables(witness, os.environ), command[0], Path.cwd() / command[0]
    try:
        if "/" not in name and witness.family == "srun":
            path = shutil.which(name, path=os.environ.get("PATH", ""))
            if path is None or (own.is_file() and os.access(own, os.X_OK)):
                os.execve(own, command, variables)
            os.execve(path, [path, *command[1:]], variables)
        os.execvpe(name, command, variables)
    except OSError as error:
        stepd = f"slurmstepd-{node_name()}: " if witness.family == "srun" else ""
        whole = f"{os.getcwd()}/{name}" if stepd and name.startswith(".") else name
        print(f"{stepd}error: execve(): {whole}: {error.strerror}", file=sys.stderr, flush=True)
        return 13 if isinstance(error, PermissionError) else 2


def _copy(source: int, tail: deque[bytes]) -> None:
    """Copy the process's stderr, and store the last ``TAIL`` bytes."""
    size = 0
    while block := os.read(source, BLOCK):
        with suppress(OSError):  # the reader may be gone
            view = memoryview(block)
            while view:
                view = view[os.write(2, view):]
        tail.append(block)
        size += len(block)
        while size - len(tail[0]) > TAIL:
            size -= len(tail.popleft())


if __name__ == "__main__":
    _run, _token, _attempt, _launch, _family, _forwards, *_command = sys.argv[1:]
    sys.exit(main(Witness(_run, _token, int(_attempt), int(_launch), _family, _forwards == "1"), _command))
