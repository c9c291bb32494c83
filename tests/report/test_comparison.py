"""Several runs on one page: curves over each other, what differs, and how each ended."""

import json
import math
import stat
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from html_page import Page
from reported import Run

from hpc_mp.base.errors import HpcMpError
from hpc_mp.cli.report import command
from hpc_mp.job import ProgramSpec
from hpc_mp.report.comparison import ComparedRow, differences, ends, labels_of, notes, overlays
from hpc_mp.report.facts import read_facts
from hpc_mp.rundir.records import Evaluation, line_of

HOSTILE = "<img src=x onerror=alert(2)>"


def evaluate(run: Run, *evaluations: tuple[int, float], labels: int = 100) -> Run:
    run.run.evaluations.write_text("".join(line_of(Evaluation(step, loss, labels, 1.0)) + "\n" for step, loss in evaluations))
    return run


def reported(*given: Any) -> Page:
    done = CliRunner().invoke(command, [str(each) for each in given], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return Page(Path(done.output.strip()).read_text(encoding="utf-8"))


def row(rows: tuple[ComparedRow, ...], what: str) -> ComparedRow:
    return next(each for each in rows if each.what == what)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Run, Run]:
    """Two runs of the same job; the second has another pipeline and more steps, and evaluates better though not in the end."""
    first = evaluate(Run(tmp_path).complete(), (10, 6.0), (20, 5.5))
    return first, evaluate(Run(tmp_path, steps=30, pipeline=1).complete(), (10, 5.0), (30, 5.75))


def test_programs_differ_by_the_variables_of_a_sweep_and_keep_the_others_to_themselves() -> None:
    one, other = (ProgramSpec.model_validate({"program": {"command": ["x"], "environment": {"LR": lr, "TOKEN": token}}})
                  for lr, token in (("1", "a"), ("2", "b")))
    found = {each.what: each.cells for each in differences([one, other], {"program.environment.LR"})}
    assert found == {"program.environment.LR": ('"1"', '"2"'), "program.environment.TOKEN": ("(hidden)", "(hidden)")}


def test_two_runs_on_one_page(pair: tuple[Run, Run]) -> None:
    first, second = pair
    page = reported(first.path, second.path)
    assert stat.S_IMODE(first.run.comparison.stat().st_mode) == 0o600 and not first.run.report.exists()
    assert [given["aria-label"] for given in page.all("svg", class_="overlay")] == [
        "Loss of all runs", "Held-out loss of all runs", "Throughput of all runs",
        "Learning rate of all runs"]
    lines = [given for given in page.all("g") if "data-label" in given]
    assert [given["data-label"] for given in lines] == ["demo 0001", "demo 0002"] * 4
    metrics = [json.loads(line)["loss"] for line in second.run.metrics.read_text().splitlines()]
    assert json.loads(lines[1]["data-values"] or "") == metrics, "all digits"
    assert {given["class"] for given in lines} == {"run-0 dashes-0", "run-1 dashes-0"}
    assert "parallel.pipeline 2 1" in page.text and "train.steps 20 30" in page.text
    assert "loss 5.5000 after step 20 loss 5.0000 after step 10" in page.text
    assert len(page.all("td", class_="least")) == 1


def test_only_keys_that_differ_are_shown(pair: tuple[Run, Run], tmp_path: Path) -> None:
    specs = [run.spec for run in pair]
    assert differences([specs[0], specs[0]]) == ()
    found = {each.what: each.cells for each in differences([*specs, None])}
    assert found == {
        "parallel.pipeline": ("2", "1", "–"), "train.steps": ("20", "30", "–"), "train.global_batch": ("16", "32", "–")}
    assert "None: the resolved job files are equal." in reported(Run(tmp_path / "a").path, Run(tmp_path / "a").path).text


def test_variables_stay_out_of_a_comparison(tmp_path: Path) -> None:
    runs = Run(tmp_path, environment={"TOKEN": "hunter2"}), Run(tmp_path, environment={"TOKEN": "hunter3", "MORE": "x"})
    page = reported(*(run.path for run in runs))
    assert "hunter" not in page.source
    assert "environment.set.TOKEN (hidden) (hidden) environment.set.MORE – (hidden)" in page.text


def test_how_they_ended(pair: tuple[Run, Run]) -> None:
    facts = [read_facts(run.run) for run in pair]
    rows = ends(facts)
    assert row(rows, "State").cells == ("completed", "completed")
    assert row(rows, "Steps").cells == ("20 of 20", "30 of 30")
    assert row(rows, "Best on held-out text") == ComparedRow(
        "Best on held-out text", ("loss 5.5000 after step 20", "loss 5.0000 after step 10"), marked=1)
    assert all("node hours" in cell for cell in row(rows, "Used").cells)
    assert row(rows, "Wall clock").cells == ("1 min 14 s",) * 2
    assert "Best checkpoint" not in {each.what for each in rows}, "there is none"
    assert notes(facts, labels_of(facts)) == ()


def test_losses_on_other_texts_are_not_compared(pair: tuple[Run, Run]) -> None:
    evaluate(pair[1], (10, 1.0), labels=50)
    facts = [read_facts(run.run) for run in pair]
    assert row(ends(facts), "Best on held-out text").marked is None
    assert notes(facts, labels_of(facts)) == (
        "the held-out texts differ, so no best loss is marked; "
        "counted tokens: demo 0001 100, demo 0002 50",)


def test_a_run_that_diverges_presses_no_other_flat(tmp_path: Path) -> None:
    runs = [Run(tmp_path), Run(tmp_path)]
    runs[0].complete()
    runs[1].start()
    runs[1].train(1, 20, loss=lambda step: 6.0 if step < 10 else math.nan if step == 20 else 10.0**step)
    figure = overlays([read_facts(run.run) for run in runs], ["good", "bad"])[0]
    good, bad = figure.lines
    assert good.pixels[0][1] < good.pixels[-1][1] - 25, "its fall is seen"
    assert min(y for _, y in bad.pixels) >= 0 and bad.values[-1] == 10.0**19
    assert figure.notes == ("bad: 1 value not finite", "bad: 10 values above the scale")


def test_steps_of_other_sizes_are_drawn_by_tokens_too(pair: tuple[Run, Run]) -> None:
    lines = [json.loads(line) for line in pair[1].run.metrics.read_text().splitlines()]
    pair[1].run.metrics.write_text("".join(json.dumps(line | {"tokens": 2 * line["tokens"]}) + "\n" for line in lines))
    figures = overlays([read_facts(run.run) for run in pair], ["a", "b"])
    assert [figure.panel.title for figure in figures][:2] == ["Loss", "Loss by tokens"]
    assert figures[1].lines[1].at[0] == 2048


def test_many_runs_and_those_that_have_only_begun(tmp_path: Path) -> None:
    runs = [Run(tmp_path) for _ in range(31)]
    for run in runs[1:]:
        run.start()
        run.train(1, 1000, loss=lambda step: 6 - step / 1000)
    page = reported(*(run.path for run in runs))
    assert len(page.source) < 2_000_000
    assert len({given["class"] for given in page.all("g") if "data-label" in given}) == 28, "seven colours in four strokes"
    assert "running" in page.text
    assert "No run has ended a step yet." in reported(runs[0].path, Run(tmp_path).path).text


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    runs = [Run(tmp_path / place) for place in ("here", "there")]
    assert labels_of([read_facts(run.run) for run in runs]) == ("here/runs/demo/0001", "there/runs/demo/0001")


def test_everything_in_a_comparison_is_escaped(tmp_path: Path) -> None:
    runs = [Run(tmp_path / HOSTILE), Run(tmp_path)]
    for run in runs:
        run.start(host=HOSTILE)
        run.train(1, 5)
        run.fail(1, "error", HOSTILE)
    page = reported(*(run.path for run in runs))
    assert HOSTILE not in page.source and HOSTILE in page.text and not page.all("img")


def test_where_a_page_is_written(pair: tuple[Run, Run], tmp_path: Path) -> None:
    first, second = pair
    for given, shown in (([first.path, second.path], "2 runs compared"), ([first.path], "demo 0001 completed")):
        target = tmp_path / f"page{len(given)}.html"
        page = reported(*given, "--output", target)
        assert target.exists() and shown in page.text
    assert not first.run.comparison.exists() and not first.run.report.exists()
    for words, said in (
        ([first.path, second.path, "--output", tmp_path / "job.toml"], "job.toml: is not an .html file"),
        ([first.path, second.path, "--output", tmp_path / "no" / "page.html"], "page.html: cannot be written"),
        ([second.path, second.path.parent], f"is {second.path}, the same as {second.path}"),
        ([first.path, tmp_path], "is not a run directory"),
    ):
        refused = CliRunner().invoke(command, [str(each) for each in words])
        assert isinstance(refused.exception, HpcMpError) and said in str(refused.exception)
