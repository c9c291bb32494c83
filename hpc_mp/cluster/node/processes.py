"""Processes that should not be there: stuck in the kernel, dead and not buried, left over from a job."""

from __future__ import annotations

import time
from dataclasses import dataclass

from hpc_mp.cluster.node.parse import fields, maybe
from hpc_mp.cluster.node.source import NodeSource, Unavailable

_MOMENT_S = 0.5  # a process that waits for a disk has come on by then
_TICKS = 100  # per second, in /proc: USER_HZ, the same on every Linux
_SETTLED_S = 60.0  # by then a process that has ended was waited for, and one whose parent has gone was meant to stay
_USERS = 1000  # the first user id of a person
_DAEMONS = ("systemd", "(sd-pam)", "dbus-daemon", "dbus-broker", "ssh-agent", "gpg-agent", "tmux", "tmux: server", "screen",
            "SCREEN", "sshd", "pipewire", "wireplumber", "pulseaudio", "atd", "crond", "at-spi-bus-laun", "dbus-broker-lau")


@dataclass(frozen=True)
class NodeProcess:
    """``age`` is in seconds; ``waits`` names where in the kernel it sleeps, empty where that is not shown."""

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
    """Attributes:
        stuck: in uninterruptible sleep, and not come on for half a second.
        zombies: dead, not waited for by their parent, started at least a minute ago. Younger ones are about to be waited for:
            a doctor's own readers are such, also those of doctors of other hosts on this machine.
        orphans: of users, started at least a minute ago, whose parent has gone; only where Slurm's daemon runs.
        count: of all.
        names: of all programs that run.
        slurm: Slurm's daemon for nodes runs here.
    """

    stuck: tuple[NodeProcess, ...]
    zombies: tuple[NodeProcess, ...]
    orphans: tuple[NodeProcess, ...]
    count: int
    names: frozenset[str]
    slurm: bool


def read_processes(source: NodeSource) -> Processes:
    """Raises Unavailable."""
    every = _all(source)
    if not every:
        raise Unavailable("/proc shows no processes")
    waiting = [process for process in every if process.state == "D"]
    if waiting:
        time.sleep(_MOMENT_S)
    later = [(before, _process(source, before.pid, 0.0)) for before in waiting]
    stuck = tuple(before for before, now in later if now and now.state == "D" and now.switches == before.switches)
    names = frozenset(process.name for process in every)
    slurm = "slurmd" in names
    return Processes(
        stuck=stuck,
        zombies=tuple(process for process in every if process.state == "Z" and process.age > _SETTLED_S),
        orphans=tuple(process for process in every if slurm and _is_orphan(process)),
        count=len(every),
        names=names,
        slurm=slurm,
    )


def _is_orphan(process: NodeProcess) -> bool:
    return (process.parent == 1 and process.user >= _USERS and process.age > _SETTLED_S and process.state != "Z"
            and process.name not in _DAEMONS)


def _all(source: NodeSource) -> list[NodeProcess]:
    up = float((maybe(source.text, "/proc/uptime") or "0").split()[0])
    found = (_process(source, int(path.rpartition("/")[2]), up) for path in source.names("/proc/[0-9]*"))
    return [process for process in found if process is not None]


def _process(source: NodeSource, pid: int, up: float) -> NodeProcess | None:
    """None when it has ended meanwhile."""
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
