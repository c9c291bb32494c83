"""The loop of prediction and observation, through whole runs: planted faults are named, healthy runs are not warned of, and the
second plan of a machine is closer to its run than the first. Ranks have the clock of a machine with known figures (``paced.py``).
"""

import json
import math
import os
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import warm
from click.testing import CliRunner

from hpc_mp import catalogue
from hpc_mp.cli.main import cli
from hpc_mp.cluster.slurm.allocation import Where
from hpc_mp.job import load_job
from hpc_mp.launch.backends import BACKENDS
from hpc_mp.launch.plan import compose
from hpc_mp.rundir import RunDirectory, read_lines
from hpc_mp.rundir.plan import ExpectedStep, read_plan

pytestmark = pytest.mark.timeout(600)

PACED = Path(__file__).with_name("paced.py")
MICROBATCHES, RUNS, HEALTHY = 4, 5, 20
AFTER = ("reduce", "publish", "update", "skew")  # parts of a step behind its passes
JOB = f"""
[job]
name = "t"
nodes = 2
ranks_per_node = 2
device = "cpu"
[model]
config = {{ model_type = "gpt2", n_layer = 4, n_embd = 16, n_head = 2, vocab_size = 300, n_positions = 16, n_inner = 16 }}
[data]
files = ["text.txt"]
sequence_length = 16
[parallel]
tensor = 1
pipeline = 2
partition = [2, 2]
order = "DPT"
microbatches = {MICROBATCHES}
[train]
steps = 10
global_batch = 8
[checkpoint]
every = 0
[environment]
set = {{ OMP_NUM_THREADS = "1" }}
"""
MACHINE = """
[gpu."Known CPU"]
vendor = "cpu"
memory_mib = 16384
memory_gbs = {memory}
peak_tflops = {{ fp32 = {peak} }}
nvlinks = 1
nccl_link_gbs = 1.0
ll_gbs = 1.0
[site.processors]
vcpus = 8
memory_gib = 64
numa = 1
gpus = 4
gpu = "Known CPU"
nics = 1
rdma_gbps = 10
"""
PEAK, MEMORY = 1e-4, 1e-3  # TFLOP/s, GB/s


class Machine:
    """A machine whose row of the catalogue is faster than it by a factor, and what the planner expects of the job on it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.job = folder, folder / "job.toml"
        (folder / "text.txt").write_text("some text\n" * 100)
        (folder / "notes").mkdir()
        self.job.write_text(JOB)
        self.row(1.0)

    def row(self, factor: float) -> None:
        (self.folder / "machines.toml").write_text(MACHINE.format(peak=factor * PEAK, memory=factor * MEMORY))
        catalogue._read.cache_clear()  # the launch is forked from this process

    def expected(self) -> ExpectedStep:
        expected = compose(load_job(self.job), Where("local", "so"), BACKENDS["local"].target).record.expected
        assert expected is not None
        return expected

    def launched(self, expected: ExpectedStep, **pace: Any) -> RunDirectory:
        """Train on ranks that take what is expected, times the factors of ``pace``, and return the run."""
        after = sum(expected.parts.get(name, 0.0) for name in AFTER)
        told = {"passes": expected.passes, "microbatches": MICROBATCHES, "message": 1e-3 * max(expected.passes), "after": after,
                "folder": str(self.folder / "notes"), "jitter": 0.05}
        environ = os.environ | {"PACE": json.dumps(told | pace), "PYTHONPATH": str(PACED.parent), "OMP_NUM_THREADS": "1"}
        done = warm.Program([PACED, "launch", self.job, "--on", "local", "--json"], environ).end(500)
        assert done.returncode == 0, done.stderr
        return RunDirectory(Path(json.loads(done.stdout)["run"]))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HPC_MP_MACHINES", str(tmp_path / "machines.toml"))
    return Machine(tmp_path)


def warnings(run: RunDirectory) -> list[str]:
    """Return what the log of a run warns of, which status must say too."""
    log = [line.partition("warning: ")[2] for line in run.main_log.read_text().splitlines() if "warning: a " in line]
    status = json.loads(CliRunner().invoke(cli, ["status", str(run.path), "--json"], catch_exceptions=False).stdout)
    assert bool(log) == bool(status["observed"]["warnings"]), (log, status["observed"])
    return log


def node_of(run: RunDirectory, rank: int) -> str:
    return next(str(line["node"]) for line in read_lines(run.ranks) if line["rank"] == rank)


FAULTS = ("slow rank", "slow host", "slow link", "wrong row")


@pytest.mark.parametrize(("fault", "seed"), [
    pytest.param(fault, seed, marks=() if (fault, seed) == ("slow rank", 0) else pytest.mark.prove)
    for fault in FAULTS for seed in range(RUNS)])
def test_a_planted_fault_is_named(machine: Machine, fault: str, seed: int) -> None:
    true = machine.expected()
    rank = seed % 4
    peer = rank ^ 1  # the other stage of its pipeline, on the same node
    plants: dict[str, dict[str, Any]] = {
        "slow rank": {"slow": {rank: 2.0 + seed / 10}}, "slow host": {"slow": {rank: 1.8, peer: 1.8}},
        "slow link": {"links": {f"{min(rank, peer)}-{max(rank, peer)}": max(true.passes) / 2}}, "wrong row": {}}
    if fault == "wrong row":
        machine.row(2.0 + seed)
    run = machine.launched(true, seed=seed, **plants[fault])
    (warning,) = warnings(run)
    here, there = node_of(run, rank), node_of(run, peer)
    words = {
        "slow rank": f"rank {rank} on {here} computes 1.", "slow host": f" on {here} computes 1.",
        "slow link": f"messages between rank {min(rank, peer)} on {there} and rank {max(rank, peer)} on {here} take ",
        "wrong row": "the catalogue's row of Known CPU is wrong"}
    assert words[fault] in warning.replace("computes 2.", "computes 1."), warning
    assert "more than predicted" in warning


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.prove) for seed in range(1, HEALTHY))])
def test_a_healthy_run_raises_no_warning(machine: Machine, seed: int) -> None:
    """Computations vary by 10 %, and the prediction is up to 18 % off."""
    pace = 0.85 + 0.33 * seed / (HEALTHY - 1)
    assert warnings(machine.launched(machine.expected(), seed=seed, jitter=0.1, pace=pace)) == []


@pytest.mark.prove
@pytest.mark.parametrize("pace", [0.6, 0.85, 1.2, 1.5, 1.9])
def test_the_second_plan_is_closer_to_its_run_than_the_first(machine: Machine, pace: float) -> None:
    true, errors = machine.expected(), []
    for number in range(3):
        run = machine.launched(true, seed=number, pace=pace)
        plan = read_plan(run)
        assert plan is not None and plan.expected is not None
        observed = median(line["step_time_s"] for line in read_lines(run.metrics))
        errors.append(abs(math.log(observed / plan.expected.seconds)))
    assert errors[0] > abs(math.log(pace)) / 2 and max(errors[1:]) < 0.75 * errors[0]


@pytest.mark.prove
def test_a_slow_rank_teaches_nothing(machine: Machine) -> None:
    true = machine.expected()
    machine.launched(true, slow={1: 2.0})
    assert machine.expected() == true
