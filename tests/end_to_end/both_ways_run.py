"""One lab on which several scripts at a time run both ways, each on two hosts of its own."""

from __future__ import annotations

import ctypes
import json
import os
import pwd
import re
import runpy
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from both_ways_compare import Plain, Way, differences, recordings, tree
from both_ways_recorder import MOST
from both_ways_sandbox import Sandbox, scaled
from slurm_lab.lab import Lab

import hpc_mp.cli.main  # noqa: F401  (forks have it)
from hpc_mp.rundir import RunDirectory
from hpc_mp.rundir.outcome import verdict
from hpc_mp.supervisor.script import script_code

NODES, POLL_S = 2, 0.05
NAMESPACES = ("mnt", "uts", "ipc", "net")
NOBODY = pwd.getpwnam("nobody")
PATIENT = {"SlurmdTimeout": "300", "MessageTimeout": "90", "BatchStartTimeout": "200", "KillWait": "2", "MailProg": "/bin/true",
           "FirstJobId": "7000001", "TCPTimeout": "60", "MinJobAge": "300", "UnkillableStepTimeout": "900"}
ENDED = re.compile(r"JobId=(\d+) .*?JobState=(\w+) .*? ExitCode=(\d+):(\d+)")

Waiting = Generator[Callable[[], object], None, Any]


@dataclass(frozen=True)
class Case:
    """A script: its name in the results, the name of its file, its text, and the seed of its programs' exit codes."""

    name: str
    file: str
    text: str
    seed: int


def lab_for(cells: int) -> Lab:
    """Return a lab of pairs of hosts, each a partition of its own, with more CPUs, memory and GPUs than there are."""
    pairs = [(f"n{NODES * cell + 1}", f"n{NODES * cell + 2}") for cell in range(cells)]
    partitions = "\nPartitionName=".join(f"c{cell} Nodes={','.join(pair)}" for cell, pair in enumerate(pairs))
    lab = Lab(gpus=8, leaves=pairs, patience=600, overrides={**PATIENT, "PartitionName": partitions})
    lab.node = "CPUs=32 RealMemory=200000 Gres=gpu:8"
    return lab


class Cell:
    """Two hosts of the lab, on which one script at a time runs both ways."""

    def __init__(self, lab: Lab, number: int, limit: float) -> None:
        self.lab, self.partition, self.limit = lab, f"c{number}", limit
        self.nodes = lab.nodes[NODES * number:NODES * (number + 1)]
        self.sandbox = Sandbox(lab.share / self.partition, (NOBODY.pw_uid, NOBODY.pw_gid))
        self.roots = [Path(f"/proc/{lab._init_of(node)}/root") for node in self.nodes]
        self.seconds = 0.0
        for node in self.nodes:  # nothing of this machine to which everybody may write is left but the lab itself
            own = str(lab.directory)
            hide = ("mkdir /run/own", f"mount --bind {own} /run/own", "mount -t tmpfs -o mode=1777 none /var/tmp",
                    f"mkdir -p {own}", f"mount --move /run/own {own}")
            lab.at(node, ["bash", "-c", " && ".join(hide)])

    def both(self, case: Case) -> Waiting:
        """Run a script both ways, and return its result. A difference counts if the script does not differ from itself."""
        text = scaled(case.text, self.partition)
        plain = yield from self.plain(case, text)
        result: dict[str, Any] = {"script": case.name, "seed": case.seed, "programs": len(plain.programs), "code": plain.code}
        if plain.excess or (plain.code is None and not plain.refused):
            return result | {"state": "too long", "why": plain.notes}
        adopted, facts = yield from self.adopted(case, text)
        result |= facts | {"adopted_code": adopted.code}
        if plain.refused and adopted.refused:
            return result | {"state": "refused", "why": [plain.refused, adopted.refused]}
        if adopted.code is None and not adopted.refused:
            return result | {"state": "too long", "why": ("adopted", *adopted.notes)}
        lines = differences(plain, adopted, started_by_us=facts["start"] == "rank")
        output = sorted((Counter(plain.output) - Counter(adopted.output)).elements()), \
            sorted((Counter(adopted.output) - Counter(plain.output)).elements())
        result |= {"state": "equal", "differences": lines, "output": output, "elsewhere": sorted(adopted.elsewhere)}
        if lines:
            again = yield from self.plain(case, text)
            itself = differences(plain, again)
            kinds = {line.split(":")[0] for line in itself}
            lines = [line for line in lines if line.split(":")[0] not in kinds]
            unstable = any(line.startswith("program") for line in itself)
            state = "varies" if unstable or not lines else "named" if facts["lost"] else "differs"
            result |= {"state": state, "itself": itself[:20], "differences": lines[:60]}
        return result

    def plain(self, case: Case, text: str) -> Waiting:
        """Run the script by sbatch."""
        self._prepare(case, text)
        submit = Fork(self.lab, ["sbatch", "--parsable", case.file], self.sandbox, self.sandbox.work, real=True)
        yield submit.ended
        if submit.code:
            return Way((), {}, frozenset(), None, refused=submit.text()[-300:])
        job = submit.text().strip().split("\n")[-1].split(";")[0]
        code = yield from self._wait(job)
        log = "".join(path.read_text(errors="replace") for path in self.sandbox.work.glob("slurm-*.out"))
        return self._way(job, code, log, "")

    def adopted(self, case: Case, text: str) -> Waiting:
        """Adopt the script, and launch its job file."""
        self._prepare(case, text)
        facts: dict[str, Any] = {"start": "", "lost": [], "notes": []}
        adopt = Fork(self.lab, ["hpc-mp", "adopt", case.file, "-o", "job.toml", "--json"], self.sandbox, self.sandbox.work)
        yield adopt.ended
        if adopt.code:
            return Way((), {}, frozenset(), None, refused=f"adopt: {adopt.text()[-300:]}"), facts
        with suppress(ValueError):
            document = json.loads(adopt.text()[adopt.text().index("{"):])
            lost = [f"{line['text']}: {line['why']}" for line in document["account"] if line["fate"] == "not carried over"]
            lost += [f"{line['text']}: {line['why']}" for line in document["account"]
                     if line["fate"] == "replaced" and line["where"] == "job.nodes"]
            facts |= {"lost": lost, "notes": document["notes"]}
            facts["start"] = "script" if 'start = "script"' in document["text"] else "rank"
        launch = Fork(self.lab, ["hpc-mp", "launch", "job.toml", "--on", "slurm", "--set", "environment.health=false", "--json"],
                      self.sandbox, self.sandbox.work)
        yield launch.ended
        answer = re.search(r'"job_id": "?(\d+)', launch.text())
        if launch.code or answer is None:
            return Way((), {}, frozenset(), None, refused=f"launch: {launch.text()[-300:]}"), facts
        code = yield from self._wait(answer[1])
        facts["attempts"] = len(list(self.sandbox.work.glob("runs/*/0*/attempts/*")))
        runs = sorted(self.sandbox.work.glob("runs/*/0*"))
        run = RunDirectory(runs[-1])
        log = run.srun_log.read_text(errors="replace") if run.srun_log.exists() else ""
        end = verdict(run) if runs else None
        facts |= {"state_of_run": end.state if end else None, "cause": end.cause.message[:300] if end and end.cause else None}
        inner = script_code(run)
        if inner is not None and facts["start"] == "script":
            facts["code_of_job"] = code
            code = inner if inner >= 0 else 128 - inner
        return self._way(answer[1], code, log, str(run.path)), facts

    def _prepare(self, case: Case, text: str) -> None:
        for root in self.roots:
            for place in ("tmp", "var/tmp", "dev/shm"):
                for path in (root / place).iterdir():
                    if not self.lab.directory.is_relative_to(f"/{place}") or path.name != self.lab.directory.name:
                        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        self.sandbox.make(case.file, text, case.seed)

    def _wait(self, job: str) -> Waiting:
        """Wait for the end of a job, and return its exit code; None if it takes too long, and is cancelled."""
        ends, deadline = Ends(self.lab.directory / "log" / "jobcomp.txt", job), time.monotonic() + self.limit
        yield lambda: ends.code() is not None or time.monotonic() > deadline
        if ends.code() is None:
            cancel = Fork(self.lab, ["scancel", job], self.sandbox, Path("/"), real=True)
            yield cancel.ended
            deadline = time.monotonic() + 60
            yield lambda: ends.code() is not None or time.monotonic() > deadline
            return None
        return ends.code()

    def _way(self, job: str, code: int | None, log: str, run: str) -> Way:
        programs = recordings(self.sandbox.seen)
        script = str(RunDirectory(Path(run)).user_script) if run else ""
        plain = Plain([job], [script], str(RunDirectory(Path(run)).shims) if run else "")
        elsewhere = {f"/{path.relative_to(root)}" for root in self.roots for place in ("tmp", "var/tmp", "dev/shm")
                     for path in self._left(root / place)}
        elsewhere |= {f"~/{path.relative_to(self.sandbox.home)}" for path in self.sandbox.home.rglob("*")}
        output = tuple(sorted(map(plain.text, log.splitlines())))
        places = frozenset(map(plain.text, elsewhere))
        return Way(tuple(map(plain.recording, programs)), tree(self.sandbox.work, plain), places, code, output,
                   excess=len(programs) > MOST, notes=(f"{len(programs)} programs",))

    def _left(self, top: Path) -> Iterator[Path]:
        for path in top.iterdir():
            if path.name != self.lab.directory.name:
                yield path
                yield from path.rglob("*") if path.is_dir() and not path.is_symlink() else ()


class Ends:
    """The end of a job, in Slurm's own list of ended jobs."""

    def __init__(self, path: Path, job: str) -> None:
        self._path, self._job = path, job

    def code(self) -> int | None:
        with suppress(OSError):
            for match in ENDED.finditer(self._path.read_text()):
                if match[1] == self._job and match[2] != "REQUEUED":
                    return int(match[4]) + 128 if int(match[4]) else int(match[3])
        return None


class Fork:
    """A program of an ordinary user on the submit host: a real one, or hpc-mp as a fork of this process, which imported it."""

    def __init__(self, lab: Lab, words: Sequence[str], sandbox: Sandbox, directory: Path, *, real: bool = False) -> None:
        self._file, self.code = os.memfd_create("output"), None
        environ = sandbox.environ() | {"SLURM_CONF": str(lab.conf)}
        init = lab._init_of(None)
        self._pid = os.fork()
        if self._pid == 0:
            _become(init, list(words), environ, directory, self._file, real)

    def ended(self) -> bool:
        if self.code is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code is not None

    def text(self) -> str:
        return os.pread(self._file, 1 << 20, 0).decode(errors="replace")

    def __del__(self) -> None:
        os.close(self._file)


def _become(init: int, words: list[str], environ: Mapping[str, str], directory: Path, output: int, real: bool) -> None:
    code = 1
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        for descriptor in [os.open(f"/proc/{init}/ns/{kind}", os.O_RDONLY) for kind in NAMESPACES]:
            if libc.setns(descriptor, 0):
                raise OSError(ctypes.get_errno(), "setns")
        os.setsid()
        os.setgroups([])
        os.setgid(NOBODY.pw_gid)
        os.setuid(NOBODY.pw_uid)
        os.chdir(directory)
        for number, descriptor in enumerate((os.open(os.devnull, os.O_RDONLY), output, output)):
            os.dup2(descriptor, number)
        signal.set_wakeup_fd(-1)
        if real:
            os.closerange(3, 100)
            os.execvpe(f"/usr/bin/{words[0]}", words, environ)
        os.environ.clear()
        os.environ.update(environ)
        sys.stdin, sys.stdout, sys.stderr = (os.fdopen(n, "w" if n else "r", buffering=1, closefd=False) for n in range(3))
        sys.argv = words
        runpy.run_module("hpc_mp", run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_all(lab: Lab, cases: Iterable[Case], cells: int, limit: float, until: float = float("inf")) -> Iterator[dict[str, Any]]:
    """Run scripts both ways, as many at a time as there are cells, and yield their results as they come.

    Args:
        until: the moment (``time.time``) after which no script is begun.
    """
    rest = iter(cases)
    idle = [Cell(lab, number, limit) for number in range(cells)]
    busy: list[tuple[Cell, Case, Waiting, Callable[[], object]]] = []
    while True:
        while idle and time.time() < until and (case := next(rest, None)) is not None:
            cell = idle.pop()
            steps = cell.both(case)
            busy.append((cell, case, steps, next(steps)))
        if not busy:
            return
        for entry in list(busy):
            cell, case, steps, condition = entry
            try:
                if not condition():
                    continue
                busy[busy.index(entry)] = (cell, case, steps, next(steps))
            except StopIteration as end:
                busy.remove(entry)
                idle.append(cell)
                yield end.value
            except Exception:
                busy.remove(entry)
                idle.append(cell)
                yield {"script": case.name, "state": "error", "why": traceback.format_exc()[-1500:]}
        time.sleep(POLL_S)
