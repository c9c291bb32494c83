"""A job script under the supervisor: its start, as sbatch would start it, the watch over it, and the reason of its failure.

It is a child of the supervisor, outside of Slurm's steps: its own sruns get the job's CPUs and GPUs as they would without us. A
witness is its parent and records its exit code even if the supervisor is killed.
"""

import math
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress

import psutil

from hpc_mp.cluster.slurm.allocation import ARRAY_ELEMENT
from hpc_mp.cluster.slurm.jobs import patient
from hpc_mp.cluster.slurm.records import find_settings
from hpc_mp.cluster.slurm.requeue import known_job
from hpc_mp.diagnosis.ends import words_of_end
from hpc_mp.diagnosis.evidence import Hang
from hpc_mp.job import ProgramSpec
from hpc_mp.program.shim import FORWARDS, with_shims, write_shims
from hpc_mp.program.witness import THE_SCRIPT, Witness
from hpc_mp.rundir import TOKEN, RunDirectory, read_json, write_json
from hpc_mp.rundir.attempt import tail
from hpc_mp.rundir.failures import RankFailure, read_ends, write_failure
from hpc_mp.rundir.program import run_variables
from hpc_mp.supervisor.context import AttemptContext, say_begun
from hpc_mp.supervisor.program import LAST_S
from hpc_mp.supervisor.signals import REPEAT_S, RunningStep, Signals
from hpc_mp.supervisor.silence import SilenceWatch, grown
from hpc_mp.supervisor.srun import LAG_S, Orphan, end_steps
from hpc_mp.supervisor.unended import MORE_S, patience

BY_CHILDREN, BY_TREE = "proctrack/cgroup", "proctrack/linuxproc"  # Slurm signals slurmstepd's children, or all below it
OF_OUR_DIRECTIVES = ("SLURM_OPEN_MODE",)  # from our --open-mode, for our log: `srun --output` of the script would append too
OF_BASH = {"SHLVL": "0"}  # of the bash that writes the variables, if sbatch was called without it
COPIES = ("HPC_MP_STAGED", "HPC_MP_LOCAL")  # directories of the copies of program.stage
SOON_S = 30.0  # between the failure of a launch and the end of a script that fails because of it


def environment(attempt: AttemptContext, spec: ProgramSpec, batch: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that sbatch gives a script, those of the job file, and those that describe the run. ``batch``: the
    variables that Slurm gave the job script."""
    run, record = attempt.run, attempt.record
    profile = {name: value for name, value in attempt.base_environ.items() if os.environ.get(name) != value}
    copies = {name: os.environ[name] for name in COPIES if name in os.environ} if spec.program.stage else {}
    forwards = {FORWARDS: str(int(find_settings().get("ProctrackType") == BY_CHILDREN))}
    own = {TOKEN: record.token, **run_variables(run.path, record.attempt), **forwards, **copies}
    # In the job file of a script that was an array of one.
    element = {"SLURM_ARRAY_JOB_ID": batch["SLURM_JOB_ID"]} if ARRAY_ELEMENT in spec.program.environment else {}
    return with_shims(run, {**element, **batch, **profile, **spec.environment.set, **spec.program.environment, **own})


def batch_environ(run: RunDirectory) -> dict[str, str]:
    """Read the variables that Slurm gave the job script, and remove the file, which may hold secrets. Raises OSError."""
    entries = run.batch_environ.read_bytes().split(b"\0")
    run.batch_environ.unlink()
    variables = dict(os.fsdecode(entry).split("=", 1) for entry in entries if b"=" in entry)
    return {name: value for name, value in variables.items() if name not in OF_OUR_DIRECTIVES and OF_BASH.get(name) != value}


class ScriptWatch:
    """The watch over a running script. ``overdue``: True if it ran to the end of the job despite a signal, and was killed.
    ``unended``: None, because no srun of ours reports the ends of tasks."""

    unended = None

    def __init__(self, attempt: AttemptContext, spec: ProgramSpec) -> None:
        self._attempt, self._spec = attempt, spec
        self._process: RunningStep | None = None
        self._warned = self.overdue = False
        self._last = math.inf
        run = attempt.run
        self.silence = SilenceWatch(spec.program.silent_limit, 1, grown([(0, run.srun_log), (0, run.metrics)]), on_hang=self.kill)

    def start(self) -> RunningStep:
        """Start the script. Its output goes to srun's log, together with the messages of its own sruns. Raises OSError."""
        run, record, program = self._attempt.run, self._attempt.record, self._spec.program
        batch = batch_environ(run)
        write_shims(run, batch)
        witness = Witness(str(run.path), record.token, record.attempt, 0, THE_SCRIPT, True)
        with open(run.srun_log, "ab") as log:
            process = subprocess.Popen(
                [*witness.of(0, THE_SCRIPT), str(run.user_script), *program.command[1:]], cwd=program.directory,
                env=environment(self._attempt, self._spec, batch), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True)
        write_json(run.script_process, {"pid": process.pid, "time": psutil.Process(process.pid).create_time()})
        self._process = process
        self.say_begun()
        return process

    def take_over(self) -> RunningStep | None:
        """Return the script that an earlier supervisor has left; None if it has ended."""
        with suppress(OSError, ValueError, KeyError, psutil.Error):
            record = read_json(self._attempt.run.script_process)
            process = psutil.Process(int(record["pid"]))
            if abs(process.create_time() - float(record["time"])) < 1:
                self._process = Orphan(process)
        return self._process

    def say_begun(self) -> None:
        """Record the host of each node, once."""
        if not self._attempt.run.ranks.exists() and self._attempt.record.hosts:
            hosts, places = self._attempt.seats()
            say_begun(self._attempt.run, self._attempt.record.attempt, places, hosts, self._spec.job.device,
                      self._attempt.record.token, time.time())

    def poll(self) -> bool:
        """Return True if the script and its processes are silent for too long, or at the last moment of the job."""
        if time.time() >= self._last:
            self._last, self.overdue = math.inf, True
            self.kill()
        return self.overdue or self.silence.noticed()

    def hang(self) -> Hang | None:
        return self.silence.hang

    def warn(self, signals: Signals) -> None:
        """Pass a signal on to the script, once."""
        number, signals.number = signals.number, None
        if number is None or self._process is None:
            return
        self._warned, run = True, self._attempt.run
        ends = self._attempt.job_id is not None and known_job(self._attempt.job_id, patient).get("JobState") != "RUNNING"
        if number == signal.SIGTERM and ends:  # from Slurm, to the whole job
            wait = patience(find_settings()) - MORE_S
            self._last = time.time() + wait - REPEAT_S - min(LAST_S, wait / 2)
            if find_settings().get("ProctrackType") == BY_TREE:  # it has reached the script too
                return
        if run.stop.exists():  # from `hpc-mp cancel`
            number = signal.Signals[f"SIG{self._spec.program.signal}"]
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, number)
        if run.stop.exists() and self._attempt.job_id is not None:
            end_steps(self._attempt.job_id, 0.0)

    def ranks_asked(self) -> bool:
        """Return True if the script was asked to stop."""
        return self._warned

    def kill(self) -> None:
        """Kill the script and its children, and end the steps that they leave behind."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        if self._attempt.job_id is not None:
            end_steps(self._attempt.job_id, min(LAG_S, self._attempt.record.grace))


def script_code(run: RunDirectory) -> int | None:
    """Return the exit code of the script, as from ``subprocess``; None if its witness was killed too."""
    with suppress(OSError, ValueError, KeyError):
        return int(read_json(run.script_end)["code"])
    return None


def record_failure(attempt: AttemptContext, code: int) -> None:
    """Record the failure of a script: that of a task in its last launch if it is recent, else the script's own. ``code``: exit
    code of the script, as from ``subprocess``."""
    run, record = attempt.run, attempt.record
    ends = read_ends(run)
    begun = {int(run.launch.values(path)[0]): float(read_json(path)["time"]) for path in run.launch.found()}
    latest = max(begun.values(), default=0.0)
    last = next((number for number, ended, failure in reversed(ends) if failure.time >= latest and (
        ended == code or time.time() - failure.time < SOON_S)), None)
    failures = [failure for number, _, failure in ends if number == last]
    if not failures:
        end = words_of_end(tail(run.srun_log), code, program=True, of_node=True)
        failures = [RankFailure(0, record.hosts[0], end.kind, end.text, time.time(), record.attempt, traceback=end.traceback,
                                of_node=True, inner=end.inner)]
    for failure in failures:
        with suppress(OSError):  # a full disk must not change the end of the job
            write_failure(run, failure)
