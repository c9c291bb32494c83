"""Whoever asks why a run failed, by whatever door, hears of the same rank and the same cause: with a verdict and without one."""

import html
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import slurm_jobs
import warm
from click.testing import CliRunner
from lab_runs import before_steps
from slurm_lab.cluster import Cluster
from slurm_lab.lab import Lab
from tables import table

from hpc_mp.cli.main import cli
from hpc_mp.rundir import RunDirectory, find_run, read_json

pytestmark = pytest.mark.timeout(300)

FAULTY = Path(__file__).with_name("faults.py")
TIMEOUT = 10  # seconds without a step until ranks count as hung, in tests of such
PATIENCE = 120  # and in others: a step may take any time on a busy machine
JOB = f"""
[job]
name = "t"
nodes = 2
ranks_per_node = 2
device = "cpu"
step_timeout = {PATIENCE}
save_timeout = {PATIENCE}
[model]
config = {{ model_type = "gpt2", n_layer = 2, n_embd = 16, n_head = 2, vocab_size = 300, n_positions = 16, n_inner = 16 }}
[data]
files = ["text.txt"]
sequence_length = 16
[parallel]
tensor = 2
pipeline = 2
microbatches = 2
[train]
steps = 6
global_batch = 4
[checkpoint]
every = 2
[slurm]
retries = 0
[environment]
set = {{ OMP_NUM_THREADS = "1" }}
"""
# What each fault is called, and what is said of it, whatever the rank.
KINDS: dict[str, tuple[str, str]] = table(__file__, "one_cause.toml", "kinds")
# Each way in which a rank can end or stand, and each rank; `make prove` takes the product.
COVER = [("stopped", 1), ("killed", 3), ("crashed", 0), ("loader", 2), ("forward", 2), ("native", 0), ("error", 2), ("user", 1)]
PRODUCT = [(fault, rank) for fault in KINDS for rank in range(4)]


@dataclass(frozen=True)
class Told:
    """What ``hpc-mp launch --wait --json`` printed, and the run."""

    run: RunDirectory
    document: dict[str, Any]
    text: str


def environment(fault: str, rank: int | str) -> dict[str, str]:
    return {"FAULT": fault, "FAULT_RANK": str(rank), "FAULT_STEP": "2", "OMP_NUM_THREADS": "1"}


def write_job(directory: Path, more: str = "") -> Path:
    (directory / "text.txt").write_text("some text\n" * 100)
    path = directory / "job.toml"
    path.write_text(JOB + more)
    return path


def limits(fault: str) -> tuple[str, ...]:
    """Of a fault after which ranks stand still."""
    stands = KINDS.get(fault, ("",))[0] in ("hang", "silent")
    return (f"job.step_timeout={TIMEOUT}", f"job.save_timeout={TIMEOUT}") if stands else ()


def launched(job: Path, fault: str, rank: int | str, *overrides: str) -> Told:
    options = [word for override in (*limits(fault), *overrides) for word in ("--set", override)]
    environ = os.environ | environment(fault, rank) | {"PYTHONPATH": str(FAULTY.parent)}
    done = warm.Program([FAULTY, "launch", job, "--on", "local", "--json", *options], environ).end(200)
    assert done.returncode in (1, 2), done.stderr
    return Told(find_run(job.parent / "runs" / "t"), json.loads(done.stdout), done.stderr)


def call(*words: str | Path) -> str:
    result = CliRunner().invoke(cli, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def doors(run: RunDirectory) -> dict[str, str]:
    """What every door says in the end, but for launch."""
    page = Path(call("report", run.path).strip()).read_text(encoding="utf-8")
    said = re.search(r'<strong>Failed:</strong> <span class="said">(.*?)</span>', page, re.DOTALL)
    return {
        "status --json": json.loads(call("status", run.path, "--json"))["cause"],
        "status": call("status", run.path).rstrip().splitlines()[-1].removeprefix("cause").strip(),
        "logs": call("logs", run.path).rstrip().splitlines()[-1],
        "report": html.unescape(said[1]) if said else "",
    }


def check(told: Told, fault: str, rank: int) -> None:
    cause = told.document["cause"]
    kind, words = KINDS[fault]
    assert (cause["rank"], cause["kind"]) == (rank, kind), cause
    assert words in cause["message"]
    assert cause["message"].startswith(f"rank {rank} (") or kind == "user"
    assert cause["message"] in told.text
    written = read_json(told.run.outcome)
    assert written["cause"] == cause and written["report"] == told.document["report"] == str(told.run.report)
    assert told.run.report.exists()
    assert set(doors(told.run).values()) == {cause["message"]}
    told.run.outcome.unlink()
    assert set(doors(told.run).values()) == {cause["message"]}, "without a verdict"


@pytest.mark.parametrize(("fault", "rank"), [
    *COVER, *(pytest.param(*case, marks=pytest.mark.prove) for case in PRODUCT if case not in COVER)])
def test_all_doors_name_the_same_rank_and_cause(tmp_path: Path, fault: str, rank: int) -> None:
    check(launched(write_job(tmp_path), fault, rank), fault, rank)


@pytest.mark.prove
@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize(("fault", "rank"), [("stopped", 0), ("stopped", 3), ("loader", 1), ("native", 2), ("killed", 2)])
def test_also_where_the_data_axis_waits(tmp_path: Path, fault: str, rank: int, zero: int) -> None:
    """FSDP2's hooks send and wait by themselves."""
    told = launched(write_job(tmp_path), fault, rank, "parallel.pipeline=1", "parallel.microbatches=1", f"parallel.zero={zero}")
    check(told, fault, rank)


@pytest.mark.prove
@pytest.mark.parametrize("rank", [0, 2])
def test_also_where_the_heartbeat_notices_first(tmp_path: Path, rank: int) -> None:
    told = launched(write_job(tmp_path), "stopped", rank, "job.step_timeout=60", "job.heartbeat_timeout=3")
    cause = told.document["cause"]
    assert (cause["rank"], cause["node"], cause["kind"]) == (rank, f"node{rank // 2}", "lost"), cause
    assert set(doors(told.run).values()) == {cause["message"]}


@pytest.mark.parametrize(("place", "rank", "limit", "kind"), [
    ("_introduce", 2, "job.heartbeat_timeout=3", "lost"),
    pytest.param("connect", 0, "job.heartbeat_timeout=3", "lost", marks=pytest.mark.prove),
    pytest.param("connect", 2, "job.heartbeat_timeout=3", "lost", marks=pytest.mark.prove),
    ("_introduce", 1, "job.meet_timeout=8", "hang"),  # not the first of its node: it has no heartbeat
    pytest.param("connect", 3, "job.meet_timeout=40", "silent", marks=pytest.mark.prove)])
def test_also_between_the_meeting_and_the_first_message(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, rank: int, limit: str, kind: str) -> None:
    """Nothing was noticed for a day."""
    monkeypatch.setenv("FAULT_AT", place)
    cause = launched(write_job(tmp_path), "stopped", rank, limit).document["cause"]
    assert cause["kind"] == kind and f"node{rank // 2}" in cause["message"], cause
    assert kind == "lost" or cause["rank"] == rank


@pytest.mark.parametrize(("error", "ranks", "kind"), table(__file__, "one_cause.toml", "failed_saves"))
def test_saves_that_fail_are_the_fault_of_a_node_where_others_can_write(
        tmp_path: Path, error: str, ranks: str, kind: str) -> None:
    """From step 2 on: the saves after steps 2 and 4 fail, and ``checkpoint.failures`` is 2."""
    told = launched(write_job(tmp_path), error, ranks)
    cause = told.document["cause"]
    assert cause["kind"] == kind and f"2 checkpoints in a row could not be saved: rank {ranks[0]}: " in cause["message"], cause
    assert cause["node"] == f"node{cause['rank'] // 2}" and told.document["steps"] == 4
    assert str(cause["rank"]) in ranks.split(",") or kind == "space", "a full file system is met by all"
    assert set(doors(told.run).values()) == {cause["message"]}


@pytest.mark.parametrize(("fault", "rank"), [("asleep", 0), ("asleep", 3), *(
    pytest.param(fault, rank, marks=pytest.mark.prove)
    for fault, rank in [("stopped", 0), ("native", 0), ("asleep", 2), ("stopped", 1), ("native", 3)])])
def test_a_rank_that_never_comes_to_the_meeting_is_named(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, rank: int) -> None:
    """For rank 0, whose socket the launcher has made, the others waited for ever."""
    monkeypatch.setenv("FAULT_AT", "read_job")
    told = launched(write_job(tmp_path), fault, rank, "job.meet_timeout=8")
    cause = told.document["cause"]
    assert (cause["kind"], cause["rank"], cause["node"]) == ("silent", rank, f"node{rank // 2}"), cause
    assert set(doors(told.run).values()) == {cause["message"]}


def test_a_verdict_goes_before_all_records(tmp_path: Path) -> None:
    """Negative control: with another verdict every door says that, and the verdict on another attempt counts for nothing."""
    told = launched(write_job(tmp_path), "error", 3)
    written = read_json(told.run.outcome)
    other = "rank 0 (dp 0, pp 0, tp 0) on n1 has a hardware fault: Xid 79"
    told.run.outcome.write_text(json.dumps(written | {"cause": {"kind": "hardware", "message": other, "rank": 0}}))
    assert set(doors(told.run).values()) == {other}
    told.run.outcome.write_text(json.dumps(written | {"attempt": 7, "cause": {"kind": "hardware", "message": other}}))
    assert set(doors(told.run).values()) == {told.document["cause"]["message"]}


# --- the same on Slurm ------------------------------------------------------------------------------------------------

PLANTED = f"""
def before(self, step):
    sys.path.append({str(FAULTY.parent)!r})
    import faults
    faults.strike(self, step)
"""


@pytest.fixture
def shared(here: Path) -> Path:
    """A job file on the file system that all nodes share."""
    return write_job(here)


def on_slurm(lab: Cluster, job: Path, fault: str, rank: int, *more: str) -> Told:
    planted = [f"environment.set.{name}={value!r}".replace("'", '"') for name, value in environment(fault, rank).items()]
    overrides = [before_steps(job.parent / "fault", PLANTED), *planted, *limits(fault), *more]
    done = slurm_jobs.command(lab, *slurm_jobs.launch_command(job, overrides, "--wait")[3:], environ=slurm_jobs.own_ledger(job))
    assert done.returncode in (1, 2), f"{done.stdout}\n{done.stderr}\n{slurm_jobs.logs(job)}"
    return Told(find_run(job.parent / "runs" / "t"), json.loads(done.stdout), done.stderr)


def check_on_slurm(lab: Cluster, told: Told, fault: str, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in lab.environ.items():
        monkeypatch.setenv(name, value)
    check(told, fault, rank)


def test_all_doors_agree_on_slurm(lab: Lab, shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = on_slurm(lab, shared, "stopped", 1, "job.ranks_per_node=1", "parallel.tensor=1", "environment.health=false")
    check_on_slurm(lab, told, "stopped", 1, monkeypatch)


@pytest.mark.prove
@pytest.mark.parametrize(("fault", "rank"), [(fault, number % 4) for number, fault in enumerate(KINDS)])
def test_every_fault_on_slurm(lab: Lab, shared: Path, fault: str, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in one rank: the product with all ranks is that of emulated nodes."""
    check_on_slurm(lab, on_slurm(lab, shared, fault, rank), fault, rank, monkeypatch)
