"""What the end of a program means: with and without a word that the time is up, a wish to stop, and a program that resumes."""

import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rendering import executable, job
from tables import table

from hpc_mp.cluster.slurm.allocation import Allocation
from hpc_mp.diagnosis.classify import classify
from hpc_mp.diagnosis.evidence import Hang
from hpc_mp.diagnosis.lines import HANG_ENDED
from hpc_mp.job import ProgramSpec
from hpc_mp.layout.placement import Degrees, place
from hpc_mp.rundir import AttemptRecord, create_run, cut_metrics, read_json
from hpc_mp.rundir.failures import RankFailure, read_failures, write_failure
from hpc_mp.rundir.history import AttemptEnd, furthest_step, record
from hpc_mp.rundir.outcome import Cause
from hpc_mp.rundir.records import RankStart, StepMetrics, line_of, read_records
from hpc_mp.supervisor import node_setup, program
from hpc_mp.supervisor.context import AttemptContext
from hpc_mp.supervisor.ending import _ending, _first_code, finish, stalled_ends
from hpc_mp.supervisor.ending import lacking as lacking_of
from hpc_mp.supervisor.gather import gather
from hpc_mp.supervisor.program import ProgramWatch, ending_of
from hpc_mp.supervisor.restart_policy import decide
from hpc_mp.supervisor.signals import TAKEN, Signals

HOUR = 3600.0


def attempt(tmp_path: Path, *, left: float | None = HOUR, lasts: float = HOUR, resumes: bool = False,
            mpi: str = "none", **program: Any) -> AttemptContext:
    """One of two hosts whose job ends in so many seconds, after as many as it lasts."""
    spec = job(job={"nodes": 2, "ranks_per_node": 2, "device": "cpu"}, program={"command": ["x"], "resumes": resumes, **program},
               slurm={"mpi": mpi})
    now = time.time()
    end = None if left is None else now + left
    begun = AttemptRecord("7.0.1", 1, ("n1", "n2"), "n1", 10001, "s", end, 120.0, 0.0 if end is None else end - lasts)
    return AttemptContext(create_run(tmp_path, "x"), spec, place(Degrees(data=4), "cluster", 2),
                          Allocation("7", 0, ("n1", "n2"), "lab", end), (), record=begun, host_order="")


def ended(begun: AttemptContext, code: int, **given: bool) -> Any:
    assert isinstance(begun.spec, ProgramSpec)
    found = ending_of(begun, begun.spec, code, **{"stop_requested": False, "cancelled": False} | given)
    return found.message if isinstance(found, Cause) else found


@pytest.mark.parametrize(("words", "completed"), table(__file__, "program_ending.toml", "left_alone"))
def test_ranks_that_mpi_left_alone_have_not_completed_the_run(tmp_path: Path, words: str, completed: bool) -> None:
    begun = attempt(tmp_path)
    log = begun.run.node_log("n2")
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(f"2: {'-' * 70}\n2: {words}\n2: A 0 1\n3: A 0 1\n")
    found = ended(begun, 0)
    assert found == "completed" if completed else 'each rank ran alone' in found and 'slurm.mpi = "pmix"' in found


# What an attempt and its end were given besides the exit code: words of these, and "near" the time limit, "endless" without one.
FLAGS = {"asked": "stop_requested", "cancelled": "cancelled", "told": "ranks_asked", "overdue": "overdue"}
LEFT: dict[str, float | None] = {"near": 10, "endless": None, "in 170 s": 170, "in 190 s": 190}
SIGTERM_ENDED = "SIGTERM ended its ranks; with program.resumes = true it would continue"
LIMIT_NEAR = 'its time limit was near (job.time_limit = "01:00:00")'
OVERDUE = f"{LIMIT_NEAR}, and its ranks kept running after SIGTERM"


@pytest.mark.parametrize(("code", "given", "means"), table(__file__, "program_ending.toml", "ends", globals()))
def test_an_end(tmp_path: Path, code: int, given: str, means: str | None) -> None:
    words = set(given.split(", ")) - {""}
    left = next((LEFT[word] for word in words & LEFT.keys()), HOUR)
    flags = {FLAGS[word]: True for word in words & FLAGS.keys()}
    assert words <= {"resumes", *LEFT, *FLAGS}
    found = ended(attempt(tmp_path, left=left, resumes="resumes" in words), code, **flags)
    assert found == means if means is None or " " not in means else means in found


USR2 = "User defined signal 2"


@pytest.mark.parametrize(("code", "ends", "means"), table(__file__, "program_ending.toml", "signals", globals()))
def test_ranks_that_a_signal_to_all_has_ended(tmp_path: Path, code: int, ends: dict[str, str], means: str | None) -> None:
    for resumes in (True, False):
        begun = attempt(tmp_path / str(resumes), resumes=resumes)
        begun.run.srun_log.parent.mkdir(parents=True, exist_ok=True)
        begun.run.srun_log.write_text("".join(
            f"srun: error: {'n1' if tasks in '0-1' else 'n2'}: task{'s' * ('-' in tasks)} {tasks}: {how}\n"
            for tasks, how in ends.items()))
        assert ended(begun, code) == (means if resumes else None)


@pytest.mark.parametrize(("code", "means"), [(138, "stopped"), (140, "stopped"), (129, "stopped"), (137, None), (1, None)])
def test_ranks_of_mpirun_that_a_signal_to_all_has_ended(tmp_path: Path, code: int, means: str | None) -> None:
    begun = attempt(tmp_path, resumes=True, start="mpi", mpi="mpirun")
    assert ended(begun, code) == means
    write_failure(begun.run, RankFailure(0, "n1", "ended", "rank 0 was ended by SIGUSR1", 1.0))  # alone
    assert ended(begun, code) is None


@pytest.mark.parametrize(("line", "record", "told"), table(__file__, "program_ending.toml", "told"))
def test_who_has_told_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, record: str, told: bool) -> None:
    executable(tmp_path / "bin" / "scontrol", f"#!/bin/sh\necho '{record}'\n")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin", prepend=":")
    watch = watched(begun := attempt(tmp_path))
    begun.run.node_log("n1").write_text(f"0: begins\n{line}\n0: more\n")
    assert watch.ranks_asked() is told


def test_what_we_have_ended_was_not_told(tmp_path: Path, sent: list[tuple[str, str]]) -> None:
    watch = watched(begun := attempt(tmp_path))
    watch._send("KILL")
    begun.run.node_log("n1").write_text("0: slurmstepd-n1: error: *** STEP 7.1 ON n1 CANCELLED AT 2026-11-26T11:41:45 ***\n")
    assert not watch.ranks_asked() and sent == [("7.1", "KILL")]


def test_signals_and_codes_of_its_own(tmp_path: Path) -> None:
    begun = attempt(tmp_path, left=10, signal="USR1", stop_codes=[3])
    assert ended(begun, 3) == "stopped" and ended(begun, 75) is None
    for code in (-10, 138, -15, 143):  # preemption sends SIGTERM all the same
        assert "SIGUSR1 ended its ranks" in ended(begun, code)
    assert ended(begun, -12) is None


def test_a_short_job_is_not_always_at_its_end(tmp_path: Path) -> None:
    """Slurm sends it no signal before its time: else each failure of it would be taken for the time limit, and come again."""
    assert ended(attempt(tmp_path, left=130, lasts=150, resumes=True), 1) is None
    assert ended(attempt(tmp_path, left=100, lasts=150, resumes=True), 1) == "stopped"


def test_a_rank_that_has_said_why_it_failed(tmp_path: Path) -> None:
    begun = attempt(tmp_path, left=10, resumes=True)
    write_failure(begun.run, RankFailure(0, "n1", "user", "there is no such program", 1.0))
    assert ended(begun, 2) is None


def test_a_program_that_resumes_is_queued_again_for_as_many_time_limits_as_it_takes() -> None:
    many = [AttemptEnd("7.0.1", n, 0, "stopped", "", (), "requeue", 0.0) for n in range(9)]
    for lacking in ("", " without a later step"):
        assert decide("stopped", cancelled=False, retries=3, stalled=many, saved=None, lacking=lacking).action == "requeue"
    idle = decide("stopped", cancelled=False, retries=3, stalled=many, saved=0, lacking=" without a new checkpoint")
    assert (idle.action, idle.why) == ("fail", "stopped 4 times without a new checkpoint: raise job.time_limit")


def test_progress_of_a_program_is_what_it_says(tmp_path: Path) -> None:
    begun = attempt(tmp_path)
    run, spec = begun.run, begun.spec
    assert (furthest_step(run, spec), lacking_of(begun)) == (0, "")

    def fails(number: int, *steps: int) -> int:
        """The ends that count against an attempt that has said ``steps``."""
        cut_metrics(run.metrics, steps[0] - 1)  # as hpc_mp.log
        with open(run.metrics, "a") as file:
            file.writelines(line_of(StepMetrics(step, 1.0, 0, 1.0, 0.0, 0.0, 0, attempt=number)) + "\n" for step in steps)
        stalled = len(stalled_ends(begun))
        record(run, AttemptEnd(f"7.{number}", number, furthest_step(run, spec), "signal", "", (), "requeue", 0.0))
        return stalled

    assert fails(1, *range(1, 26)) == 0 and lacking_of(begun) == " without a later step"
    assert fails(2, *range(21, 23)) == 1 and fails(3, *range(21, 25)) == 2, "further than the second, not than the first"
    assert fails(4, *range(21, 27)) == 0 and fails(5, 1) == 1


def test_what_is_said_for_the_ranks_as_they_begin(tmp_path: Path) -> None:
    begun = attempt(tmp_path)
    assert isinstance(begun.spec, ProgramSpec)
    assert not ProgramWatch(begun, begun.spec).poll()
    starts = read_records(begun.run.ranks, RankStart)
    assert [(each.rank, each.node, each.local_rank, each.task, each.token) for each in starts] == [
        (0, "n1", 0, 0, "7.0.1"), (1, "n1", 1, 1, "7.0.1"), (2, "n2", 0, 2, "7.0.1"), (3, "n2", 1, 3, "7.0.1")]
    assert read_json(begun.run.status)["phase"] == "running"


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    asked: list[tuple[str, str]] = []
    monkeypatch.setattr(program, "cancel", lambda name, number: asked.append((name, number)))
    return asked


def watched(begun: AttemptContext) -> ProgramWatch:
    begun.run.srun_log.write_text("srun: launching StepId=7.0 on host n1\nsrun: launching StepId=7.1 on host n1, 2 tasks: [0-1]")
    assert isinstance(begun.spec, ProgramSpec)
    return ProgramWatch(begun, begun.spec)


@pytest.mark.parametrize(("first", "ends", "kind", "nodes"), [
    (None, ("n1: tasks 0-1: Aborted",), "lost", ("n2",)),  # n2 has rebooted: its slurmd does not know the step
    (None, ("n1: tasks 0-1: Aborted", "n2: task 3: Killed"), "lost", ("n2",)),
    (None, ("n1: tasks 0-1: Aborted", "n2: tasks 2-3: Killed"), "hang", ()), (None, (), "hang", ()),
    (1, ("n1: tasks 0-1: Aborted",), "hang", ())])  # the hang has a cause
def test_a_hang_without_a_cause_is_of_the_node_that_srun_has_given_up(
        tmp_path: Path, first: int | None, ends: tuple[str, ...], kind: str, nodes: tuple[str, ...]) -> None:
    begun = attempt(tmp_path)
    watch = watched(begun)
    watch.silence.hang = Hang(60.0, first, first)
    begun.run.srun_log.write_text("\n".join([
        *(f"srun: launching StepId=7.1 on host {host}, 2 tasks: [{tasks}]" for host, tasks in (("n1", "0-1"), ("n2", "2-3"))),
        HANG_ENDED, *(f"srun: error: {end}" for end in ends), "srun: forcing job termination",
        "srun: error: Timed out waiting for job step to complete", ""]))
    hang = watch.hang()
    assert watch.unended is not None
    cause = classify(gather(begun, 1, None, hang=hang, unended=watch.unended.hosts))
    assert (cause.kind, cause.nodes) == (kind, nodes)


@pytest.mark.parametrize(("ends", "code", "expected"), [
    ((), 0, ("vanished", True)), (("n1: tasks 0-1: Completed",), 0, ("vanished", True)),
    (("n1: tasks 0-1: Killed", "n2: tasks 2-3: Killed"), 9, ("signal", True)),
    (("n1: tasks 0-1: Completed", "n2: tasks 2-3: Completed"), 0, ("completed", None))])
def test_a_step_that_slurm_has_lost_is_not_completed(tmp_path: Path, ends: tuple[str, ...], code: int, expected: object) -> None:
    """srun then ends with 0, without the ends of some tasks; a task that was killed is no task that was lost."""
    begun = attempt(tmp_path)
    watch = watched(begun)
    begun.run.srun_log.write_text("\n".join([
        *(f"srun: launching StepId=7.1 on host {host}, 2 tasks: [{tasks}]" for host, tasks in (("n1", "0-1"), ("n2", "2-3"))),
        *(f"srun: {'' if end.endswith('Completed') else 'error: '}{end}" for end in ends), ""]))
    end = _ending(begun, _first_code(begun.run, code, stop_requested=False), None, False, False, watch, None)
    assert ((end.kind, end.retry) if isinstance(end, Cause) else (end, None)) == expected


class Asked(Signals):
    """A supervisor that has just been asked to stop, without handlers in the process of the tests."""

    def __init__(self) -> None:
        self.number, self.warn, self.stop_requested, self._ended, self._sent = None, None, True, False, 0.0

    def close(self) -> None:
        pass


@pytest.mark.parametrize("resumes", [True, False])
@pytest.mark.parametrize("script", [
    "exec sleep 60",  # srun dies of the signal, for which it has no handler yet
    "trap '' USR2; echo 'srun: error: n1: task 0: User defined signal 2' >&2; exit 140", "trap '' USR2; exit 0"])
def test_a_wish_to_stop_that_comes_before_the_ranks_is_no_failure(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, resumes: bool) -> None:
    executable(tmp_path / "bin" / "srun", f"#!/bin/bash\n[[ $* == *node-end.sh* ]] && exit 0\n{script}\n")
    executable(tmp_path / "bin" / "scontrol", "#!/bin/sh\necho JobId=7 JobState=RUNNING Restarts=0 PreemptTime=None\n")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin", prepend=":")
    decisions: list[tuple[Any, str]] = []
    monkeypatch.setattr(AttemptContext, "is_current", lambda _: True)
    monkeypatch.setattr("hpc_mp.supervisor.ending.act", lambda _, end, decision, *__: decisions.append((end, decision.action)))
    begun = replace(attempt(tmp_path, resumes=resumes, stop_codes=[3]), command=("srun", "--nodes=2", "true"))
    begun.run.srun_log.parent.mkdir(parents=True, exist_ok=True)
    begun.run.srun_log.touch()
    finish(begun, node_setup.start(begun, Asked()), None, Asked(), None)
    assert decisions == [("stopped", "requeue")]


@pytest.mark.parametrize(("here", "printed", "container", "absent"), [
    ([0, 1, 2], [], False, {3: "n2"}), ([0], [], False, {1: "n1", 2: "n2", 3: "n2"}), ([1, 2, 3], [], False, {0: "n1"}),
    ([0, 1], [2], False, {3: "n2"}), ([0, 1, 2, 3], [], False, {}), ([0, 1, 2], [3], False, {}), ([], [], False, {}),
    ([], [0, 1], True, {})])
def test_ranks_that_have_not_begun_when_others_have_are_named(
        tmp_path: Path, sent: list[tuple[str, str]], here: list[int], printed: list[int], container: bool, absent: dict[int, str],
) -> None:
    """Nothing happened for ``program.silent_limit``, an hour. ``here``: those that have said that they begin."""
    begun, now = attempt(tmp_path, left=None), [time.monotonic()]
    if container:  # where nothing of ours starts them
        begun = replace(begun, spec=begun.spec.model_copy(update={
            "slurm": begun.spec.slurm.model_copy(update={"container": "image.sqsh"})}))
    watch = watched(begun)
    watch.silence._clock = lambda: now[0]
    for rank in here:
        begun.run.rank_host(rank).write_text("n1")
    begun.run.node_log("n2").write_text("".join(f"{rank}: a line\n" for rank in printed))
    noticed = []
    for second in range(0, 200, 2):
        noticed += [second] if watch.poll() else []
        now[0] += 2.0
    failures = read_failures(begun.run, 1)
    assert {failure.rank: failure.node for failure in failures} == absent and sent == ([("7.1", "KILL")] if absent else [])
    assert (noticed == [152]) == bool(absent), "90 s, a tenth of a second for each rank, and a minute"
    if absent:
        cause = classify(gather(begun, 137))
        assert (cause.kind, cause.rank, cause.node) == ("silent", *next(iter(absent.items())))
        assert "gave no sign of life: it did not begin within 152 s (job.meet_timeout)" in cause.message


@pytest.mark.parametrize(("number", "line", "expected"), [
    *((number, "", [("7.1", "TERM")]) for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)),
    (signal.SIGTERM, "", [("7.1", "TERM")]),  # scancel --batch, scancel --full: to the job's script alone
    (signal.SIGTERM, "0: slurmstepd-n1: error: *** STEP 7.1 ON n1 CANCELLED AT 2026-11-26T11:41:45 ***\n", [])])
def test_a_wish_to_stop_is_passed_on_once_and_only_if_slurm_has_not(
        tmp_path: Path, sent: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch, number: int, line: str,
        expected: list[tuple[str, str]]) -> None:
    executable(tmp_path / "bin" / "scontrol", "#!/bin/sh\necho JobId=7 JobState=RUNNING Restarts=0 PreemptTime=None\n")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin", prepend=":")
    watch, signals = watched(begun := attempt(tmp_path)), Signals.__new__(Signals)  # without handlers in the process of the tests
    begun.run.node_log("n1").write_text(line)
    signals.number = number
    watch.warn(signals)
    assert sent == (expected if number != signal.SIGTERM else []), "Slurm's own may be on its way"
    for _ in range(3):
        watch.warn(signals)
    assert sent == expected


@pytest.mark.parametrize(("before", "number", "asked"), [
    *(("", number, True) for number in TAKEN), ("signal.signal(signal.SIGHUP, signal.SIG_IGN)", signal.SIGHUP, False)])  # nohup
def test_a_supervisor_outlives_what_somebody_sends(before: str, number: signal.Signals, asked: bool) -> None:
    says = f"""
import os, signal
{before}
from hpc_mp.supervisor.signals import Signals
signals = Signals()
os.kill(os.getpid(), {number:d})
print(signals.stop_requested)
"""
    assert subprocess.run([sys.executable, "-c", says], capture_output=True, text=True).stdout == f"{asked}\n"


@pytest.mark.parametrize(("record", "leaves"), table(__file__, "program_ending.toml", "cancelled"))
def test_ranks_of_a_job_that_slurm_ends_for_good_are_ended_before_the_supervisor_is(
        tmp_path: Path, sent: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch, record: str, leaves: bool) -> None:
    executable(tmp_path / "bin" / "scontrol", f"""#!/bin/sh
[ "$2" = config ] && echo 'KillWait = 4 sec' || echo 'JobId=7 {record} PreemptTime=None'
""")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin", prepend=":")
    monkeypatch.setattr(program, "end_of", lambda environ, job: None)
    watch, signals = watched(begun := attempt(tmp_path)), Signals.__new__(Signals)
    begun.run.node_log("n1").write_text("0: slurmstepd-n1: error: *** STEP 7.1 ON n1 CANCELLED AT 2026-11-26T11:41:45 ***\n")
    signals.number = signal.SIGTERM
    watch.warn(signals)
    watch.warn(signals)
    begun.run.srun_log.write_text(begun.run.srun_log.read_text() + "\nsrun: forcing job termination\n")
    watch.poll()
    assert sent == [("7.1", "KILL")] * leaves and watch.overdue is leaves


@pytest.mark.parametrize(("left", "lasts", "times"), [(100.0, 200.0, 1), (130.0, 200.0, 0), (100.0, HOUR, 0), (None, HOUR, 0)])
def test_a_short_job_is_warned_by_us(tmp_path: Path, sent: list[tuple[str, str]], left: float | None, lasts: float,
                                     times: int) -> None:
    """Slurm warns the others."""
    watch = watched(attempt(tmp_path, left=left, lasts=lasts))
    for _ in range(3):
        watch.poll()
    assert sent == [("7.1", "TERM")] * times


@pytest.mark.parametrize(("left", "now", "overdue"), [
    (7.0, 7.0, True), (20.0, 20.0, False), (7.0, HOUR, False), (7.0, None, False), (None, None, False)])
def test_ranks_that_go_on_until_the_time_limit_are_ended_before_slurm_ends_all(
        tmp_path: Path, sent: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch, left: float | None, now: float | None,
        overdue: bool) -> None:
    """Then somebody is left to queue the job again. By then the job may have been given more time."""
    monkeypatch.setattr(program, "end_of", lambda environ, job: None if now is None else time.time() + now)
    watch = watched(attempt(tmp_path, left=left))
    for _ in range(3):
        watch.poll()
    assert sent == [("7.1", "KILL")] * overdue and watch.overdue == overdue
