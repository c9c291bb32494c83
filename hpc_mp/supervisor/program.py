"""An attempt of a user's program: the signals sent to its ranks, the watch over them, and the meaning of their end."""

import itertools
import math
import os
import re
import signal
import time
from contextlib import suppress
from typing import Literal

from hpc_mp.base.errors import RunFailed
from hpc_mp.cluster.slurm.allocation import end_of
from hpc_mp.cluster.slurm.jobs import patient
from hpc_mp.cluster.slurm.records import find_settings
from hpc_mp.cluster.slurm.requeue import known_job
from hpc_mp.cluster.slurm.submit import cancel
from hpc_mp.diagnosis.evidence import Hang
from hpc_mp.diagnosis.lines import ALONE, HANG_ENDED, LABEL, OTHERS_ENDED, STEP_ASKED, all_ends, unmet_mpi
from hpc_mp.job import ProgramSpec
from hpc_mp.job.spec import time_to_meet
from hpc_mp.job.values import toml_value
from hpc_mp.program.node import send_signal
from hpc_mp.rundir import AttemptRecord
from hpc_mp.rundir.attempt import AttemptReader, tail
from hpc_mp.rundir.failures import RankFailure, write_failure
from hpc_mp.rundir.outcome import Cause
from hpc_mp.supervisor.context import AttemptContext, say_begun
from hpc_mp.supervisor.restart_policy import departure
from hpc_mp.supervisor.signals import REPEAT_S, Signals
from hpc_mp.supervisor.silence import NodeLogs, SilenceWatch, add_what_logs_say, explained, rank_files, record_on_all_nodes, where
from hpc_mp.supervisor.unended import MORE_S, FailedStep, UnendedTasks, patience

EARLY_S, START_S = 60.0, 60.0  # Slurm may send it early by this (man sbatch); a shorter job does not get it
LAST_S = 10.0  # before the end, at most half of the grace: remaining ranks are ended, to leave time for the conclusion
ENDING = ("KILL", "ABRT")  # our signals that end ranks without a request to stop
SENT = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)  # sent only by users (scancel --signal); slurmstepd reports SIGTERM
TAIL = 1 << 22  # bytes of a node's log that are searched for the stacks of its ranks
MPI_SAYS = 1000  # lines of a node's log in which its MPI reports its start
SEEN_S = 60.0  # until a file of another host is visible: NFS caches a directory's content that long
STEP = re.compile(r"launching StepId=(\d+\.\d+)")  # of srun --verbose


class ProgramWatch:
    """The supervisor's watch over the running tasks of a program.

    Attributes:
        silence: detects that they hang; then a step records their stacks, and they are ended.
        unended: detects nodes that do not report their tasks' ends; None if srun does not start the tasks.
        overdue: True if they ran to their time limit despite the signal, and were ended.
        warned: True if they were asked to stop, by us or by Slurm.
    """

    def __init__(self, attempt: AttemptContext, spec: ProgramSpec, begins: bool = True) -> None:
        """Start the watch. ``begins``: True if the attempt begins now, which is then recorded."""
        run, record = attempt.run, attempt.record
        self._attempt, self._spec, self._unsaid, self._began = attempt, spec, begins, time.time()
        if record.hosts:  # else only mpirun knows them
            self.say_begun()
        self._due = record.end - record.grace if record.end is not None and not sent_by_slurm(record, record.end) else math.inf
        self._last = self._last_moment(record.end)
        self.overdue = self.warned = self._ended = self._leaves = False
        self._signalled: float | None = None
        ranks = len(attempt.placement.ranks)
        logs = NodeLogs(run, attempt.placement, record.hosts)
        self.silence = SilenceWatch(spec.program.silent_limit, ranks, rank_files(run, ranks) if attempt.by_mpirun else logs,
                                    on_hang=self._record_stacks, troubled=lambda: logs.troubled)
        tasks = dict.fromkeys(record.hosts, spec.srun_tasks_per_node)
        self.unended = UnendedTasks(run.srun_log, tasks, find_settings, begins=begins) if attempt.allocation is not None else None
        noted = begins and attempt.allocation is not None and spec.slurm.container is None  # recorded by ranks as they begin
        self._meet = time_to_meet(spec.job) if noted else 0.0
        by_srun = attempt.allocation is not None and not spec.by_mpirun
        self._failed = FailedStep(run.srun_log, stop_requested=self.ranks_asked, grace=record.grace,
                                  stop_codes=spec.program.stop_codes, begins=begins) if by_srun else None

    def say_begun(self) -> None:
        """Record, once, the host of each rank."""
        if self._unsaid:
            self._unsaid, attempt = False, self._attempt
            hosts, places = attempt.seats()
            say_begun(attempt.run, attempt.record.attempt, places, hosts, self._spec.job.device, attempt.record.token,
                      self._began)

    def poll(self) -> bool:
        """Warn the tasks of a time limit if Slurm does not. Return True if they hang, or do not end when they must."""
        if self._unsaid and len(self._attempt.run.rank_host.found()) == len(self._attempt.placement.ranks):
            self.say_begun()
        if time.time() >= self._due:
            self._due = math.inf
            self._warn()
        if self._failed is not None and self._failed.due():
            self._note(OTHERS_ENDED)
            self._send("KILL")
        if time.time() >= self._last:
            self._last = self._last_moment(end_of({}, self._attempt.job_id or ""))  # the time limit may have been extended
            self.overdue = self._leaves or time.time() >= self._last
            if self.overdue:
                self._last = math.inf
                self._send("KILL")
        unended = self.unended is not None and self.unended.noticed()
        if self.unended is not None and self.unended.begun:  # their silence means nothing then
            return unended
        return self.silence.noticed() or self._absent()

    def _absent(self) -> bool:
        """Return True if some ranks have not begun in time but others have. They are recorded as failed, and all are ended."""
        if not self._meet or self.silence.seconds < self._meet + SEEN_S:
            return False
        self._meet, run, record = 0.0, self._attempt.run, self._attempt.record
        begun = {int(run.rank_host.values(path)[0]) for path in run.rank_host.found()} | {*self.silence.speakers}
        absent = [place for place in self._attempt.placement.ranks if begun and place.rank not in begun]
        for place in absent:
            message = f"it did not begin within {self.silence.seconds:.0f} s (job.meet_timeout)"
            write_failure(run, RankFailure(place.rank, record.hosts[place.node], "silent", message, time.time(), record.attempt))
        if absent:
            self._note(OTHERS_ENDED)
            self._send("KILL")
        return bool(absent)

    def ranks_asked(self) -> bool:
        """Return True if we or Slurm asked the ranks to stop: slurmstepd reports SIGTERM, and Slurm's record the job's."""
        allocation, hosts = self._attempt.allocation, self._attempt.record.hosts
        if not (self.warned or self._ended or allocation is None):
            self.warned = (any(map(STEP_ASKED.search, tail(self._attempt.run.node_log(hosts[0]))))
                           or departure(known_job(allocation.job_id, patient), allocation.restart, ()) is not None)
        return self.warned

    def _warn(self) -> None:
        self.warned = True
        self._send(self._spec.program.signal)

    def _note(self, line: str) -> None:
        """Write a line to srun's log, after which failures count as echoes."""
        with open(self._attempt.run.srun_log, "a", encoding="utf-8") as log:
            log.write(f"{line}\n")

    def _last_moment(self, end: float | None) -> float:
        """Return the time at which remaining ranks are ended, given the end of the job."""
        return math.inf if end is None else end - min(LAST_S, self._attempt.record.grace / 2)

    def _record_stacks(self) -> None:
        """Record the stacks of all ranks, and end the remaining ranks by SIGABRT, at which Python writes its stack too."""
        self._note(HANG_ENDED)
        record_on_all_nodes(self._attempt)
        self._send("ABRT")

    def hang(self) -> Hang | None:
        """Return the detected hang, with its explanation by the logs of the ended ranks; None without one."""
        run, hang = self._attempt.run, self.silence.hang
        if hang is None:
            return None
        add_what_logs_say(run, self._last_lines)
        self._attempt.say(where(run))
        hang = explained(hang, run)
        if hang.rank is None and self.unended is not None:  # a node that died or rebooted as its ranks began leaves no stack
            self.unended.conclude()
        return hang

    def _last_lines(self, rank: int) -> list[str]:
        """Return the last lines of a rank, from its own log or from that of its node."""
        if self._attempt.by_mpirun:
            return AttemptReader(self._attempt.run, self._attempt.record.attempt).last_lines(rank)
        seats = sorted(self._attempt.placement.ranks, key=lambda place: (place.node, place.local_rank))
        task, place = next((task, place) for task, place in enumerate(seats) if place.rank == rank)
        log = self._attempt.run.node_log(self._attempt.record.hosts[place.node])
        with suppress(OSError), open(log, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            lines = file.read().decode(errors="replace").splitlines()
            return [label[2] for line in lines if (label := LABEL.match(line)) and int(label[1]) == task]
        return []

    def warn(self, signals: Signals) -> None:
        """Forward the request to stop, once. Slurm's SIGTERM to the whole job reaches the ranks by itself, and some programs end
        at once at a second one. If the ranks have not got it a moment later, it was only for the job script."""
        if signals.number == signal.SIGTERM and self._signalled is None:
            self._signalled = time.monotonic()
        elif signals.number is not None:
            by_slurm = signals.number == signal.SIGTERM and self.ranks_asked()
            signals.number = None
            if by_slurm:
                self._leave()
            else:
                self._warn()

    def _leave(self) -> None:
        """Note how long ranks may continue if their job ends now and is not requeued: the supervisor must outlive them."""
        allocation = self._attempt.allocation
        job = known_job(allocation.job_id, patient) if allocation is not None else {}
        if allocation is not None and job.get("JobState", "RUNNING") != "RUNNING" and int(job["Restarts"]) <= allocation.restart:
            wait = patience(find_settings()) - MORE_S
            self._leaves, self._last = True, time.time() + wait - REPEAT_S - min(LAST_S, wait / 2)

    def _send(self, number: str) -> None:
        self._ended = self._ended or number in ENDING
        if self._spec.by_mpirun:
            send_signal(self._attempt.record, number)
            return
        log = self._attempt.run.srun_log.read_text(encoding="utf-8", errors="replace")
        with suppress(RunFailed):  # the step may have ended just now
            for name in STEP.findall(log)[-1:]:
                cancel(name, number)


def sent_by_slurm(record: AttemptRecord, end: float) -> bool:
    """Return True if Slurm sends the signal before the end of the job: a short job does not get it (slurm/job.sbatch.j2)."""
    return end - record.time - record.grace >= EARLY_S + START_S


def ending_of(attempt: AttemptContext, spec: ProgramSpec, code: int, stop_requested: bool, cancelled: bool, overdue: bool = False,
              ranks_asked: bool = False) -> Literal["completed", "stopped"] | Cause | None:
    """Return the end of an attempt in which no rank failed by itself; None if a rank failed.

    Args:
        code: code of the task that ended first, as from ``subprocess``.
        stop_requested: True if the supervisor was asked to stop the ranks.
        cancelled: True if the user wants the run to stop.
        overdue: True if the ranks had to be ended at the time limit.
        ranks_asked: True if the ranks were asked to stop.
    """
    record = attempt.record
    if attempt.has_failed():
        return None
    if spec.program.resumes and signalled(attempt, code):
        return "stopped"
    early = EARLY_S if record.end is not None and sent_by_slurm(record, record.end) else 0.0  # by which Slurm may send the signal
    late = record.end is not None and time.time() >= record.end - (0.0 if spec.by_script else record.grace + early)
    if code == 0 and (alone := _met_nobody(attempt)) is not None:
        return Cause("user", alone)
    sigkill = code in (-signal.SIGKILL, 128 + signal.SIGKILL)
    warned = stop_requested or late or (ranks_asked and not sigkill)  # scancel of a step sends SIGKILL at once
    if code == 0 and not (cancelled or stop_requested or ranks_asked or (late and spec.program.resumes)):
        return "completed"
    killed = overdue and sigkill
    warnings = (signal.SIGTERM, signal.Signals[f"SIG{spec.program.signal}"])  # Slurm's own in preemption, and ours
    by_signal = killed or code == 0 or -code in warnings or code - 128 in warnings  # many exit with 0 after SIGTERM
    if code in spec.program.stop_codes or cancelled or (warned and spec.program.resumes and (code > 0 or by_signal)):
        return "stopped"
    if not warned or not by_signal:
        return None
    limit = f"its time limit was near (job.time_limit = {toml_value(spec.job.time_limit)}), and " if late else ""
    ends = (f"its ranks kept running after SIG{spec.program.signal}" if killed else f"SIG{spec.program.signal} ended its ranks"
            if code else "its ranks were asked to stop and ended with exit code 0, which does not prove that they were done")
    return Cause("cancelled", f"the job was ended by Slurm: {limit}{ends}; with program.resumes = true it would "
                           "continue")


def signalled(attempt: AttemptContext, code: int) -> bool:
    """Return True if a signal of ``SENT`` to all ranks has ended the ranks without a handler: no rank has failed then."""
    if attempt.by_mpirun:  # the guard of a rank that is signalled separately records a failure
        return -code in SENT or code - 128 in SENT
    spec = attempt.spec
    tasks = attempt.placement.nodes * (spec.srun_tasks_per_node if isinstance(spec, ProgramSpec) else spec.job.ranks_per_node)
    ends = all_ends(attempt.run.srun_log.read_text(encoding="utf-8", errors="replace").splitlines()) if -code in SENT else ()
    return sum(len(end.tasks) for end in ends if end.code == code) >= min(2, tasks)


def _met_nobody(attempt: AttemptContext) -> str | None:
    """Return the reason why each rank of a program has computed by itself, if their MPI reports it; else None."""
    for host in attempt.record.hosts if len(attempt.placement.ranks) > 1 else ():
        with suppress(OSError), open(attempt.run.node_log(host), encoding="utf-8", errors="replace") as log:
            if (why := unmet_mpi((line.rstrip() for line in itertools.islice(log, MPI_SAYS)), ALONE)) is not None:
                return f"each rank ran alone: {why}"
    return None
