"""What can be done with a running lab: commands, faults, and questions to its Slurm.

Nothing is noted in pid files: a process is found in the process table by its command line, which names the lab's directory.
"""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from . import conf

HERE = Path(__file__).resolve().parent
USER = "nobody"
NAMESPACES = ("--mount", "--uts", "--ipc", "--net")
FINISHED = frozenset(
    {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "PREEMPTED"}
)


class LabError(Exception):
    """The lab did not do what it should have done in time."""


def wait_until(condition: Callable[[], object], what: str, timeout: float = 30.0, pause: float = 0.05) -> None:
    """Raise LabError with `what` if `condition` is not true within `timeout` seconds."""
    end = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > end:
            raise LabError(f"not within {timeout:g} s: {what}")
        time.sleep(pause)


class Cluster:
    """A running lab, by its directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.share = directory / "share"
        self.nodes = tuple((directory / "etc" / "nodes").read_text().split())
        self.number = int((directory / "etc" / "name").read_text().strip().removeprefix("lab"))

    # --- commands ----------------------------------------------------------------------------------------------------

    @property
    def environ(self) -> dict[str, str]:
        """The environment for a Slurm client, on this machine too: this process's own without what Slurm sets."""
        slurm = ("SLURM_", "SBATCH_", "SALLOC_", "SRUN_", "SQUEUE_", "SACCT_", "SINFO_")
        kept = {key: value for key, value in os.environ.items() if not key.startswith(slurm)}
        return kept | {"SLURM_CONF": str(self.directory / "etc" / "slurm.conf")}

    def popen(
        self,
        argv: Sequence[str],
        *,
        user: str | None = None,
        environ: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        **keywords: object,
    ) -> subprocess.Popen[str]:
        """Start a command on the submit host, `ctl`; `environ` is added to the lab's. Its pid is the command's own."""
        added = {} if user is None else {"HOME": str(self.share / "home"), "USER": user, "LOGNAME": user, "SHELL": "/bin/bash"}
        become = [] if user is None else ["setpriv", f"--reuid={user}", f"--regid={pwd.getpwnam(user).pw_gid}", "--clear-groups"]
        place = ["env", f"--chdir={cwd or self.share}"]
        process: subprocess.Popen[str] = subprocess.Popen(
            [*self._enter(), *become, *place, *map(str, argv)],
            env={**self.environ, **added, **(environ or {})},
            start_new_session=True,
            text=True,
            **keywords,  # type: ignore[call-overload]
        )
        return process

    def run(
        self,
        argv: Sequence[str],
        *,
        user: str | None = None,
        timeout: float = 60.0,
        environ: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        check: bool = False,
        input: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """`popen`, to its end, with both outputs. After `timeout` seconds its whole session is killed: TimeoutExpired."""
        pipe = subprocess.PIPE
        stdin = subprocess.DEVNULL if input is None else pipe
        process = self.popen(argv, user=user, environ=environ, cwd=cwd, stdin=stdin, stdout=pipe, stderr=pipe)
        try:
            out, err = process.communicate(input, timeout)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise
        if check and process.returncode:
            raise LabError(f"{' '.join(map(str, argv))} ended with {process.returncode}:\n{out}{err}")
        return subprocess.CompletedProcess(list(argv), process.returncode, out, err)

    def at(self, node: str, argv: Sequence[str], timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run a command inside a node, as root."""
        enter = ["nsenter", f"--target={self._init_of(node)}", *NAMESPACES, "--pid"]
        return subprocess.run([*enter, *map(str, argv)], env=self.environ, capture_output=True, text=True, timeout=timeout)

    # --- faults ------------------------------------------------------------------------------------------------------

    def kill(self, node: str) -> None:
        """End all processes of a node at once. Slurm calls it DOWN some 10 s later, unless it is booted again before."""
        os.kill(self._init_of(node), signal.SIGKILL)
        wait_until(lambda: self._find(node) is None, f"node {node} dead")

    def boot(self, node: str) -> None:
        """Start a node that was killed (its /tmp is empty again; its links are as they were)."""
        inside = [*self._enter(), "--pid", "setsid", "--fork", *self.network_of(node)]
        unshare = ["unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child"]
        command = [*inside, *unshare, *self._command(node)]
        with open(self.directory / "log" / f"init.{node}.out", "ab") as log:
            subprocess.run(command, env=self.environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=True)
        wait_until(lambda: self._find(node) is not None, f"node {node} started")

    def link(self, node: str, up: bool) -> None:
        """Pull a node's cable, or put it back."""
        self.fabric("ip", "link", "set", f"p-{node}", "up" if up else "down")

    def shape(self, rate: str, nodes: Sequence[str] | None = None) -> None:
        """Limit what nodes send and receive, each way, to a rate as tc writes it ("200mbit")."""
        self._queue(nodes or self.nodes, "tbf", "rate", rate, "burst", "128kb", "latency", "50ms")

    def unshape(self) -> None:
        """Take every limit away."""
        self._queue(self.nodes, "noqueue")

    def mend(self) -> None:
        """No jobs, every node up, every link whole: as after `up`."""
        for user in ("root", USER):
            self.run(["scancel", f"--user={user}"])
        self.unshape()
        for node in self.nodes:
            self.link(node, True)
            if self._find(node) is None:
                self.boot(node)
            self.run(["scontrol", "update", f"NodeName={node}", "State=RESUME"])
        self.wait_idle(60)

    # --- Slurm -------------------------------------------------------------------------------------------------------

    def idle(self) -> int:
        """How many nodes are idle (of those that run: 24.11 counts a cloud's sleeping nodes too)."""
        asked = ["sinfo", "--noheader", f"--nodes={','.join(self.nodes)}", "--states=idle", "--format=%D"]
        return int(self.run(asked).stdout.strip() or 0)

    def wait_idle(self, timeout: float = 30.0) -> None:
        """Until every node is idle."""
        wait_until(lambda: self.idle() == len(self.nodes), "all nodes idle", timeout)

    def sbatch(self, *arguments: str, **keywords: object) -> int:
        """Submit; the job's id. Keywords as for `run`."""
        answer = self.run(["sbatch", "--parsable", *arguments], check=True, **keywords)  # type: ignore[arg-type]
        return int(answer.stdout.strip().split(";")[0])

    def job(self, job_id: int) -> dict[str, str]:
        """A job's fields as scontrol shows them: JobState, Reason, Restarts, NodeList, ExitCode …"""
        fields = self.run(["scontrol", "show", "job", "--oneliner", str(job_id)]).stdout.split()
        return dict(field.split("=", 1) for field in fields if "=" in field)

    def wait_job(self, job_id: int, *states: str, timeout: float = 60.0) -> dict[str, str]:
        """Until the job is in one of the states (default: finished in whatever way); its fields then."""
        wanted = states or FINISHED
        wait_until(lambda: self.job(job_id)["JobState"] in wanted, f"job {job_id} in {', '.join(wanted)}", timeout, 0.2)
        return self.job(job_id)

    def logs(self, lines: int = 20) -> str:
        """The ends of all daemons' logs."""
        files = sorted(path for path in (self.directory / "log").iterdir() if path.stat().st_size)
        return "\n".join(f"== {f.name}\n" + "\n".join(f.read_text().splitlines()[-lines:]) for f in files)

    # --- processes ---------------------------------------------------------------------------------------------------

    def _command(self, node: str | None) -> list[str]:
        """The command line of PID 1 of a node, or of the lab."""
        if node is None:
            return ["bash", f"{HERE}/init.sh", str(self.directory)]
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

    def fabric(self, *argv: str) -> None:
        """Run a command where the switches are: `p-n1` is the switch's end of n1's cable, `up-s1` and `dn-s1` an uplink's."""
        subprocess.run([*self._enter(), *argv], check=True, capture_output=True)

    @staticmethod
    def network_of(node: str) -> list[str]:
        """What to put before a command of `fabric` that is to run in a node's network; its end of the cable is `eth0`."""
        return ["nsenter", f"--net=/run/netns/{node}"]

    def processes(self, node: str) -> list[int]:
        """All processes of a node, as seen from here."""
        space = os.readlink(f"/proc/{self._init_of(node)}/ns/pid")
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if os.readlink(process / "ns" / "pid") == space:
                    found.append(int(process.name))
        return found

    def _queue(self, nodes: Sequence[str], *discipline: str) -> None:
        """The queueing discipline of both ends of the nodes' cables."""
        for node in nodes:
            self.fabric("tc", "qdisc", "replace", "dev", f"p-{node}", "root", *discipline)
            self.fabric(*self.network_of(node), "tc", "qdisc", "replace", "dev", "eth0", "root", *discipline)


def find_init(argv: Sequence[str]) -> int | None:
    """The process with this command line that is PID 1 of its own namespace; its pid as seen from here."""
    wanted = b"".join(argument.encode() + b"\0" for argument in argv)
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cmdline").read_bytes() == wanted and "\t1\n" in _line(process / "status", "NSpid:"):
                return int(process.name)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return None


def _line(path: Path, start: str) -> str:
    return next(line for line in path.read_text().splitlines(keepends=True) if line.startswith(start))
