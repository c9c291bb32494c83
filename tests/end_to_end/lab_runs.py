"""Runs on the lab's Slurm: how tests start and disturb them, and what they read of their ends."""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
from slurm_jobs import close, emulated, losses, until
from slurm_lab.cluster import Cluster

from hpc_mp.rundir import RunDirectory
from hpc_mp.rundir.history import AttemptEnd, history
from hpc_mp.rundir.outcome import Cause, Outcome, verdict

HARD = ["a b", "$HOME", ";ls", "'", '"', "new\nline", "é 漢", "--nodes", "", "\\", "*"]  # arguments
ON_SLURM = ("--on", "slurm", "--set", "environment.health=false")
GLOO = ("--set", 'environment.set={ GLOO_SOCKET_IFNAME = "eth0" }')
ENDS = ("COMPLETED", "FAILED", "CANCELLED")

# --- programs ----------------------------------------------------------------------------------------------------------


def hpc_mp(lab: Cluster, here: Path, *words: str | Path, user: str | None = None, timeout: float = 300,
           environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run ``hpc-mp WORDS`` in a directory, with a ledger of bad nodes of its own."""
    return lab.run([sys.executable, "-m", "hpc_mp", *map(str, words)], user=user, timeout=timeout, cwd=here,
                   environ={"XDG_STATE_HOME": str(here / "state"), **(environ or {})})


def program(here: Path, text: str) -> list[str]:
    """Write a program that knows its ``rank``, and return its command."""
    (here / "program.py").write_text("import os, signal, sys, time\nrank = int(os.environ['RANK'])\n" + textwrap.dedent(text))
    return [sys.executable, "program.py"]


def run_words(command: Sequence[str], *options: str, nodes: int = 2, per_node: int = 2) -> list[str]:
    return ["run", *ON_SLURM, *("--nodes", str(nodes), "--ranks-per-node", str(per_node)), *options, "--", *command]


def submitted(lab: Cluster, here: Path, command: Sequence[str], *options: str, per_node: int = 2) -> RunDirectory:
    """Queue a command, and do not wait for it."""
    done = hpc_mp(lab, here, *run_words(command, *options, per_node=per_node))
    assert done.returncode == 0, done.stdout + done.stderr
    return newest(here)


def newest(here: Path) -> RunDirectory:
    return RunDirectory(max(here.glob("runs/*/0*"), key=lambda path: path.stat().st_mtime))


def logs_of(run: RunDirectory) -> str:
    """Return the end of every log, for a failed assertion."""
    files = [*run.path.glob("slurm-*.log"), *run.path.rglob("log/*.log")]
    return "\n".join(f"== {path}\n{path.read_text(errors='replace')[-3000:]}" for path in files)


def ended(run: RunDirectory) -> Outcome:
    """Return the verdict on a run that has ended."""
    found = verdict(run)
    assert found is not None, logs_of(run)
    return found


def until_ended(run: RunDirectory, timeout: float = 240) -> Outcome:
    until(lambda: verdict(run) is not None, "the end", timeout)
    return ended(run)


def check_cause(run: RunDirectory, kind: str, *words: str, **fields: object) -> Cause:
    """Check the kind of a run's failure, words of its message, and fields such as ``rank`` and ``node``."""
    cause, facts = ended(run).cause, {"kind": kind, **fields}
    assert cause is not None and {name: getattr(cause, name) for name in facts} == facts, f"{cause}\n{logs_of(run)}"
    assert all(word in cause.message for word in words), f"{cause}\n{logs_of(run)}"
    return cause


# --- processes on the nodes --------------------------------------------------------------------------------------------


def command_line(pid: int) -> str:
    """Return the command line of a process, "" if it has ended."""
    with suppress(psutil.Error):
        return " ".join(psutil.Process(pid).cmdline())
    return ""


def send(number: signal.Signals, pids: Sequence[int]) -> None:
    """Send a signal to those of the processes that still run."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def running(lab: Cluster, run: RunDirectory, word: str) -> list[int]:
    """Return the processes on nodes of the lab whose command line has this word and the run's directory, without shells."""
    lines = ((pid, command_line(pid)) for node in lab.nodes for pid in lab.processes(node))
    return [pid for pid, line in lines if word in line and str(run.path) in line and not line.startswith("bash ")]


def kill_supervisor(lab: Cluster, run: RunDirectory) -> None:
    send(signal.SIGKILL, running(lab, run, "hpc_mp.supervisor"))


# --- our own engine ----------------------------------------------------------------------------------------------------

# A module that Python imports by itself: it calls `before` in each step of a rank, without a hook in the product.
SITE = """
import os, sys, threading, time
{before}
def wait():
    while not hasattr(sys.modules.get("hpc_mp.train.rank.trainer"), "Trainer"):
        time.sleep(0.01)
    trainer = sys.modules["hpc_mp.train.rank.trainer"].Trainer
    original = trainer._step
    def step(self, step, *rest):
        before(self, step)
        return original(self, step, *rest)
    trainer._step = step
if "SLURM_LOCALID" in os.environ and "train" in open("/proc/self/cmdline").read():
    threading.Thread(target=wait, daemon=True).start()
"""
FAULT = """
def before(self, step):
    if (os.environ["SLURMD_NODENAME"], os.environ["SLURM_LOCALID"], step) == ("{node}", "{local}", {step}):
        {fault}
"""


def before_steps(place: Path, before: str) -> str:
    """Write the module with the source text of ``before`` to a directory, and return the override by which ranks import it."""
    place.mkdir(exist_ok=True)
    (place / "sitecustomize.py").write_text(SITE.format(before=before))
    return f"environment.set.PYTHONPATH={place}"


def with_fault(job: Path, fault: str, step: int | str = "step", local: int = 0) -> tuple[str, ...]:
    """Return overrides that plant a fault in the rank on n2 with that local rank; by default in every step."""
    return (before_steps(job.parent / "fault", FAULT.format(fault=fault, node="n2", local=local, step=step)),)


def first_end(run: RunDirectory, timeout: float) -> AttemptEnd:
    """Return the end of the first attempt when there is one."""
    until(lambda: history(run), "the end of the first attempt", timeout)
    return history(run)[0]


def state(lab: Cluster, job_id: str) -> str:
    return lab.run(["squeue", "--noheader", "--states=all", "--format=%T", "--jobs", job_id]).stdout.strip()


def saving(run: RunDirectory) -> bool:
    """Return True while a checkpoint is written."""
    return any(run.checkpoints.glob(".step*"))


def job_ends(lab: Cluster, job_id: str, run: RunDirectory, expected: str = "COMPLETED", timeout: float = 240) -> None:
    """Wait until Slurm has ended the job, and check how."""
    until(lambda: state(lab, job_id) in ENDS, "the job's end", timeout, 0.3)
    assert state(lab, job_id) == expected, logs_of(run)


def completes(lab: Cluster, job_id: str, run: RunDirectory, job: Path, overrides: tuple[str, ...]) -> None:
    """Wait for the end of a job, which must have the losses of an undisturbed one."""
    job_ends(lab, job_id, run)
    assert close(losses(run.path), emulated(job, overrides))
