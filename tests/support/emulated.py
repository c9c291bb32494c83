"""Fake ranks that need no torch; what one does stands in its environment: ``DEED_<rank>``, else ``DEED``.

``python emulated.py RUN RANKS`` starts RANKS of them and prints how they ended as one JSON document.
"""

import dataclasses
import functools
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job import load_job
from hpc_mp.launch.backends.interrupts import Interrupts
from hpc_mp.launch.backends.watch import RanksEnd, watch
from hpc_mp.launch.emulator.emulator import EmulatedRank, Emulator
from hpc_mp.launch.listener import Teller
from hpc_mp.rundir import LineFile, Manifest, RunDirectory, newest_complete, write_json, write_manifest
from hpc_mp.rundir.attempt import AttemptReader
from hpc_mp.rundir.records import StepMetrics, line_of

ENTRY = "emulated:rank"
NO_WARNING, A_WARNING = "emulated:no_warning", "emulated:a_warning"  # in place of what asks transformers
if "LAG" in os.environ:
    sys.modules["__main__"].LAG_S = float(os.environ["LAG"])  # type: ignore[attr-defined]  # of the zygote that imports us


def no_warning(*_: Any) -> list[str]:
    return []


def a_warning(*_: Any) -> list[str]:
    return ["a warning"]


def asked(what: str) -> Any:
    """What the launcher asks of the zygote: every way in which a call can end."""
    os.environ["LEFT"] = what
    if what == "refuse":
        raise HpcMpError("a value", "a rule", "a remedy")
    if what == "die":
        os.kill(os.getpid(), signal.SIGSEGV)
    return {"left": what, "numbers": [1, 2.5]}[what]


def rank(job_file: Path) -> int:
    """The entry of every fake rank."""
    number = os.environ["SLURM_PROCID"]
    print(f"rank {number} lives")
    (job_file.parent / f"alive-{number}").write_bytes(Path("/proc/self/cmdline").read_bytes())
    return DEEDS[os.environ.get(f"DEED_{number}", os.environ.get("DEED", "end"))](job_file)


def hang(job_file: Path) -> int:
    while True:
        signal.pause()


def hang_deaf(job_file: Path) -> int:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (job_file.parent / f"ready-{os.environ['SLURM_PROCID']}").touch()
    return hang(job_file)


def fail(job_file: Path) -> int:
    raise ValueError("boom")


def die(job_file: Path, number: signal.Signals) -> int:
    os.kill(os.getpid(), number)
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


def train(job_file: Path) -> int:
    """Trains without a model: rank 0 writes what a real one does. ``PAUSE``: seconds per step, cut short by a stop."""
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    run, steps = RunDirectory(job_file.parent), load_job(job_file).train.steps
    newest, _ = newest_complete(run.checkpoints)
    first = int(newest.name[-8:]) if newest else 0
    if os.environ["SLURM_PROCID"] != "0":
        while first < steps and not asked and not (run.checkpoints / f"step-{steps:08d}").exists():
            time.sleep(0.02)
        return 75 if asked else 0
    metrics = LineFile(run.metrics)
    for step in range(first + 1, steps + 1):
        metrics.write(line_of(StepMetrics(step, 8.0 / step, 100 * step, 0.5 if step > first + 1 else 5.0, 200.0, 1.0, 0,
                                          attempt=run.attempt())))
        ended = time.monotonic() + float(os.environ.get("PAUSE", "0"))
        while time.monotonic() < ended and not asked:
            time.sleep(0.02)
        if asked or step == steps:
            directory = run.checkpoints / f"step-{step:08d}"
            directory.mkdir()
            write_manifest(directory, Manifest(step, {}))
            return 75 if asked else 0
    return 0


def report_failure(job_file: Path, kind: str, message: str, code: int = 1) -> int:
    run, number = RunDirectory(job_file.parent), int(os.environ["SLURM_PROCID"])
    write_json(run.failure(run.attempt(), number), {
        "attempt": run.attempt(), "rank": number, "node": os.environ["SLURMD_NODENAME"], "host": "here",
        "pid": os.getpid(), "time": time.time(), "kind": kind, "message": message, "traceback": ""})
    return code


def multiply(job_file: Path) -> int:
    """Uses the torch that was imported before the fork, with threads of its own."""
    import torch

    torch.set_num_threads(2)
    matrix = torch.randn(300, 300, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    same = torch.allclose(torch.linalg.inv(matrix) @ matrix, torch.eye(300, dtype=torch.float64))
    threads = len(os.listdir("/proc/self/task"))
    print(f"same {same}, several threads {threads > 1}")
    return 0


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
    hang, hang_deaf, fail, save_and_stop, echo, tell, train, multiply)} | {
    "end": lambda _: 0,
    "leave": lambda _: sys.exit(7),
    "segfault": functools.partial(die, number=signal.SIGSEGV),
    "killed": functools.partial(die, number=signal.SIGKILL),
    "wrong_input": functools.partial(report_failure, kind="user", message="data.files = x: is empty. give text.", code=2),
    "error": functools.partial(report_failure, kind="error", message="ValueError: boom"),
    "peer": functools.partial(report_failure, kind="peer", message="RuntimeError: Connection closed by peer")}


def emulate(run: RunDirectory, ranks: int, environment: Mapping[str, str], more: Sequence[str] = ()) -> RanksEnd:
    """Start fake ranks and follow them to their end; ``more``: what else is imported before they are forked."""
    modules = (ENTRY.partition(":")[0], *more)
    with (Emulator(modules, environment) as emulator, Interrupts() as interrupts, open(run.path / ".lock", "w") as lock,
          socket.create_server(("127.0.0.1", 0)) as listener):
        port = str(listener.getsockname()[1])
        tasks = [EmulatedRank(run.rank_log(n), {"SLURM_PROCID": str(n), "MASTER_PORT": port}) for n in range(ranks)]
        emulator.start(tasks, run.job, listener, lock.fileno(), ENTRY)
        return watch(emulator, AttemptReader(run, 1), interrupts, Teller(functools.partial(print, file=sys.stderr, flush=True)))


if __name__ == "__main__":
    print(json.dumps(dataclasses.asdict(emulate(RunDirectory(Path(sys.argv[1])), int(sys.argv[2]), os.environ))))
