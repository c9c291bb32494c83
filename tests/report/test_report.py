"""The report: a run directory in, one honest and self-contained page out."""

import base64
import hashlib
import json
import math
import re
import stat
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
from click.testing import CliRunner
from html_page import Page
from reported import BEGIN, MIB, Run

from hpc_mp.base.errors import HpcMpError
from hpc_mp.cli.report import command
from hpc_mp.layout.placement import Degrees, place
from hpc_mp.report.curves import curves
from hpc_mp.report.facts import read_facts
from hpc_mp.report.page import write_report
from hpc_mp.report.summary import key_numbers, later_half, layout, summarize
from hpc_mp.rundir import RunDirectory, write_json
from hpc_mp.rundir.records import Evaluation, StepMetrics, line_of

HOSTILE = "<script>alert(1)</script>\"'&<img src=x onerror=alert(2)>"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


# --- the page as a file ----------------------------------------------------------------------------------------------


def test_a_complete_run(run: Run) -> None:
    path = write_report(run.complete().run)
    page = Page(path.read_text(encoding="utf-8"))
    assert path == run.path / "report.html"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in run.path.iterdir() if entry.name.startswith(".")] == [], "no temporary file stays"
    assert page.all("span", class_="completed")
    assert "2 nodes × 4 = 8 ranks · tensor 2 × pipeline 2 × data 2 · ZeRO-1 · 1f1b, 4 microbatches of 2 sequences" in page.text
    for kind, name, count in (("svg", "curve", 5), ("div", "cell", 8), ("svg", "gantt", 2), ("svg", "memory", 1)):
        assert len(page.all(kind, class_=name)) == count, name
    assert not page.all("p", class_="missing")
    assert path.stat().st_size < 200_000


def test_the_page_needs_nothing_from_elsewhere(run: Run) -> None:
    page = run.complete().page()
    assert not re.search(r"https?://|//[a-z]+\.[a-z]+/|@import|url\((?!#hatch)", page.source)
    assert not page.all("link") + page.all("img") + page.all("iframe")
    assert not any(key in ("src", "href", "srcset", "xlink:href") for _, given in page.found for key in given)
    (policy,) = (given["content"] for given in page.all("meta") if given.get("http-equiv"))
    script = re.search("<script>(.*)</script>", page.source, re.DOTALL)
    assert script and policy and policy.startswith("default-src 'none'; ")
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    assert policy.endswith(f"; script-src 'sha256-{digest}'"), "no other script than this one runs"


def test_variables_stay_out_of_the_page(tmp_path: Path) -> None:
    run = Run(tmp_path, environment={"TOKEN": "hunter2"})
    page = run.page()
    assert "hunter2" in run.run.job.read_text() and "hunter2" not in page.source
    assert 'TOKEN = "(hidden)"' in page.text


def test_an_unclosed_element_is_seen() -> None:
    for broken in ("<p><b>text</p>", "<div>", "</div>", "<p a=1 a=2></p>"):
        with pytest.raises(AssertionError):
            Page(broken)


def test_a_page_that_is_there_is_replaced_and_becomes_private(run: Run) -> None:
    run.run.report.write_text("old")
    run.run.report.chmod(0o644)
    assert "demo 0001" in run.page().text
    assert stat.S_IMODE(run.run.report.stat().st_mode) == 0o600


def test_a_page_that_cannot_be_written_is_said(run: Run) -> None:
    run.run.report.mkdir()  # stands in the way, for root too
    with pytest.raises(HpcMpError, match=r"report\.html: cannot be written \(Is a directory\)"):
        write_report(run.run)
    assert not list(run.path.glob(".report*"))


def test_the_command_prints_the_path(run: Run) -> None:
    for argument in (run.path, run.path.parent):
        done = CliRunner().invoke(command, [str(argument)])
        assert (done.exit_code, done.output) == (0, f"{run.run.report}\n")
    refused = CliRunner().invoke(command, [str(run.path / "log")])
    assert isinstance(refused.exception, HpcMpError) and "is not a run directory" in str(refused.exception)


# --- hostile input ---------------------------------------------------------------------------------------------------


def test_everything_from_the_run_is_escaped(tmp_path: Path) -> None:
    run = Run(tmp_path, environment={"NOTE": HOSTILE})
    run.start(node=lambda n: f"{HOSTILE}{n}", host=HOSTILE)
    run.train(1, 5)
    run.trace()
    trace = json.loads(run.run.trace(0).read_text())
    trace["actions"].append([HOSTILE, 0, 0, BEGIN + 0.2, BEGIN + 0.3])
    run.run.trace(0).write_text(json.dumps(trace))
    run.fail(1, "error", HOSTILE, traceback=HOSTILE)
    run.log(f"warning: {HOSTILE}", f"checkpoint {HOSTILE} is skipped: {HOSTILE}")
    (run.path / "status.json").write_text(HOSTILE)
    page = run.page()
    assert HOSTILE not in page.source
    assert page.text.count(HOSTILE) >= 6, "it is shown, as text"
    assert len(page.all("script")) == 1 and not page.all("img")
    assert not any(key.startswith("on") for _, given in page.found for key in given)
    write_json(run.run.outcome, {"state": HOSTILE, "cause": {"message": f"{HOSTILE} says the launcher"}})
    verdict = run.page()
    assert HOSTILE not in verdict.source and f"{HOSTILE} says the launcher" in verdict.text


def test_without_escaping_the_same_text_would_be_markup() -> None:
    page = Page(f"<p>{HOSTILE}</p>")
    assert page.all("script") and page.all("img")


# --- head ------------------------------------------------------------------------------------------------------------


def test_key_numbers_are_those_of_the_files(run: Run) -> None:
    run.complete()
    metrics = [json.loads(line) for line in run.run.metrics.read_text().splitlines()]
    later = metrics[10:]
    shown = {each.name: each.value for each in key_numbers(read_facts(run.run))}
    assert shown == {
        "Steps": "20 of 20",
        "Loss": f"{metrics[0]['loss']:.4f} → {metrics[-1]['loss']:.4f}",
        "Tokens per second": f"{median(m['tokens_per_s'] for m in later):,.0f}",
        "Step time": f"{1000 * median(m['step_time_s'] for m in later):.0f} ms",
        "Used": "0.04 node hours",  # two nodes for 74 s
        "Peak memory": "300 MiB",
    }
    page = run.page()
    assert all(value in page.text for value in shown.values())
    (drawn,) = (given for given in page.all("svg", class_="curve") if "Loss" in (given["aria-label"] or ""))
    assert json.loads(drawn["data-values"] or "") == [m["loss"] for m in metrics], "all digits"
    assert json.loads(drawn["data-steps"] or "") == [m["step"] for m in metrics]


def test_drops_and_expert_ranks_are_said_where_there_are_some(run: Run) -> None:
    run.complete()
    facts = read_facts(run.run)
    assert {"Dropped choices", "MFU"}.isdisjoint(each.name for each in key_numbers(facts))
    on_gpus = replace(facts, metrics=tuple(replace(metric, mfu=metric.step / 50, samples_per_s=4.0) for metric in facts.metrics))
    assert {each.name: each.value for each in key_numbers(on_gpus)}["MFU"] == "31.0 %"  # of steps 11 to 20
    assert "4 samples per second, median of steps 11–20" in [each.note for each in key_numbers(on_gpus)]
    dropping = replace(facts, metrics=tuple(replace(metric, dropped_share=metric.step / 1000) for metric in facts.metrics))
    assert {each.name: each.value for each in key_numbers(dropping)}["Dropped choices"] == "1.55%"  # of steps 11 to 20
    assert "tensor 1 × pipeline 1 × data 4 with expert 2 ·" in layout(place(Degrees(data=4, expert=2), "DPT", 4), None)
    assert "expert" not in layout(facts.placement, facts.spec)


def test_evaluations_are_drawn_into_the_loss(run: Run) -> None:
    run.complete()
    assert not run.page().all("g", class_="held-out")
    (run.path / "evaluations.jsonl").write_text("".join(
        line_of(Evaluation(step, loss, 100, 1.0)) + "\n" for step, loss in ((5, 6.5), (10, math.nan), (20, 5.25))))
    assert {each.name: each.value for each in key_numbers(read_facts(run.run))}["Held-out loss"] == "5.2500"
    assert len(list(run.page().all("g", class_="held-out"))) == 1
    loss, *others = curves(read_facts(run.run).metrics, read_facts(run.run).evaluations)
    assert len(loss.held_out) == 2 and not any(other.held_out for other in others)
    (_, above), (last, below) = loss.held_out
    assert above < loss.points[4][1], "6.5 lies above the 5.5 of that step"
    assert last == loss.points[-1][0] and loss.points[0][1] < below


def test_later_half_is_of_the_newest_attempt() -> None:
    def metric(step: int, attempt: int) -> StepMetrics:
        return StepMetrics(step=step, loss=1, grad_norm=1, tokens=1, step_time_s=1, tokens_per_s=1, peak_memory_bytes=1,
                      attempt=attempt)

    assert [m.step for m in later_half(tuple(metric(s, 1 + (s > 6)) for s in range(1, 11)))] == [9, 10]
    assert [m.step for m in later_half((metric(1, 1),))] == [1]


def state_of(run: Run) -> str:
    return summarize(read_facts(run.run)).state


def test_states(run: Run) -> None:
    assert state_of(run) == "running"
    run.start()
    run.status("preparing data", done=1, total=4)
    assert state_of(run) == "running"
    assert "preparing data, 25.0 %" in run.page().text
    run.train(1, 10)
    run.status("training")
    assert state_of(run) == "running"
    run.status("stopped")
    assert state_of(run) == "stopped"
    run.status("saving")
    run.train(11, 20)
    assert state_of(run) == "running"
    run.status("training")
    assert state_of(run) == "completed", "status.json may lag behind on a full disk"
    run.status("unsaved")
    assert state_of(run) == "failed"
    run.log("checkpoint of step 20 FAILED: OSError: No space left on device")
    text = run.page().text
    assert "the last checkpoint could not be saved" in text and "No space left on device" in text
    write_json(run.path / "outcome.json", {"state": "completed", "cause": None})
    assert state_of(run) == "completed"
    write_json(run.path / "outcome.json", {"state": "failed", "cause": "the file system went away"})
    assert "the file system went away" in run.page().text


def test_the_first_cause_is_named_and_echoes_are_not(run: Run) -> None:
    run.start()
    run.train(1, 3)
    run.fail(0, "peer", "Connection closed by peer", after=50)
    run.fail(5, "error", "RuntimeError: out of memory", after=61, traceback="Traceback of rank 5")
    run.fail(6, "error", "RuntimeError: later", after=62)
    summary = summarize(read_facts(run.run))
    assert summary.state == "failed" and summary.cause.startswith("rank 5 (dp ")
    assert summary.cause.endswith(") on node1 failed: RuntimeError: out of memory")
    assert summary.traceback == "Traceback of rank 5"
    assert [failure.rank for failure in summary.failures] == [5, 6, 0]
    page = run.page()
    assert page.all("span", class_="failed") and "Traceback of rank 5" in page.text


def test_the_verdict_knows_of_signals(run: Run) -> None:
    run.start()
    run.fail(0, "error", "ValueError: an echo")
    run.log("training from step 1 to 20", "attempt 1 failed: rank 3 on node0 was killed by SIGKILL")
    write_json(run.run.outcome, {"attempt": 1, "state": "failed", "cause": {"message": "rank 3 on node0 was killed by SIGKILL"}})
    summary = summarize(read_facts(run.run))
    assert (summary.state, summary.cause) == ("failed", "rank 3 on node0 was killed by SIGKILL")
    assert summary.problems == (), "the cause is not said twice"


def test_kinds_of_failures_that_are_not_known_count_as_errors(run: Run) -> None:
    run.fail(0, "peer", "echo", after=1)
    run.fail(1, "strange", "unheard of", after=2)
    assert "unheard of" in summarize(read_facts(run.run)).cause


def test_a_requeued_job_is_no_longer_failed(run: Run) -> None:
    run.start()
    run.fail(2, "error", "RuntimeError: broken", after=0.5)
    assert state_of(run) == "running", "rank 2 started after that"
    run.fail(2, "error", "RuntimeError: broken", after=60)
    assert state_of(run) == "failed"


def test_failures_of_an_earlier_attempt_are_not_the_current_ones(run: Run) -> None:
    run.start()
    run.train(1, 14)
    run.fail(2, "error", "RuntimeError: broken")
    run.resume(10)
    assert state_of(run) == "running"
    run.start()
    run.train(11, 20)
    run.trace()
    run.status("done")
    assert state_of(run) == "completed"
    page = run.page()
    assert not page.all("div", class_="bad")
    assert "on node1 failed: RuntimeError: broken" in page.text, "in the table of attempts"
    assert "1–10" in page.text and "11–20" in page.text
    assert page.text.count("attempt 2") == 5, "the resume is marked in every curve"
    assert "as executed; " in page.text and "% with equal stages" in page.text


def test_what_the_log_says_of_checkpoints_and_warnings(run: Run) -> None:
    run.complete()
    run.log("checkpoint step-00000010 is skipped: shard-1 has 3 bytes, 5 were saved",
            "checkpoint step-00000020 saved in 0.04 s",
            "checkpoint of step 15 FAILED: OSError: No space left on device (on rank 3)",
            "warning: slow network", "warning: slow network")
    summary = summarize(read_facts(run.run))
    assert [text.split()[2] for text in summary.problems] == ["step-00000010", "of"]
    assert summary.warnings == ("slow network",)
    page = run.page()
    assert "No space left on device" in page.text and "slow network" in page.text


# --- runs that have only begun, or are half-written ------------------------------------------------------------------


def test_a_run_that_has_only_begun(run: Run) -> None:
    page = run.page()
    assert len(page.all("p", class_="missing")) == 3, "curves, schedule, memory"
    assert "not started" in page.text and "no rank has reported yet" in page.text
    assert len(page.all("div", class_="cell")) == 8


def test_an_empty_job_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "x" / "0001"
    path.mkdir(parents=True)
    (path / "job.toml").touch()
    page = Page(write_report(RunDirectory(path)).read_text())
    assert len(page.all("p", class_="missing")) == 5
    assert "x 0001" in page.text and "job.toml is invalid" in page.text


NAMES = ("job.toml", "placement.json", "metrics.jsonl", "ranks.jsonl", "status.json", "trace/rank-00003.json",
         "failures/attempt-1-rank-00001.json", "log/main.log")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("content", [
    pytest.param(b"", id="empty"), pytest.param(b"{", id="brace"), pytest.param(b"[1, 2", id="cut"),
    pytest.param(b"3\n", id="number"), pytest.param(b"[]\n", id="list"), pytest.param(b"{}\n", id="object"),
    pytest.param(b"\xff\xfe\n", id="bytes"), pytest.param(b'{"attempt": "x", "rank": {}}\n', id="kinds")])
def test_one_broken_file_never_breaks_the_page(run: Run, name: str, content: bytes) -> None:
    run.complete()
    run.fail(1, "error", "x")
    (run.path / name).write_bytes(content)
    page = run.page()
    left_out = name.endswith("jsonl") and content in (b"", b"{", b"[1, 2", b"\xff\xfe\n")  # as a half-written line is
    broken = name != "log/main.log" and not left_out
    assert ("Could not be read" in page.text) == broken
    assert (name in page.text) >= broken


@pytest.mark.parametrize("name", NAMES[1:])
def test_a_file_that_is_not_there(run: Run, name: str) -> None:
    run.complete()
    (run.path / name).unlink(missing_ok=True)
    assert "Could not be read" not in run.page().text


def test_values_that_are_not_finite(run: Run) -> None:
    run.start()
    run.train(1, 6, loss=lambda step: [5.0, float("nan"), float("inf"), 4.0, 3.0, float("-inf")][step - 1])
    page = run.page()
    assert "3 steps not finite" in page.text
    assert "5.0000 → 3.0000" in page.text and "−2.0000, 3 steps without one" in page.text
    (drawn,) = (given for given in page.all("svg", class_="curve") if "Loss" in (given["aria-label"] or ""))
    assert json.loads(drawn["data-steps"] or "") == [1, 4, 5]


def test_numbers_beyond_every_axis(run: Run) -> None:
    run.complete()
    run.train(21, 22, loss=lambda step: 1.7e308 * (-1) ** step)
    for path, old, new in (
        (run.run.ranks, str(BEGIN + 1), "1e30"),
        (run.run.metrics, '"step_time_s": 0.501,', '"step_time_s": NaN,'),
        (run.run.trace(0), str(BEGIN), "NaN"),
        (run.run.trace(1), str(201 * MIB), str(10**400)),
    ):
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))
    page = run.page()
    assert "2 steps not finite" in page.text
    for said in ("ranks.jsonl: 8 of 8", "metrics.jsonl: 1 of 22", "trace/rank-00000.json", "trace/rank-00001.json"):
        assert said in page.text


def test_a_log_without_end_is_cut(run: Run) -> None:
    run.log(*(f"warning: step {step} was slow" for step in range(1000)))
    summary = summarize(read_facts(run.run))
    assert summary.warnings[:2] == ("(950 earlier ones are in log/main.log)", "step 950 was slow")
    assert len(summary.warnings) == 51
