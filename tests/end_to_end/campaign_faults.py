"""The faults of a campaign: what each does to a lab on which a run trains, which hosts it hits, and when it is over.

A row of ``FAULTS`` plants one fault. ``ends``: the attempt must end by it; ``asks``: it is a wish of somebody that the job stops.
"""

import random
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil
from lab_runs import command_line, send
from slurm_lab.cluster import Cluster

RANK = ("hpc_mp train", "campaign_program.py")


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

    def strike(self, pids: Sequence[int], number: "signal.Signals") -> bool:
        """Send a signal to one of the processes; whether there was one."""
        send(number, pids and [self.draw.choice(pids)])
        return bool(pids)

    def slurm(self, *words: str) -> None:
        with suppress(subprocess.TimeoutExpired):
            self.lab.run(words, timeout=30)


def _parents_name(pid: int) -> str:
    with suppress(psutil.Error):
        return psutil.Process(psutil.Process(pid).ppid()).name()
    return ""


Hit = tuple[str, ...] | None
"""The hosts that a fault has hit, () if it has none, None if there was nothing that it could have hit."""


def to_a_rank(number: signal.Signals, scene: Scene) -> Hit:
    host = scene.draw.choice(scene.hosts)
    return (host,) if scene.strike(scene.ranks(host), number) else None


def killed(words: str, scene: Scene) -> Hit:
    """Kill a process on the first host whose command line holds the words."""
    host = scene.hosts[0]
    pids = [pid for pid in scene.pids(host, [words]) if _parents_name(pid) != "srun"]  # srun has a child of its name
    return (host,) if scene.strike(pids, signal.SIGKILL) else None


def stepd(batch: bool, scene: Scene) -> Hit:
    """Kill the slurmstepd of the ranks on any host, or that of the job script."""
    host = scene.hosts[0] if batch else scene.draw.choice(scene.hosts)
    for pid in scene.pids(host, [f"slurmstepd: [{scene.job_id}."]):
        if (f"slurmstepd: [{scene.job_id}.batch]" in command_line(pid)) == batch and "extern" not in command_line(pid):
            send(signal.SIGKILL, [pid])
            return (host,)
    return None


def host_dies(seconds: float, scene: Scene) -> Hit:
    host = scene.draw.choice(scene.hosts)
    if not scene.lab.runs(host):
        return None
    scene.lab.kill(host)
    scene.after(seconds, lambda: scene.lab.runs(host) or scene.lab.boot(host))
    return (host,)


def host_stands_still(scene: Scene) -> Hit:
    host = scene.draw.choice(scene.hosts)
    if not scene.lab.runs(host):
        return None
    stopped = scene.lab.processes(host)
    send(signal.SIGSTOP, stopped)
    scene.after(60, lambda: send(signal.SIGCONT, stopped))
    return (host,)


def link_cut(scene: Scene) -> Hit:
    host = scene.draw.choice(scene.hosts)
    scene.lab.link(host, False)
    scene.after(45, lambda: scene.lab.link(host, True))
    return (host,)


def preempted(grace: int, scene: Scene) -> Hit:
    scene.slurm("scontrol", "update", "PartitionName=all", f"GraceTime={grace}")
    host = scene.draw.choice(scene.hosts)
    scene.slurm("sbatch", "--partition=urgent", f"--nodelist={host}", "--exclusive", "--time=1", "--output=/dev/null",
                "--wrap=sleep 2")
    return ()


def asked(command: str, scene: Scene) -> Hit:
    """Give a command of Slurm about the job; SIGNAL is the one by which its ranks are asked to save and stop."""
    scene.slurm(*command.replace("SIGNAL", scene.signal).split(), scene.job_id)
    return ()


def controller_killed(scene: Scene) -> Hit:
    pids = [pid for pid in psutil.pids() if command_line(pid).startswith("slurmctld ") and of_lab(pid, scene.lab)]
    send(signal.SIGKILL, pids)
    scene.after(6, lambda: daemon(scene.lab, scene.lab._enter(), "slurmctld"))
    return () if pids else None


def node_daemon_killed(scene: Scene) -> Hit:
    host = scene.draw.choice(scene.hosts)
    pids = [pid for pid in scene.pids(host, ["slurmd "]) if command_line(pid).startswith("slurmd ")]
    send(signal.SIGKILL, pids)
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
    "rank killed": Fault(partial(to_a_rank, signal.SIGKILL)),
    "rank stopped": Fault(partial(to_a_rank, signal.SIGSTOP)),
    "srun killed": Fault(partial(killed, "^srun --export")),  # the supervisor has it in its arguments
    "supervisor killed": Fault(partial(killed, "-m hpc_mp.supervisor ")),
    "slurmstepd of ranks killed": Fault(partial(stepd, False)),
    "slurmstepd of the script killed": Fault(partial(stepd, True), ends=False),  # the script lives on, and ends the job
    "host dies": Fault(partial(host_dies, 90)),
    "host reboots": Fault(partial(host_dies, 3)),
    "host stands still": Fault(host_stands_still),
    "link cut": Fault(link_cut),
    "requeued": Fault(partial(asked, "scontrol requeue"), asks=True),
    "preempted with grace": Fault(partial(preempted, 20), asks=True),
    "preempted at once": Fault(partial(preempted, 0), asks=True),
    "signal to the ranks": Fault(partial(asked, "scancel --signal=SIGNAL"), asks=True),
    "SIGTERM to all": Fault(partial(asked, "scancel --full --signal=TERM"), asks=True),
    "slurmctld killed": Fault(controller_killed, ends=False),
    "slurmd killed": Fault(node_daemon_killed, ends=False),
}

SETTINGS = {
    "PreemptType": "preempt/partition_prio",
    "PreemptMode": "REQUEUE",
    "PartitionName": "urgent Nodes=ALL PriorityTier=100 PreemptMode=OFF",
}
"""Lines of slurm.conf that preemption needs."""
