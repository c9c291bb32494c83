"""Processes that should not exist: stuck in the kernel, zombies, left over from a job."""

import time
from dataclasses import dataclass

from hpc_mp.cluster.node.source import NodeSource, Unavailable, fields, maybe, uptime

_MOMENT_S = 0.5  # a process that waits for a disk has made progress by then
_TICKS = 100  # per second, in /proc: USER_HZ, the same on every Linux
_SETTLED_S = 60.0  # by then an ended process was waited for, and a process whose parent is gone was meant to stay
_USERS = 1000  # the first user id of a person
_DAEMONS = ("systemd", "(sd-pam)", "dbus-daemon", "dbus-broker", "ssh-agent", "gpg-agent", "tmux", "tmux: server", "screen",
            "SCREEN", "sshd", "pipewire", "wireplumber", "pulseaudio", "atd", "crond", "at-spi-bus-laun", "dbus-broker-lau")


@dataclass(frozen=True)
class NodeProcess:
    """A process. ``age`` is in seconds; ``waits`` names the place in the kernel where it sleeps, empty if not shown."""

    pid: int
    name: str
    state: str
    parent: int
    user: int
    age: float
    switches: int
    waits: str = ""


@dataclass(frozen=True)
class Processes:
    """The processes of a node."""

    stuck: tuple[NodeProcess, ...]  # in uninterruptible sleep, without progress for half a second
    # dead, not waited for by their parent, started at least a minute ago. Younger zombies are about to be waited for: the readers
    # of a doctor, also of doctors of other hosts on this machine.
    zombies: tuple[NodeProcess, ...]
    # users' processes, started at least a minute ago, whose parent is gone; only if Slurm's daemon runs
    orphans: tuple[NodeProcess, ...]
    count: int  # number of all processes
    slurm: bool  # True if Slurm's node daemon runs here


def read_processes(source: NodeSource) -> Processes:
    """Read the processes. Raises Unavailable."""
    every = _all(source)
    if not every:
        raise Unavailable("/proc shows no processes")
    waiting = [process for process in every if process.state == "D"]
    if waiting:
        time.sleep(_MOMENT_S)
    later = [(before, _process(source, before.pid, 0.0)) for before in waiting]
    stuck = tuple(before for before, now in later if now and now.state == "D" and now.switches == before.switches)
    slurm = any(process.name == "slurmd" for process in every)
    return Processes(
        stuck=stuck,
        zombies=tuple(process for process in every if process.state == "Z" and process.age > _SETTLED_S),
        orphans=tuple(process for process in every if slurm and process.parent == 1 and process.user >= _USERS
                      and process.age > _SETTLED_S and process.state != "Z" and process.name not in _DAEMONS),
        count=len(every),
        slurm=slurm,
    )


def _all(source: NodeSource) -> list[NodeProcess]:
    up = maybe(uptime, source) or 0.0
    processes = (_process(source, int(path.rpartition("/")[2]), up) for path in source.names("/proc/[0-9]*"))
    return [process for process in processes if process is not None]


def _process(source: NodeSource, pid: int, up: float) -> NodeProcess | None:
    stat, status = maybe(source.text, f"/proc/{pid}/stat"), maybe(source.text, f"/proc/{pid}/status")
    if stat is None or status is None:
        return None
    name, words, more = stat[stat.find("(") + 1:stat.rfind(")")], stat[stat.rfind(")") + 1:].split(), fields(status)
    return NodeProcess(
        pid=pid,
        name=name,
        state=words[0],
        parent=int(words[1]),
        user=int(more.get("Uid", "0").split()[0]),
        age=up - int(words[19]) / _TICKS,
        switches=int(more.get("voluntary_ctxt_switches", 0)) + int(more.get("nonvoluntary_ctxt_switches", 0)),
        waits=(maybe(source.text, f"/proc/{pid}/wchan") or "").strip("0"),
    )
