"""``python -m hpc_mp.program.stacks RUN ATTEMPT TIME``: record the stacks of a node's hung ranks.

py-spy is used if it is installed and the kernel permits it. Else ranks get SIGABRT at ``TIME`` (unix seconds, the same on all
nodes: the first rank that dies ends the others). Python then writes the stacks of all threads to the rank's log
(PYTHONFAULTHANDLER).
"""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_mp.base.files import write_text
from hpc_mp.rundir import RunDirectory
from hpc_mp.rundir.rank_env import SOURCES

TOOL = "py-spy"
TOOL_S = 4.0  # a process that does not answer the debugger (for example in state D) must not delay the others
ABORT_S = 4.0  # to write its stacks as it dies: the SIGABRT that ends the ranks afterwards would interrupt it
WORKERS = 8  # maximum number of further inspected processes of a rank, such as its data loader's
NO_CORE = 1  # byte: at this size no core is written to a file or a program (core(5)); a rank's core may be hundreds of GB
WORDS = 200  # characters of a command line


@dataclass(frozen=True, slots=True)
class RankProcess:
    """A process of a rank. ``environ``: its initial environment. ``state``: the kernel's state of the process, with the kernel
    function in which it sleeps."""

    pid: int
    parent: int
    rank: int
    command: tuple[str, ...]
    environ: Mapping[str, str]
    state: str

    def __str__(self) -> str:
        command = " ".join(" ".join(self.command).split())[:WORDS].encode(errors="replace").decode()
        return f"rank {self.rank}, pid {self.pid}, {self.state}: {command}"

    @property
    def is_python(self) -> bool:
        return "python" in os.path.basename(_link(self.pid, "exe"))


def record_stacks(run: RunDirectory, attempt: int, until: float = 0.0) -> list[int]:
    """Record the stacks of the ranks on this machine. Return the ranks. ``until``: unix seconds at which ranks without stacks
    from py-spy get SIGABRT."""
    ranks: dict[int, list[RankProcess]] = {}
    for process in processes(run, attempt):
        ranks.setdefault(process.rank, []).append(process)
    chosen = {rank: in_order(group)[:1 + WORKERS] for rank, group in ranks.items()}
    with ThreadPoolExecutor(max_workers=max(1, os.cpu_count() or 1)) as pool:
        futures = {process.pid: pool.submit(stack, process) for group in chosen.values() for process in group}
        stacks = {pid: future.result() for pid, future in futures.items()}
    for rank, group in chosen.items():
        text = "\n".join(f"{process}\n{stacks[process.pid]}" for process in group)
        with suppress(OSError):  # a full disk must not keep them alive
            write_text(run.rank_stack(rank), text)
    silent = [group[0].pid for group in chosen.values() if not any(stacks[process.pid] for process in group)]
    for pid in (process.pid for group in ranks.values() for process in group):
        without_core(pid)
    time.sleep(max(0.0, until - time.time()) if silent else 0.0)
    for pid in silent:
        with suppress(OSError):  # it has ended by now
            os.kill(pid, signal.SIGABRT)
    due = time.monotonic() + ABORT_S
    while any(map(lives, silent)) and time.monotonic() < due:
        time.sleep(0.05)
    return sorted(ranks)


def lives(pid: int) -> bool:
    """Return True if a process has not ended; a zombie has ended."""
    return "".join(stat_of(pid)[:1]) not in ("", "Z", "X")


def stat_of(pid: int) -> list[str]:
    """Return the fields of a process after its name, the state first; empty if it has ended or is hidden."""
    return read_proc(pid, "stat").rpartition(")")[2].split()


def read_proc(pid: int, name: str) -> str:
    """Return a file of a process; empty if it does not exist or belongs to another user."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="surrogateescape")
    return ""


def processes(run: RunDirectory, attempt: int) -> list[RankProcess]:
    """Return the processes of this attempt's ranks that this user may inspect, by pid."""
    variables = {"HPC_MP_RUN": str(run.path), "HPC_MP_ATTEMPT": str(attempt)}
    rank_processes = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(ValueError, IndexError):  # it has ended
                environ = dict(word.split("=", 1) for word in _words(int(entry), "environ") if "=" in word)
                rank = rank_of(environ) if variables.items() <= environ.items() else None
                if rank is not None:
                    rank_processes.append(_process(int(entry), rank, environ))
    return sorted(rank_processes, key=lambda process: process.pid)


def rank_of(environ: Mapping[str, str]) -> int | None:
    """Return the rank from torchrun's variable, else from an MPI launcher's; None for the one command of a node."""
    names = ("RANK",) if "NODE_RANK" in environ else ("RANK", *(rank for _, _, (rank, _, _) in SOURCES))
    return next((int(environ[name]) for name in names if name in environ), None)


def _process(pid: int, rank: int, environ: Mapping[str, str]) -> RankProcess:
    fields, where = stat_of(pid), read_proc(pid, "wchan").strip()
    state = f"state {fields[0]}" + (f" ({where})" if where not in ("", "0") else "")
    return RankProcess(pid, int(fields[1]), rank, tuple(_words(pid, "cmdline")), environ, state)


def in_order(processes: Sequence[RankProcess]) -> list[RankProcess]:
    """Sort the program itself first: the Python process that has no parent among them."""
    pids = {process.pid for process in processes if process.is_python}
    return sorted(processes, key=lambda process: (not process.is_python, process.parent in pids, process.pid))


def stack(process: RankProcess, run: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run) -> str:
    """Return the stacks of all threads in faulthandler's format; empty if py-spy cannot read them."""
    paths = (os.environ.get("PATH", ""), os.path.dirname(sys.executable), process.environ.get("PATH", ""),
             os.path.dirname(process.command[0]) if process.command else "")
    tool = shutil.which(TOOL, path=os.pathsep.join(filter(None, paths)))
    if tool is None or not process.is_python:
        return ""
    try:
        completed = run([tool, "dump", "--json", "--pid", str(process.pid)], capture_output=True, text=True, timeout=TOOL_S)
        return "".join(map(_thread, json.loads(completed.stdout)))
    except (OSError, ValueError, KeyError, TypeError, subprocess.SubprocessError):  # not permitted, or an unknown Python
        return ""


def _thread(thread: Mapping[str, Any]) -> str:
    calls = "".join(f'  File "{call["filename"]}", line {call["line"]} in {call["name"]}\n' for call in thread["frames"])
    return f'Thread 0x{thread["thread_id"]:x} "{thread["thread_name"]}" (most recent call first):\n{calls}\n'


def without_core(pid: int) -> None:
    """Prevent a core dump when the process dies."""
    with suppress(OSError, ValueError):
        _, hard_limit = resource.prlimit(pid, resource.RLIMIT_CORE)
        soft_limit = NO_CORE if hard_limit == resource.RLIM_INFINITY else min(NO_CORE, hard_limit)
        resource.prlimit(pid, resource.RLIMIT_CORE, (soft_limit, hard_limit))


def _words(pid: int, name: str) -> list[str]:
    return read_proc(pid, name).rstrip("\0").split("\0")


def _link(pid: int, name: str) -> str:
    with suppress(OSError):
        return os.readlink(f"/proc/{pid}/{name}")
    return ""


if __name__ == "__main__":
    record_stacks(RunDirectory(Path(sys.argv[1])), int(sys.argv[2]), float(sys.argv[3]))
