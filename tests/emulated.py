"""Fake ranks that need no torch, and a launcher for them that runs as a process of its own.

``python emulated.py RUN RANKS`` starts RANKS fake ranks (their deeds in the environment: ``DEED_<rank>``, else ``DEED``)
and prints how they ended as one JSON document.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from hpc_mp.launch.emulator import Emulator, Task
from hpc_mp.launch.interrupts import Interrupts
from hpc_mp.launch.progress import Quiet
from hpc_mp.launch.tail import Attempt
from hpc_mp.launch.watch import Ended, watch
from hpc_mp.rundir import RunDirectory

ENTRY = "emulated:rank"
MARK = "HPC_MP_TEST_MARK"


def rank(job_file: Path) -> int:
    """The entry of every fake rank."""
    number = os.environ["SLURM_PROCID"]
    print(f"rank {number} lives")
    (job_file.parent / f"alive-{number}").touch()
    return DEEDS[os.environ.get(f"DEED_{number}", os.environ.get("DEED", "end"))](job_file)


def end(job_file: Path) -> int:
    return 0


def hang(job_file: Path) -> int:
    while True:
        signal.pause()


def hang_deaf(job_file: Path) -> int:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return hang(job_file)


def fail(job_file: Path) -> int:
    raise ValueError("boom")


def leave(job_file: Path) -> int:
    sys.exit(7)


def segfault(job_file: Path) -> int:
    os.kill(os.getpid(), signal.SIGSEGV)
    return hang(job_file)


def killed(job_file: Path) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return hang(job_file)


def save_and_stop(job_file: Path) -> int:
    """What a real rank does: the handler sets a flag, the next step boundary sees it."""
    asked = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    (job_file.parent / f"ready-{os.environ['SLURM_PROCID']}").touch()
    while not asked:
        time.sleep(0.02)
    return 75


def echo(job_file: Path) -> int:
    """Ends in failure shortly after another rank did, as a collective makes it."""
    time.sleep(0.3)
    return 1


def tell(job_file: Path) -> int:
    """Writes down what it sees of itself."""
    descriptors = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            descriptors[name] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
    listening = False
    if "HPC_MP_LISTEN_FD" in os.environ:
        with socket.socket(fileno=int(os.environ["HPC_MP_LISTEN_FD"])) as listener:
            listening = listener.getsockname()[1] == int(os.environ["MASTER_PORT"])
            assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    document = {"environ": dict(os.environ), "fds": descriptors, "listening": listening, "cwd": os.getcwd(),
                "sigint": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
                "sigterm": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
                "sigchld": signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL, "parent": os.getppid(),
                "torch": "torch" in sys.modules}
    (job_file.parent / f"told-{os.environ['SLURM_PROCID']}.json").write_text(json.dumps(document))
    return 0


DEEDS: dict[str, Callable[[Path], int]] = {f.__name__: f for f in (
    end, hang, hang_deaf, fail, leave, segfault, killed, save_and_stop, echo, tell)}


def emulate(run: RunDirectory, ranks: int, environment: Mapping[str, str]) -> Ended:
    """Start fake ranks and follow them to their end."""
    modules = (ENTRY.partition(":")[0],)
    with (Emulator(modules, environment) as emulator, Interrupts() as interrupts, open(run.path / ".lock", "w") as lock,
          socket.create_server(("127.0.0.1", 0)) as listener):
        port = str(listener.getsockname()[1])
        tasks = [Task(run.rank_log(n), {"SLURM_PROCID": str(n), "MASTER_PORT": port}) for n in range(ranks)]
        emulator.start(tasks, run.job, listener, lock.fileno(), ENTRY)
        return watch(emulator, ranks, Attempt(run, 1), interrupts, Quiet())


def marked(mark: str) -> list[psutil.Process]:
    """The living processes whose environment carries ``mark``."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


if __name__ == "__main__":
    how = emulate(RunDirectory(Path(sys.argv[1])), int(sys.argv[2]), os.environ)
    print(json.dumps(dataclasses.asdict(how)))
