"""The faults of a campaign: what each does to a lab on which a run trains, which hosts it hits, and when it is over.

A row of ``FAULTS`` plants one fault. ``ends``: the attempt must end by it; ``asks``: it is a wish of somebody that the job stops.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from slurm_lab.cluster import Cluster

RANK = ("hpc_mp train", "campaign_program.py")
STEP = "slurmstepd: [{job}.{step}]"


@dataclass(frozen=True)
class Planted:
    """One fault in a run.

    Attributes:
        hosts: whom an end may blame for it; empty if the fault has no host.
        time: unix seconds.
        step: the newest step that the run had said by then.
        attempt: the run's attempt then.
    """

    kind: str
    moment: str
    hosts: tuple[str, ...]
    time: float
    step: int
    attempt: int


@dataclass
class Scene:
    """What faults act on: a lab, the job of a run, and what is to be mended later, by time."""

    lab: Cluster
    job_id: str
    hosts: Sequence[str]
    draw: random.Random
    signal: str = "USR2"
    later: list[tuple[float, Callable[[], object]]] = field(default_factory=list)

    def after(self, seconds: float, mend: Callable[[], object]) -> None:
        self.later.append((time.monotonic() + seconds, mend))

    def mend(self, *, all_of_it: bool = False) -> None:
        """Do what is due."""
        now = time.monotonic()
        due = [entry for entry in self.later if all_of_it or entry[0] <= now]
        self.later = [entry for entry in self.later if entry not in due]
        for _, mend in due:
            mend()

    def pids(self, host: str, words: Sequence[str]) -> list[int]:
        """The processes of a host with one of these texts in their command line; ``^`` stands for its beginning."""
        with suppress(Exception):
            return [pid for pid in self.lab.processes(host) if any(word in f"^{command_line(pid)}" for word in words)]
        return []

    def ranks(self, host: str) -> list[int]:
        """The ranks there: other processes have their command line, too, as the supervisor, srun, and forks of a rank."""
        return [pid for pid in self.pids(host, RANK) if _parents_name(pid) == "slurmstepd"]

    def strike(self, pids: Sequence[int], number: signal.Signals) -> bool:
        """Send a signal to one of the processes; whether there was one."""
        for pid in pids and [self.draw.choice(pids)]:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        return bool(pids)

    def slurm(self, *words: str) -> None:
        with suppress(subprocess.TimeoutExpired):
            self.lab.run(words, timeout=30)


def command_line(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def _parents_name(pid: int) -> str:
    with suppress(psutil.Error):
        return psutil.Process(psutil.Process(pid).ppid()).name()
    return ""


Hit = tuple[str, ...] | None
"""The hosts that a fault has hit, () if it has none, None if there was nothing that it could have hit."""


def to_a_rank(number: signal.Signals) -> Callable[[Scene], Hit]:
    def fault(scene: Scene) -> Hit:
        host = scene.draw.choice(scene.hosts)
        return (host,) if scene.strike(scene.ranks(host), number) else None
    return fault


def killed(words: str) -> Callable[[Scene], Hit]:
    """A process on the first host whose command line holds the words."""
    def fault(scene: Scene) -> Hit:
        host = scene.hosts[0]
        pids = [pid for pid in scene.pids(host, [words]) if _parents_name(pid) != "srun"]  # srun has a child of its name
        return (host,) if scene.strike(pids, signal.SIGKILL) else None
    return fault


def stepd(batch: bool) -> Callable[[Scene], Hit]:
    """The slurmstepd of the ranks on any host, or that of the job script."""
    def fault(scene: Scene) -> Hit:
        host = scene.hosts[0] if batch else scene.draw.choice(scene.hosts)
        script = STEP.format(job=scene.job_id, step="batch")
        for pid in scene.pids(host, [f"slurmstepd: [{scene.job_id}."]):
            if (script in command_line(pid)) == batch and "extern" not in command_line(pid):
                os.kill(pid, signal.SIGKILL)
                return (host,)
        return None
    return fault


def host_dies(seconds: float) -> Callable[[Scene], Hit]:
    def fault(scene: Scene) -> Hit:
        host = scene.draw.choice(scene.hosts)
        if not scene.lab.runs(host):
            return None
        scene.lab.kill(host)
        scene.after(seconds, lambda: scene.lab.runs(host) or scene.lab.boot(host))
        return (host,)
    return fault


def host_stands_still(scene: Scene) -> Hit:
    host = scene.draw.choice(scene.hosts)
    if not scene.lab.runs(host):
        return None
    stopped = scene.lab.processes(host)

    def signalled(number: signal.Signals) -> None:
        for pid in stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    signalled(signal.SIGSTOP)
    scene.after(60, lambda: signalled(signal.SIGCONT))
    return (host,)


def link_cut(scene: Scene) -> Hit:
    host = scene.draw.choice(scene.hosts)
    scene.lab.link(host, False)
    scene.after(45, lambda: scene.lab.link(host, True))
    return (host,)


def preempted(grace: int) -> Callable[[Scene], Hit]:
    def fault(scene: Scene) -> Hit:
        scene.slurm("scontrol", "update", "PartitionName=all", f"GraceTime={grace}")
        host = scene.draw.choice(scene.hosts)
        scene.slurm("sbatch", "--partition=urgent", f"--nodelist={host}", "--exclusive", "--time=1", "--output=/dev/null",
                    "--wrap=sleep 2")
        return ()
    return fault


def said(*words: str) -> Callable[[Scene], Hit]:
    """A command of Slurm about the job; {signal} is the one by which its ranks are asked to save and stop."""
    def fault(scene: Scene) -> Hit:
        scene.slurm(*(word.format(signal=scene.signal) for word in words), scene.job_id)
        return ()
    return fault


def controller_killed(scene: Scene) -> Hit:
    pids = [int(entry.name) for entry in Path("/proc").glob("[0-9]*")
            if command_line(int(entry.name)).startswith("slurmctld ") and of_lab(int(entry.name), scene.lab)]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    scene.after(6, lambda: daemon(scene.lab, scene.lab._enter(), "slurmctld"))
    return () if pids else None


def node_daemon_killed(scene: Scene) -> Hit:
    host = scene.draw.choice(scene.hosts)
    pids = [pid for pid in scene.pids(host, ["slurmd "]) if command_line(pid).startswith("slurmd ")]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    scene.after(4, lambda: scene.lab.runs(host) and daemon(scene.lab, scene.lab.inside(host), "slurmd"))
    return (host,) if pids else None


def of_lab(pid: int, lab: Cluster) -> bool:
    with suppress(OSError):
        return str(lab.directory).encode() in Path(f"/proc/{pid}/environ").read_bytes()
    return False


def daemon(lab: Cluster, where: list[str], name: str) -> None:
    """Start one of Slurm's daemons again, as a process of the lab that ends with it."""
    space = where if "--pid" in where else [*where, "--pid"]
    log = open(lab.directory / "log" / f"{name}.again", "ab")  # noqa: SIM115 (the daemon's own)
    subprocess.Popen([*space, "setsid", "--fork", name, "-D"], env=lab.environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    log.close()


@dataclass(frozen=True)
class Fault:
    plant: Callable[[Scene], Hit]
    ends: bool = True
    asks: bool = False


FAULTS: dict[str, Fault] = {
    "rank killed": Fault(to_a_rank(signal.SIGKILL)),
    "rank stopped": Fault(to_a_rank(signal.SIGSTOP)),
    "srun killed": Fault(killed("^srun --export")),  # the supervisor has it in its arguments
    "supervisor killed": Fault(killed("-m hpc_mp.supervisor ")),
    "slurmstepd of ranks killed": Fault(stepd(batch=False)),
    "slurmstepd of the script killed": Fault(stepd(batch=True), ends=False),  # the script lives on, and ends the job
    "host dies": Fault(host_dies(90)),
    "host reboots": Fault(host_dies(3)),
    "host stands still": Fault(host_stands_still),
    "link cut": Fault(link_cut),
    "requeued": Fault(said("scontrol", "requeue"), asks=True),
    "preempted with grace": Fault(preempted(20), asks=True),
    "preempted at once": Fault(preempted(0), asks=True),
    "signal to the ranks": Fault(said("scancel", "--signal={signal}"), asks=True),
    "SIGTERM to all": Fault(said("scancel", "--full", "--signal=TERM"), asks=True),
    "slurmctld killed": Fault(controller_killed, ends=False),
    "slurmd killed": Fault(node_daemon_killed, ends=False),
}

SETTINGS = {
    "PreemptType": "preempt/partition_prio",
    "PreemptMode": "REQUEUE",
    "PartitionName": "urgent Nodes=ALL PriorityTier=100 PreemptMode=OFF",
}
"""Lines of slurm.conf that preemption needs."""
