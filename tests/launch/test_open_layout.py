"""What a launch expects, which layouts it refuses, and what it chooses where a job leaves its layout open."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.text import duration, memory_size
from hpc_mp.cli.launch import print_preview
from hpc_mp.cluster.slurm.allocation import Where
from hpc_mp.cluster.slurm.query import NodeKind, SlurmPartition
from hpc_mp.job import JobSpec, dump_job, resolve
from hpc_mp.job.layout import layout_of
from hpc_mp.launch.choices import slurm_gpus
from hpc_mp.launch.facts import ClusterFacts
from hpc_mp.launch.launch import Preview
from hpc_mp.launch.open_layout import CHOSEN, known_machine
from hpc_mp.launch.plan import Target, TrainingPlan, compose
from hpc_mp.launch.render.script import JobScript
from hpc_mp.launch.summary import describe
from hpc_mp.layout.placement import ORDERS
from hpc_mp.planner.device import Device, Pool
from hpc_mp.planner.expectation import machine_of
from hpc_mp.planner.footprint import footprint
from hpc_mp.planner.step import step_time
from hpc_mp.rundir import RunDirectory
from hpc_mp.rundir.plan import RunPlan, read_plan, write_plan

LLAMA = {"model_type": "llama", "hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8,
         "intermediate_size": 28672, "vocab_size": 128256, "max_position_embeddings": 8192}
STATED = {"tensor": 8, "pipeline": 1, "microbatches": 32}
H100 = machine_of("h100", 8)


def job(parallel: Mapping[str, Any], layers: int = 8, nodes: int = 2, batch: int = 64, **train: Any) -> JobSpec:
    return resolve({
        "job": {"nodes": nodes, "ranks_per_node": 8}, "model": {"config": LLAMA | {"num_hidden_layers": layers}},
        "data": {"files": ["/corpus/*.txt"], "sequence_length": 8192}, "parallel": dict(parallel),
        "train": {"steps": 10, "global_batch": batch, "precision": "bf16"} | train}, Path("/"))


def planned(spec: JobSpec, gpu: str | None = "h100", earlier: RunPlan | None = None) -> TrainingPlan:
    kind = NodeKind(tuple(f"n{number}" for number in range(spec.job.nodes)), 96, 2**41, ((gpu, 8),))
    facts = ClusterFacts((24, 11), "c", SlurmPartition("gpu", True, True, None, (kind,)))
    target = Target("in a new Slurm job", lambda _spec, _release: facts, slurm_gpus, in_script=True)
    return compose(spec, Where("slurm", "so"), target, earlier=earlier)


@pytest.fixture(autouse=True)
def own_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def rows(plan: TrainingPlan) -> dict[str, str]:
    rows, name = dict[str, str](), ""
    for line in describe(plan, "x").splitlines():
        name = line[:10].strip() or name
        rows[name] = f"{rows.get(name, '')} {line[10:]}".strip()
    return rows


# --- what is expected -------------------------------------------------------------------------------------------------


def test_a_summary_and_a_plan_say_what_to_expect(tmp_path: Path) -> None:
    plan = planned(job(STATED))
    expected, layout = plan.record.expected, layout_of(plan.spec, plan.shape)
    assert expected is not None
    step, ranks = step_time(layout, plan.shape, H100), footprint(layout, plan.shape)
    assert rows(plan)["expects"].startswith(
        f"{memory_size(max(rank.total for rank in ranks))} of the 79.6 GiB of each GPU; {duration(step.seconds)} per step, "
        f"{step.tokens_per_s:,.0f} tokens/s, {100 * step.mfu:.1f} % of the peak (")
    kept = memory_size(max(ranks, key=lambda rank: rank.total).activations)
    assert rows(plan)["in flight"].endswith(f"recompute none, activations {kept}")
    write_plan(RunDirectory(tmp_path), plan.record)
    assert read_plan(RunDirectory(tmp_path)) == plan.record
    write_plan(RunDirectory(tmp_path), replace(plan.record, expected=None))
    assert read_plan(RunDirectory(tmp_path)) == replace(plan.record, expected=None)


def test_explain_shows_the_parts(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(job(STATED))
    print_preview(Preview((plan,), Path("/r"), JobScript("", (), "t", ()), None, True), explain=True, as_json=False)
    shown, expected = capsys.readouterr().out, plan.record.expected
    assert expected is not None and {"products", "attention", "tensor"} <= expected.parts.keys()
    for name, seconds in expected.parts.items():
        assert f"    {name} {duration(seconds)}\n" in shown
    for name, size in expected.fullest.items():
        assert f"    memory of {name} {memory_size(size)}\n" in shown


@pytest.mark.parametrize(("gpu", "reason"), [(None, "nothing names their model"), ("l40s", "no machine with it"),
                                             ("a100", "it may be A100 40GB, A100 80GB")])
def test_nothing_is_expected_and_chosen_on_unknown_machines(gpu: str | None, reason: str) -> None:
    plan = planned(job({"tensor": 8}), gpu)
    assert plan.record.expected is None and reason in rows(plan)["expects"] and "left open" not in rows(plan)
    assert plan.spec.parallel.pipeline == 1 and plan.spec.parallel.zero == 1 and plan.spec.parallel.sequence is False
    assert "links between nodes" in plan.resolution.order.why


def test_cpus_and_shared_gpus_are_no_machine() -> None:
    spec, facts = job(STATED), ClusterFacts()
    assert known_machine(spec, Device("cpu", ""), facts) == (None, "ranks compute on CPUs, of which no row is known")
    assert known_machine(spec, Device("cuda", "4 ranks share 2 GPUs"), facts)[0] is None
    assert known_machine(spec, Device("cuda", "", gpu="NVIDIA H100 80GB HBM3"), facts)[0] == H100


CPU = """
[gpu."Some CPU"]
vendor = "cpu"
memory_mib = 16384
memory_gbs = 8.0
peak_tflops = { fp32 = 0.1, fp64 = 0.05 }
nvlinks = 1
nccl_link_gbs = 1.0
ll_gbs = 1.0
[site.processors]
vcpus = 8
memory_gib = 64
numa = 1
gpus = 4
gpu = "Some CPU"
nics = 1
rdma_gbps = 10
"""


def test_cpus_of_a_row_are_shared_by_the_ranks_of_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "machines.toml").write_text(CPU)
    monkeypatch.setenv("HPC_MP_MACHINES", str(tmp_path / "machines.toml"))
    spec = job(STATED)
    there, _ = known_machine(spec, Device("cpu", ""), ClusterFacts())  # 8 ranks on a node, measured with 4
    here, _ = known_machine(spec, Device("cpu", "", (Pool("this machine", None, (0,)),)), ClusterFacts())  # all 16 ranks
    assert there is not None and here is not None
    assert (there.memory, here.memory) == (8 * 2**30, 4 * 2**30) and (there.fabric.gpus, here.fabric.gpus) == (8, 16)
    assert (there.gpu.peak_tflops["fp32"], here.gpu.memory_gbs, here.fabric.link) == (0.05, 2.0, 0.25)


# --- what is refused --------------------------------------------------------------------------------------------------


def remedied(spec: JobSpec, remedy: str) -> JobSpec:
    """Return the job with the keys that a remedy names."""
    settings = re.findall(r"([a-z]+)\.([a-z_]+) = (\S+?)(?= and |:)", remedy)
    changes: dict[str, dict[str, Any]] = {}
    for table, key, value in settings:
        changes.setdefault(table, {})[key] = tomllib.loads(f"x = {value}")["x"]
    tree = tomllib.loads(dump_job(spec))
    return resolve(tree | {table: tree[table] | keys for table, keys in changes.items()}, Path("/"))


def test_llama_70b_on_16_nodes_is_refused_with_what_fits() -> None:
    spec = job({"tensor": 8, "pipeline": 4, "microbatches": 32}, layers=80, nodes=16, batch=512)  # of four samples
    with pytest.raises(HpcMpError) as refused:
        planned(spec)
    error = refused.value
    size = float(re.match(r"(\d+) GiB on each GPU \(\d+ GiB of activations, ", error.value)[1])  # type: ignore[index]
    # 34 s b h of a layer with flash attention and tensor ranks of 8 (arXiv:2205.05198), four microbatches of 20 layers in flight
    assert size > 20 * 4 * (10 + 24 / 8) * 8192 * 4 * 8192 / 2**30
    assert error.rule == "is more than the 79.6 GiB of H100 80GB HBM3"
    assert error.remedy.startswith("use parallel.") and "microbatches" in error.remedy
    accepted = planned(remedied(spec, error.remedy)).record.expected
    assert accepted is not None and accepted.total <= H100.memory
    assert error.remedy.endswith(f": {memory_size(accepted.total)} and {duration(accepted.seconds)} per step")


REFUSED: list[tuple[dict[str, Any], set[str]]] = [
    ({"tensor": 2, "pipeline": 1, "microbatches": 1}, {"microbatches"}),
    ({"tensor": 2, "pipeline": 1, "microbatches": 8, "zero": 0}, {"zero", "shard_degree", "microbatches"}),
    ({"tensor": 1, "pipeline": 1, "microbatches": 1, "zero": 0}, {*CHOSEN}),
]


@pytest.mark.parametrize(("parallel", "allowed"), REFUSED)
def test_the_cheapest_change_that_fits_is_named(parallel: dict[str, Any], allowed: set[str]) -> None:
    spec = job(parallel)
    with pytest.raises(HpcMpError) as refused:
        planned(spec)
    better = remedied(spec, refused.value.remedy)
    changed = {key for key in CHOSEN if getattr(better.parallel, key) != getattr(spec.parallel, key)}
    assert changed and changed <= allowed | {"recompute"}
    expected = planned(better).record.expected
    assert expected is not None and expected.total <= H100.memory


def test_a_job_that_cannot_fit_on_its_nodes_is_told_so() -> None:
    with pytest.raises(HpcMpError, match="Use more nodes, or a smaller model: no layout of these fits"):
        planned(job({"tensor": 8, "pipeline": 1, "microbatches": 8}, layers=60, nodes=1, batch=8))


def test_gradient_accumulation_is_named_as_the_job_names_it() -> None:
    spec = job({"tensor": 2, "pipeline": 1}, gradient_accumulation_steps=1)
    with pytest.raises(HpcMpError, match=r"train\.gradient_accumulation_steps = \d") as refused:
        planned(spec)
    assert "parallel.microbatches" not in refused.value.remedy


# --- what is chosen ---------------------------------------------------------------------------------------------------


def test_a_stated_layout_is_kept() -> None:
    plan = planned(job(STATED))
    assert plan.resolution.opened == () and "left open" not in rows(plan)
    assert (plan.spec.parallel.zero, plan.spec.parallel.recompute, plan.spec.parallel.schedule) == (1, "none", "1f1b")


@pytest.mark.parametrize("parallel", [{"tensor": 4}, {"pipeline": 2, "zero": 1}, {"microbatches": 2, "recompute": "full"}, {}])
def test_open_keys_get_the_planners_best_and_stated_ones_hold(parallel: dict[str, Any]) -> None:
    plan = planned(job(parallel))
    chosen = {choice.key.removeprefix("parallel.") for choice in plan.resolution.opened}
    assert chosen == {*CHOSEN} - parallel.keys() and rows(plan)["order"].startswith(f"{plan.placement.order} (a step takes ")
    assert {key: getattr(plan.spec.parallel, key) for key in parallel} == parallel
    expected = plan.record.expected
    assert expected is not None and expected.total <= 0.96 * H100.memory
    limit = max(expected.parts, key=expected.parts.__getitem__)
    assert f"{duration(expected.seconds)} per step, limited by {limit}" in rows(plan)["left open"]
    assert {"parallel.sequence", "parallel.recompute"} - {f"parallel.{key}" for key in parallel} <= {
        choice.key for choice in plan.record.choices}
    plain = compose_without(plan, parallel)
    if plain is not None:  # the defaults, had they been taken
        assert expected.seconds <= plain.seconds * 1.001


def compose_without(plan: TrainingPlan, parallel: dict[str, Any]) -> Any:
    """Return the step of a job whose open keys have their defaults; None if it does not fit."""
    spec = job(parallel)
    whole = spec.model_copy(update={"parallel": spec.parallel.model_copy(update={
        "microbatches": spec.microbatches, "order": "DPT"})})
    layout = layout_of(whole, plan.shape)
    fits = max(rank.total for rank in footprint(layout, plan.shape)) <= 0.95 * H100.memory
    return step_time(layout, plan.shape, H100) if fits else None


@pytest.mark.parametrize("parallel", [{"partition": [4, 4], "pipeline": 2}, {"partition": "uniform"}])
def test_who_names_stages_names_a_layout(parallel: dict[str, Any]) -> None:
    assert planned(job(parallel | {"tensor": 8, "recompute": "full"})).resolution.opened == ()


def test_a_resumed_run_keeps_its_layout_if_its_ranks_allow_that() -> None:
    first = planned(job({"tensor": 4}))
    other = replace(first.record, choices=tuple(
        replace(choice, value={"parallel.recompute": "full", "parallel.microbatches": 16}.get(choice.key, choice.value))
        for choice in first.record.choices))
    again = planned(job({"tensor": 4}), earlier=other)
    assert (again.spec.parallel.recompute, again.spec.parallel.microbatches) == ("full", 16)
    assert again.spec.parallel.recompute != first.spec.parallel.recompute, "it would be chosen anew otherwise"
    assert rows(again)["left open"] == "as in the run that is resumed"
    fewer = planned(job({"tensor": 4}, nodes=1, batch=6), earlier=other)  # 2 replicas × 16 microbatches do not divide 6
    assert fewer.spec.parallel.microbatches in (1, 3) and "the planner's best" in rows(fewer)["left open"]


def test_ranks_have_the_order_with_the_quickest_step() -> None:
    spec = job({"tensor": 2, "pipeline": 4, "microbatches": 16}, batch=32)
    plan = planned(spec)
    layout = layout_of(plan.spec, plan.shape)
    steps = {order: step_time(replace(layout, order=order), plan.shape, H100).seconds for order in ORDERS}
    assert min(steps.values()) < 0.99 * max(steps.values()), "orders differ"
    assert steps[plan.spec.parallel.order] == pytest.approx(min(steps.values()), rel=1e-3)
    assert rows(plan)["order"].startswith(f"{plan.spec.parallel.order} (a step takes ")
    worst = max(steps, key=steps.__getitem__)
    assert planned(job({"tensor": 2, "pipeline": 4, "microbatches": 16, "order": worst}, batch=32)).placement.order == worst


