"""Why a job has to go, by Slurm's record and slurmstepd's words; and what is written of one that ended with its job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from rendering import executable, job

from hpc_mp.base.command import CommandFailed
from hpc_mp.cluster.slurm.allocation import Allocation
from hpc_mp.cluster.slurm.requeue import requeue
from hpc_mp.cluster.slurm.steps import use_up_numbers
from hpc_mp.diagnosis.lines import NODE_FAILURE
from hpc_mp.layout.placement import Degrees, place
from hpc_mp.rundir import create_run
from hpc_mp.rundir.history import AttemptEnd, history
from hpc_mp.rundir.outcome import Cause
from hpc_mp.supervisor.context import SupervisedRun
from hpc_mp.supervisor.departure import PREEMPTED, QUEUED_AGAIN, REASONS, departure, has_expired
from hpc_mp.supervisor.ending import _departed, _with_end
from hpc_mp.supervisor.gather import ScriptLog, gather, user_cancelled
from hpc_mp.supervisor.prepare import begin
from hpc_mp.supervisor.restart_policy import IDLE_STOPS, decide
from hpc_mp.supervisor.srun import ASKING, StepEnd

GIVEN = Allocation("7", 0, ("n1", "n2"), "lab", None)
SAYS = "slurmstepd-n1: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-26T11:38:46{} ***"
RUNS = {"JobState": "RUNNING", "Restarts": "0", "PreemptTime": "None"}


def because(reason: str) -> str:
    return SAYS.format(f" DUE TO {reason}")


def waiting(tmp_path: Path) -> SupervisedRun:
    return SupervisedRun(create_run(tmp_path, "x"), job(parallel={"rank_map": "block"}), place(Degrees(data=2), "DPT", 1), GIVEN)


def silent(argv: object) -> str:
    raise CommandFailed(f"no answer to {argv}")


@pytest.mark.parametrize(("record", "said", "why"), [
    (RUNS, (), None),
    ({}, (), None),
    (RUNS | {"PreemptTime": ""}, (), None),
    (RUNS | {"PreemptTime": "2026-11-26T11:38:46"}, (), PREEMPTED),  # in the grace time slurmstepd says nothing of the job
    (RUNS | {"JobState": "COMPLETING"}, (because("PREEMPTION"),), PREEMPTED),
    ({}, (because("PREEMPTION"),), PREEMPTED),  # Slurm does not answer
    (RUNS | {"Restarts": "1"}, (because("JOB REQUEUE"),), REASONS["JOB REQUEUE"]),
    (RUNS | {"Restarts": "1"}, (), QUEUED_AGAIN),
    (RUNS, (because("TIME LIMIT"),), None),  # it would come again
    (RUNS, (SAYS.format(""), SAYS.format(" DUE TO SIGNAL Terminated")), None),
    (RUNS, ("hpc-mp: 11:38:47 attempt 1 failed: " + because("NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS"),), None),
])
def test_why_a_job_has_to_go(record: Mapping[str, str], said: tuple[str, ...], why: str | None) -> None:
    assert departure(record, 0, said) == why


@pytest.mark.parametrize(("words", "expired", "cancelled"), [
    ("", False, True), (" DUE TO TIME LIMIT", True, False), (" DUE TO PREEMPTION", False, False),
    (" DUE TO SIGNAL Terminated", False, True),
])
def test_what_slurmstepd_says_of_the_end_of_a_job(tmp_path: Path, words: str, expired: bool, cancelled: bool) -> None:
    log = tmp_path / "slurm-7.log"
    log.write_text(f"{SAYS.format(words)}\n")
    assert (has_expired([SAYS.format(words)]), user_cancelled(ScriptLog(log, 0))) == (expired, cancelled)


@pytest.mark.parametrize(("states", "expired", "refused"), [
    ("RUNNING", False, None), ("COMPLETING", False, "the job is COMPLETING"), ("COMPLETING", True, None), ("TIMEOUT", True, None),
    ("CANCELLED", True, "the job is CANCELLED"),
])
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


@pytest.mark.parametrize(("lines", "srun", "kind", "nodes", "words"), [
    ((because("PREEMPTION"),), "", "stopped", (), "stopped: Slurm preempted the job, which ended its ranks and its supervisor"),
    ((because("JOB REQUEUE"),), "", "stopped", (), "stopped: the job was requeued (scontrol requeue), which ended"),
    ((because("NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS"),), "srun: error: Node failure on n2\n", "node", ("n2",),
     "node n2 failed according to Slurm: srun: error: Node failure on n2; all its nodes answer now"),
    (("srun: error: Node failure on n1",), "", "node", ("n1",), "node n1 failed according to Slurm"),
    ((), "", "vanished", (), "it ended without a record, as if its first node, n1, had died; all its nodes answer now"),
    (("hpc-mp: 11:00:00 attempt 1 (token 7.0.9) on n1, n2; x", because("PREEMPTION"),
      "hpc-mp: 11:00:00 attempt 1 (token TOKEN) on n1"),
     "", "vanished", (), "it ended without a record"),  # an earlier start was preempted
    (("hpc-mp: 11:00:00 attempt 1 has ended: node n1 lost: srun: error: Node failure on n1; waiting",), "", "vanished", (), "it"),
])
def test_an_attempt_that_was_ended_with_its_job(
        tmp_path: Path, lines: tuple[str, ...], srun: str, kind: str, nodes: tuple[str, ...], words: str) -> None:
    """Its supervisor was killed as its ranks were; the next one reads what Slurm has said."""
    before = waiting(tmp_path)
    run, first = before.run, begin(before, silent).record
    log = tmp_path / "slurm-7.log"
    begun = f"hpc-mp: 11:38:41 attempt 1 (token {first.token}) on n1, n2; rank map"
    log.write_text("".join(f"{line.replace('TOKEN', first.token)}\n" for line in (begun, *lines)))
    run.srun_log.write_text(srun)

    def ask(argv: object) -> str:
        return "n1|idle|none\nn2|idle|none\n" if "sinfo" in str(argv) else silent(argv)

    begin(replace(before, allocation=replace(GIVEN, restart=1)), ask, ScriptLog(log, log.stat().st_size))
    [end] = history(run)
    named = {"node": nodes[:1], "vanished": ("n1",)}.get(kind, (None,))
    assert (end.kind, end.nodes, (end.node,)) == (kind, nodes, named) and end.message.startswith(words), end
    assert end.counts == (kind != "stopped") and bool(end.departed) == (kind == "stopped")


@pytest.mark.parametrize(("lines", "script", "record", "why"), [
    ((), (), RUNS | {"PreemptTime": "2026-11-26T11:38:46"}, PREEMPTED),
    (("srun: error: Node failure on n2",), (), RUNS | {"Restarts": "1"}, ""),  # a node is to be blamed
    ((), (because("NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS"),), RUNS | {"Restarts": "1"}, ""),
    ((), (), RUNS, ""),
    # our own words of the attempt before: this one was blamed on "n2;"
    ((), ("hpc-mp: 14:47:48 attempt 1: node n2 failed according to Slurm: srun: error: Node failure on n2; down now: n2",
          because("PREEMPTION")), RUNS | {"Restarts": "1"}, PREEMPTED),
    ((), ("hpc-mp: 14:47:48 attempt 1: node n2 failed according to Slurm: "
          + because("NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS"), because("JOB REQUEUE")),
     RUNS | {"Restarts": "1"}, REASONS["JOB REQUEUE"]),
    ((), ("hpc-mp: 14:47:48 attempt 1 failed: node n1 lost: " + because("PREEMPTION"),), RUNS, ""),
])
def test_a_failed_node_comes_before_what_follows_from_it(
        tmp_path: Path, lines: tuple[str, ...], script: tuple[str, ...], record: dict[str, str], why: str) -> None:
    attempt = begin(waiting(tmp_path), silent)
    attempt.run.srun_log.write_text("".join(f"{line}\n" for line in lines))
    (log := tmp_path / "slurm-7.log").write_text("".join(f"{line}\n" for line in script))
    assert _departed(attempt, record, ScriptLog(log, 0)) == why
    assert _departed(replace(attempt, allocation=None), record, None) == ""
    words = gather(attempt, 1, ScriptLog(log, 0), ask=silent).srun
    named = {failed[1] for line in words if (failed := NODE_FAILURE.search(line))}
    assert named == ({"n2"} if lines else set())


def test_the_end_of_a_job_is_what_it_is_now(tmp_path: Path) -> None:
    attempt = begin(waiting(tmp_path), silent)
    later = _with_end(attempt, RUNS | {"EndTime": "2026-11-26T11:38:46"}).record.end
    assert later is not None and attempt.record.end is None
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
