"""``hpc-mp launch`` on emulated nodes: what it refuses, writes, starts and says; ranks are fake."""

import fcntl
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import warm
from launching import answers, environment, held, make_run, marked, record, silent, the_run, until, write_job
from played_slurm import FAKE_CLI
from tables import table

import hpc_mp.launch.launch
from hpc_mp.base.errors import HpcMpError
from hpc_mp.cli.launch import _curve_words
from hpc_mp.job import load_any, load_job
from hpc_mp.launch.launch import LaunchRequest, preview
from hpc_mp.launch.listener import Teller
from hpc_mp.launch.plan import newest_run
from hpc_mp.launch.resume import resuming
from hpc_mp.rundir import RunDirectory
from hpc_mp.rundir.outcome import Outcome

# --- the command, with fake ranks ---------------------------------------------------------------------------


def start(mark: str, job: Path, *arguments: str, **environ: str) -> warm.Program:
    """``hpc-mp launch`` with fake ranks that train."""
    return warm.Program([FAKE_CLI, "launch", job, "--on", "local", *arguments], environment(mark, **{"DEED": "train", **environ}))


def launch(mark: str, job: Path, *arguments: str, **environ: str) -> tuple[int, str, str]:
    return start(mark, job, *arguments, **environ).outcome()


def cold(mark: str, job: Path, out: int = subprocess.PIPE, err: int = subprocess.PIPE, **environ: str) -> subprocess.Popen[str]:
    """The same as a Python of its own, whose output is buffered as any other's and whose processes are all known by the mark."""
    return subprocess.Popen([sys.executable, str(FAKE_CLI), "launch", str(job), "--on", "local"], stdout=out, stderr=err,
                            text=True, env=environment(mark, **{"DEED": "train", **environ}))


KEYS = ["run", "state", "job_id", "steps", "first_step", "first_loss", "loss", "evaluation_loss", "best_evaluation_loss",
        "tokens_per_s", "checkpoint", "best_checkpoint", "cause", "report"]


def test_a_run_from_start_to_end(job: Path, mark: str) -> None:
    code, out, err = launch(mark, job, "--json")
    assert code == 0, err
    run = the_run(job)
    document = json.loads(out)
    assert out.count("\n") == 1 and list(document) == KEYS
    assert document == {
        "run": str(run.path), "state": "completed", "job_id": None, "steps": 5, "first_step": 1, "first_loss": 8.0, "loss": 1.6,
        "evaluation_loss": None, "best_evaluation_loss": None, "tokens_per_s": 200.0,
        "checkpoint": str(run.checkpoints / "step-00000005"), "best_checkpoint": None, "cause": None, "report": str(run.report)}
    assert load_job(run.job).parallel.order == json.loads(run.placement.read_text())["order"]
    assert run.script.read_text().startswith("#!/bin/bash")
    assert run.rank_log(3).read_text() == "rank 3 lives\n"
    assert oct(run.path.stat().st_mode)[-3:] == "700"
    public = [path.name for path in (run.job, run.script, run.placement, run.path / "outcome.json")
              if path.stat().st_mode & 0o077]
    assert not public, "a copy of the run would show them to others"
    code, out, err = launch(mark, job)
    assert code == 0 and "loss      8.0000 → 1.6000 in 5 steps, 200 tokens/s on average" in out and err == ""
    for line in ("where     ", "state     ", "defaults  ", f"run       {the_run(job, 2).path}", "saved     ",
                 "report    ", f"export    hpc-mp export {the_run(job, 2).path} --output DIRECTORY"):
        assert line in out
    code, out, err = launch(mark, job, "--resume", "--json", "--set", "train.steps=7", "--set", "job.nodes=1")
    assert code == 0, err
    run, document = the_run(job, 2), json.loads(out)
    assert document["run"] == str(run.path) and document["steps"] == 7 and document["first_loss"] == 8.0, "it is extended"
    assert load_job(run.path / "attempts" / "1" / "job.toml").train.steps == 5
    assert load_job(run.job).train.steps == 7 and len(json.loads(run.placement.read_text())["ranks"]) == 2
    assert not the_run(job, 3).path.exists()


def test_a_killed_rank_fails_the_run(job: Path, mark: str) -> None:
    running = start(mark, job, "--json", "--set=environment.set.TOKEN=hunter2", PAUSE="60")
    run = the_run(job)
    until(lambda: run.metrics.exists() and run.rank_log(3).exists())
    began = time.monotonic()
    rank_process(running, run, 3).kill()
    code, out, err = running.outcome()
    assert time.monotonic() - began < 30
    assert code == 1
    document = json.loads(out)
    assert list(document) == KEYS and document["state"] == "failed"
    cause = document["cause"]
    assert (cause["rank"], cause["node"], cause["kind"]) == (3, "node1", "signal")
    assert ("rank 3 (dp 3, pp 0, tp 0) on node1 was killed by SIGKILL (the system ran out of memory, or another process "
            "killed it)") in err
    assert f"its log:    {run.rank_log(3)}" in err and "Traceback" not in err
    assert f"hpc-mp launch {job} --on local '--set=environment.set.TOKEN=…' --resume" in err
    assert "hunter2" not in out + err and "hunter2" in run.job.read_text(), "values of variables are not printed"
    assert "attempt 1 failed: rank 3 (dp 3, pp 0, tp 0) on node1 was killed by SIGKILL" in run.main_log.read_text()


def rank_process(launcher: warm.Program, run: RunDirectory, rank: int) -> psutil.Process:
    """A rank, known by its log."""
    log = str(run.rank_log(rank))

    def process() -> psutil.Process | None:
        with suppress(FileNotFoundError):  # another process has ended meanwhile
            return next((p for p in psutil.Process(launcher.process.pid).children(recursive=True)
                         if os.readlink(f"/proc/{p.pid}/fd/1") == log), None)
        return None

    found: psutil.Process = until(process)
    return found


def test_wrong_input_found_by_a_rank_is_the_users(job: Path, mark: str) -> None:
    code, out, err = launch(mark, job, "--json", DEED="peer", DEED_2="wrong_input", DEED_1="error")
    assert code == 2 and json.loads(out)["cause"]["kind"] == "user"
    assert err.endswith("hpc-mp: data.files = x: is empty. give text.\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupt_saves_and_says_how_to_go_on(job: Path, mark: str, number: int) -> None:
    running = start(mark, job, "--json", PAUSE="60")
    until(the_run(job).metrics.exists)
    code, out, err = running.outcome(number)
    document = json.loads(out)
    assert code == 1 and document["state"] == "stopped" and document["cause"] is None
    assert document["steps"] == 1 and document["checkpoint"].endswith(f"step-{document['steps']:08d}")
    assert "saving at the next step" in err
    assert f"stopped after step {document['steps']}. Continue with: hpc-mp launch {job} --on local --resume" in err
    code, out, err = launch(mark, job, "--json", "--resume")
    assert code == 0 and json.loads(out)["run"] == document["run"] and json.loads(out)["steps"] == 5
    assert [step["step"] for step in map(json.loads, the_run(job).metrics.read_text().splitlines())] == [1, 2, 3, 4, 5]


def test_a_reader_that_goes_takes_nothing_with_it(job: Path, mark: str) -> None:
    """Ctrl-C ends ``| tee`` at once; the run must still save and stop."""
    running = cold(mark, job, PAUSE="60")
    until(the_run(job).metrics.exists)
    for pipe in (running.stdout, running.stderr):
        assert pipe is not None
        pipe.close()
    running.send_signal(signal.SIGINT)
    assert running.wait(20) == 1
    outcome = json.loads(the_run(job).outcome.read_text())
    assert outcome["state"] == "stopped" and outcome["checkpoint"].endswith("step-00000001")


def test_a_full_disk_below_the_output_is_said(job: Path, mark: str) -> None:
    with open("/dev/full", "w") as full:
        running = cold(mark, job, out=full.fileno())
    _, err = running.communicate(timeout=60)
    assert running.returncode == 1 and err == "hpc-mp: standard output is incomplete (No space left on device)\n"
    assert json.loads(the_run(job).outcome.read_text())["state"] == "completed"


def test_a_refusal_is_one_paragraph_and_exit_code_2(job: Path, mark: str) -> None:
    for options in ([], ["--json"]):
        code, out, err = launch(mark, job, "--set", "parallel.tensor=3", *options)
        assert (code, err.count("\n")) == (2, 1) and err.startswith("hpc-mp: tensor(3)")
        assert json.loads(out)["state"] == "refused" if options else out == ""
    code, out, err = launch(mark, job, "--json", "--set", "slurm.extra.nodez=1")  # as the script is rendered
    assert code == 2 and "nodez" in err and json.loads(out)["state"] == "refused" and not (job.parent / "runs").exists()


def test_a_dry_run_prints_what_is_used_and_writes_nothing(job: Path, mark: str) -> None:
    code, out, err = launch(mark, job, "--dry-run", "--set", "job.nodes=4")
    assert (code, out) == (0, "") and "where     nodes(4)" in err, "on emulated nodes no script is used"
    assert "script    none here; --on slurm prints that of the same job" in err
    code, explained, _ = launch(mark, job, "--explain")
    assert code == 0 and "#!/bin/bash\n    The shell that runs this script" in explained
    assert 'job.device = "cpu"\n    nvidia-smi finds no GPU' in explained and "parallel.order = " in explained
    assert "# defaults of the keys that the job file leaves out\n" in explained and "learning_rate = 0.0003" in explained
    assert "(launch --explain lists them)" in " ".join(err.split()) and "learning_rate" not in err
    code, out, _ = launch(mark, job, "--dry-run", "--json")
    document = json.loads(out)
    assert document["state"] == "planned" and document["script"].startswith("#!/bin/bash\n")
    assert "/runs/t/0001" in document["script"] and "supervise --after" in document["script"]
    assert not (job.parent / "runs").exists()


# --- what a plan remarks on ---------------------------------------------------------------------------------


def previewed(job: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str, resume: bool = False) -> str:
    """Everything that a dry run says."""
    monkeypatch.setattr(hpc_mp.launch.launch, "check_model", lambda *_, **__: [])
    said: list[str] = []
    preview(LaunchRequest(job, "local", overrides, resume=resume), Teller(said.append))
    return "\n".join(said)


@pytest.mark.parametrize(("limit", "words"), table(__file__, "launch.toml", "limits"))
def test_a_limit_in_minutes_that_looks_like_hours_is_remarked_on(job: Path, monkeypatch: pytest.MonkeyPatch, limit: str,
                                                                  words: str) -> None:
    said = previewed(job, monkeypatch, f"job.time_limit='{limit}'")
    assert re.search(f"\nlimit     job.time_limit = {limit} {words}", said) if words else "\nlimit " not in said


STOP = {"attempt": 1, "state": "stopped", "cause": None}


@pytest.mark.parametrize(("verdicts", "saved", "words"), table(__file__, "launch.toml", "forgotten"))
def test_a_forgotten_resume_is_noted(job: Path, monkeypatch: pytest.MonkeyPatch, verdicts: list[str], saved: int,
                                     words: str) -> None:
    for verdict in verdicts:
        run = make_run(load_any(job), *([saved] if saved else []))
        run.metrics.write_text("".join(record(step) + "\n" for step in range(1, 5)) if saved else "")
        if verdict:  # else it goes on still
            run.outcome.write_text(json.dumps(STOP | {"state": verdict}))
    said = previewed(job, monkeypatch, "train.eps=1e-8")
    how = f"to resume that run: hpc-mp launch {job} --on local --set=train.eps=1e-8 --resume"
    assert f"note: run {words}, and this is a new one from the beginning; {how}" in said if words else "note:" not in said
    if words:
        assert "note:" not in previewed(job, monkeypatch, resume=True)
        assert "note:" not in previewed(job, monkeypatch, 'sweep.grid={"train.seed" = [1, 2]}'), "runs of a sweep are others"


def test_of_a_program_that_cannot_go_on_no_resume_is_forgotten(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job.write_text('[job]\nname = "t"\n[program]\ncommand = ["true"]\nresumes = true\n')
    make_run(load_any(job)).outcome.write_text(json.dumps(STOP))
    assert "note: run 0001 of this job stopped, and this is a new one" in previewed(job, monkeypatch)
    assert "note: run 0001" not in previewed(job, monkeypatch, "program.resumes=false")


# --- going on -----------------------------------------------------------------------------------------------


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """A job whose run has done its five steps, without the cost of running it."""
    path = write_job(tmp_path)
    make_run(load_job(path), 3, 5)
    return path


def left(job: Path, *overrides: str, ask: Any = silent) -> bool:
    spec = load_job(job, overrides)
    with resuming(spec, newest_run(spec), ask) as resumed:
        return resumed.left


@pytest.mark.parametrize(("override", "said", "way"), table(__file__, "launch.toml", "fixed"))
def test_what_must_not_change(finished: Path, override: str, said: str, way: str) -> None:
    """The key that begins with a run's state is named if it may change that, and if there is a state."""
    run = the_run(finished)
    words = f'without --resume that begins with its state: checkpoint.resume = "{run.path}"'
    with pytest.raises(HpcMpError, match=said) as refused:
        left(finished, override)
    if way:
        assert (words in str(refused.value)) == (way == "begins")
        assert "ut the old value back, or launch a new run without --resume" in str(refused.value)
        run.checkpoints.rename(run.path / "gone")
        with pytest.raises(HpcMpError, match=said) as refused:
            left(finished, override)
        assert words not in str(refused.value)


def test_the_end_of_a_run_names_the_steps_that_it_has_made(tmp_path: Path) -> None:
    for first, last, words in ((1, 5, "5 steps"), (131, 140, "steps 131 to 140"), (7, 7, "step 7"), (1, 1, "1 step")):
        ended = Outcome(tmp_path, "completed", steps=last, first_step=first, first_loss=8.0, loss=7.0)
        assert _curve_words(ended, "") == f"8.0000 → 7.0000 in {words}"


def test_what_may_change(finished: Path) -> None:
    for override in ("parallel.tensor=2", "parallel.zero=3", "job.nodes=4", "parallel.order='TPD'", "train.learning_rate=0.1",
                     "checkpoint.every=2", "job.time_limit='2:00:00'", "model.stage=true", "data.stage=true"):
        assert left(finished, override, "train.steps=6"), override


def test_a_run_is_finished_when_its_last_checkpoint_is_whole(finished: Path, mark: str) -> None:
    assert not left(finished)
    code, out, err = launch(mark, finished, "--resume", "--json")
    assert code == 0 and json.loads(out)["state"] == "completed" and "nothing is left to do" in err
    assert not list((the_run(finished).path / "attempts").iterdir())
    written = the_run(finished).outcome.stat().st_mtime_ns
    assert json.loads(launch(mark, finished, "--resume", "--json")[1])["report"] == json.loads(out)["report"]
    assert the_run(finished).outcome.stat().st_mtime_ns == written, "the run ended then: the time since costs nothing"
    (the_run(finished).checkpoints / "step-00000005" / "complete.json").unlink()
    assert left(finished)


def test_a_run_is_held_by_one_launch(job: Path, mark: str) -> None:
    running = start(mark, job, PAUSE="60")
    until(the_run(job).metrics.exists)
    code, _, err = launch(mark, job, "--resume")
    assert code == 2 and "is still going on, or another launch resumes it" in err
    assert running.outcome(signal.SIGTERM)[0] == 1
    pair = [start(mark, job, "--resume", PAUSE="60") for _ in range(2)]
    refused = until(lambda: [one for one in pair if one.process.poll() is not None])
    assert len(refused) == 1 and refused[0].outcome()[0] == 2
    (winner,) = (one for one in pair if one not in refused)
    until(lambda: len(the_run(job).metrics.read_text().splitlines()) == 2)
    assert winner.outcome(signal.SIGTERM)[0] == 1
    assert [path.name for path in (the_run(job).path / "attempts").iterdir()] == ["1"]


def test_ranks_hold_the_run_after_their_launcher(job: Path, mark: str) -> None:
    """The lock is the open file's, and every rank has it: a dead launcher alone does not free a run."""
    running, run = cold(mark, job, DEED="hang"), the_run(job)
    until(run.rank_log(3).exists)
    with open(run.lock) as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    running.kill()
    until(lambda: not marked(mark))
    with held(run):  # now
        running.communicate()


def test_a_queued_run_is_not_resumed(finished: Path) -> None:
    (the_run(finished).path / "job.id").write_text("17\n")
    line = "17|{}|N/A||0|0|None|\n"
    with pytest.raises(HpcMpError, match=r"is Slurm job 17, which is PENDING. .* end it with `hpc-mp cancel"):
        left(finished, ask=answers({"squeue": line.format("PENDING")}))
    assert not left(finished, ask=answers({"squeue": line.format("COMPLETED")}))
    assert not left(finished, ask=silent)


# --- on a terminal ------------------------------------------------------------------------------------------


def test_a_terminal_shows_a_bar(job: Path, mark: str) -> None:
    keyboard, screen = pty.openpty()
    running = cold(mark, job, err=screen, PAUSE="0.3")
    os.close(screen)
    shown = ""
    with suppress(OSError):  # EIO: nobody has the screen open any more
        while text := os.read(keyboard, 1 << 16):
            shown += text.decode(errors="replace")
    out, _ = running.communicate(timeout=60)
    assert running.returncode == 0 and re.search(r"step \d/5 .*loss \d\.\d{4}, 200 tokens/s", shown), shown
    assert "step 3/5" not in out
