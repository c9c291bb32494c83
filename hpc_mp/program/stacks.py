"""``python -m hpc_mp.program.stacks RUN ATTEMPT TIME``: on a node whose ranks hang, write down where each of them stands.

By py-spy, where it is there and the kernel lets it; else by SIGABRT at ``TIME`` (unix seconds, the same on all nodes: the first
rank that dies ends the others), at which Python writes the stacks of all threads into the rank's log (PYTHONFAULTHANDLER).
"""

from __future__ import annotations

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
TOOL_S = 4.0  # a process that does not answer the debugger (in state D, say) must not keep the others waiting
ABORT_S = 4.0  # to write its stacks as it dies: another SIGABRT, which whoever ends it may send, would end it in the middle
WORKERS = 8  # further processes of a rank, its data loader's, that are looked at
NO_CORE = 1  # byte: of this size no core is written, to a file or to a program (core(5)); that of a rank may be hundreds of GB
WORDS = 200  # characters of a command line


@dataclass(frozen=True, slots=True)
class RankProcess:
    """A process of a rank.

    Attributes:
        environ: as it was started with.
        state: in the kernel's words, with where in the kernel it sleeps.
    """

    pid: int
    parent: int
    rank: int
    command: tuple[str, ...]
    environ: Mapping[str, str]
    state: str

    def __str__(self) -> str:
        words = " ".join(" ".join(self.command).split())[:WORDS].encode(errors="replace").decode()
        return f"rank {self.rank}, pid {self.pid}, {self.state}: {words}"

    @property
    def is_python(self) -> bool:
        return "python" in os.path.basename(_link(self.pid, "exe"))


def record_stacks(run: RunDirectory, attempt: int, until: float = 0.0) -> list[int]:
    """Write down where the ranks of this machine stand; the ranks that were found.

    Args:
        until: when those get SIGABRT of which py-spy has told nothing.
    """
    ranks: dict[int, list[RankProcess]] = {}
    for process in processes(run, attempt):
        ranks.setdefault(process.rank, []).append(process)
    chosen = {rank: in_order(found)[:1 + WORKERS] for rank, found in ranks.items()}
    with ThreadPoolExecutor(max_workers=max(1, os.cpu_count() or 1)) as pool:
        asked = {process.pid: pool.submit(stack, process) for found in chosen.values() for process in found}
        stacks = {pid: answer.result() for pid, answer in asked.items()}
    for rank, found in chosen.items():
        text = "\n".join(f"{process}\n{stacks[process.pid]}" for process in found)
        with suppress(OSError):  # a full disk must not keep them from being ended
            write_text(run.rank_stack(rank), text)
    silent = [found[0].pid for found in chosen.values() if not any(stacks[process.pid] for process in found)]
    for pid in (process.pid for found in ranks.values() for process in found):
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
    """Return if a process has not ended, buried or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def processes(run: RunDirectory, attempt: int) -> list[RankProcess]:
    """Those of this attempt's ranks that this user may look into, by pid."""
    wanted = {"HPC_MP_RUN": str(run.path), "HPC_MP_ATTEMPT": str(attempt)}
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError, ValueError, IndexError):  # it has ended, or is somebody else's
                environ = dict(word.split("=", 1) for word in _words(entry, "environ") if "=" in word)
                rank = rank_of(environ) if wanted.items() <= environ.items() else None
                if rank is not None:
                    found.append(_process(int(entry), rank, environ))
    return sorted(found, key=lambda process: process.pid)


def rank_of(environ: Mapping[str, str]) -> int | None:
    """By the name of torchrun's, else by that of MPI's launcher; None for the one command of a node, which is no rank."""
    names = ("RANK",) if "NODE_RANK" in environ else ("RANK", *(rank for _, _, (rank, _, _) in SOURCES))
    return next((int(environ[name]) for name in names if name in environ), None)


def _process(pid: int, rank: int, environ: Mapping[str, str]) -> RankProcess:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    where = ""
    with suppress(OSError):
        where = Path(f"/proc/{pid}/wchan").read_text(encoding="ascii").strip()
    state = f"state {fields[0]}" + (f" ({where})" if where not in ("", "0") else "")
    return RankProcess(pid, int(fields[1]), rank, tuple(_words(str(pid), "cmdline")), environ, state)


def in_order(processes: Sequence[RankProcess]) -> list[RankProcess]:
    """The program itself first: of the processes that are Python's the one that none of the others has started."""
    pids = {process.pid for process in processes if process.is_python}
    return sorted(processes, key=lambda process: (not process.is_python, process.parent in pids, process.pid))


def stack(process: RankProcess, run: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run) -> str:
    """The stacks of all its threads as faulthandler writes them; empty where py-spy cannot tell."""
    near = (os.environ.get("PATH", ""), os.path.dirname(sys.executable), process.environ.get("PATH", ""),
            os.path.dirname(process.command[0]) if process.command else "")
    tool = shutil.which(TOOL, path=os.pathsep.join(filter(None, near)))
    if tool is None or not process.is_python:
        return ""
    try:
        said = run([tool, "dump", "--json", "--pid", str(process.pid)], capture_output=True, text=True, timeout=TOOL_S)
        return "".join(map(_thread, json.loads(said.stdout)))
    except (OSError, ValueError, KeyError, TypeError, subprocess.SubprocessError):  # it may not, or does not know this Python
        return ""


def _thread(thread: Mapping[str, Any]) -> str:
    calls = "".join(f'  File "{call["filename"]}", line {call["line"]} in {call["name"]}\n' for call in thread["frames"])
    return f'Thread 0x{thread["thread_id"]:x} "{thread["thread_name"]}" (most recent call first):\n{calls}\n'


def without_core(pid: int) -> None:
    """Let it write no core as it dies."""
    with suppress(OSError, ValueError):
        _, most = resource.prlimit(pid, resource.RLIMIT_CORE)
        allowed = NO_CORE if most == resource.RLIM_INFINITY else min(NO_CORE, most)
        resource.prlimit(pid, resource.RLIMIT_CORE, (allowed, most))


def _words(pid: str, name: str) -> list[str]:
    return Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="surrogateescape").rstrip("\0").split("\0")


def _link(pid: int, name: str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/{name}")
    except OSError:
        return ""


if __name__ == "__main__":
    record_stacks(RunDirectory(Path(sys.argv[1])), int(sys.argv[2]), float(sys.argv[3]))
