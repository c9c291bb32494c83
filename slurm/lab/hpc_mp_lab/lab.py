"""Start and end of a cluster.

A cluster is one process tree below one PID 1 (`init.sh`) in separate namespaces. When that process ends, the kernel ends every
process, interface and mount of the cluster. When the process that made the cluster ends, for any reason, `init.sh` ends too.
"""

import os
import platform
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

from hpc_mp_lab import conf
from hpc_mp_lab.cluster import HERE, NAMESPACES, LabCluster, LabError, wait_until

PROLOG = "task-prolog.sh"
END_S = 10.0  # in which the lab's first process ends
KEYS = ("munge/key", "etc/slurm.key")


@dataclass(eq=False)
class Lab(LabCluster):
    """A cluster that lives from ``up`` to ``down``, or until the process that called ``up`` ends.

    directory: existing empty directory, visible to all nodes; `down` removes it. leaves: the nodes, by leaf switch.
    node: resources of each node in slurm.conf's syntax. accounting: slurmdbd with account `acc` and the ``users``.
    overrides: lines of slurm.conf to add or replace.
    keep: paths below /tmp that nodes see too, although every node has a separate /tmp.
    cores: cores of this machine to divide among the nodes; default: each node runs on all cores.
    release: release of Slurm; default: this machine's. patience: timeout in seconds for the nodes to become idle.
    """

    directory: Path
    leaves: Sequence[Sequence[str]]
    _: KW_ONLY
    node: str = "CPUs=4 RealMemory=4000"
    accounting: bool = False
    users: Sequence[str] = ("root",)
    overrides: Mapping[str, str] = field(default_factory=dict)
    keep: Sequence[Path] = ()
    cores: Sequence[int] = ()
    release: tuple[int, ...] | None = None
    patience: float = 30.0

    def __post_init__(self) -> None:
        self.nodes = tuple(name for leaf in self.leaves for name in leaf)
        self.endings = ExitStack()

    def up(self, say: Callable[[str], None] = lambda _: None) -> None:
        """Start everything and wait until all nodes are idle. Raises LabError with the daemons' logs as a note. say: called with
        the current step."""
        with ExitStack() as endings:
            unshare = ["unshare", *NAMESPACES, "--pid", "--fork", "--kill-child"]
            process = subprocess.Popen(
                [*unshare, *self._command(None)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            )
            endings.callback(self._end, process)
            wait_until(lambda: self._find(None) is not None, "the lab's first process")
            self.number = self._claim()
            endings.callback(self._release)
            endings.callback(self._evict, os.readlink(f"/proc/{process.pid}/ns/net"), process.pid)
            self.write()
            try:
                assert process.stdin and process.stdout
                say("the database and its daemon" if self.accounting else "switches and controller")
                process.stdin.write(b"\n")
                process.stdin.flush()
                if process.stdout.readline() != b"ready\n":
                    raise LabError("the lab did not start")
                for node in self.nodes:
                    say(f"node {node}")
                    self.boot(node)
                say("all nodes idle")
                self.wait_idle(self.patience)
            except BaseException as error:
                error.add_note(self.logs())
                raise
            self.process = process
            self.endings = endings.pop_all()

    def down(self) -> None:
        """End the cluster; no process, interface, mount or directory of it is left."""
        self.endings.close()

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """Close the standard input of the lab's first process, which then ends; kill it if a process that was forked meanwhile
        holds the other end of the pipe."""
        try:
            process.communicate(timeout=END_S)
        except subprocess.TimeoutExpired:
            process.kill()  # by --kill-child, all processes of the lab end with it
            process.communicate()
            shutil.rmtree(self.directory, ignore_errors=True)  # as the first process does

    def _claim(self) -> int:
        """Return the cluster's number: the first for which the interface on this machine can be created, which is exclusive."""
        init = self._init_of(None)
        for number in range(32):
            name = self.interface(number)
            cable = ["ip", "link", "add", name, "type", "veth", "peer", "name", "uplink", "netns", str(init)]
            if not self._routed(number) and subprocess.run(cable, capture_output=True).returncode == 0:
                subprocess.run(["ip", "addr", "add", f"{conf.address(number, conf.HOST)}/24", "dev", name], check=True)
                subprocess.run(["ip", "link", "set", name, "up"], check=True)
                return number
        raise LabError("32 labs are running, or network interfaces cannot be created")

    @staticmethod
    def _routed(number: int) -> bool:
        """Return True if this machine already has a route to these addresses."""
        show = ["ip", "route", "show", "to", "root", f"{conf.address(number, 0)}/24"]
        return bool(subprocess.run(show, capture_output=True).stdout)

    def _release(self) -> None:
        """Delete this machine's end of the cable (the kernel would do so a little later)."""
        subprocess.run(["ip", "link", "del", self.interface(self.number)], capture_output=True)

    def _evict(self, network: str, spared: int) -> None:
        """Kill this machine's remaining processes in the cluster's network, except ``spared``."""
        pid_namespace = os.readlink("/proc/self/ns/pid")
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                space = [os.readlink(process / "ns" / kind) for kind in ("net", "pid")]
                if space == [network, pid_namespace] and int(process.name) != spared:
                    os.kill(int(process.name), signal.SIGKILL)

    @staticmethod
    def interface(number: int) -> str:
        """Return the name of this machine's end of the cluster's cable."""
        return f"slurmlab{number}"

    def files(self) -> dict[str, str]:
        """Return the files of the directory's etc: Slurm's, and those of `init.sh` and `node.sh`, where a tab separates words."""
        directory = self.directory
        release = self.release or installed_release()
        prolog = {"TaskProlog": str(directory / "etc" / PROLOG)} if self.cores else {}
        return {
            "name": f"lab{self.number}\n",
            "nodes": " ".join(self.nodes) + "\n",
            "cores": "".join(f"{node} {','.join(map(str, cpus))}\n" for node, cpus in shared_out(self.cores, self.nodes).items()),
            "slurm.conf": conf.slurm_conf(directory, self.number, self.nodes, self.node, self.accounting,
                                          prolog | dict(self.overrides)),
            "slurmdbd.conf": conf.slurmdbd_conf(directory, self.number) if self.accounting else "",
            "cgroup.conf": conf.cgroup_conf(release),
            "gres.conf": "",
            "topology.conf": conf.topology_conf(self.leaves),
            "hosts": conf.hosts(self.number, self.nodes, platform.node()),
            "network": conf.network(self.number, self.leaves),
            "users": ",".join(self.users) + "\n",
            "system": "",
            "kept": "\t".join(str(path) for path in (*self.keep, directory) if path.is_relative_to("/tmp")) + "\n",
            "hidden": "",
            PROLOG: (HERE / PROLOG).read_text(),  # every user runs it, and not all may read the installation of hpc-mp
        }

    def write(self) -> None:
        """Fill the directory."""
        directory = self.directory
        for name in ("etc", "munge", "log", "state", "spool", *(f"spool/{n}" for n in self.nodes)):
            (directory / name).mkdir()
        for name, text in self.files().items():
            (directory / "etc" / name).write_text(text)
        for key in KEYS:
            (directory / key).touch(0o600)
            (directory / key).write_bytes(os.urandom(1024))
        (directory / "etc" / "slurmdbd.conf").chmod(0o600)  # slurmdbd requires it
        (directory / "etc" / PROLOG).chmod(0o755)


def installed_release() -> tuple[int, ...]:
    """Return the release of this machine's Slurm, such as (22, 5, 8)."""
    program = shutil.which("slurmctld") or "/usr/sbin/slurmctld"
    output = subprocess.run([program, "-V"], capture_output=True, text=True).stdout
    return tuple(map(int, re.findall(r"\d+", output)[:3]))


def shared_out(cores: Sequence[int], nodes: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Divide the cores evenly among the nodes. If there are fewer cores than nodes, neighbours get different cores."""
    share = len(cores) // len(nodes)
    if not share:
        return {node: (cores[i % len(cores)],) for i, node in enumerate(nodes)} if cores else {}
    return {node: tuple(cores[i * share : (i + 1) * share]) for i, node in enumerate(nodes)}


def spread(count: int, switches: int) -> list[tuple[str, ...]]:
    """Distribute nodes n1 … over leaf switches as evenly as possible, the first switches with more nodes."""
    nodes = [f"n{i}" for i in range(1, count + 1)]
    sizes = [count // switches + (i < count % switches) for i in range(switches)]
    ends = [sum(sizes[: i + 1]) for i in range(switches)]
    return [tuple(nodes[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
