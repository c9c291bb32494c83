"""Runs as their user meets them day by day: lists, Slurm's job ids, arrays, followers, what is lost and what it has cost."""

import json
import math
import os
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from launching import call, executable, held, make_run, record, write_job
from tables import table

from hpc_mp.base import text
from hpc_mp.base.errors import HpcMpError
from hpc_mp.cli import progress, status
from hpc_mp.cli.main import cli
from hpc_mp.cluster.slurm.jobs import SlurmJob, explained
from hpc_mp.job import ProgramSpec, dump_job, load_job
from hpc_mp.job.program import Program
from hpc_mp.launch import resume
from hpc_mp.launch.backends.slurm import _QueueWatcher
from hpc_mp.launch.listener import Listener
from hpc_mp.rundir import RunDirectory, write_json
from hpc_mp.rundir.attempt import AttemptReader
from hpc_mp.rundir.history import AttemptEnd
from hpc_mp.rundir.history import record as write_end
from hpc_mp.rundir.records import AWAITING, RankStart, RankStatus, StepMetrics, line_of, write_record
from hpc_mp.rundir.runs import SweepMember, write_member
from hpc_mp.rundir.usage import cut_steps, usage
from hpc_mp.runs import cancel
from hpc_mp.runs.status import seen
from hpc_mp.train.rank.logs import StepWords

SWEEP = ({"train.seed": 1}, {"train.seed": 2, "train.learning_rate": 0.01}, {"train.seed": 3})


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a job file, with a Slurm whose squeue prints the file ``queue`` and whose scancel keeps its words."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "queue").write_text("")
    executable(tmp_path / "bin", "squeue", f'echo "$@" >> {tmp_path}/asked; cat {tmp_path}/queue')
    executable(tmp_path / "bin", "scancel", f'echo "$@" >> {tmp_path}/cancelled; sed -i "s/RUNNING/CANCELLED/" {tmp_path}/queue')
    executable(tmp_path / "bin", "scontrol", "echo 'Invalid job id specified' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    return tmp_path


def made(folder: Path, job_id: str | None = None, *, name: str = "t", steps: int = 0, age: float = 0.0,
         state: str | None = None, member: int | None = None) -> RunDirectory:
    """A run of 5 steps that was launched ``age`` seconds ago. ``member``: its place in ``SWEEP``."""
    run = make_run(load_job(write_job(folder)), name=name)
    os.utime(run.job, (time.time() - age,) * 2)
    if job_id is not None:
        run.job_id.write_text(f"{job_id}\n")
    if member is not None:
        write_member(run, SweepMember("0001", member, len(SWEEP), SWEEP[member]))
    if steps:
        run.metrics.write_text("".join(record(step, 1, 2.0, 9.0 - step) + "\n" for step in range(1, steps + 1)))
    if state is not None:
        write_json(run.outcome, {"attempt": 1, "state": state, "cause": None})
    return run


def queued(folder: Path, *lines: str) -> None:
    (folder / "queue").write_text("".join(f"{line}\n" for line in lines))


def running_jobs(*jobs: str) -> tuple[str, ...]:
    return tuple(f"{job}|RUNNING|N/A|n1|0|0|None|" for job in jobs)


def put_away(run: RunDirectory, *attempts: int) -> None:
    for attempt in attempts:
        run.put_away(attempt).mkdir()
        os.link(run.job, run.of_attempt(attempt).job)


# --- lists and ids ----------------------------------------------------------------------------------------------------


def test_status_without_a_name_lists_runs_the_newest_first(here: Path) -> None:
    made(here, "7", steps=5, age=9000, state="completed")
    made(here, "8", name="other", steps=2, age=60)
    broken = made(here, age=30)
    broken.job.write_text("[job]\nno_such_key = 1\n")
    os.utime(broken.job, (time.time() - 30,) * 2)
    queued(here, *running_jobs("8"))
    rows = [line.split() for line in call("status").stdout.splitlines()]
    assert rows[0][:6] == ["run", "state", "job", "step", "loss", "launched"]
    assert [row[:4] for row in rows[1:]] == [["runs/t/0002", "unreadable", "–", "–"], ["runs/other/0001", "running", "8", "2/5"],
                                             ["runs/t/0001", "completed", "7", "5/5"]]
    assert rows[3][4] == "4.0000" and rows[3][-1] == "kB" and "--jobs=8 " in (here / "asked").read_text()
    document = json.loads(call("status", "runs", "--json").stdout)
    assert [run["state"] for run in document["runs"]] == ["unreadable", "running", "completed"]
    assert document["runs"][1]["bytes"] > 0


def test_job_files_say_where_else_runs_lie(here: Path) -> None:
    with pytest.raises(HpcMpError, match=r"finds no run below .*runs"):
        call("status")
    made(here, state="completed")
    (here / "runs").rename(here / "elsewhere")
    (here / "job.toml").write_text('[job]\ndirectory = "elsewhere"\n')
    assert "elsewhere/t/0001  completed" in call("status").stdout


def test_a_list_of_long_runs_reads_their_ends_alone(here: Path) -> None:
    run = made(here, state="completed")
    run.metrics.write_text("no step\n" + (record(7, 1, 1.0, 3.0) + "\n") * 20_000)
    began = time.process_time()
    assert [seen(run, []).step for _ in range(3)] == [7] * 3
    assert time.process_time() - began < 0.2, "some ms a run, whatever its length"


def test_a_job_id_names_its_run(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Far away Slurm says where the script of the job lies."""
    run = made(here, "7", steps=2, state="stopped")
    write_json(run.successors, ["7", "9"])
    run.slurm_log("5").write_text("an earlier attempt\n")
    for job in ("7", "9", "5"):
        assert json.loads(call("status", job, "--json").stdout)["run"] == str(run.path)
    assert "an earlier attempt" in call("logs", "7").stdout
    with pytest.raises(HpcMpError, match="job 4711: is no job of a run below"):
        call("logs", "4711")
    executable(here / "bin", "scontrol", f"echo 'JobId=7 JobName=t JobState=COMPLETED Command={run.script} WorkDir=/x'")
    (here / "far away").mkdir()
    monkeypatch.chdir(here / "far away")
    assert json.loads(call("status", "7", "--json").stdout)["run"] == str(run.path)


# --- arrays -----------------------------------------------------------------------------------------------------------


def test_a_sweep_shows_what_each_run_has(here: Path) -> None:
    runs = [made(here, f"12_{element}", member=element, state="completed") for element in range(3)]
    text = call("status", "12").stdout
    assert "train.seed = 2, train.learning_rate = 0.01" in next(line for line in text.splitlines() if "0002" in line)
    assert "sweep     run 2 of 3: train.seed = 2, train.learning_rate = 0.01\n" in call("status", "12_1").stdout
    with pytest.raises(HpcMpError, match=r"job 12: is an array of 3 runs\. Name one of them: 12_0, 12_1, 12_2"):
        call("logs", "12")
    runs[0].slurm_log("12_1").write_text("of the second\n")
    assert call("logs", "12_1").stdout == "of the second\n" and call("logs", "12_0").stdout == "", "each has its own"


@pytest.mark.parametrize(("word", "options", "cancelled", "others"), table(__file__, "runs.toml", "sweeps"))
def test_cancelling_of_sweeps(here: Path, word: str, options: list[str], cancelled: str, others: str) -> None:
    runs = [made(here, f"12_{element}", member=element) for element in range(3)]
    queued(here, *(f"12_{element}|PENDING|N/A||0|0|Priority|" for element in range(3)))
    text = call("cancel", word, *options).stdout
    assert (here / "cancelled").read_text() == f"{cancelled}\n"
    assert others in text and ("other runs" in text) == bool(others)
    (here / "cancelled").unlink()
    queued(here, *running_jobs("12_0", "12_1", "12_2"))
    call("cancel", "12")
    assert (here / "cancelled").read_text() == "--signal=USR2 12_0 12_1 12_2\n" and all(run.stop.exists() for run in runs), (
        "running ones are all asked before any is waited for")


@pytest.mark.parametrize(("phase", "ended"), [("stopped", True), ("running", False)])
def test_a_job_whose_nodes_are_cleared_up_need_not_be_waited_for(here: Path, monkeypatch: pytest.MonkeyPatch, phase: str,
                                                                 ended: bool) -> None:
    """One of them may be dead, and Slurm takes minutes to notice."""
    run = made(here, "7", steps=5)
    write_record(run.status, RankStatus(1, phase, time=time.time()))
    monkeypatch.setattr(cancel.queue, "job_states", lambda *_: {"7": SlurmJob("7", "COMPLETING")})
    assert (run in cancel._within({run: SlurmJob("7", "RUNNING")}, 3.0)) is ended


# --- what is lost, and what it costs ----------------------------------------------------------------------------------


def test_cancel_says_how_many_steps_are_lost(here: Path) -> None:
    run = made(here, "7", steps=5)
    run.checkpoint(2).mkdir()
    (run.checkpoint(2) / "complete.json").write_text("{}")
    queued(here, *running_jobs("7"))
    assert call("cancel", "7", "--now").stdout.endswith("step-00000002: 3 steps are lost\n")
    assert "step-00000002 (3 steps are lost)" in call("status", "7").stdout


def started(run: RunDirectory, attempt: int, nodes: int, at: float, device: str = "H100") -> None:
    with open(run.ranks, "a") as file:
        file.writelines(line_of(RankStart(attempt, rank, f"n{rank // 2}", "h", at, device=device)) + "\n"
                        for rank in range(2 * nodes))


def test_what_a_run_has_cost(here: Path) -> None:
    now = time.time()
    run = made(here, "7", steps=5, age=9000)
    began = run.job.stat().st_mtime
    started(run, 1, 2, began + 600)
    write_end(run, AttemptEnd("7.0", 1, 2, "lost", "rank 3 is lost", (), "requeue", began + 4200))
    cut_steps(run, 2)
    put_away(run, 1)
    started(run, 2, 1, began + 5000)
    found = usage(run, began + 8600)
    assert found.node_hours == pytest.approx(2 * 1 + 1) and found.gpu_hours == pytest.approx(2 * 3)
    assert found.queue_s == pytest.approx(600 + 800) and (found.lost_steps, found.lost_s) == (3, 6.0)
    assert found.words() == "3.00 node hours, 6.00 GPU hours, 23 min 20 s in the queue, 3 steps trained again (6 s)"
    queued(here, f"7|RUNNING|{time.strftime('%Y-%m-%dT%H:%M:%S', time.localtime(now))}|n1|1|0|None|")
    text = call("status", "7").stdout
    assert "3 steps trained again" in text and "GPU hours" in text
    vanished = made(here, "8", steps=5, age=9000)
    began = vanished.job.stat().st_mtime
    started(vanished, 1, 1, began, device="cpu")
    write_end(vanished, AttemptEnd("8.0", 1, 0, "vanished", "it ended without a word", (), "requeue", began + 10))
    put_away(vanished, 1)
    cost = usage(vanished, began + 7200, waits=True)
    assert cost.node_hours == pytest.approx(10 / 3600) and cost.gpu_hours == 0 and cost.queue_s == pytest.approx(7190, abs=5), (
        "its steps and not the wait for the next")


def test_a_restart_says_what_it_came_after(here: Path) -> None:
    run = made(here, "7", steps=5)
    write_end(run, AttemptEnd("7.0", 1, 2, "lost", "rank 3 on n2 was killed by SIGKILL", (), "requeue", 1.0))
    waits = seen(run, [SlurmJob("7", "PENDING", "BeginTime")])
    assert waits.before == "attempt 1, saved up to step 2: rank 3 on n2 was killed by SIGKILL"
    run.put_away(1).mkdir()
    queued(here, "7|RUNNING|N/A|n1|1|0|None|")
    assert "before    attempt 1: rank 3 on n2 was killed by SIGKILL\n" in call("status", "7").stdout
    write_json(run.outcome, {"attempt": 2, "state": "completed", "cause": None})
    assert seen(run, []).before == "attempt 1: rank 3 on n2 was killed by SIGKILL", "its end does not hide it"
    other = made(here, "8")
    other.job.write_text(dump_job(ProgramSpec(program=Program(command=("python", "train.py")))))
    write_end(other, AttemptEnd("8.0", 1, 0, "node", "node n2 failed", (), "requeue", 1.0))
    waits = seen(other, [SlurmJob("8", "PENDING", "BeginTime")])
    assert waits.before == "attempt 1: node n2 failed", "what a program has saved is not known"


@pytest.mark.parametrize("why", table(__file__, "runs.toml", "restarts"))
def test_a_restart_of_a_run_that_had_to_go_says_why(here: Path, why: str) -> None:
    """Such an end has no cause: it stands in the history alone."""
    run = made(here, "7", steps=5)
    put_away(run, 1, 2)
    for attempt in (1, 2):
        write_end(run, AttemptEnd(f"7.{attempt}", attempt, 2, "stopped", f"{why} ({attempt})", (), "requeue", 1.0, departed=why))
    queued(here, "7|RUNNING|N/A|n1|2|0|None|")
    text = call("status", "7").stdout
    assert "started again 2 times" in text and f"before    attempt 2: {why} (2)\n" in text


@pytest.mark.parametrize(("age", "phase", "late"), [
    (5.0, "training", False), (600.0, "training", True), (600.0, "saving", False)])
def test_a_late_step_has_no_time_left(here: Path, age: float, phase: str, late: bool) -> None:
    """A run whose ranks have ended says for what it waits: no step of it is late, and no time is left until the last."""
    run = made(here, steps=3)
    write_json(run.status, {"attempt": 1, "phase": phase})
    os.utime(run.metrics, (time.time() - age,) * 2)
    with held(run):
        found, text = seen(run, []), call("status", run.path).stdout
    assert (found.late, found.eta) == (late, None if late else 4.0)
    assert ("the next one is late" in text) == late and (" left" in text) != late
    write_record(run.status, RankStatus(1, AWAITING, "until it has noticed that n2 is dead", time=time.time()))
    now = seen(run, [SlurmJob("7", "RUNNING")])
    assert now.phase == "waiting for Slurm until it has noticed that n2 is dead" and not now.late and now.eta is None


# --- followers --------------------------------------------------------------------------------------------------------


def test_following_without_a_terminal(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "SECONDS", (0.05,))
    run = made(here, "7")
    queued(here, "7|PENDING|N/A||0|0|Priority|")

    echo = status.click.echo

    def goes_on(line: str) -> None:
        """What comes next comes once the follower has said what there is."""
        echo(line)
        if "pending" in line:
            queued(here, *running_jobs("7"))
        elif "running" in line:
            write_json(run.outcome, {"attempt": 1, "state": "failed", "cause": {"message": "rank 0 was killed"}})

    monkeypatch.setattr(status.click, "echo", goes_on)
    result = call("status", "7", "--follow")
    pending, running, failed = result.stdout.splitlines()
    assert "pending (Priority: " in pending and "running" in running and failed.endswith("failed: rank 0 was killed")
    assert CliRunner().invoke(cli, ["status", "7", "--follow"], standalone_mode=False).return_value == 1


def test_a_silent_follower_says_now_and_then_that_it_lives(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "SECONDS", (0.01,))
    monkeypatch.setattr(status, "SILENCE_S", 0.0)
    run, said = made(here), list[str]()
    polls = iter([[seen(run, [SlurmJob("7", state)])] for state in ("RUNNING", "RUNNING", "COMPLETED")])
    monkeypatch.setattr(status.click, "echo", said.append)
    status.follow(lambda: next(polls), lambda _: "", lambda each: each.state, quiet=False)
    assert [line.split()[-1] for line in said] == ["running", "running", "completed"]


def test_waiting_without_a_terminal_prints_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch,
                                                               capsys: pytest.CaptureFixture[str]) -> None:
    listener, step = progress.TerminalListener(aside=False), StepMetrics(4, 2.5, 64, 3.0, 100.0, 1.0, 1)
    listener.begin(10)
    listener.update(None, [step])
    assert capsys.readouterr().err == "", "not at every step"
    monkeypatch.setattr(progress, "LINE_S", 0.0)
    listener.begin(10)
    listener.update(None, [step])
    listener.update(RankStatus(1, "saving"), [])
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and lines[0].endswith("step 4/10: loss 2.5000, 100 tokens/s, about 18 s left")


class Ear(Listener):
    interval = 0.01

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.updates: set[str] = set()

    def update(self, status: RankStatus | None, steps: Any) -> None:
        assert status is not None
        self.updates.add(f"{status.phase} {status.detail}")

    def note(self, text: str) -> None:
        self.notes.append(text)


def watched(here: Path, ear: Ear) -> _QueueWatcher:
    run = made(here, "7")
    return _QueueWatcher([AttemptReader(run, 1)], load_job(run.job), ear)


def test_a_job_that_slurm_has_not_looked_at(here: Path) -> None:
    watched(here, ear := Ear())({"7": explained(SlurmJob("7", "PENDING", "None"))}, 0.02)
    assert ear.updates == {"pending not looked at yet"}


@pytest.mark.parametrize(("reason", "answer", "calls", "words"), table(__file__, "runs.toml", "held_jobs"))
def test_a_job_that_no_node_started_is_released(here: Path, reason: str, answer: str, calls: int, words: str) -> None:
    """Slurm holds it for ever, although its controller may only have been killed; a hold of the user's own is left alone."""
    executable(here / "bin", "scontrol", f'echo "$@" >> {here}/asked; {answer}')
    watcher = watched(here, ear := Ear())
    for _ in range(5):
        watcher({"7": explained(SlurmJob("7", "PENDING", reason)), "8": explained(SlurmJob("8", "PENDING", "Resources"))}, 0.02)
    asked = (here / "asked").read_text().splitlines() if (here / "asked").exists() else []
    assert [line for line in asked if "release" in line] == ["release 7"] * calls
    assert words in ear.notes[-1] if words else not any("release" in note.partition("waits")[0] for note in ear.notes)


# --- logs -------------------------------------------------------------------------------------------------------------


def test_the_main_log_has_a_line_about_steps_now_and_then(here: Path) -> None:
    def said(seconds: float, last: int) -> list[str]:
        lines: list[str] = []
        words = StepWords(SimpleNamespace(say=lines.append), 3, 6, seconds)  # type: ignore[arg-type]
        for step in range(3, last + 1):
            words(StepMetrics(step, math.nan if step == 6 else 2.5, 64, 3.0, 1234.0, 1.0, 1))
        words.close()
        return lines

    assert said(60.0, 6) == ["step 3/6: loss 2.5000, 1,234 tokens/s", "step 6/6: no loss, 1,234 tokens/s"]
    assert said(60.0, 5) == ["step 3/6: loss 2.5000, 1,234 tokens/s", "step 5/6: loss 2.5000, 1,234 tokens/s"], "it was stopped"
    assert len(said(0.0, 6)) == 4
    assert text.speed(1234.0, 0.4131) == "1,234 tokens/s, MFU 41.3 %"


def test_what_the_supervisor_says_into_two_logs_is_shown_once(here: Path) -> None:
    run = made(here, "7")
    queued(here, "7|PENDING|N/A||0|0|Resources|")
    assert call("logs", "7").stdout.startswith("job 7 waits in the queue (Resources: ")
    queued(here)
    write_json(run.outcome, {"attempt": 1, "state": "completed", "cause": None})
    run.slurm_log("7").write_text("module loaded\nhpc-mp: 10:00:00 attempt 1 failed\n"
                                  "hpc-mp: 10:01:00 attempt 2 (7.1) on n1, n2\n")
    run.main_log.write_text("10:01:00 attempt 2 (7.1) on n1, n2\n10:01:09 step 1/5: loss 6.0000, 50 tokens/s\n")
    assert call("logs", "7").stdout.splitlines() == [
        "module loaded", "hpc-mp: 10:00:00 attempt 1 failed", "10:01:00 attempt 2 (7.1) on n1, n2",
        "10:01:09 step 1/5: loss 6.0000, 50 tokens/s"]


# --- a resume right after the end -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("states", "verdict", "refused"), [
    (["COMPLETING", "COMPLETING", "COMPLETED"], None, False), (["RUNNING", "COMPLETED"], "completed", False),
    (["RUNNING", "COMPLETED"], None, True), (["PENDING", "COMPLETED"], "stopped", True), (["COMPLETING"] * 99, None, True)])
def test_a_resume_waits_for_a_job_that_is_just_ending(here: Path, monkeypatch: pytest.MonkeyPatch, states: list[str],
                                                      verdict: str | None, refused: bool) -> None:
    monkeypatch.setattr(resume, "POLL_S", 0.01)
    run, answers = made(here, "7", state=verdict), iter(states)
    with pytest.raises(HpcMpError, match="is Slurm job 7, which is") if refused else nullcontext():
        resume._check_not_queued(run, lambda _: f"7|{next(answers)}|N/A||0|0|None|\n", patience=0.2)
