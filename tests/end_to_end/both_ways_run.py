"""One lab on which several scripts at a time run both ways, each on two hosts of its own."""

import json
import pwd
import re
import shutil
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from subprocess import CompletedProcess
from typing import Any

from both_ways_compare import Plain, Way, differences, recordings, refusal, tree
from both_ways_recorder import MOST
from both_ways_sandbox import Sandbox, scaled
from slurm_lab.cluster import USER, LabError, wait_until
from slurm_lab.lab import Lab

from hpc_mp.rundir import RunDirectory
from hpc_mp.rundir.outcome import verdict
from hpc_mp.supervisor.script import script_code

NODES = 2
SHARED = ("tmp", "var/tmp", "dev/shm")  # places of a host to which everybody may write
HPC_MP = (sys.executable, "-P", "-m", "hpc_mp")
PATIENT = {"SlurmdTimeout": "300", "MessageTimeout": "90", "BatchStartTimeout": "200", "KillWait": "2", "MailProg": "/bin/true",
           "FirstJobId": "7000001", "TCPTimeout": "60", "MinJobAge": "300", "UnkillableStepTimeout": "900"}


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
        owner = pwd.getpwnam(USER)
        self.sandbox = Sandbox(lab.share / self.partition, (owner.pw_uid, owner.pw_gid))
        self.roots = [Path(f"/proc/{lab._init_of(node)}/root") for node in self.nodes]
        for node in self.nodes:  # nothing of this machine to which everybody may write is left but the lab itself
            own = str(lab.directory)
            hide = ("mkdir /run/own", f"mount --bind {own} /run/own", "mount -t tmpfs -o mode=1777 none /var/tmp",
                    f"mkdir -p {own}", f"mount --move /run/own {own}")
            lab.at(node, ["bash", "-c", " && ".join(hide)])

    def both(self, case: Case) -> dict[str, Any]:
        """Run a script both ways, and return its result. A difference counts if the script does not differ from itself."""
        text = scaled(case.text, self.partition)
        plain = self.plain(case, text)
        result: dict[str, Any] = {"script": case.name, "seed": case.seed, "programs": len(plain.programs), "code": plain.code}
        if plain.excess or (plain.code is None and not plain.refused):
            return result | {"state": "too long"}
        adopted, facts = self.adopted(case, text)
        result |= facts | {"adopted_code": adopted.code}
        if plain.refused and adopted.refused:
            return result | {"state": "refused", "why": [plain.refused, adopted.refused]}
        if adopted.code is None and not adopted.refused:
            return result | {"state": "too long", "why": "adopted"}
        lines = differences(plain, adopted, started_by_us=facts["start"] == "rank")
        result |= {"state": "equal", "differences": lines}
        if lines:
            itself = differences(plain, self.plain(case, text))
            kinds = {line.split(":")[0] for line in itself}
            lines = [line for line in lines if line.split(":")[0] not in kinds]
            unstable = any(line.startswith("program") for line in itself)
            state = "varies" if unstable or not lines else "named" if facts["lost"] else "differs"
            result |= {"state": state, "itself": itself[:20], "differences": lines[:60]}
        return result

    def plain(self, case: Case, text: str) -> Way:
        self._prepare(case, text)
        submitted = self._run("/usr/bin/sbatch", "--parsable", case.file)
        if submitted.returncode:
            return refusal(submitted.stderr)
        job = submitted.stdout.strip().split("\n")[-1].split(";")[0]
        return self._way(job, self._wait(job), None)

    def adopted(self, case: Case, text: str) -> tuple[Way, dict[str, Any]]:
        self._prepare(case, text)
        facts: dict[str, Any] = {"start": "", "lost": []}
        adopt = self._run(*HPC_MP, "adopt", case.file, "-o", "job.toml", "--json")
        if adopt.returncode:
            return refusal(f"adopt: {adopt.stderr}"), facts
        document = json.loads(adopt.stdout)
        facts["lost"] = [f"{line['text']}: {line['why']}" for line in document["account"]
                         if line["fate"] == "not carried over" or (line["fate"], line["where"]) == ("replaced", "job.nodes")]
        facts["start"] = "script" if 'start = "script"' in document["text"] else "rank"
        launch = self._run(*HPC_MP, "launch", "job.toml", "--on", "slurm", "--set", "environment.health=false", "--json")
        answer = re.search(r'"job_id": "?(\d+)', launch.stdout)
        if launch.returncode or answer is None:
            return refusal(f"launch: {launch.stderr}"), facts
        code = self._wait(answer[1])
        run = RunDirectory(max(self.sandbox.work.glob("runs/*/0*")))
        end = verdict(run)
        facts |= {"state_of_run": end.state if end else None, "cause": end.cause.message[:300] if end and end.cause else None}
        inner = script_code(run) if facts["start"] == "script" else None
        return self._way(answer[1], code if inner is None else inner if inner >= 0 else 128 - inner, run), facts

    def _run(self, *words: str) -> CompletedProcess[str]:
        """Run a program as an ordinary user on the submit host, with no variables but those of the sandbox."""
        variables = (f"{name}={value}" for name, value in (self.sandbox.environ() | {"SLURM_CONF": str(self.lab.conf)}).items())
        return self.lab.run(["env", "-i", *variables, *words], user=USER, cwd=self.sandbox.work, timeout=600)

    def _prepare(self, case: Case, text: str) -> None:
        for path in (path for root in self.roots for place in SHARED for path in (root / place).iterdir()):
            if path.name != self.lab.directory.name:
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        self.sandbox.make(case.file, text, case.seed)

    def _wait(self, job: str) -> int | None:
        """Wait for the end of a job, and return its exit code; None if it takes too long, and is cancelled."""
        with suppress(LabError):
            wait_until(lambda: self._code(job) is not None, f"the end of job {job}", self.limit)
            return self._code(job)
        self.lab.run(["scancel", job])
        with suppress(LabError):
            wait_until(lambda: self._code(job) is not None, f"the end of the cancelled job {job}")
        return None

    def _code(self, job: str) -> int | None:
        """Return the exit code of a job by Slurm's own list of ended jobs."""
        ended = re.compile(rf"JobId={job} .*?JobState=(?!REQUEUED)\w+ .*? ExitCode=(\d+):(\d+)")
        with suppress(OSError):
            if match := ended.search((self.lab.directory / "log" / "jobcomp.txt").read_text()):
                return int(match[2]) + 128 if int(match[2]) else int(match[1])
        return None

    def _way(self, job: str, code: int | None, run: RunDirectory | None) -> Way:
        programs = recordings(self.sandbox.seen)
        plain = Plain([job], [str(run.user_script)] if run else [], str(run.shims) if run else "")
        elsewhere = {f"/{path.relative_to(root)}" for root in self.roots for place in SHARED for path in self._left(root / place)}
        elsewhere |= {f"~/{path.relative_to(self.sandbox.home)}" for path in self.sandbox.home.rglob("*")}
        return Way(tuple(map(plain.recording, programs)), tree(self.sandbox.work, plain), frozenset(map(plain.text, elsewhere)),
                   code, excess=len(programs) > MOST)

    def _left(self, top: Path) -> Iterator[Path]:
        for path in top.iterdir():
            if path.name != self.lab.directory.name:
                yield path
                yield from path.rglob("*") if path.is_dir() and not path.is_symlink() else ()


def run_all(lab: Lab, cases: Iterable[Case], cells: int, limit: float, until: float = float("inf")) -> Iterator[dict[str, Any]]:
    """Run scripts both ways, as many at a time as there are cells, and yield their results as they come.

    Args:
        until: the moment (``time.time``) after which no script is begun.
    """
    idle: SimpleQueue[Cell] = SimpleQueue()
    for number in range(cells):
        idle.put(Cell(lab, number, limit))

    def result(case: Case) -> dict[str, Any] | None:
        if time.time() > until:
            return None
        cell = idle.get()
        try:
            return cell.both(case)
        except Exception:
            return {"script": case.name, "state": "error", "why": traceback.format_exc()[-1500:]}
        finally:
            idle.put(cell)

    with ThreadPoolExecutor(cells) as pool:
        yield from filter(None, (done.result() for done in as_completed([pool.submit(result, case) for case in cases])))
