"""Why a job has to go, what is written of one that ended with it, and what follows after a supervisor was killed."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from launching import silent
from rendering import executable, job
from tables import table

from hpc_mp.base.files import write_json
from hpc_mp.cluster.slurm.allocation import Allocation
from hpc_mp.cluster.slurm.requeue import requeue
from hpc_mp.cluster.slurm.steps import use_up_numbers
from hpc_mp.diagnosis.lines import NODE_FAILURE
from hpc_mp.job.load import dump_job
from hpc_mp.layout.placement import Degrees, place, to_dict
from hpc_mp.rundir import AttemptRecord, RunDirectory, create_run, write_attempt
from hpc_mp.rundir.failures import RankFailure, write_failure
from hpc_mp.rundir.history import AttemptEnd, history
from hpc_mp.rundir.outcome import Cause
from hpc_mp.supervisor import after
from hpc_mp.supervisor.context import SupervisedRun
from hpc_mp.supervisor.ending import _departed, _with_end
from hpc_mp.supervisor.gather import ScriptLog, gather, user_cancelled
from hpc_mp.supervisor.prepare import begin
from hpc_mp.supervisor.restart_policy import IDLE_STOPS, PREEMPTED, QUEUED_AGAIN, REASONS, decide, departure, has_expired
from hpc_mp.supervisor.signals import Signals
from hpc_mp.supervisor.srun import ASKING, StepEnd

GIVEN = Allocation("7", 0, ("n1", "n2"), "lab", None)
SAYS = "slurmstepd-n1: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-26T11:38:46{} ***"
RUNS = {"JobState": "RUNNING", "Restarts": "0", "PreemptTime": "None"}
WHY = {"PREEMPTED": PREEMPTED, "QUEUED_AGAIN": QUEUED_AGAIN, "REQUEUED": REASONS["JOB REQUEUE"]}


def waiting(tmp_path: Path) -> SupervisedRun:
    return SupervisedRun(create_run(tmp_path, "x"), job(parallel={"rank_map": "block"}), place(Degrees(data=2), "DPT", 1), GIVEN)


def end_of(before: SupervisedRun, script: ScriptLog | None, node: str = "") -> AttemptEnd:
    """How the next start of the job says that the attempt ended. ``node``: what Slurm says of a node."""
    def ask(argv: Sequence[str]) -> str:
        return ("n1|idle|none\nn2|idle|none\n" if "sinfo" in str(argv) else node if "node" in argv else "") or silent(argv)

    begin(replace(before, allocation=replace(GIVEN, restart=1)), ask, script)
    return history(before.run)[-1]


@pytest.mark.parametrize(("changes", "said", "why"), table(__file__, "departure.toml", "reasons", WHY))
def test_why_a_job_has_to_go(changes: dict[str, str] | None, said: list[str], why: str | None) -> None:
    assert departure({} if changes is None else RUNS | changes, 0, said) == why


@pytest.mark.parametrize(("words", "expired", "cancelled"), table(__file__, "departure.toml", "slurmstepd"))
def test_what_slurmstepd_says_of_the_end_of_a_job(tmp_path: Path, words: str, expired: bool, cancelled: bool) -> None:
    log = tmp_path / "slurm-7.log"
    log.write_text(f"{SAYS.format(words)}\n")
    assert (has_expired([SAYS.format(words)]), user_cancelled(ScriptLog(log, 0))) == (expired, cancelled)


@pytest.mark.parametrize(("states", "expired", "refused"), table(__file__, "departure.toml", "time_limits"))
def test_a_job_at_its_time_limit_is_taken_back_while_it_ends(
        tmp_path: Path, states: str, expired: bool, refused: str | None) -> None:
    script = tmp_path / "0001" / "job.sbatch"
    said = requeue("7", 0, script, lambda argv: f"JobId=7 JobState={states} Restarts=0 Command={script}", expired)
    assert said == refused or (refused is not None and said is not None and said.startswith(refused))


def test_a_departure_is_not_counted_and_goes_on_for_ever() -> None:
    gone = [AttemptEnd("7.0.1", n, 0, "stopped", "", (), "requeue", 0.0, departed=PREEMPTED) for n in range(IDLE_STOPS + 2)]
    idle = [replace(end, departed="") for end in gone]
    for stalled, departed, action in (
            (gone, True, "requeue"), (gone, False, "requeue"), (idle, True, "requeue"), (idle, False, "fail")):
        decided = decide("stopped", cancelled=False, retries=0, stalled=stalled, saved=0, lacking="", departed=departed)
        assert decided.action == action
    dead = Cause("lost", "n2 vanished", nodes=("n2",), retry=True)
    assert decide(dead, cancelled=False, retries=1, stalled=gone, saved=0, lacking="").action == "requeue"


@pytest.mark.parametrize(("lines", "srun", "kind", "nodes", "words"), table(__file__, "departure.toml", "attempts"))
def test_an_attempt_that_was_ended_with_its_job(
        tmp_path: Path, lines: tuple[str, ...], srun: str, kind: str, nodes: tuple[str, ...], words: str) -> None:
    """Its supervisor was killed as its ranks were; the next one reads what Slurm has said."""
    before = waiting(tmp_path)
    run, first = before.run, begin(before, silent).record
    log = tmp_path / "slurm-7.log"
    begun = f"hpc-mp: 11:38:41 attempt 1 (token {first.token}) on n1, n2; rank map"
    log.write_text("".join(f"{line.replace('TOKEN', first.token)}\n" for line in (begun, *lines)))
    run.srun_log.write_text(srun)

    end = end_of(before, ScriptLog(log, log.stat().st_size))
    named = {"node": tuple(nodes[:1]), "vanished": ("n1",)}.get(kind, (None,))
    assert (end.kind, end.nodes, (end.node,)) == (kind, tuple(nodes), named) and end.message.startswith(words), end
    assert end.counts == (kind != "stopped") and bool(end.departed) == (kind == "stopped")


@pytest.mark.parametrize(("started", "node"), [(-60, None), (60, "n1"), (None, "n1")])
def test_a_job_may_be_killed_without_a_death_of_its_node(tmp_path: Path, started: float | None, node: str | None) -> None:
    """Its first node's daemon has run since so many seconds from the start of the attempt on: it was not restarted in between."""
    first = begin(before := waiting(tmp_path), silent).record
    began = None if started is None else datetime.fromtimestamp(first.time + started).isoformat(timespec="seconds")
    end = end_of(before, None, f"NodeName=n1 BootTime=2026-11-01T00:00:00 SlurmdStartTime={began}\n")
    assert (end.kind, end.node) == ("vanished", node)
    assert end.message.startswith(f"it ended without a record, {'as if' if node else 'although'} its first node, n1, had")


@pytest.mark.parametrize(("lines", "script", "failure", "changes", "why"), table(__file__, "departure.toml", "failed_nodes", WHY))
def test_a_failed_node_comes_before_what_follows_from_it(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: tuple[str, ...], script: tuple[str, ...], failure: str,
        changes: dict[str, str], why: str) -> None:
    monkeypatch.setattr("hpc_mp.supervisor.ending.stepd_above", lambda: 71)
    attempt, record = begin(waiting(tmp_path), silent), RUNS | changes
    if failure:
        write_failure(attempt.run, RankFailure(0, "n1", failure, "NodeLost", 0.0, attempt=attempt.record.attempt, nodes=("n1",)))
    attempt.run.srun_log.write_text("".join(f"{line}\n" for line in lines))
    (log := tmp_path / "slurm-7.log").write_text("".join(f"{line}\n" for line in script))
    assert _departed(attempt, record, ScriptLog(log, 0)) == why
    assert _departed(replace(attempt, allocation=None), record, None) == ""
    words = gather(attempt, 1, ScriptLog(log, 0), ask=silent).srun
    assert {failed[1] for line in words if (failed := NODE_FAILURE.search(line))} == ({"n2"} if lines else set())


def test_the_end_of_a_job_is_what_it_is_now(tmp_path: Path) -> None:
    attempt = begin(waiting(tmp_path), silent)
    assert _with_end(attempt, RUNS | {"EndTime": "2026-11-26T11:38:46"}).record.end is not None and attempt.record.end is None
    for record in ({}, RUNS | {"EndTime": "Unknown"}, {"JobState": "PENDING", "EndTime": "2026-11-26T11:38:46"}):
        assert _with_end(attempt, record).record.end is None


@pytest.mark.parametrize(("code", "forced", "died"), [
    (-9, False, True), (-11, False, True), (-1, False, True), (-9, True, False), (0, False, False), (137, False, False),
    *((-number, False, False) for number in ASKING)])
def test_the_death_of_srun(code: int, forced: bool, died: bool) -> None:
    assert StepEnd(code, forced).died is died


@pytest.mark.parametrize(("restart", "count", "step"), [
    (0, 0, ["srun"]), (1, 5, ["srun", "--nodes=4"]), (2, 10, ["/usr/bin/srun", "--het-group=0,1"]), (1, 0, ["mpirun"])])
def test_steps_of_a_start_have_numbers_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restart: int, count: int,
                                                    step: list[str]) -> None:
    executable(tmp_path / "bin" / "srun", f'#!/bin/sh\necho "$*" >> {tmp_path}/started\n')
    monkeypatch.setenv("PATH", f"{tmp_path}/bin", prepend=":")
    use_up_numbers(step, {"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}, restart)
    started = (tmp_path / "started").read_text().splitlines() if count else []
    assert len(started) == count and all(line.endswith("--overlap true") for line in started)
    assert all(("--het-group=0,1" in line) == ("--het-group=0,1" in step) for line in started)


BEGAN = "srun: launching StepId=7.1 on host n1, 2 tasks: [0-1]\nsrun: launching StepId=7.1 on host n2, 2 tasks: [2-3]\n"
WELL = "srun: launch/slurm: _task_finish: n1: tasks 0-1: Completed\n"
ALL_WELL = WELL + "srun: launch/slurm: _task_finish: n2: tasks 2-3: Completed\n"
STOPPED = "srun: error: n1: tasks 0-1: Exited with exit code 75\nsrun: error: n2: tasks 2-3: Exited with exit code 75\n"
EXITED = WELL + "srun: error: n2: task 2: Exited with exit code 3\nsrun: launch/slurm: _task_finish: n2: task 3: Completed\n"
LOST = WELL + "srun: error: Node failure on n2\n"
KILLED = WELL + "srun: error: n2: task 3: Killed\n"
PREEMPT_TIME = " PreemptTime=2026-11-26T11:38:46"


class EndedStep:
    """srun as ``orphans`` gives it, which ends as it is looked at."""

    pid, returncode = 1, 0

    def __init__(self) -> None:
        self.argv = ["srun", "x", "run"]

    def poll(self) -> int:
        return 0

    def wait(self, timeout: float) -> int:
        return 0

    def send_signal(self, number: int, /) -> None:
        pass


@pytest.fixture
def killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunDirectory]:
    """A run whose supervisor has been killed; it goes on from there."""
    def go_on(said: str, *, resumes: bool, job_says: str = "", steps: int = 1, asked_to_stop: bool = False,
              engine: bool = False) -> RunDirectory:
        run = create_run(tmp_path, "x")
        program: dict[str, Any] = {} if engine else {"program": {"command": ["x"], "resumes": resumes}}
        run.job.write_text(dump_job(job(job={"nodes": 2, "ranks_per_node": 2, "device": "cpu"}, **program)))
        write_json(run.placement, to_dict(place(Degrees(data=4), "cluster", 2)))
        write_attempt(run.attempt_record, AttemptRecord("7.0.1", 1, ("n1", "n2"), "n1", 10001, "s", None, 120.0))
        run.srun_log.write_text(said)
        if asked_to_stop:
            run.stop.touch()
        executable(tmp_path / "bin" / "scontrol",
                   f"#!/bin/sh\necho JobId=7 JobState=RUNNING Restarts=0 Command={run.script}{job_says}\n")
        for name in ("sinfo", "squeue", "scancel", "sacct", "sbatch", "srun"):
            executable(tmp_path / "bin" / name, "#!/bin/sh\n")
        monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
        for name, value in {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1,n2", "SLURMD_NODENAME": "n1"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(after, "orphans", lambda *_: [EndedStep() for _ in range(steps)])
        monkeypatch.setattr(Signals, "close", lambda self: None)
        after.go_on_after(137, run.path, ["srun", "x", "run"], Signals())
        return run
    return go_on


@pytest.mark.parametrize(("said", "given", "kind", "action"), table(__file__, "departure.toml", "killed", globals()))
def test_how_the_ranks_of_a_killed_supervisor_have_ended(
        killed: Callable[..., RunDirectory], said: str, given: dict[str, Any], kind: str, action: str) -> None:
    run = killed(BEGAN + said, **given)
    [end] = history(run)
    assert (end.kind, end.action) == (kind, action), end
    assert run.outcome.exists() is (action != "requeue")
    if kind == "supervisor":
        assert end.message.startswith("the supervisor on n1 was killed by SIGKILL")
    assert ("its ranks save and stop, and the run continues" in run.main_log.read_text()) is given["resumes"]
