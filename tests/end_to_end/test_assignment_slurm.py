"""The time that a better order of hosts saves, measured and predicted: a real Slurm whose four hosts have links of 200 Mbit/s,
one of them degraded. Gradients dominate a step: a rank sends 50 MB of them, and computes for 32 tokens."""

import sysconfig
import time
from itertools import combinations
from pathlib import Path
from statistics import median

import pytest
from slurm_jobs import launch, own_ledger
from slurm_lab import faults
from slurm_lab.cluster import Cluster

from hpc_mp.cluster.bandwidth import LinkRates, rates, where, write_measured
from hpc_mp.layout.placement import from_dict
from hpc_mp.planner.assignment import step_times
from hpc_mp.rundir import RunDirectory, read_attempt, read_json, read_lines
from hpc_mp.rundir.plan import read_plan

NODES, BASE, SLOW = ("n1", "n2", "n3", "n4"), 200, 60  # Mbit/s
PAYLOAD = 1448 / 1514  # of a frame
JOB = f"""
[job]
name = "placed"
nodes = 4
ranks_per_node = 1
device = "cpu"
[model.config]
model_type = "llama"
num_hidden_layers = 6
hidden_size = 512
intermediate_size = 2048
num_attention_heads = 8
num_key_value_heads = 8
vocab_size = 512
max_position_embeddings = 16
bos_token_id = 0
eos_token_id = 0
[data]
files = ["{sysconfig.get_paths()['stdlib']}/a*.py"]
sequence_length = 16
[parallel]
pipeline = 2
microbatches = 2
order = "DPT"
[train]
steps = 5
global_batch = 4
optimizer = "sgd"
learning_rate = 0.001
[environment]
health = false
set = {{ OMP_NUM_THREADS = "1" }}
"""


def plant(lab: Cluster, job: Path, a: str, b: str) -> LinkRates:
    """What the doctor would measure."""
    config = lab.run(["scontrol", "show", "config"], check=True).stdout
    name = next(line.split()[-1] for line in config.splitlines() if line.startswith("ClusterName"))
    pairs = tuple((i, j, (SLOW if {NODES[i], NODES[j]} == {a, b} else BASE) * PAYLOAD / 8000)
                  for i, j in combinations(range(4), 2))
    measured = LinkRates(name, time.time(), NODES, pairs)
    write_measured(where(name, own_ledger(job)), measured)
    return measured


def trained(lab: Cluster, job: Path, rank_map: str) -> tuple[RunDirectory, float]:
    """The run, and the median seconds of its steps but the first."""
    run = RunDirectory(Path(launch(lab, job, (f'parallel.rank_map="{rank_map}"',), timeout=600)["run"]))
    return run, median([line["step_time_s"] for line in read_lines(run.metrics)][1:])


@pytest.mark.prove
@pytest.mark.timeout(1500)
def test_a_better_order_of_hosts_saves_what_was_predicted(lab: Cluster, here: Path) -> None:
    """As given, n1 and n3 are the replicas of a stage; moved, nothing passes between them."""
    job = here / "job.toml"
    job.write_text(JOB)
    lab.shape(f"{BASE}mbit")
    with faults.slow_pair(lab, "n1", "n3", f"{SLOW}mbit", f"{BASE}mbit"):
        found = rates(plant(lab, job, "n1", "n3"))
        (given, usual), (moved, chosen) = trained(lab, job, "block"), trained(lab, job, "auto")
    plan = read_plan(moved)
    assert found is not None and plan is not None
    cost = step_times(from_dict(read_json(moved.placement)), plan.traffic, found)
    before, after = (cost(read_attempt(run.attempt_record).hosts)[0] for run in (given, moved))
    print(f"step {usual:.2f} s as given, {chosen:.2f} s moved: saves {usual - chosen:.2f} s; "
          f"predicted {before:.2f} − {after:.2f} = {before - after:.2f} s")
    assert read_attempt(given.attempt_record).hosts == NODES != read_attempt(moved.attempt_record).hosts
    assert usual - chosen == pytest.approx(before - after, rel=0.15)
