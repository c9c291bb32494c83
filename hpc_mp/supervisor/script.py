"""A job script under the supervisor: its start, as sbatch would start it, the watch over it, and why it failed.

It is a child of the supervisor, in no step of Slurm: so its own sruns get the job's CPUs and GPUs as they would without us.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress

from hpc_mp.cluster.slurm.records import find_settings
from hpc_mp.diagnosis.ends import words_of_end
from hpc_mp.diagnosis.evidence import Hang
from hpc_mp.job import ProgramSpec
from hpc_mp.program.shim import with_shims, write_shims
from hpc_mp.rundir import TOKEN, RunDirectory
from hpc_mp.rundir.attempt import tail
from hpc_mp.rundir.failures import RankFailure, read_ends, write_failure
from hpc_mp.rundir.program import run_variables
from hpc_mp.supervisor.begun import say_begun
from hpc_mp.supervisor.context import AttemptContext
from hpc_mp.supervisor.signals import Signals
from hpc_mp.supervisor.silence import SilenceWatch, grown
from hpc_mp.supervisor.srun import LAG_S, end_steps

OF_OUR_DIRECTIVES = ("SLURM_OPEN_MODE",)  # of --open-mode, for our log: with it `srun --output` would append too
BY_PROCESS_GROUP = "proctrack/pgid"  # the only one with which Slurm's signals to the job do not reach children in other sessions


def environment(attempt: AttemptContext, spec: ProgramSpec) -> dict[str, str]:
    """Return the variables that sbatch gives a script, those of the job file, and those that describe the run."""
    run, record = attempt.run, attempt.record
    profile = {name: value for name, value in attempt.base_environ.items() if os.environ.get(name) != value}
    own = {TOKEN: record.token, **run_variables(run.path, record.attempt)}
    return with_shims(run, {**_batch_environ(run), **profile, **spec.environment.set, **spec.program.environment, **own})


def _batch_environ(run: RunDirectory) -> Mapping[str, str]:
    """Read the variables that Slurm gave the job script, and remove the file, which may hold secrets."""
    entries = run.batch_environ.read_bytes().split(b"\0")
    run.batch_environ.unlink()
    variables = dict(os.fsdecode(entry).split("=", 1) for entry in entries if b"=" in entry)
    return {name: value for name, value in variables.items() if name not in OF_OUR_DIRECTIVES}


class ScriptWatch:
    """The watch over a running script.

    Attributes:
        overdue: always False: Slurm itself ends a script at its time limit.
        unended: None: no srun of ours reports the ends of tasks.
    """

    overdue, unended = False, None

    def __init__(self, attempt: AttemptContext, spec: ProgramSpec) -> None:
        self._attempt, self._spec = attempt, spec
        self._process: subprocess.Popen[bytes] | None = None
        self._warned = False
        run = attempt.run
        self.silence = SilenceWatch(spec.program.silent_limit, 1, grown([(0, run.srun_log), (0, run.metrics)]), on_hang=self.end)

    def start(self) -> subprocess.Popen[bytes]:
        """Start the script. Its output goes to the log of srun, whose messages are among it. Raises OSError."""
        run, command = self._attempt.run, self._spec.program.command
        write_shims(run)
        with open(run.srun_log, "ab") as log:
            self._process = subprocess.Popen(
                [run.user_script, *command[1:]], cwd=self._spec.program.directory, env=environment(self._attempt, self._spec),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        self.say_begun()
        return self._process

    def say_begun(self) -> None:
        """Record the host of each node, once."""
        if not self._attempt.run.ranks.exists() and self._attempt.record.hosts:
            hosts, places = self._attempt.seats()
            say_begun(self._attempt.run, self._attempt.record.attempt, places, hosts, self._spec.job.device,
                      self._attempt.record.token, time.time())

    def poll(self) -> bool:
        """Return True if the script and all that it has started are silent for too long."""
        return self.silence.noticed()

    def hang(self) -> Hang | None:
        return self.silence.hang

    def warn(self, signals: Signals) -> None:
        """Pass a signal on to the script, once. Slurm's SIGTERM to the whole job reaches it by itself."""
        number, signals.number = signals.number, None
        if number is None or self._process is None:
            return
        self._warned = True
        if number == signal.SIGTERM and find_settings().get("ProctrackType") != BY_PROCESS_GROUP:
            return
        if self._attempt.run.stop.exists():  # of `hpc-mp cancel`
            number = signal.Signals[f"SIG{self._spec.program.signal}"]
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, number)

    def ranks_asked(self) -> bool:
        """Return True if the script was asked to stop."""
        return self._warned

    def end(self) -> None:
        """Kill the script and its children, and have the steps that they leave behind end."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        if self._attempt.job_id is not None:
            end_steps(self._attempt.job_id, min(LAG_S, self._attempt.record.grace))


def record_failure(attempt: AttemptContext, code: int) -> None:
    """Record why a script failed: its last launch, if tasks of it have failed and no later one was made; else the script itself.

    Args:
        code: exit code of the script, as from ``subprocess``.
    """
    run, record = attempt.run, attempt.record
    ends = read_ends(run)
    last = max((number for number, _, _ in ends), default=0)
    launches = max((int(run.launch.values(path)[0]) for path in run.launch.found()), default=math.inf)
    failures = [failure for number, _, failure in ends if number == last == launches]
    if not failures:
        end = words_of_end(tail(run.srun_log), code, program=True, of_node=True)
        failures = [RankFailure(0, record.hosts[0], end.kind, end.text, time.time(), record.attempt, traceback=end.traceback,
                                of_node=True, inner=end.inner)]
    for failure in failures:
        with suppress(OSError):  # a full disk must not change the end of the job
            write_failure(run, failure)
