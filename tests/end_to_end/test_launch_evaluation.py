"""Held-out text from the job file to what a user sees: prepared before the run, then in the log, the status and the report."""

import json
from pathlib import Path

import warm
from click.testing import CliRunner
from launching import command, environment, mark  # noqa: F401  (mark is a fixture)
from layouts import write_job

from hpc_mp.base.errors import HpcMpError
from hpc_mp.cli.main import cli
from hpc_mp.rundir import RunDirectory, read_lines

EVALUATE = """
[evaluate]
files = ["held-out/*.txt"]
every = 2
"""
LAYOUT = ["job.nodes=2", "job.ranks_per_node=2", "parallel.tensor=2", "parallel.pipeline=2", "parallel.microbatches=3"]


def test_evaluations_are_seen_everywhere(tmp_path: Path, mark: str) -> None:  # noqa: F811
    job = write_job(tmp_path, more=EVALUATE)
    (tmp_path / "held-out").mkdir()
    (tmp_path / "held-out" / "some.txt").write_text(Path(json.encoder.__file__).read_text()[:2000])
    prepared = CliRunner().invoke(cli, ["data", "prepare", str(job), "--json"])
    assert prepared.exit_code == 0, prepared.output
    tokens = json.loads(prepared.stdout)["held_out"]
    made = sorted((tmp_path / "runs" / ".cache").glob("tokens-*"))

    done = warm.Program(command(job, LAYOUT)[1:], environment(mark)).end(120)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    run = RunDirectory(Path(outcome["run"]))
    found = read_lines(run.evaluations)
    assert [(line["step"], line["label_tokens"], line["attempt"]) for line in found] == [
        (step, tokens["tokens"] - 1, 1) for step in (2, 3)]
    assert outcome["evaluation_loss"] == found[-1]["loss"] and "held out  loss" in done.stderr
    assert outcome["best_evaluation_loss"] == min(line["loss"] for line in found)
    assert outcome["best_checkpoint"] == outcome["checkpoint"], "the only one"
    assert f"held out after step 2: loss {found[0]['loss']:.4f}" in done.stderr, "while it goes on"
    assert f"held out after step 2: loss {found[0]['loss']:.4f} (perplexity " in run.main_log.read_text()
    assert sorted(run.cache.glob("tokens-*")) == made and len(made) == 2, "nothing is left to tokenize"
    status = json.loads(CliRunner().invoke(cli, ["status", str(run.path), "--json"]).stdout)
    assert status["evaluation"] == found[-1] and status["state"] == "completed"
    assert status["best"] == found[-1] | {"path": outcome["checkpoint"]}
    words = CliRunner().invoke(cli, ["status", str(run.path)]).output
    assert "held out  after step 3: loss" in words and f"best      {outcome['checkpoint']}, held out loss" in words
    assert 'class="held-out"' in run.report.read_text() and "Held-out loss" in run.report.read_text()

    again = CliRunner().invoke(cli, ["launch", str(job), "--on", "local", "--set=evaluate.files=['none/*.txt']"])
    assert isinstance(again.exception, HpcMpError)
    assert str(again.exception).startswith("evaluate.files: ") and "matches no file" in str(again.exception)
