"""A running lab for tests: the cluster of `hpc_mp_lab`, with commands on the submit host, jobs, and an ordinary user."""

import os
import pwd
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpc_mp_lab import cluster
from hpc_mp_lab.cluster import HERE, NAMESPACES, LabError, wait_until

__all__ = ["HERE", "NAMESPACES", "USER", "Cluster", "LabError", "wait_until"]

USER = "nobody"
FINISHED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "PREEMPTED"}


class Cluster(cluster.LabCluster):
    """A running lab, identified by its directory."""

    @property
    def share(self) -> Path:
        """A directory that all nodes and all users see."""
        return self.directory / "share"

    # --- commands ----------------------------------------------------------------------------------------------------

    def popen(self, argv: Sequence[str], *, user: str | None = None, environ: Mapping[str, str] | None = None,
              cwd: Path | None = None, **keywords: object) -> subprocess.Popen[str]:
        """Start a command on the submit host, `ctl`; `environ` is added to the lab's. Its pid is the command's own."""
        added = {} if user is None else {"HOME": str(self.share / "home"), "USER": user, "LOGNAME": user, "SHELL": "/bin/bash"}
        become = [] if user is None else ["setpriv", f"--reuid={user}", f"--regid={pwd.getpwnam(user).pw_gid}", "--clear-groups"]
        place = ["env", f"--chdir={cwd or self.share}"]
        process: subprocess.Popen[str] = subprocess.Popen(
            [*self._enter(), *become, *place, *map(str, argv)], env={**self.environ, **added, **(environ or {})},
            start_new_session=True, text=True, **keywords)  # type: ignore[call-overload]
        return process

    def run(self, argv: Sequence[str], *, timeout: float = 60.0, check: bool = False, input: str | None = None,
            **keywords: Any) -> subprocess.CompletedProcess[str]:
        """Run `popen` to its end and capture both outputs; `keywords` are its own. After `timeout` seconds, kill its session and
        raise TimeoutExpired."""
        pipe = subprocess.PIPE
        process = self.popen(argv, stdin=(subprocess.DEVNULL if input is None else pipe), stdout=pipe, stderr=pipe, **keywords)
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
        command = [*self.inside(node), *map(str, argv)]
        return subprocess.run(command, env=self.environ, capture_output=True, text=True, timeout=timeout)

    def mend(self) -> None:
        """Restore the state after `up`: no jobs, every node up, every link intact."""
        for user in ("root", USER):
            self.run(["scancel", f"--user={user}"])
        self.unshape()
        for node in self.nodes:
            self.link(node, True)
            if not self.runs(node):
                self.boot(node)
            self.run(["scontrol", "update", f"NodeName={node}", "State=RESUME"])
        self.wait_idle(60)

    # --- Slurm -------------------------------------------------------------------------------------------------------

    def sbatch(self, *arguments: str, **keywords: Any) -> int:
        """Submit a job and return its ID. The keywords are those of `run`."""
        return int(self.run(["sbatch", "--parsable", *arguments], check=True, **keywords).stdout.strip().split(";")[0])

    def job(self, job_id: int) -> dict[str, str]:
        """Return a job's fields as scontrol shows them: JobState, Reason, Restarts, NodeList, ExitCode …"""
        fields = self.run(["scontrol", "show", "job", "--oneliner", str(job_id)]).stdout.split()
        return dict(field.split("=", 1) for field in fields if "=" in field)

    def wait_job(self, job_id: int, *states: str, timeout: float = 60.0) -> dict[str, str]:
        """Wait until the job is in one of the states (default: any finished state), and return its fields."""
        wanted = states or FINISHED
        wait_until(lambda: self.job(job_id)["JobState"] in wanted, f"job {job_id} in {', '.join(wanted)}", timeout, 0.2)
        return self.job(job_id)
