"""``python -m hpc_mp.program.node RUN``: a node's task in which mpirun starts the ranks (``slurm.mpi = "mpirun"``).

srun starts one task on every node, with the CPUs, GPUs and memory of its ranks. The task on the first node runs mpirun.
mpirun starts its daemons by ``agent HOST COMMAND``, as it would by ssh; the agent passes the command to the task on that host.
So the ranks belong to srun's step: Slurm's signals to the step reach them, and no rank outlives it.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from pathlib import Path

from hpc_mp.base.dead_children import DeadChildren
from hpc_mp.base.errors import HpcMpError
from hpc_mp.layout.placement import from_dict
from hpc_mp.program.guard import PASSED, STOP, first_code, guards
from hpc_mp.program.mpirun import as_root, by_agent, family, patient, without_task
from hpc_mp.program.stacks import processes, read_proc
from hpc_mp.program.stepd import watch_stepd
from hpc_mp.rundir import TOKEN, AttemptRecord, RunDirectory, read_attempt, read_json
from hpc_mp.rundir.failures import RankFailure, write_failure
from hpc_mp.rundir.program import OWN_PATH, read_program
from hpc_mp.rundir.rank_env import node_name

SETTING = 'slurm.mpi = "mpirun"'
BRING = "add the module that provides it to slurm.modules, or its directory to PATH in slurm.setup"
OTHERWISE = 'add a module of Open MPI, MPICH or Intel MPI to slurm.modules, or set program.start = "node"'
AGENT = "hpc-mp-daemon"  # looked up on PATH, because mpirun splits a path at its blanks
TAKEN = (*PASSED, signal.SIGABRT)
KEPT_BACK = PASSED  # blocked in mpirun and its daemons: Slurm may signal the whole step, and they would end ranks that save
END_OF_ALL, SIGNAL = "end", "signal"  # messages to a node's task, other than a command of mpirun
WORKERS = 64  # nodes contacted concurrently
POLL_S = 0.1
REPEAT_S = 2.0  # between two requests to stop: a rank may not have begun at the first one
LAG_S = 10.0  # in which mpirun must notice that all its processes are dead
REACHED_S = 60.0  # until a node's task must be reachable: srun starts all tasks at once


def main(path: Path, environ: Mapping[str, str] = os.environ) -> int:
    """Run the task and return its exit code: the code of this node's rank that first ended by itself; else mpirun's on the first
    node, and 0 on the others; 2 if mpirun is missing, with a record of the reason."""
    received: list[int] = []
    for number in TAKEN:
        signal.signal(number, lambda number, frame: received.append(number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, TAKEN)
    run = RunDirectory(path)
    record = read_attempt(run.attempt_record)
    if record.token != environ.get(TOKEN):
        print(f"hpc-mp: attempt {environ.get(TOKEN)} is no longer the run's current one; it ends", file=sys.stderr)
        return 1
    watch_stepd(run, environ)
    node = record.hosts.index(node_name(environ))
    guards(environ).mkdir(mode=0o700, exist_ok=True)
    mpi_environ = _environment(run, environ)
    access = NodeAccess(record, mpi_environ, received)
    mpirun = None
    try:
        mpirun = _start(run, record, mpi_environ) if node == 0 else None
    except HpcMpError as error:
        print(f"hpc-mp: {error}", file=sys.stderr, flush=True)
        with suppress(OSError):  # a full disk must not hide the reason: the log has it too
            message = f"{record.hosts[0]}: {error}"
            write_failure(run, RankFailure(0, record.hosts[0], "user", message, time.time(), record.attempt))
        return 2
    signals = PassedOn(run, record.attempt, f"SIG{read_program(run.program).signal}", guards(environ))
    children = DeadChildren(mpirun.pid, LAG_S) if mpirun is not None else None
    stuck = False
    while mpirun.poll() is None if mpirun is not None else not access.over.is_set():
        if mpirun is not None and children is not None and not stuck and children.noticed():
            stuck = True
            mpirun.kill()
        while received:
            signals.note(received.pop(0))
        signals.send()
        time.sleep(POLL_S)
    survivors = signals.end()
    code = first_code(guards(environ)) or (mpirun.returncode if mpirun is not None and not stuck else 0) or int(survivors)
    if mpirun is not None and code == 0:  # otherwise srun ends the tasks of the other nodes
        for host in record.hosts[1:]:
            with suppress(OSError, EOFError):  # it has ended with its daemon
                _ask(record, host, [END_OF_ALL], patience=0.0)
    return code if code >= 0 else 128 - code


def send_signal(record: AttemptRecord, number: str) -> None:
    """Make the tasks of all nodes forward a signal, named without SIG, to their ranks. If Slurm tracks processes by their
    parents (``proctrack/linuxproc``), its own signal would also reach mpirun and its daemons, which would end the ranks."""

    def ask(host: str) -> None:
        with suppress(OSError, EOFError, AuthenticationError):  # the task may have ended just now
            _ask(record, host, [SIGNAL, number], patience=0.0)

    with ThreadPoolExecutor(max_workers=min(WORKERS, len(record.hosts))) as pool:
        list(pool.map(ask, record.hosts))


def _environment(run: RunDirectory, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of mpirun and its daemons, and write the agent that they look up on PATH."""
    agent = guards(environ) / AGENT
    python = [sys.executable, "-P", "-m", "hpc_mp.program.node", str(run.path)]
    agent.write_text(f'#!/bin/sh\nexec {shlex.join(python)} "$@"\n', encoding="utf-8")
    agent.chmod(0o700)
    shared = without_task(environ)
    return {**shared, **as_root(), **by_agent(AGENT), OWN_PATH: shared["PATH"], "PATH": f"{agent.parent}:{shared['PATH']}"}


def _start(run: RunDirectory, record: AttemptRecord, environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start mpirun, which starts the ranks' guards. Raises HpcMpError if it is missing or of an unknown family."""
    mpirun = family(patient, OTHERWISE, SETTING, BRING)
    placement = from_dict(read_json(run.placement))
    rank = [sys.executable, "-P", "-m", "hpc_mp.program", str(run.path)]
    argv = ["mpirun", *mpirun.on(record.hosts, len(placement.ranks) // placement.nodes), *rank]
    signal.pthread_sigmask(signal.SIG_BLOCK, KEPT_BACK)
    try:
        with open(run.srun_log, "ab") as log:
            return subprocess.Popen(argv, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, KEPT_BACK)


class PassedOn:
    """Forwarding of signals from a node's task to the guards of its ranks. mpirun's daemons end the ranks at most signals."""

    def __init__(self, run: RunDirectory, attempt: int, stop: str, directory: Path) -> None:
        self._run, self._attempt, self._directory = run, attempt, directory
        self._stop = signal.Signals[stop]
        self._stop_requested, self._sent = False, 0.0

    def note(self, number: int) -> None:
        """Handle a received signal."""
        if number == signal.SIGABRT:  # the ranks hang: the programs themselves write their stacks at this signal
            for process in processes(self._run, self._attempt):
                _kill(process.pid, signal.SIGABRT)
        elif number in (self._stop, STOP):
            self._stop_requested = True
        else:
            self._to_guards(number)

    def send(self) -> None:
        """Repeat the request to stop once it has been made. A guard forwards it to its rank only once."""
        if self._stop_requested and time.monotonic() - self._sent > REPEAT_S:
            self._sent = time.monotonic()
            self._to_guards(STOP)

    def end(self) -> bool:
        """Kill ranks that outlived mpirun and its daemons, for example after the death of a daemon. Return True for any."""
        pids = self._guards()
        self._to_guards(signal.SIGKILL)  # their ranks die too
        return bool(pids)

    def _guards(self) -> list[int]:
        return [int(name) for name in os.listdir(self._directory) if name.isdigit() and _is_guard(name)]

    def _to_guards(self, number: int) -> None:
        for pid in self._guards():
            _kill(pid, number)


class NodeAccess:
    """The access point where mpirun's agents request the start of its daemon on this node. ``over``: set once the daemon or
    mpirun has ended."""

    def __init__(self, record: AttemptRecord, environ: Mapping[str, str], received: list[int]) -> None:
        self._secret, self._environ, self._received = record.secret.encode(), environ, received
        self.over = threading.Event()
        self._listener = Listener(("", record.port), backlog=16)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            with suppress(OSError, EOFError):
                caller = self._listener.accept()
                threading.Thread(target=self._serve, args=(caller,), daemon=True).start()

    def _serve(self, caller: Connection) -> None:
        with caller, suppress(OSError, EOFError, AuthenticationError, ValueError):
            deliver_challenge(caller, self._secret)
            answer_challenge(caller, self._secret)
            words = json.loads(caller.recv_bytes())
            if words[0] in (END_OF_ALL, SIGNAL):
                if words[0] == SIGNAL:
                    self._received.append(signal.Signals[f"SIG{words[1]}"])
                else:
                    self.over.set()
                caller.send_bytes(b"0")
                return
            signal.pthread_sigmask(signal.SIG_BLOCK, KEPT_BACK)  # of this thread; bash keeps the mask, dash does not
            daemon = subprocess.Popen(["bash", "-c", " ".join(words)], env=self._environ, stdin=subprocess.DEVNULL,
                                      start_new_session=True)
            try:
                caller.send_bytes(json.dumps(daemon.wait()).encode())
            finally:
                self.over.set()


def agent(path: Path, words: Sequence[str]) -> int:
    """Run words on a host of the job, like ``ssh HOST WORDS``, and return their exit code."""
    for number in KEPT_BACK:  # children of mpirun may get signals that mpirun itself blocks
        signal.signal(number, signal.SIG_IGN)
    words = [*words]
    while words and words[0].startswith("-"):  # an option of ssh
        words.pop(0)
    host, *command = words
    code = _ask(read_attempt(RunDirectory(path).attempt_record), host, command)
    return code if code >= 0 else 128 - code


def _ask(record: AttemptRecord, host: str, words: Sequence[str], patience: float = REACHED_S) -> int:
    """Send words to a node's task and return its answer. Raises OSError, or EOFError if the task ends."""
    secret, due = record.secret.encode(), time.monotonic() + patience
    address = dict(zip(record.hosts, record.addresses, strict=True))[host]
    while True:
        try:
            connection = Client((address, record.port))
            break
        except OSError:
            if time.monotonic() >= due:
                raise
            time.sleep(POLL_S)
    with connection:
        answer_challenge(connection, secret)
        deliver_challenge(connection, secret)
        connection.send_bytes(json.dumps(list(words)).encode())
        return int(json.loads(connection.recv_bytes()))


def _is_guard(pid: str) -> bool:
    """Return True if the process is still a guard: a killed guard has not removed its note."""
    return "hpc_mp.program" in read_proc(int(pid), "cmdline").split("\0")


def _kill(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


if __name__ == "__main__":
    sys.exit(agent(Path(sys.argv[1]), sys.argv[2:]) if len(sys.argv) > 2 else main(Path(sys.argv[1])))
