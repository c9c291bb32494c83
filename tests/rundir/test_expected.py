"""A run's steps next to its plan: what is said, when a warning is due, and which culprit it names."""

import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
from launching import write_job

from hpc_mp.base.text import duration, memory_size
from hpc_mp.cli.status import single_text
from hpc_mp.cluster.paces import ledger, pace
from hpc_mp.cluster.slurm.allocation import Where
from hpc_mp.job import dump_job, load_job
from hpc_mp.launch.backends import BACKENDS
from hpc_mp.launch.plan import compose
from hpc_mp.launch.run_files import begin
from hpc_mp.report.conclude import conclude
from hpc_mp.report.facts import read_facts
from hpc_mp.report.summary import key_numbers
from hpc_mp.rundir import RunDirectory, create_run
from hpc_mp.rundir.expected import ENOUGH, LAST, ObservedSteps, observe
from hpc_mp.rundir.outcome import Outcome, State
from hpc_mp.rundir.plan import ExpectedStep, RunPlan, Traffic, write_plan
from hpc_mp.rundir.records import RankMemory, RankStart, RankTrace, StepMetrics, TracedAction, line_of
from hpc_mp.runs.status import seen as seen_status

GIB = 2**30
EXPECTED = ExpectedStep(
    "H100 80GB HBM3", "8 H100", 80 * GIB, ({"activations": 30 * GIB, "parameters": 20 * GIB, "libraries": 3 * GIB},), 10.0,
    {"products": 7.0, "attention": 1.0, "bubble": 1.0, "reduce": 0.5, "publish": 0.25, "update": 0.25}, 1e5, 0.4, (8.0, 8.0))


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = create_run(tmp_path, "job")
    write_plan(run, RunPlan((1, 1), Traffic(), (), expected=EXPECTED))
    return run


def stepped(run: RunDirectory, seconds: Sequence[float], peak: float = 50 * GIB, attempt: int = 1, first: int = 1) -> None:
    with open(run.metrics, "a") as file:
        file.write("".join(line_of(StepMetrics(step, 2.0, 100 * step, time, 100 / time, 1.0, int(peak), attempt=attempt)) + "\n"
                           for step, time in enumerate(seconds, first)))


def traced(run: RunDirectory, *, slow: float = 1.0, waits: float = 1.0, transit: float = 0.0, compute: float = 8.0,
           limit: int = 80 * GIB, attempt: int = 1, replicas: int = 2) -> None:
    """Write traces of pipelines with two stages, of which the last rank computes ``slow`` times as long. Each waits ``waits`` for
    a gradient before it is sent; that of the first pipeline is ``transit`` under way."""
    run.traces.mkdir(exist_ok=True)
    last = 2 * replicas - 1
    for rank in range(last + 1):
        stage, late = rank % 2, transit * (rank == 0)
        busy = compute * (slow if rank == last else 1.0)
        wait = waits + max(0.0, compute * slow - busy)
        sent, arrived = 100.0 + busy / 3 + wait, 100.0 + busy / 3 + wait + late
        message = TracedAction("SEND_B", 1, 0, sent, sent) if stage else TracedAction("RECV_B", 0, 0, sent - wait, arrived)
        actions = (TracedAction("F", stage, 0, 100.0, 100.0 + busy / 3), message,
                   TracedAction("B", stage, 0, arrived, arrived + busy * 2 / 3))
        trace = RankTrace(attempt, rank, 2, actions, RankMemory(1, 1, 1, limit=limit), pp=stage)
        run.trace(rank).write_text(line_of(trace))
    starts = [RankStart(attempt, rank, f"n{rank}", f"host{rank}", 1.0, dp=rank // 2, pp=rank % 2) for rank in range(last + 1)]
    run.ranks.write_text("".join(f"{line_of(start)}\n" for start in starts))


# --- what is said, and when -------------------------------------------------------------------------------------------


def test_the_steps_count_without_the_first_two_once_there_are_eight(run: RunDirectory) -> None:
    times = [60.0, 30.0, 10.1, 10.3, 10.2, 10.4, 10.2]
    stepped(run, times)
    assert observe(run, 1) is None, "seven steps"
    stepped(run, [10.6], first=8)
    assert (seen := observe(run, 1)) == ObservedSteps(EXPECTED, median([*times[2:], 10.6]), 50 * GIB, ())
    assert seen is not None and seen.words == (
        f"a step takes {duration(10.25)}, 1.02 of the predicted 10 s; the fullest rank holds 50 GiB, 1.00 of the "
        f"predicted {memory_size(50 * GIB)}"), "libraries are not PyTorch's"


def test_the_newest_steps_of_the_attempt_count(run: RunDirectory) -> None:
    stepped(run, [30.0] * 30)
    stepped(run, [10.0] * 6, attempt=2, first=31)
    assert observe(run, 2) is None, "six steps of its own"
    stepped(run, [10.0] * LAST, attempt=2, first=37)
    seen = observe(run, 2)
    assert seen is not None and seen.seconds == 10.0 and not seen.warnings
    assert observe(run, 1) is None, "another attempt than that of the last steps"


def test_nothing_is_compared_without_a_prediction(run: RunDirectory) -> None:
    stepped(run, [30.0] * 10)
    write_plan(run, RunPlan((1, 1), Traffic(), ()))
    assert observe(run, 1) is None
    run.plan.unlink()
    assert observe(run, 1) is None


def test_200_healthy_runs_raise_no_warning(tmp_path: Path) -> None:
    """Predictions 18 % off at most, steps that vary by 8 %, slow first steps, and one in twenty with a stall."""
    rng = random.Random(7)
    for number in range(200):
        run = create_run(tmp_path, f"job{number}")
        write_plan(run, RunPlan((1, 1), Traffic(), (), expected=EXPECTED))
        usual, peak = 10.0 * rng.uniform(0.85, 1.18), 50 * GIB * rng.uniform(0.85, 1.18)
        stepped(run, [usual * (6 if step < 2 else 3 if rng.random() < 0.05 else 1) * rng.lognormvariate(0, 0.08)
                      for step in range(rng.randint(ENOUGH, 40))], peak)
        seen = observe(run, 1)
        assert seen is not None and seen.warnings == (), (usual, seen)


def test_small_differences_are_no_warning(run: RunDirectory) -> None:
    """A step of milliseconds, and a rank of a small model."""
    small = replace(EXPECTED, seconds=0.02, needs=({"parameters": GIB},))
    write_plan(run, RunPlan((1,), Traffic(), (), expected=small))
    stepped(run, [0.06] * 10, 4 * GIB)
    seen = observe(run, 1)
    assert seen is not None and seen.warnings == ()
    write_plan(run, RunPlan((1,), Traffic(), (), expected=replace(small, seconds=0.2)))
    assert len((observe(run, 1) or seen).warnings) == 1, "140 ms are a difference"


# --- culprits ---------------------------------------------------------------------------------------------------------

Plant = Callable[[RunDirectory], None]
CULPRITS: list[tuple[float, Plant, str, str]] = [
    (16.0, lambda run: traced(run, slow=1.8), "rank",
     "16 s, 60 % more than predicted (10 s): rank 3 on n3 computes 1.80 times as long as its peers"),
    (16.0, lambda run: traced(run, slow=1.8, replicas=1), "stage",
     "pipeline rank 1 on n1 computes 1.80 times as long as others, by what is predicted"),
    (16.0, lambda run: traced(run, transit=6.0), "link",
     "messages between rank 0 on n0 and rank 1 on n1 take 6 s: this link is slow"),
    (16.0, lambda run: traced(run, transit=6.0, slow=1.3), "link",
     "messages between rank 0 on n0 and rank 1 on n1 take 6 s"),
    (16.0, lambda run: traced(run), "sums", "sums over data ranks take 6 s longer than predicted: links are slow"),
    (16.0, lambda run: traced(run, compute=14.0), "machine",
     "all ranks compute 1.75 times as long as predicted: the catalogue's row of H100 80GB HBM3 is wrong"),
    (16.0, lambda run: None, "unknown", "no rank has left a trace"),
    (16.0, lambda run: traced(run, slow=1.8, attempt=2), "unknown", "no rank has left a trace"),
    (6.0, lambda run: traced(run), "machine", "6 s, 40 % less than predicted (10 s): H100 80GB HBM3 is faster than its row"),
]


@pytest.mark.parametrize(("seconds", "plant", "place", "words"), CULPRITS, ids=[words[:40] for *_, words in CULPRITS])
def test_a_slow_run_names_its_likely_culprit(run: RunDirectory, seconds: float, plant: Plant, place: str, words: str) -> None:
    plant(run)
    stepped(run, [seconds] * 10)
    seen = observe(run, 1)
    assert seen is not None and len(seen.warnings) == 1 and words in seen.warnings[0], seen
    assert seen.culprit == place
    run.metrics.unlink()
    stepped(run, [12.9] * 10)
    assert (observe(run, 1) or seen).warnings == (), "29 % more"


def test_a_step_that_was_recorded_before_it_became_slow_names_nobody(run: RunDirectory) -> None:
    traced(run, slow=1.8)
    stepped(run, [10.0] * 20 + [16.0] * 30)
    seen = observe(run, 1)
    assert seen is not None and seen.culprit == "unknown"
    assert "60 % more than predicted (10 s): step 2, the last that ranks have recorded, was not slow" in seen.warnings[0]
    run.metrics.unlink()
    stepped(run, [16.0] * 50)
    assert (observe(run, 1) or seen).culprit == "rank"


def test_time_outside_of_the_passes_is_the_hosts_if_nothing_is_reduced(run: RunDirectory) -> None:
    parts = {name: seconds for name, seconds in EXPECTED.parts.items() if name not in ("reduce", "publish")}
    write_plan(run, RunPlan((1, 1), Traffic(), (), expected=replace(EXPECTED, parts=parts)))
    traced(run)
    stepped(run, [16.0] * 10)
    seen = observe(run, 1)
    assert seen is not None and "6.75 s are outside of the passes: the input or the host is slow" in seen.warnings[0]


@pytest.mark.parametrize(("peak", "limit", "words"), [
    (70, 80, ["70 GiB, 40 % more than predicted (50 GiB): the planner misjudges this model"]),
    (50, 40, ["the GPUs have 40 GiB, in the catalogue's row of H100 80GB HBM3 they have 80 GiB: it is wrong, or not theirs"]),
    (70, 141, ["the GPUs have 141 GiB", "70 GiB, 40 % more"]), (50, 78, []), (50, 0, [])])
def test_memory_that_is_off_is_named(run: RunDirectory, peak: int, limit: int, words: list[str]) -> None:
    traced(run, limit=limit * GIB)
    stepped(run, [10.0] * 10, peak * GIB)
    seen = observe(run, 1)
    assert seen is not None and len(seen.warnings) == len(words) and seen.culprit == ""
    assert all(word in warning for word, warning in zip(words, seen.warnings, strict=True)), seen.warnings
    write_plan(run, RunPlan((1, 1), Traffic(), (), expected=replace(EXPECTED, needs=({"activations": 50 * GIB, "process": 1},))))
    seen = observe(run, 1)
    assert seen is not None and "row" not in str(seen.warnings), "the memory of a host is in no row"


def test_broken_traces_are_left_out(run: RunDirectory) -> None:
    traced(run, slow=1.8)
    run.trace(0).write_text("{")
    stepped(run, [16.0] * 10)
    seen = observe(run, 1)
    assert seen is not None and "rank 3 on n3" in seen.warnings[0]


# --- where it is said, and what it teaches ----------------------------------------------------------------------------


@pytest.fixture
def trained(run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A run whose steps take 16 s in place of 10 because of a slow rank, with its job; and a ledger of its own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    run.job.write_text(dump_job(load_job(write_job(tmp_path))))
    stepped(run, [16.0] * 10)
    traced(run, slow=1.8)
    return run


def test_status_and_report_compare(trained: RunDirectory) -> None:
    lines = single_text([seen_status(trained, [])]).splitlines()
    words = "expected  a step takes 16 s, 1.60 of the predicted 10 s; "
    (place,) = (number for number, line in enumerate(lines) if line.startswith(words))
    assert lines[place + 1].startswith("warning   a step takes 16 s, 60 % more than predicted (10 s): rank 3 on n3 computes")
    notes = {number.name: number.note for number in key_numbers(read_facts(trained))}
    assert notes["Step time"].endswith(", predicted 10 s") and notes["Peak memory"] == "fullest rank, of 80 GiB, predicted 50 GiB"
    write_plan(trained, RunPlan((1, 1), Traffic(), ()))
    assert "expected" not in single_text([seen_status(trained, [])])
    assert "predicted" not in str(key_numbers(read_facts(trained)))


def alike(run: RunDirectory) -> None:
    traced(run, compute=14.0)


@pytest.mark.parametrize(("plant", "state", "expected", "factor"), [
    (alike, "completed", EXPECTED, 1.6 ** 0.5), (alike, "failed", EXPECTED, 1.0), (alike, "completed", None, 1.0),
    (lambda run: traced(run, slow=1.8), "completed", EXPECTED, 1.0),  # a slow rank is no trait of the machine
    (alike, "completed", replace(EXPECTED, mfu=0.08), 1.0),  # it measures launches
    (alike, "completed", replace(EXPECTED, seconds=12.5, pace=1.25, mfu=0.09), 1.6 ** 0.5)])  # a pace is not taught twice
def test_a_completed_run_teaches_the_pace_of_its_gpu(trained: RunDirectory, plant: Plant, state: State,
                                                     expected: ExpectedStep | None, factor: float) -> None:
    plant(trained)
    write_plan(trained, RunPlan((1, 1), Traffic(), (), expected=expected))
    for _ in range(2):  # a verdict is made once, whoever concludes again
        conclude(Outcome(trained.path, state), 1)
    assert pace(ledger(), EXPECTED.gpu) == pytest.approx(factor)
    assert not ledger().exists() or len(ledger().read_text().splitlines()) == 1


def test_rank_0_writes_the_comparison_into_the_log_once(tmp_path: Path) -> None:
    spec = load_job(write_job(tmp_path, 1, 1), ["train.steps=11", "job.device=cpu"])
    plan = compose(spec, Where("local", "so"), BACKENDS["local"].target)
    expected = replace(EXPECTED, seconds=1e-3, memory=2**20, needs=({"parameters": 2**20},))
    with begin(replace(plan, record=replace(plan.record, expected=expected)), None) as begun:
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        done = subprocess.run([sys.executable, "-m", "hpc_mp", "train", str(begun.run.job)], env=os.environ | alone, check=False,
                              capture_output=True, text=True)
        log = begun.run.main_log.read_text()
    assert done.returncode == 0, done.stderr
    (said,) = (line for line in log.splitlines() if line[9:].startswith("a step takes "))
    assert said.endswith("of the predicted 1 MiB")
    assert [line[9:31] for line in log.splitlines() if "than predicted (1 MiB)" in line] == ["warning: a rank holds "]
