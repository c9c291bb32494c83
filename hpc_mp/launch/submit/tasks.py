"""The tasks of a submitted callable: those of a Slurm job, or processes on emulated nodes of this machine."""

import os
import secrets
import shlex
import socket
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import submitit
from submitit.core.utils import DelayedSubmission, JobPaths

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.exit_codes import ending
from hpc_mp.cluster.slurm import jobs as queue
from hpc_mp.cluster.slurm import submit as slurm
from hpc_mp.cluster.slurm.jobs import FINAL, SlurmJob
from hpc_mp.diagnosis.lines import task_ends
from hpc_mp.launch.backends.backend import CallRequest, SubmittedTasks
from hpc_mp.launch.emulator.emulator import EmulatedRank, Emulator, Exit
from hpc_mp.launch.emulator.slurm_env import EMULATED, in_blocks, inherited, srun_environments
from hpc_mp.rundir.rank_env import emulated_node

ENTRY = "hpc_mp.launch.submit.worker:emulated"
# A USR2 before submitit's handler is installed would kill the task (Slurm sends it up to 60 s early). An ignored signal is
# ignored only until the handler is set.
PYTHON = shlex.join(["sh", "-c", 'trap "" USR2; exec "$@"', "-", sys.executable])
WARNING_S = 90  # submitit's, before the time limit, when a running call ends. Slurm may warn a minute earlier
LIMIT_MIN = 5  # submitit's, unless "time" gives another
SRUN = ["--kill-on-bad-exit=1", "--wait=60", "--export=ALL"]  # ALL: else a site's --export=NONE reaches the tasks


class SlurmTasks(SubmittedTasks):
    """A Slurm job. submitit renders and pickles; we submit, query and cancel, since it cannot without accounting. Raises
    HpcMpError if a name in ``options`` is not one of submitit's, and RunFailed if sbatch refuses."""

    def __init__(self, request: CallRequest) -> None:
        executor, folder = _executor(request), request.folder
        self.id = executor.submit(request.call).job_id
        self.words = executor.words
        self._log = folder / f"{self.id}_0_log.out"  # srun's messages are there too
        self._job, self._due, self._delays = SlurmJob(self.id, "PENDING"), 0.0, iter(queue.DELAYS_S)

    def state(self) -> str:
        """Return Slurm's state, at most half a minute old: Slurm is asked at growing intervals, however often this is called."""
        if not self._job.ended and time.monotonic() >= self._due:
            self._due = time.monotonic() + next(self._delays, queue.DELAYS_S[-1])
            self._job = queue.job_states([self.id])[self.id]
        return self._job.state

    def why(self) -> str:
        code = f", {ending(self._job.exit_code)}" if self._job.exit_code else ""
        reason = f" ({self._job.meaning or self._job.reason})" if self._job.reason else ""
        lines = self._log.read_text(errors="replace").splitlines() if self._log.exists() else ()
        first = next((f"; {end.line}" for end in task_ends(lines)), "")  # Slurm's code is the greatest of all tasks'
        return f"Slurm job {self.id} is {self._job.state}{code}{reason}{first}"

    def cancel(self) -> None:
        slurm.cancel(self.id)
        self._due = 0.0


class _Executor(submitit.SlurmExecutor):
    """submitit's executor, which renders and pickles. We submit, from a clean environment, and keep the site's messages."""

    words = ""

    def _submit_command(self, command: str) -> submitit.SlurmJob[Any]:
        script = Path(self.folder) / "job.sbatch"
        script.write_text(self._make_submission_file_text(command, uid=""), encoding="utf-8")
        submission = slurm.sbatch(script)
        self.words = submission.words
        return submitit.SlurmJob(self.folder, submission.job_id, tasks=list(range(self._num_tasks())))


def _executor(request: CallRequest) -> _Executor:
    """Return the executor that submits a call. Raises HpcMpError if a name in its options is not one of submitit's."""
    folder, options = request.folder, request.options
    executor = _Executor(folder, python=PYTHON)
    path = f"export PYTHONPATH={shlex.quote(os.pathsep.join(filter(None, sys.path)))}"  # tasks can import what we can
    limit = options.get("time", LIMIT_MIN)
    warning = min(WARNING_S, limit * 60 // 4) if isinstance(limit, int) else WARNING_S  # else at a short job's start
    # sites refuse wckeys that they do not know
    defaults = {"job_name": folder.name, "wckey": None, "stderr_to_stdout": True, "signal_delay_s": warning}
    cpus = [f"--cpus-per-task={options['cpus_per_task']}"] if "cpus_per_task" in options else []  # not inherited on 22.05
    try:
        executor.update_parameters(**{
            **defaults, **options, "nodes": request.nodes, "ntasks_per_node": request.tasks_per_node,
            "setup": [path, *options.get("setup", ())], "srun_args": [*SRUN, *cpus, *options.get("srun_args", ())]})
    except (ValueError, TypeError, NameError) as error:
        raise HpcMpError(f"slurm = {dict(options)}", str(error).replace("\n", " "),
                         "name those, or others in additional_parameters") from None
    return executor


class EmulatedTasks(SubmittedTasks):
    """Processes on this machine, one per task, with srun's variables; they live no longer than this object. ``options`` are only
    for Slurm, but checked. Raises HpcMpError as ``SlurmTasks``."""

    def __init__(self, request: CallRequest) -> None:
        _executor(request)
        folder, nodes, tasks_per_node = request.folder, request.nodes, request.tasks_per_node
        self.id, self.words = str(1 + secrets.randbelow(10**9)), ""
        self._cancelled, self._tasks, self._per_node = False, nodes * tasks_per_node, tasks_per_node
        DelayedSubmission(request.call).dump(JobPaths(folder, job_id=self.id).submitted_pickle)
        shared = {**inherited(os.environ), **EMULATED, "SUBMITIT_EXECUTOR": "slurm"}
        self._stack = ExitStack()
        self._emulator = self._stack.enter_context(Emulator([ENTRY.partition(":")[0], "submitit.core.submission"], shared))
        environs = srun_environments(in_blocks(nodes, tasks_per_node), self.id, {})
        tasks = [EmulatedRank(JobPaths(folder, job_id=self.id, task_id=task).stdout, environ)
                 for task, environ in enumerate(environs)]
        with socket.create_server(("127.0.0.1", 0)) as listener, open(folder / ".lock", "w") as lock:
            self._emulator.start(tasks, folder, listener, lock.fileno(), ENTRY)

    def state(self) -> str:
        exits = self._ended()
        if len(exits) < self._tasks and self._emulator.broken is None:
            return "RUNNING"
        self._stack.close()
        if self._cancelled:
            return "CANCELLED"
        return "FAILED" if self._emulator.broken or any(end.code for end in exits) else "COMPLETED"

    def why(self) -> str:
        ends = "; ".join(f"task {end.rank} on {emulated_node(end.rank // self._per_node)} {ending(end.code)}"
                         for end in self._ended() if end.code)
        return self._emulator.broken or ends or f"it is {self.state()}"

    def cancel(self) -> None:
        if self.state() not in FINAL:
            self._cancelled = True
            self._emulator.command("kill")

    def _ended(self) -> list[Exit]:
        """Return all ends of tasks so far, without waiting."""
        self._emulator.receive()
        return self._emulator.exits
