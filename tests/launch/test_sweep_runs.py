"""Sweeps from their launch to their end: one after the other on emulated nodes, interrupted, resumed, cancelled, compared."""

import json
import os
import re
import signal
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from launching import call, make_run, record, the_run, until, write_job
from rendering import CPU, PYTHON, RUN, facts
from rendering import job as resolved
from test_launch import start
from test_run_job import job

import hpc_mp
from hpc_mp.base.errors import HpcMpError
from hpc_mp.job import load_job
from hpc_mp.launch.fit import check_fit
from hpc_mp.launch.launch import LaunchRequest, preview
from hpc_mp.launch.listener import Listener
from hpc_mp.launch.render import render
from hpc_mp.launch.sweep import best_runs
from hpc_mp.rundir import RunDirectory
from hpc_mp.rundir.outcome import verdict
from hpc_mp.rundir.records import Evaluation
from hpc_mp.rundir.runs import SweepMember, best_of, members, read_member, write_member
from hpc_mp.runs.status import seen

__all__ = ["job"]  # a fixture
GRID = 'sweep.grid={ "train.seed" = [1, 2, 3] }'
PAIR = GRID.replace(", 3", "")


def runs_of(job: Path) -> list[RunDirectory]:
    return [RunDirectory(path) for path in sorted(the_run(job).path.parent.glob("[0-9]*"))]


def interrupt(path: Path) -> threading.Thread:
    """Ctrl-C, as soon as ``path`` is there."""
    def press() -> None:
        until(path.exists, 60)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    return thread


# --- one after the other ----------------------------------------------------------------------------------------------


def test_all_runs_of_a_sweep_are_run_here(job: Path) -> None:
    shown = call("launch", job, "--on", "local", "--set", GRID, "--set", "sweep.simultaneous=2")
    text, lines = shown.output, shown.stdout.splitlines()
    assert shown.exit_code == 0 and [verdict(run).state for run in runs_of(job)] == ["completed"] * 3  # type: ignore[union-attr]
    assert [load_job(run.job).train.seed for run in runs_of(job)] == [1, 2, 3]
    assert [read_member(run) for run in runs_of(job)] == [
        SweepMember("0001", number, 3, {"train.seed": number + 1}) for number in range(3)]
    assert "sweep     3 runs, train.seed(3); one after the other here\n" in text and "  3  train.seed = 3" in text
    assert "sweep.simultaneous has no effect here" in text and "sweep     run 2 of 3: train.seed = 2" in text
    assert text.count("warning: a warning") == 3 and text.rindex("a warning") < text.index(f"run       {runs_of(job)[0].path}"), (
        "every run is checked before the first one is started")
    assert list(members(runs_of(job)[1])) == runs_of(job)
    assert "--array" not in runs_of(job)[0].script.read_text()
    assert "0002      completed, loss 8.0000 → 1.6000 in 5 steps; train.seed = 2" in lines
    assert "0001      completed, loss 8.0000 → 1.6000 in 5 steps; train.seed = 1  ← best by loss" in lines
    assert f"compare   hpc-mp report {the_run(job).path} --all" in lines
    table = call("status", job.parent / "runs").stdout
    assert table.count("best by loss") == 1 and "train.seed = 3" in table.splitlines()[1]
    document = json.loads(call("status", the_run(job).path, "--json").stdout)
    assert document["sweep"] == {"first": "0001", "number": 0, "of": 3, "values": {"train.seed": 1}}
    second = runs_of(job)[1]  # its job file means that run, and not the newest of its name
    outcome = hpc_mp.run_job(second.job, on="local", overrides=["train.steps=7"], resume=True)
    assert (outcome.run, outcome.steps) == (second.path, 7) and len(runs_of(job)) == 3
    assert read_member(second) is not None, "it still belongs to its sweep"


def test_a_run_that_fails_is_followed_by_the_next(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def say(text: str) -> None:
        if found := re.match(r"sweep     run (\d) of 3", text):
            monkeypatch.setenv("DEED_1", "error" if found[1] == "2" else "train")

    outcome = hpc_mp.run_job(job, on="local", overrides=[GRID], say=say)
    assert outcome.state == "failed" and [each.state for each in outcome.elements] == ["completed", "failed", "completed"]


def test_an_interrupt_ends_the_sweep_and_resume_goes_on_with_all_of_it(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setenv("PAUSE", "60")
    pressed = interrupt(the_run(job).metrics)
    outcome = hpc_mp.run_job(job, on="local", overrides=[GRID], say=said.append)
    pressed.join()
    assert outcome.state == "stopped" and len(outcome.elements) == len(runs_of(job)) == 1
    assert said[-1] == "sweep     2 runs not started; --resume starts them" and outcome.not_started == 2
    preview(LaunchRequest(job, "local", (GRID,), resume=True),
            SimpleNamespace(say=said.append, note=said.append))  # type: ignore[arg-type]
    assert re.search(r"1  train.seed = 1: 0001 goes on( from step \d+)?\n +2  train.seed = 2: a new run\n", "\n".join(said))
    monkeypatch.setenv("PAUSE", "0")
    on = hpc_mp.run_job(job, on="local", overrides=[GRID], resume=True)
    assert [each.state for each in on.elements] == ["completed"] * 3 and len(runs_of(job)) == 3
    assert [run.attempt() for run in runs_of(job)] == [2, 1, 1] and len(members(runs_of(job)[0])) == 3
    wider = hpc_mp.run_job(job, on="local", overrides=['sweep.grid={ "train.seed" = [2, 4] }'], resume=True)
    assert [each.run.name for each in wider.elements] == ["0002", "0004"], "a value that is new is a new run of the same sweep"
    assert [(each.first, each.number) for each in members(runs_of(job)[0]).values()] == [("0001", number) for number in range(4)]
    assert call("status", job.parent / "runs").stdout.count("best by loss") == 1
    with pytest.raises(HpcMpError, match="there is no run with these values"):
        hpc_mp.run_job(job, on="local", overrides=['sweep.grid={ "train.seed" = [8, 9] }'], resume=True)


@pytest.mark.parametrize(("options", "states", "words"), [
    ([], ["stopped", "completed"], "the other runs"), (["--all"], ["stopped"], "1 run not started; --resume starts it")])
def test_cancelling_of_one_run_and_of_the_sweep(tmp_path: Path, mark: str, options: list[str], states: list[str],
                                                words: str) -> None:
    """From another terminal: the launch goes on with the next run, or ends."""
    job = write_job(tmp_path)
    launched = start(mark, job, "--set", PAIR, PAUSE="0.3")
    until(the_run(job).metrics.exists, 60)
    call("cancel", the_run(job).path, "--now", *options)
    code, out, err = launched.outcome()
    assert (code, ends(out)) == (1, states) and (not options or words in out), out + err
    ways = [line for line in err.splitlines() if line.startswith("continue with: ")]
    alone = f"continue with: hpc-mp launch {the_run(job).job} --on local --resume"
    whole = f"continue with: hpc-mp launch {job} --on local '--set={PAIR}' --resume"
    assert ways == [whole if options else alone]
    code, out, _ = start(mark, job, "--resume", "--set", PAIR).outcome()
    assert (code, ends(out)) == (0, ["completed"] * 2), "what was asked for then does not end this launch"


def ends(out: str) -> list[str]:
    return [line.split(",")[0].split()[-1] for line in out.splitlines() if line.startswith("ended")]


def test_a_sweep_of_one_run_is_a_job(job: Path) -> None:
    outcome = hpc_mp.run_job(job, on="local", overrides=["sweep.runs=[{ train.seed = 7 }]"])
    assert outcome.state == "completed" and load_job(the_run(job).job).train.seed == 7


def test_a_dry_run_shows_every_run(job: Path) -> None:
    said: list[str] = []
    ear: Listener = SimpleNamespace(say=said.append, note=said.append)  # type: ignore[assignment]
    shown = preview(LaunchRequest(job, "local", (GRID,)), ear)
    assert shown.document()["sweep"] == [{"train.seed": seed} for seed in (1, 2, 3)] and "  2  train.seed = 2" in "\n".join(said)
    assert preview(LaunchRequest(job, "local"), Listener()).document()["sweep"] == []
    many = [f"{{ train.seed = {seed} }}" for seed in range(40)]
    preview(LaunchRequest(job, "local", (f"sweep.runs=[{', '.join(many)}]",)), ear)
    assert any(line.endswith(" 20  train.seed = 19\n               and 20 others") for line in said)


# --- on Slurm ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("simultaneous", "line"), [(2, "#SBATCH --array=0-3%2"), (None, "#SBATCH --array=0-3")])
def test_the_script_of_a_sweep(simultaneous: int | None, line: str) -> None:
    sweep = {"grid": {"train.seed": [1, 2], "train.clip": [0.5, 1.0]}} | ({"simultaneous": simultaneous} if simultaneous else {})
    script = render(resolved(job=CPU, sweep=sweep), [RUN.with_name(f"{n:04d}") for n in range(4)], facts(), python=PYTHON)
    assert line in script.text.splitlines() and script.text.count("export HPC_MP_RUN=") == 1
    assert dict(script.explanations)[line].endswith("at most 2 of them at once." if simultaneous else "one job per run.")
    spec = resolved(job=CPU, sweep=sweep)
    check_fit(spec, facts(most_elements=4))
    with pytest.raises(HpcMpError, match=r"\[sweep\]: has 4 runs, and this Slurm takes arrays of 3 jobs at most"):
        check_fit(spec, facts(most_elements=3))


# --- the best ---------------------------------------------------------------------------------------------------------


def test_the_best_run() -> None:
    least, less, more, told = (Evaluation(1, loss, 9, 1.0, accuracy=loss / 8) for loss in (2.5, 3.0, 4.0, 2.0))
    assert best_of([(2.0, None), (1.0, None)]) == best_of([(2.0, less), (1.0, None)]) == (1, "loss")
    assert best_of([(2.0, less), (1.0, more)]) == (0, "held-out loss")
    assert best_of([(None, None), (2.0, less), (1.0, least)]) == (2, "held-out loss")
    assert best_of([(2.0, less), (None, None)]) is best_of([]) is None
    less, told = (replace(each, criterion="accuracy") for each in (less, told))
    assert best_of([(1.0, told), (2.0, less)]) == (1, "held-out accuracy")
    assert best_of([(1.0, told), (2.0, least)]) == (0, "loss"), "two criteria"


def test_each_sweep_has_a_best_run_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for number in range(5):
        run = make_run(load_job(write_job(tmp_path)))
        run.metrics.write_text(record(1, loss=9.0 - number) + "\n")
        if number != 4:
            write_member(run, SweepMember("0001" if number < 2 else "0003", number % 2, 2, {"train.seed": number}))
        found.append(seen(run, []))
    assert best_runs(found) == {found[1].run: "loss", found[3].run: "loss"}, "a run of no sweep is none's best"
    monkeypatch.chdir(tmp_path)
    assert call("report", "runs/t/0003", "--all").stdout == f"{found[2].run}/comparison.html\n"
    page = (found[2].run / "comparison.html").read_text()
    assert "train.seed = 2" in page and "/t/0004<" in page and "/t/0001<" not in page
