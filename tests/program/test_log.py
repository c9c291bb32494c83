"""``hpc_mp.log``: steps of a program as lines of ``metrics.jsonl``, each once, over several attempts."""

import math
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

import hpc_mp
from hpc_mp.base.errors import HpcMpError
from hpc_mp.cli.main import cli
from hpc_mp.program.log import _writer
from hpc_mp.rundir import RunDirectory, create_run
from hpc_mp.rundir.records import RankStatus, StepMetrics, read_records, write_record
from hpc_mp.rundir.usage import usage


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    made = create_run(tmp_path, "x")
    monkeypatch.setenv("HPC_MP_RUN", str(made.path))
    monkeypatch.setenv("HPC_MP_ATTEMPT", "1")
    monkeypatch.setenv("RANK", "0")
    _writer.cache_clear()
    return made


def steps(run: RunDirectory) -> list[tuple[int, float, int, int]]:
    return [(each.step, each.loss, each.tokens, each.attempt) for each in read_records(run.metrics, StepMetrics)]


def test_steps_are_written_as_they_end(run: RunDirectory) -> None:
    hpc_mp.log(step=1, loss=2.5, tokens=10)
    hpc_mp.log(step=2, loss=2.0, tokens=10, learning_rate=1e-3)
    hpc_mp.log(step=4, tokens=20)
    assert [(step, tokens, attempt) for step, _, tokens, attempt in steps(run)] == [(1, 10, 1), (2, 20, 1), (4, 40, 1)]
    assert [loss for _, loss, _, _ in steps(run)][:2] == [2.5, 2.0] and math.isnan(steps(run)[2][1])
    with pytest.raises(HpcMpError, match="does not follow step 4"):
        hpc_mp.log(step=4)


def test_a_program_may_say_how_long_a_step_took(run: RunDirectory) -> None:
    hpc_mp.log(step=1, tokens=10, seconds=0.5)
    first, = read_records(run.metrics, StepMetrics)
    assert (first.step_time_s, first.tokens_per_s) == (0.5, 20.0)


def test_a_later_attempt_goes_on_and_what_it_does_again_is_lost(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(1, 6):
        hpc_mp.log(step=step, loss=1.0, tokens=1)
    monkeypatch.setenv("HPC_MP_ATTEMPT", "2")
    run.put_away(1).mkdir()
    hpc_mp.log(step=4, loss=0.5, tokens=1)
    assert [(step, tokens, attempt) for step, _, tokens, attempt in steps(run)] == [(1, 1, 1), (2, 2, 1), (3, 3, 1), (4, 4, 2)]
    assert usage(run, None).lost_steps == 2


@pytest.mark.parametrize(("name", "value"), [("RANK", "1"), ("HPC_MP_RUN", None)])
def test_other_ranks_and_programs_outside_of_a_run_write_nothing(run: RunDirectory, monkeypatch: pytest.MonkeyPatch, name: str,
                                                                 value: str | None) -> None:
    if value is None:
        monkeypatch.delenv(name)
    else:
        monkeypatch.setenv(name, value)
    hpc_mp.log(step=1, loss=1.0)
    assert not run.metrics.exists()


def test_status_and_report_show_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text("import hpc_mp\nfor n in range(1, 9): hpc_mp.log(step=n, loss=8 / n, tokens=5)\n")
    monkeypatch.setenv("PYTHONPATH", str(Path(hpc_mp.__file__).parents[1]))
    done = CliRunner().invoke(cli, ["run", "--on", "local", "--ranks-per-node", "2", "--", sys.executable, "program.py"])
    assert done.exit_code == 0, done.output + repr(done.exception)
    assert "loss      8.0000 → 1.0000 in 8 steps" in done.output and "report" in done.output
    assert "step      8, loss 1.0000" in CliRunner().invoke(cli, ["status", "runs/program"]).output
    page = (tmp_path / "runs" / "program" / "0001" / "report.html").read_text()
    assert "program.py" in page and "Peak memory" not in page
    for unknown in ("Gradient norm", "Learning rate", "The schedule as executed", "Groups of ranks", "tensor 1", "order DPT"):
        assert unknown not in page
    assert "2 ranks on 1 node" in page and "as reported by the program" in page


def test_the_first_step_of_an_attempt_counts_from_when_its_ranks_began(run: RunDirectory) -> None:
    write_record(run.status, RankStatus(1, "running", time=time.time() - 40))
    hpc_mp.log(step=1, tokens=100)
    hpc_mp.log(step=2, tokens=100)
    first, second = read_records(run.metrics, StepMetrics)
    assert 40 <= first.step_time_s < 60 and first.tokens_per_s < 3 and second.step_time_s < 5


def test_a_program_that_says_nothing_and_starts_its_ranks_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["run", "--on", "local", "--nodes", "2", "--ranks-per-node", "3", "--set", "program.start=node", "--", "true"]
    assert CliRunner().invoke(cli, words).exit_code == 0
    assert CliRunner().invoke(cli, ["report", "runs/true"]).exit_code == 0
    page = (tmp_path / "runs" / "true" / "0001" / "report.html").read_text()
    assert "2 nodes × 3 = 6 ranks" in page and "The program has not reported a step" in page
    assert "each starts its own ranks" in page
