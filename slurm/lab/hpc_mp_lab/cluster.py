"""Operations on a running cluster: kill and boot nodes, pull and shape cables, run commands.

No pid files are used. A process is found in the process table by its command line, which contains the cluster's directory. It
must belong to root, because any user can choose a process's command line.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from hpc_mp_lab import conf

HERE = Path(__file__).resolve().parent
NAMESPACES = ("--mount", "--uts", "--ipc", "--net")
SLURM_VARIABLES = ("SLURM_", "SBATCH_", "SALLOC_", "SRUN_", "SQUEUE_", "SACCT_", "SINFO_")


class LabError(Exception):
    """Raised if the cluster does not reach the expected state in time."""


def wait_until(condition: Callable[[], object], what: str, timeout: float = 60.0, pause: float = 0.05) -> None:
    """Wait for ``condition``. Raises LabError with ``what`` if it is not true within ``timeout`` seconds."""
    end = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > end:
            raise LabError(f"timed out after {timeout:g} s, expected: {what}")
        time.sleep(pause)


class LabCluster:
    """A running cluster, by its directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.nodes = tuple((directory / "etc" / "nodes").read_text().split())
        self.number = int((directory / "etc" / "name").read_text().strip().removeprefix("lab"))

    # --- commands ----------------------------------------------------------------------------------------------------

    @property
    def conf(self) -> Path:
        """The value for SLURM_CONF."""
        return self.directory / "etc" / "slurm.conf"

    @property
    def environ(self) -> dict[str, str]:
        """The environment of a Slurm client, also on this machine: that of this process without Slurm's variables."""
        variables = {key: value for key, value in os.environ.items() if not key.startswith(SLURM_VARIABLES)}
        return variables | {"SLURM_CONF": str(self.conf)}

    def inside(self, node: str) -> list[str]:
        """Return the prefix of a command to run it inside a node as root."""
        return ["nsenter", f"--target={self._init_of(node)}", *NAMESPACES, "--pid"]

    # --- nodes and cables --------------------------------------------------------------------------------------------

    def runs(self, node: str) -> bool:
        return self._find(node) is not None

    def kill(self, node: str) -> None:
        """Kill all processes of a node at once. Slurm marks it DOWN about 10 s later, unless it is booted again before."""
        init = self._init_of(node)
        space = os.readlink(f"/proc/{init}/ns/pid")
        os.kill(init, signal.SIGKILL)
        wait_until(lambda: not _processes(space), f"node {node} dead")  # so that no process holds a port that the boot needs

    def boot(self, node: str) -> None:
        """Start a node that was killed (its /tmp is empty again; its links are as they were)."""
        inside = [*self._enter(), "--pid", "setsid", "--fork", *self.network_of(node), *self._cores_of(node)]
        unshare = ["unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child"]
        command = [*inside, *unshare, *self._command(node)]
        with open(self.directory / "log" / f"init.{node}.out", "ab") as log:
            subprocess.run(command, env=self.environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=True)
        wait_until(lambda: self._find(node) is not None, f"node {node} started")

    def link(self, node: str, up: bool) -> None:
        """Pull a node's cable, or put it back."""
        self.fabric("ip", "link", "set", f"p-{node}", "up" if up else "down")

    def shape(self, rate: str, nodes: Sequence[str] | None = None) -> None:
        """Limit the rate of nodes in each direction, in tc's notation ("200mbit")."""
        self._queue(nodes or self.nodes, "tbf", "rate", rate, "burst", "128kb", "latency", "50ms")

    def unshape(self, nodes: Sequence[str] | None = None) -> None:
        """Remove all rate limits."""
        self._queue(nodes or self.nodes, "noqueue")

    # --- Slurm -------------------------------------------------------------------------------------------------------

    def idle(self) -> int:
        """Return the number of idle nodes (of ``nodes`` only: 24.11 counts a cloud's sleeping nodes too)."""
        command = ["sinfo", "--noheader", f"--nodes={','.join(self.nodes)}", "--states=idle", "--format=%D"]
        return int(self.ask(command).strip() or 0)

    def ask(self, argv: Sequence[str]) -> str:
        """Return the standard output of a Slurm client, "" if the controller does not answer."""
        command = [*self._enter(), *argv]
        done = subprocess.run(command, env=self.environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
        return done.stdout

    def wait_idle(self, timeout: float = 60.0) -> None:
        """Wait until every node is idle."""
        wait_until(lambda: self.idle() == len(self.nodes), "all nodes idle", timeout, 0.2)

    def logs(self, lines: int = 20) -> str:
        """Return the last lines of all daemons' logs."""
        files = sorted(path for path in (self.directory / "log").iterdir() if path.stat().st_size)
        return "\n".join(f"== {f.name}\n" + "\n".join(f.read_text().splitlines()[-lines:]) for f in files)

    # --- processes ---------------------------------------------------------------------------------------------------

    def _command(self, node: str | None) -> list[str]:
        """Return the command line of PID 1 of a node, or of the cluster."""
        if node is None:
            return _first(self.directory)
        return ["bash", f"{HERE}/node.sh", node, str(self.directory), conf.node_address(self.number, node)]

    def _find(self, node: str | None) -> int | None:
        return find_init(self._command(node))

    def _init_of(self, node: str | None) -> int:
        pid = self._find(node)
        if pid is None:
            raise LabError(f"{node or 'the lab'} is not running")
        return pid

    def _enter(self) -> list[str]:
        return ["nsenter", f"--target={self._init_of(None)}", *NAMESPACES]

    def fabric(self, *argv: str) -> str:
        """Run a command in the switches' namespace: `p-n1` is the switch's end of n1's cable, `up-s1` and `dn-s1` an uplink."""
        return subprocess.run([*self._enter(), *argv], check=True, capture_output=True, text=True).stdout

    @staticmethod
    def network_of(node: str) -> list[str]:
        """Return the prefix of a command of ``fabric`` to run it in a node's network; the node's end of the cable is `eth0`."""
        return ["nsenter", f"--net=/run/netns/{node}"]

    def _cores_of(self, node: str) -> list[str]:
        """Return the prefix of a command to run it on the node's share of the cores, empty if it has none."""
        shares = dict(line.split() for line in (self.directory / "etc" / "cores").read_text().splitlines())
        return ["taskset", "--cpu-list", shares[node]] if shares else []

    def processes(self, node: str) -> list[int]:
        """Return the pids of all processes of a node, in this process's namespace."""
        return _processes(os.readlink(f"/proc/{self._init_of(node)}/ns/pid"))

    def _queue(self, nodes: Sequence[str], *discipline: str) -> None:
        """Set the queueing discipline at both ends of the nodes' cables."""
        for node in nodes:
            self.fabric("tc", "qdisc", "replace", "dev", f"p-{node}", "root", *discipline)
            self.fabric(*self.network_of(node), "tc", "qdisc", "replace", "dev", "eth0", "root", *discipline)


def _processes(space: str) -> list[int]:
    """Return all processes in this pid namespace, including zombies."""
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.readlink(process / "ns" / "pid") == space:
                pids.append(int(process.name))
    return pids


def first_process(directory: Path) -> int | None:
    """Return the pid of the cluster's first process in this directory, None if it does not run."""
    return find_init(_first(directory))


def _first(directory: Path) -> list[str]:
    return ["bash", f"{HERE}/init.sh", str(directory)]


def find_init(argv: Sequence[str]) -> int | None:
    """Return the pid, in our namespace, of root's process with this command line that is PID 1 of its namespace, or None. Only
    the name of the script is compared: another installation of hpc-mp may have started it."""
    command = _words(argv)
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if _words((process / "cmdline").read_text(errors="replace").split("\0")[:-1]) == command:
                status = (process / "status").read_text().splitlines()
                if "Uid:\t0\t0\t0\t0" in status and any(line.startswith("NSpid:") and line.endswith("\t1") for line in status):
                    return int(process.name)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return None


def _words(argv: Sequence[str]) -> list[str]:
    return [*argv[:1], *(os.path.basename(script) for script in argv[1:2]), *argv[2:]]
