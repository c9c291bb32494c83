"""Where the tasks of a submitted callable run: a Slurm job, or processes on emulated nodes of this machine."""

from __future__ import annotations

import os
import secrets
import selectors
import shlex
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import submitit
from submitit.core.utils import DelayedSubmission, JobPaths

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.exit_codes import ending
from hpc_mp.cluster.slurm import jobs as queue
from hpc_mp.cluster.slurm import submit as slurm
from hpc_mp.cluster.slurm.job import FINAL, SlurmJob
from hpc_mp.cluster.slurm.nodelist import compress
from hpc_mp.cluster.slurm.variables import FOREIGN
from hpc_mp.launch.emulator.emulator import Emulator
from hpc_mp.launch.emulator.emulator import Task as Emulated
from hpc_mp.launch.emulator.slurm_env import node_name
from hpc_mp.launch.submit.worker import Task

ENTRY = "hpc_mp.launch.submit.worker:emulated"
# A USR2 before submitit's handler is there would kill the task (Slurm sends it up to 60 s early); one that is ignored
# stays so only until the handler is set.
PYTHON = shlex.join(["sh", "-c", 'trap "" USR2; exec "$@"', "-", sys.executable])
SRUN = ["--kill-on-bad-exit=1", "--wait=60", "--export=ALL"]  # ALL: else a site's --export=NONE reaches the tasks


class Hand(Protocol):
    """What a ``Job`` needs from the place where its tasks run."""

    id: str
    words: str

    def state(self) -> str:
        """In Slurm's words."""

    def why(self) -> str:
        """How it ended, for a failure of which no task has said anything."""

    def cancel(self) -> None: ...


class OnSlurm(Hand):
    """A Slurm job. submitit renders and pickles; we hand in, ask and end, for it cannot without accounting.

    Raises:
        HpcMpError: a name in ``options`` is none of submitit's.
        RunFailed: sbatch refuses.
    """

    def __init__(self, task: Task, folder: Path, nodes: int, tasks_per_node: int, options: Mapping[str, Any]) -> None:
        executor = _Executor(folder, python=PYTHON)
        path = f"export PYTHONPATH={shlex.quote(os.pathsep.join(filter(None, sys.path)))}"  # what we can import, tasks can
        ours = {"job_name": folder.name, "wckey": None, "stderr_to_stdout": True}  # sites refuse wckeys that they do not know
        cpus = [f"--cpus-per-task={options['cpus_per_task']}"] if "cpus_per_task" in options else []  # not inherited on 22.05
        try:
            executor.update_parameters(**{
                **ours, **options, "nodes": nodes, "ntasks_per_node": tasks_per_node,
                "setup": [path, *options.get("setup", ())], "srun_args": [*SRUN, *cpus, *options.get("srun_args", ())]})
        except (ValueError, TypeError, NameError) as error:
            raise HpcMpError(f"slurm = {dict(options)}", str(error).replace("\n", " "),
                             "name those, or others in additional_parameters") from None
        self.id = executor.submit(task).job_id
        self.words = executor.words
        self._seen, self._due, self._delays = SlurmJob(self.id, "PENDING"), 0.0, iter(queue.DELAYS_S)

    def state(self) -> str:
        """As Slurm said half a minute ago at most: it is asked ever more rarely, whoever asks us."""
        if not self._seen.ended and time.monotonic() >= self._due:
            self._due = time.monotonic() + next(self._delays, queue.DELAYS_S[-1])
            self._seen = queue.look([self.id])[self.id]
        return self._seen.state

    def why(self) -> str:
        code = f", {ending(self._seen.exit_code)}" if self._seen.exit_code else ""
        reason = f" ({self._seen.meaning or self._seen.reason})" if self._seen.reason else ""
        return f"Slurm job {self.id} is {self._seen.state}{code}{reason}"

    def cancel(self) -> None:
        slurm.cancel(self.id)
        self._due = 0.0


class _Executor(submitit.SlurmExecutor):
    """submitit's, which renders and pickles; handed in by us, from a clean environment and with the site's words kept."""

    words = ""

    def _submit_command(self, command: str) -> submitit.SlurmJob[Any]:
        script = Path(self.folder) / "job.sbatch"
        script.write_text(self._make_submission_file_text(command, uid=""), encoding="utf-8")
        submission = slurm.sbatch(script)
        self.words = submission.words
        return submitit.SlurmJob(self.folder, submission.job_id, tasks=list(range(self._num_tasks())))


class OnEmulator(Hand):
    """Processes here, one per task, with the names that srun sets; they live no longer than this object."""

    def __init__(self, task: Task, folder: Path, nodes: int, tasks_per_node: int) -> None:
        self.id, self.words = str(1 + secrets.randbelow(10**9)), ""
        self._exits: dict[int, int] = {}
        self._broken, self._cancelled, self._tasks = "", False, nodes * tasks_per_node
        self._per_node = tasks_per_node
        DelayedSubmission(task).dump(JobPaths(folder, job_id=self.id).submitted_pickle)
        shared = {name: value for name, value in os.environ.items() if not FOREIGN.match(name)}
        names = {"HPC_MP_EMULATED": "1", "SUBMITIT_EXECUTOR": "slurm", "GLOO_SOCKET_IFNAME": "lo"}
        logs = [JobPaths(folder, job_id=self.id, task_id=rank).stdout for rank in range(self._tasks)]
        self._stack = ExitStack()
        self._emulator = self._stack.enter_context(Emulator([ENTRY.partition(":")[0], "submitit.core.submission"],
                                                            shared | names))
        with socket.create_server(("127.0.0.1", 0)) as listener, open(folder / ".lock", "w") as lock:
            self._emulator.start([Emulated(log, _slurm_names(self.id, rank, nodes, tasks_per_node))
                                  for rank, log in enumerate(logs)], folder, listener, lock.fileno(), ENTRY)

    def state(self) -> str:
        self._hear()
        if len(self._exits) < self._tasks and not self._broken:
            return "RUNNING"
        self._stack.close()
        if self._cancelled:
            return "CANCELLED"
        return "FAILED" if self._broken or any(self._exits.values()) else "COMPLETED"

    def why(self) -> str:
        ends = "; ".join(f"task {rank} on {node_name(rank // self._per_node)} {ending(code)}"
                         for rank, code in self._exits.items() if code)
        return self._broken or ends or f"it is {self.state()}"

    def cancel(self) -> None:
        if self.state() not in FINAL:
            self._cancelled = True
            self._emulator.command("kill")

    def _hear(self) -> None:
        """Take what has come, without waiting."""
        with selectors.DefaultSelector() as selector:
            while len(self._exits) < self._tasks and not self._broken:
                if not selector.get_map():
                    selector.register(self._emulator, selectors.EVENT_READ)
                if not selector.select(0):
                    return
                try:
                    for event in self._emulator.events():
                        if event["event"] == "exit":
                            self._exits[event["rank"]] = event["code"]
                        else:
                            self._broken = f"what tasks need cannot be imported ({event['why']})"
                except EOFError:
                    self._broken = self._broken or f"the process that forked the tasks {self._emulator.wait()}"


def _slurm_names(job_id: str, rank: int, nodes: int, per_node: int) -> dict[str, str]:
    """What srun tells a task."""
    hosts = compress(map(node_name, range(nodes)))
    return {
        "SLURM_JOB_ID": job_id, "SLURM_STEP_ID": "0", "SLURM_JOB_NODELIST": hosts, "SLURM_STEP_NODELIST": hosts,
        "SLURM_NTASKS": str(nodes * per_node), "SLURM_NNODES": str(nodes), "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_TASKS_PER_NODE": str(per_node) if nodes == 1 else f"{per_node}(x{nodes})",
        "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % per_node), "SLURM_NODEID": str(rank // per_node),
        "SLURMD_NODENAME": node_name(rank // per_node),
    }
