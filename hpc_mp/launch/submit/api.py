"""``hpc_mp.submit``: a Python callable on every task of a Slurm job, or of emulated nodes on this machine."""

import pickle
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hpc_mp.base.errors import HpcMpError, RunFailed
from hpc_mp.cluster.slurm.allocation import decide
from hpc_mp.cluster.slurm.jobs import FINAL
from hpc_mp.launch.backends import BACKENDS, CallRequest, SubmittedTasks
from hpc_mp.launch.submit.worker import SubmittedCall, failure_file
from hpc_mp.rundir import read_json

ON = ("auto", *(name for name, backend in BACKENDS.items() if backend.named and backend.submit))
POLL_S = 0.1  # between two polls of the files
LATE_S = 5.0  # delay in which a result may appear on a shared file system after the job has ended


def submit(
    function: Callable[..., Any], /, *arguments: Any, on: str = "auto", nodes: int = 1, tasks_per_node: int = 1,
    directory: str | Path = "submitted", slurm: Mapping[str, Any] | None = None, **keywords: Any,
) -> "SubmittedJob":
    """Call ``function(*arguments, **keywords)`` in ``nodes * tasks_per_node`` processes, and return at once.

    Each process has ``SLURM_PROCID`` and the other variables of srun, and ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``,
    ``MASTER_ADDR`` and ``MASTER_PORT`` (of task 0's host). Function and arguments are pickled by value (cloudpickle).

    Args:
        on: a Slurm job, emulated nodes here (which end with the returned object), or "auto": Slurm if it answers.
        directory: parent of a new folder with the pickles, the script and the logs; all nodes must see it.
        slurm: parameters of ``submitit.SlurmExecutor``: ``{"partition": "gpu", "time": 60, "gpus_per_node": 8}`` (minutes),
            others in ``"additional_parameters"``.

    Raises:
        HpcMpError: a parameter is wrong, or the caller is inside an allocation.
        RunFailed: sbatch refuses, in its own words.
    """
    if not callable(function):
        raise HpcMpError(f"submit({function!r}, …)", "is nothing that can be called",
                         "give a function and its arguments: submit(train, 3); hpc_mp.run_job starts a job file")
    for name, value in (("nodes", nodes), ("tasks_per_node", tasks_per_node)):
        if not isinstance(value, int) or value < 1:
            raise HpcMpError(f"{name} = {value}", "must be at least 1", "give a positive number")
    if on not in ON:
        raise HpcMpError(f'on = "{on}"', "is no back end that runs a callable", f"choose one of {', '.join(ON)}")
    where = decide(on)
    start = BACKENDS[where.place].submit
    if start is None:
        raise HpcMpError(f'on = "{on}"', f"not built yet for a callable {where.why}",
                         'use on = "local", or call it outside of the allocation for a job of its own: '
                         "env -u SLURM_JOB_ID python …")
    base = Path(directory).resolve()
    base.mkdir(parents=True, exist_ok=True)
    name = getattr(function, "__name__", type(function).__name__).strip("<>")
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=base))
    tasks = start(CallRequest(SubmittedCall(function, arguments, keywords), folder, nodes, tasks_per_node, slurm or {}))
    return SubmittedJob(tasks, folder, nodes * tasks_per_node)


class SubmittedJob:
    """A submitted callable. ``id``: id of Slurm's job; on emulated nodes a substitute number. ``words``: the site's messages at
    submission; mostly empty."""

    def __init__(self, running: SubmittedTasks, folder: Path, tasks: int) -> None:
        self._running, self.folder, self.tasks = running, folder, tasks
        self.id: str = running.id
        self.words: str = running.words

    @property
    def state(self) -> str:
        """The state in Slurm's words: ``PENDING``, ``RUNNING``, ``COMPLETED``, ``FAILED``, ``CANCELLED`` … For a Slurm job it is
        at most half a minute old. Files that tasks wrote about their end take precedence."""
        reported = self._running.state()
        if reported in FINAL:
            return reported
        if any(failure_file(self.folder, task).exists() for task in range(self.tasks)):
            return "FAILED"
        return "COMPLETED" if all(self._result(task).exists() for task in range(self.tasks)) else reported

    @property
    def logs(self) -> list[Path]:
        """The output file of each task, by task; a file exists once its task has begun."""
        return [self.folder / f"{self.id}_{task}_log.out" for task in range(self.tasks)]

    def results(self, timeout: float | None = None) -> list[Any]:
        """Wait for the results of the call and return them, by task. Raises RunFailed if a task failed, with the first one, its
        host and the Python error with its traceback, and TimeoutError if results are missing after ``timeout`` seconds; the job
        continues."""
        deadline = None if timeout is None else time.monotonic() + timeout
        ended: float | None = None
        while not all(self._result(task).exists() for task in range(self.tasks)):
            self._check()
            now = time.monotonic()
            if ended is None and self._running.state() in FINAL:
                ended = now
            if ended is not None and now > ended + LATE_S:
                self._check()
                missing = [str(task) for task in range(self.tasks) if not self._result(task).exists()]
                raise RunFailed(f"{self._running.why()}; no result of task {', '.join(missing)}; logs are in {self.folder}")
            if deadline is not None and now > deadline:
                raise TimeoutError(f"job {self.id} is {self.state} after {timeout:g} s")
            time.sleep(POLL_S)
        self._check()
        results = []
        for task in range(self.tasks):
            kind, value = pickle.loads(self._result(task).read_bytes())
            if kind == "error":
                raise RunFailed(f"task {task} failed:\n{value}its log: {self.logs[task]}")
            results.append(value)
        return results

    def result(self, timeout: float | None = None) -> Any:
        """Return the result of task 0; raises as ``results`` does."""
        return self.results(timeout)[0]

    def cancel(self) -> None:
        """End the job. Raises RunFailed if Slurm refuses."""
        self._running.cancel()

    def _check(self) -> None:
        """Raise RunFailed for the earliest failure that a task has recorded."""
        failures = [read_json(path) for task in range(self.tasks) if (path := failure_file(self.folder, task)).exists()]
        if failures:
            first = min(failures, key=lambda failure: float(failure["time"]))
            raise RunFailed(f"task {first['rank']} on {first['node']} failed: {first['message']}\n{first['traceback']}"
                            f"its log: {self.logs[first['rank']]}")

    def _result(self, task: int) -> Path:
        return self.folder / f"{self.id}_{task}_result.pkl"
