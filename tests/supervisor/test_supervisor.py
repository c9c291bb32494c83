"""The host's decisions and records: pure parts, with stand-ins for what Slurm says."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rendering import executable, job
from tables import table

from hpc_mp.base.command import CommandFailed
from hpc_mp.base.errors import HpcMpError
from hpc_mp.cluster.bad_nodes import BadNode, Certainty, bad_nodes, choose, ledger, record
from hpc_mp.cluster.slurm.allocation import Allocation, allocation
from hpc_mp.cluster.slurm.nodes import NodeState
from hpc_mp.cluster.slurm.requeue import await_notice, exclude, held_back, notice_s, persistent, queued_again, requeue
from hpc_mp.cluster.slurm.steps import one_task_per_node
from hpc_mp.layout.placement import Degrees, place
from hpc_mp.rundir import create_run, history, read_attempt
from hpc_mp.rundir.history import AttemptEnd
from hpc_mp.rundir.outcome import Cause
from hpc_mp.supervisor.context import AttemptContext, SupervisedRun
from hpc_mp.supervisor.ending import _ending, interrupted
from hpc_mp.supervisor.prepare import FIRST_PORT, PORTS, begin, port
from hpc_mp.supervisor.restart_policy import IDLE_STOPS
from hpc_mp.supervisor.restart_policy import decide as decide_of

MACHINE = Cause("lost", "n3 vanished", nodes=("n3",), retry=True)
PROGRAM = Cause("error", "rank 1 raised")


def end(kind: str = "lost", step: int = 0, token: str = "7.0.1") -> AttemptEnd:
    return AttemptEnd(token, 1, step, kind, "", (), "requeue", 0.0)


def bad(node: str, time: float = 0.0, sure: Certainty = "likely", code: str = "lost") -> BadNode:
    return BadNode(node, code, f"{node} vanished", "run", time, 1e12, sure)


class Slurm:
    """Answers by the first words of a question, and remembers what it was asked."""

    def __init__(self, **answers: str | Exception | list[str | Exception]) -> None:
        self.answers = answers
        self.asked: list[str] = []

    def __call__(self, argv: Sequence[str]) -> str:
        self.asked.append(" ".join(argv))
        for words, answer in self.answers.items():
            if self.asked[-1].replace("-", "").startswith(words.replace("_", " ")):
                said = answer.pop(0) if isinstance(answer, list) else answer
                if isinstance(said, Exception):
                    raise said
                return said
        raise CommandFailed(f"no answer to {argv}")


# --- decide ----------------------------------------------------------------------------------------------------------

decide = partial(decide_of, cancelled=False, retries=3, lacking=" without a new checkpoint")
TWICE, SPENT, FORGIVEN = [end()] * 2, [end()] * 3, [*[replace(end(), returned=("n3",))] * 2, end(), end()]
IDLE, LOST, STOPS = [end("stopped")] * IDLE_STOPS, [end("lost")] * IDLE_STOPS, [end("stopped")] * 3


@pytest.mark.parametrize(("ending", "options", "action", "why"), table(__file__, "supervisor.toml", "decisions", globals()))
def test_decisions(ending: Any, options: dict[str, Any], action: str, why: str) -> None:
    decision = decide(ending, **{"stalled": [], "saved": 0, **options})
    assert decision.action == action and why in decision.why


def test_each_blame_excuses_one_end() -> None:
    blamed = replace(end(), nodes=("n3",))
    assert history.returned([], ("n1", "n3")) == () == history.returned([blamed], ("n1", "n2"))
    assert history.returned([blamed], ("n1", "n3")) == ("n3",)
    again = replace(blamed, returned=("n3",))  # it blames the node anew, which excuses nothing
    assert history.returned([blamed, again], ("n1", "n3")) == ()
    assert history.returned([blamed, again, blamed], ("n1", "n3")) == ("n3",)


def test_progress_refills_the_budget() -> None:
    ends = [end(step=0), end(step=0), end(step=0), end(step=40)]
    assert history.without_progress(ends, 40) == [ends[-1]]
    assert history.without_progress(ends, 50) == []
    assert history.without_progress(ends[:3], 0) == ends[2::-1]
    assert history.without_progress([*ends[:2], replace(end(step=0), action="resume"), ends[2]], 0) == [ends[2]]


# --- requeue ---------------------------------------------------------------------------------------------------------


SCRIPT = Path("/a b/runs/0001/job.sbatch")
RUNNING = (f"JobId=7 JobName=a JobState=RUNNING Restarts=0 Partition=all ExcNodeList=(null) Command={SCRIPT} "
           "WorkDir=/a b/runs/0001")
NODES = "n1|idle|none\nn2|allocated|none\nn3|allocated|none\nn4|down*|Not responding\nn5|mixed|none\n"


def test_a_requeue_with_exclusion_never_holds_the_job() -> None:
    slurm = Slurm(scontrol_show_job=RUNNING, scontrol_requeue="", scontrol_update=[CommandFailed("busy"), ""], sinfo=NODES)
    assert requeue("7", 0, SCRIPT, slurm) is None and exclude("7", [bad("n3")], (), 2, slurm).nodes == ("n3",)
    words = [question.split(" ")[1] for question in slurm.asked if question.startswith("scontrol")]
    assert words == ["show", "requeue", "show", "update", "show", "update"]
    assert slurm.asked[-1].endswith("ExcNodeList=n3")


@pytest.mark.parametrize(("listed", "recorded", "needed", "wanted"), table(__file__, "supervisor.toml", "excluded"))
def test_the_list_of_excluded_nodes(listed: str, recorded: tuple[str, ...], needed: int, wanted: str | None) -> None:
    slurm = Slurm(scontrol_show_job=RUNNING.replace("(null)", listed), scontrol_update="", sinfo=NODES)
    exclude("7", [*([bad("n2", sure="certain")] if recorded else []), bad("n3", time=1.0)], recorded, needed, slurm)
    updates = [question.partition("ExcNodeList=")[2] for question in slurm.asked if "update" in question]
    assert updates == ([] if wanted is None or wanted == listed else [wanted])


def test_a_name_that_slurm_does_not_know_any_more_is_left_off() -> None:
    """It would refuse the whole list. A node of the user's in another partition stays."""
    listed = RUNNING.replace("(null)", "gone,old,x1")  # by the user: gone and x1
    slurm = Slurm(scontrol_show_job=listed, scontrol_update="", sinfo=[NODES, "x1|idle|none\n"])
    exclude("7", [bad("old"), bad("n3")], ("old",), 2, slurm)
    assert slurm.asked[-1].endswith("ExcNodeList=x1,n3") and slurm.asked[-2].endswith("--nodes=gone,x1")


@pytest.mark.parametrize(("reason", "restarts", "begin", "held"), table(__file__, "supervisor.toml", "holds"))
def test_slurms_own_hold_is_known_from_a_time_that_the_user_has_set(reason: str, restarts: str, begin: str, held: bool) -> None:
    said = (f"JobId=7 JobState=PENDING Reason={reason} Restarts={restarts} SubmitTime=2026-01-02T00:00:00 "
            f"EligibleTime=2026-01-02T{begin}")
    assert held_back("7", Slurm(scontrol_show_job=said)) is held


@pytest.mark.parametrize(("restarts", "restart", "again"), [("0", 0, False), ("1", 0, True), ("1", 1, False), ("", 0, False)])
def test_slurms_own_requeue_is_seen(restarts: str, restart: int, again: bool) -> None:
    said = RUNNING.replace("RUNNING", "COMPLETING").replace("Restarts=0", f"Restarts={restarts}")
    assert queued_again("7", restart, SCRIPT, Slurm(scontrol_show_job=said)) is again
    assert not queued_again("7", restart, Path("/other/job.sbatch"), Slurm(scontrol_show_job=said))
    assert not queued_again("7", restart, SCRIPT, Slurm())


@dataclass
class Later:
    """A Slurm of which n4 is marked after two looks; ``says`` is what it says from the fourth on."""

    says: dict[str, str] = field(default_factory=dict)
    slept: list[float] = field(default_factory=list)

    def __call__(self, argv: Sequence[str]) -> str:
        late = len(self.slept) >= 3
        if argv[0] == "sinfo":
            state = self.says.get("state", "allocated*") if late else "allocated*" if len(self.slept) > 1 else "allocated"
            return f"n4|{state}|none\n"
        return RUNNING.replace("Restarts=0", self.says["restarts"]) if late and "restarts" in self.says else RUNNING


@pytest.mark.parametrize(("says", "seconds", "comes"), table(__file__, "supervisor.toml", "dead_nodes"))
def test_slurm_is_given_the_time_to_notice_a_dead_node(says: dict[str, str], seconds: float, comes: bool) -> None:
    slurm = Later(says)

    def sleep(seconds: float) -> None:
        slurm.slept.append(seconds)
        time.sleep(0.05)

    assert await_notice("7", 0, SCRIPT, ["n4"], seconds, lambda: True, slurm, sleep) is comes
    assert len(slurm.slept) == 3 if comes else slurm.slept
    assert not await_notice("7", 0, SCRIPT, ["n4"], 60.0, lambda: False, slurm, slurm.slept.append)


def test_how_long_slurm_takes_to_notice() -> None:
    assert notice_s(lambda argv: "SlurmdTimeout           = 60 sec\n") == 90.0
    assert notice_s(Slurm()) == 330.0  # it does not tell


AGAIN = RUNNING.replace("RUNNING", "COMPLETING").replace("Restarts=0", "Restarts=1")
ANOTHERS = ("", "Command=/bin/bash WorkDir=/", "Command=/a b/runs/0002/job.sbatch WorkDir=/")


@pytest.mark.parametrize(("job_id", "shown", "answer", "refusal"), [
    *(("7", RUNNING.replace("RUNNING", state), "", f"the job is {state}")  # somebody ended it
      for state in ("CANCELLED", "COMPLETING", "PENDING", "TIMEOUT")),
    *(("7", f"JobId=7 JobState=RUNNING {command}", "", "this allocation does not belong to the job") for command in ANOTHERS),
    ("7_2", RUNNING, "", None),  # elements of an array share the first one's script
    ("7", RUNNING, CommandFailed("disabled"), "disabled"),
    ("7", [RUNNING, AGAIN], CommandFailed("Socket timed out"), None),  # a lost answer is looked into
])
def test_what_is_queued_again_and_what_is_left_alone(job_id: str, shown: Any, answer: Any, refusal: str | None) -> None:
    slurm = Slurm(scontrol_show_job=shown, scontrol_requeue=answer)
    script = SCRIPT if job_id == "7" else Path("/a b/runs/0003/job.sbatch")
    assert (found := requeue(job_id, 0, script, slurm)) == refusal or (refusal and found and found.startswith(refusal))
    assert (f"scontrol requeue {job_id}" in slurm.asked) == (refusal in (None, "disabled"))


def test_slurm_is_asked_until_it_can_be_reached() -> None:
    silences = CommandFailed("Unable to contact slurm controller"), CommandFailed("did not answer within 20 s")
    assert persistent(("scontrol", "x"), Slurm(scontrol=[*silences, "yes"]), lambda seconds: None) == "yes"
    with pytest.raises(CommandFailed, match="no such job"):
        persistent(("scontrol", "x"), Slurm(scontrol=CommandFailed("no such job")), lambda seconds: None)


# --- allocation ------------------------------------------------------------------------------------------------------


PLAIN = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[2-4]", "SLURM_RESTART_COUNT": "2", "SLURM_CLUSTER_NAME": "lab",
         "SLURM_JOB_END_TIME": "1234"}
MIXED = {"SLURM_JOB_ID": "8", "SLURM_HET_JOB_ID": "8", "SLURM_HET_SIZE": "2", "SLURM_JOB_NODELIST": "n1",
         "SLURM_JOB_NODELIST_HET_GROUP_0": "n1", "SLURM_JOB_NODELIST_HET_GROUP_1": "n[3-4]"}
# The last element's SLURM_JOB_ID is that of the whole array: to requeue it would start every element again.
ELEMENT = {"SLURM_JOB_ID": "6", "SLURM_ARRAY_JOB_ID": "6", "SLURM_ARRAY_TASK_ID": "2", "SLURM_JOB_NODELIST": "n1"}


@pytest.mark.parametrize(("environ", "end", "found"), [
    ({}, "", None), (PLAIN, "", Allocation("7", 2, ("n2", "n3", "n4"), "lab", 1234.0)),
    (MIXED, "N/A", Allocation("8", 0, ("n1", "n3", "n4"), "cluster", None)),
    (ELEMENT, "N/A", Allocation("6_2", 0, ("n1",), "cluster", None)),
    (ELEMENT, "2126-01-02T03:04:05", Allocation("6_2", 0, ("n1",), "cluster", datetime(2126, 1, 2, 3, 4, 5).timestamp()))])
def test_an_allocation_is_read_from_the_scripts_environment(environ: dict[str, str], end: str, found: Allocation | None) -> None:
    assert allocation(environ, Slurm(squeue=f"{end}\n")) == found


# --- begin -----------------------------------------------------------------------------------------------------------


def spec(**parallel: Any) -> Any:
    return job(job={"nodes": 2, "ranks_per_node": 1}, parallel=parallel)


GIVEN = Allocation("7", 0, ("localhost", "n2"), "lab", None)


def test_each_start_is_an_attempt_with_a_token_and_a_port_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    run, block = create_run(tmp_path, "a"), spec(rank_map="block")
    placement = place(Degrees(data=2), "DPT", 1)
    run.main_log.write_text("first\n")
    first = begin(SupervisedRun(run, block, placement, GIVEN), Slurm()).record
    assert (first.attempt, first.token, first.hosts, first.address) == (1, "7.0.1", ("localhost", "n2"), "localhost")
    assert read_attempt(run.attempt_record) == first and run.main_log.exists()

    down = Slurm(sinfo="localhost|idle|none\nn2|down*|Not responding\n")
    second = begin(SupervisedRun(run, block, placement, replace(GIVEN, restart=1)), down).record
    assert (second.attempt, second.token) == (2, "7.1.2") and second.port != first.port
    assert not run.main_log.exists() and (run.path / "attempts/1/log/main.log").read_text().startswith("first\n")
    [ended] = history.history(run)
    assert (ended.kind, ended.token, ended.nodes) == ("vanished", "7.0.1", ("n2",))
    assert ended.message == "it ended without a record, as if its first node, localhost, had died; down now: n2"
    assert ended.node == "localhost"
    assert ended.time <= time.time() and "n2" in (run.path / "attempts/1/log/main.log").read_text()
    assert set(bad_nodes(ledger("lab"))) == {"n2"}

    history.record(run, end(token="7.1.2"))
    begin(SupervisedRun(run, block, placement, replace(GIVEN, restart=2)), down)
    assert len(history.history(run)) == 2  # that start had said how it ended


def test_too_few_hosts_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    run = create_run(tmp_path, "a")
    with pytest.raises(HpcMpError, match="are fewer than job"):
        begin(SupervisedRun(run, spec(), place(Degrees(data=2), "DPT", 1), replace(GIVEN, hosts=("n1",))), Slurm())
    assert not run.attempt_record.exists()


@given(st.text(), st.text())
def test_ports_lie_below_the_ephemeral_ones(run: str, token: str) -> None:
    assert FIRST_PORT <= port(Path(run), token) < FIRST_PORT + PORTS <= 32768


def test_a_node_step_shares_the_shape_of_the_ranks_step() -> None:
    srun = ["srun", "--export=ALL", "--nodes=2", "--relative=0", "--ntasks=4", "--label", "python"]
    assert one_task_per_node(srun, 2, ["true"]) == ["srun", "--export=ALL", "--nodes=2", "--relative=0", "--ntasks=2",
                                               "--ntasks-per-node=1", "--overlap", "true"]
    assert "--ntasks=2" not in (one_task_per_node(["/usr/bin/srun", "--het-group=0,1"], 2, ["true"]) or [])
    assert one_task_per_node(["mpirun", "-n", "2"], 2, ["true"]) is None


def ended_well(directory: Path, monkeypatch: pytest.MonkeyPatch, restarts: int = 0, whole: bool = False) -> AttemptContext:
    """An attempt whose step has ended with 0, of a job that Slurm has queued again so often."""
    run = create_run(directory, "a")
    executable(directory / "bin" / "scontrol", f"#!/bin/sh\necho JobId=7 Restarts={restarts} Command={run.script}\n")
    monkeypatch.setenv("PATH", str(directory / "bin"), prepend=":")
    monkeypatch.setattr("hpc_mp.rundir.history.complete", lambda *_: whole)
    return begin(SupervisedRun(run, spec(rank_map="block"), place(Degrees(data=2), "DPT", 1), GIVEN), Slurm())


@pytest.mark.parametrize(("restarts", "cut_short"), [(0, False), (1, True)])
def test_a_step_that_ends_well_while_its_node_fails_is_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: int,
                                                              cut_short: bool) -> None:
    assert interrupted(ended_well(tmp_path, monkeypatch, restarts)) is cut_short


@pytest.mark.parametrize(("fails", "restarts", "whole", "asked", "cancelled", "end"),
                         table(__file__, "supervisor.toml", "starting"))
def test_a_step_that_is_ended_while_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool, restarts: int,
                                              whole: bool, asked: bool, cancelled: bool, end: str) -> None:
    attempt = ended_well(tmp_path, monkeypatch, restarts, whole)
    attempt.run.srun_log.parent.mkdir(exist_ok=True)
    attempt.run.srun_log.write_text(fails * "srun: error: Node failure on n2\nsrun: forcing job termination\n")
    found = _ending(attempt, 0, None, asked, cancelled, None, None)
    assert (found.kind if isinstance(found, Cause) else found) == end
    if isinstance(found, Cause) and fails:
        assert (found.node, found.nodes) == ("n2", ("n2",))
    assert not isinstance(found, Cause) or found.retry


# --- ledger ----------------------------------------------------------------------------------------------------------


def test_the_ledger_forgets_what_has_expired(tmp_path: Path) -> None:
    path = ledger("lab", {"XDG_STATE_HOME": str(tmp_path)})
    assert bad_nodes(path) == {}
    old, new = (BadNode("n3", "lost", why, "run", 0.0, until) for why, until in (("first", 10.0), ("second", 20.0)))
    record(path, [old, replace(old, node="n4")])
    record(path, [new])
    assert bad_nodes(path, 5.0) == {"n3": new, "n4": replace(old, node="n4")}
    assert bad_nodes(path, 15.0) == {"n3": new}
    assert bad_nodes(path, 20.0) == {}


def test_what_a_run_has_suffered_itself_counts_most_for_it(tmp_path: Path) -> None:
    """It was given its own bad node, while good ones stood idle for what other runs remembered of them."""
    path = ledger("lab", {"XDG_STATE_HOME": str(tmp_path)})
    own, others = bad("n3", time=1.0), [bad("n1", time=2.0), bad("n2", time=3.0)]
    record(path, [replace(own, run="/runs/1"), *others])
    states = {f"n{number}": NodeState("idle") for number in range(1, 5)}
    for run, kept in ((None, "n2"), (Path("/runs/1"), "n3"), (Path("/runs/2"), "n2")):
        assert choose(list(bad_nodes(path, 5.0, run).values()), (), states, needed=3).nodes == (kept,)
