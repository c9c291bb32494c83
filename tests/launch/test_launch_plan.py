"""What ``hpc-mp launch`` decides before the start, and how it judges the end: its pure parts."""

import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from launching import answers, executable, make_run, silent, write_job
from tables import table

from hpc_mp.base.command import CommandFailed
from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.text import data_size
from hpc_mp.cluster.node.nvidia_smi import Gpu
from hpc_mp.cluster.slurm.allocation import Where, decide
from hpc_mp.job import Environment, JobSpec, Slurm, load_job
from hpc_mp.job.layout import layout_of, measured_with, read_shape
from hpc_mp.launch import run_files
from hpc_mp.launch.backends import BACKENDS
from hpc_mp.launch.emulator.slurm_env import EMULATED, TaskPlace, in_blocks, shared_environment, srun_environments
from hpc_mp.launch.model_check import acceptance, check_model
from hpc_mp.launch.plan import TrainingPlan, compose, newest_run
from hpc_mp.launch.run_files import begin, next_runs, script
from hpc_mp.launch.summary import PLACES, defaults, describe, without_effect
from hpc_mp.layout.model_profile import ModelProfile, UnitProfile, write_profile
from hpc_mp.planner.device import check_memory, choose
from hpc_mp.planner.traffic import traffic_of
from hpc_mp.rundir import create_run, write_json
from hpc_mp.rundir.layout import COUNTERS
from hpc_mp.rundir.origin import Counters, Origin, counters_document
from hpc_mp.rundir.plan import RunPlan, Traffic, read_plan
from hpc_mp.rundir.records import StepMetrics, line_of

GIB = 2**30


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """No nvidia-smi."""
    monkeypatch.setenv("PATH", "")


def spec_of(directory: Path, nodes: int = 2, ranks: int = 2, more: str = "", *overrides: str) -> JobSpec:
    return load_job(write_job(directory, nodes, ranks, more), overrides)


def planned(spec: JobSpec, **more: Any) -> TrainingPlan:
    return compose(spec, Where("local", "so"), BACKENDS["local"].target, **more)


def words_of(plan: TrainingPlan) -> str:
    return " ".join(describe(plan, "emulated on this machine").split())


# --- the environment of a rank ------------------------------------------------------------------------------


def test_a_rank_is_told_what_srun_tells() -> None:
    step = {"SLURM_JOB_NAME": "t", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234", "WORD": "a b", "SLURM_PROCID": "0"}
    told = srun_environments(in_blocks(2, 4), "77", step)
    assert [one["SLURM_PROCID"] for one in told] == [str(rank) for rank in range(8)]
    assert told[5] == {
        "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_NTASKS": "8", "SLURM_NPROCS": "8",
        "SLURM_NNODES": "2", "SLURM_JOB_NUM_NODES": "2", "SLURM_STEP_NODELIST": "node[0-1]",
        "SLURM_JOB_NODELIST": "node[0-1]", "SLURM_TASKS_PER_NODE": "4(x2)", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "77",
        "SLURM_JOB_NAME": "t", "SLURMD_NODENAME": "node1", "MASTER_PORT": "1234",
        "MASTER_ADDR": "10.0.0.1", "WORD": "a b",  # environment.set takes precedence, but for a rank's own number
    }
    (alone,) = srun_environments([TaskPlace(0, 0)], "1", {})
    assert (alone["SLURM_STEP_NODELIST"], alone["SLURM_TASKS_PER_NODE"]) == ("node0", "1"), "without brackets"


def test_ranks_share_what_libraries_read_when_imported(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, 2, 2, '[environment]\nset = { HF_HUB_OFFLINE = "0" }\n')
    shared = shared_environment(spec, {"PATH": "/bin", "SLURM_JOB_ID": "9", "RANK": "3", "RANKING": "kept"}, 9, EMULATED)
    assert shared == {
        "PATH": "/bin", "RANKING": "kept", "OMP_NUM_THREADS": "2", "HPC_MP_EMULATED": "1", "GLOO_SOCKET_IFNAME": "lo",
        "RES_OPTIONS": "timeout:1 attempts:1",
        "HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }
    assert shared_environment(spec, {}, 3, {})["OMP_NUM_THREADS"] == "1"
    assert shared_environment(spec, {"OMP_NUM_THREADS": "7"}, 9, {})["OMP_NUM_THREADS"] == "7"


# --- where (what a controller answers, or does not: tests/cluster/test_site.py) -------------------------------


@pytest.mark.parametrize(("on", "environ", "table", "found", "why"), table(__file__, "launch_plan.toml", "places"))
def test_where(on: str, environ: dict[str, str], table: dict[str, str], found: str, why: str) -> None:
    where = decide(on, environ, answers(table))
    assert where.place == found and why in where.why


def test_a_stale_allocation_is_told_in_one_line() -> None:
    ask = Mock(side_effect=CommandFailed("squeue: error: no DNS\nsqueue: fatal: no controller"))
    assert decide("auto", {"SLURM_JOB_ID": "7"}, ask).why == (
        "squeue: fatal: no controller; SLURM_JOB_ID=7 is not a live allocation (squeue: fatal: no controller)")


def test_slurms_programs_without_a_slurm(tmp_path: Path) -> None:
    """Emulated nodes are then a second choice, which is said at the end as well."""
    executable(tmp_path, "sbatch", "exit 0")
    here = {"PATH": str(tmp_path)}
    words = "sbatch is on PATH, but no Slurm answers (scontrol is not on PATH), and SLURM_CONF is not set"
    assert decide("auto", here, silent).missed.startswith(words)
    assert "SLURM_CONF is not set" not in decide("auto", {**here, "SLURM_CONF": "/x"}, silent).missed
    assert decide("auto", {"PATH": "/nowhere"}, silent).missed == "" == decide("local", here, silent).missed


# --- the device and its memory ------------------------------------------------------------------------------

GPUS = (Gpu(0, "H200", 100 * GIB), Gpu(1, "H200", 100 * GIB))


@pytest.mark.parametrize(
    ("asked", "ranks", "gpus", "built", "kind", "why"), table(__file__, "launch_plan.toml", "devices", globals()))
def test_device(asked: Any, ranks: int, gpus: tuple[Gpu, ...], built: bool, kind: str, why: str) -> None:
    device = choose(asked, ranks, gpus, built, 8 * GIB)
    assert (device.kind, device.why) == (kind, why)
    assert sorted(rank for pool in device.pools for rank in pool.ranks) == list(range(ranks))


def test_shared_gpus_add_up() -> None:
    for gpus, built, rule in (((), True, "finds no GPU"), (GPUS, False, "built without CUDA")):
        with pytest.raises(HpcMpError, match=rule):
            choose("cuda", 1, gpus, built, GIB)
    device = choose("cuda", 4, GPUS, True, GIB)
    assert [pool.ranks for pool in device.pools] == [(0, 2), (1, 3)]
    check_memory([50 * GIB, 10 * GIB, 50 * GIB, 10 * GIB], device)
    refused = r"101 GiB of model state .* 2 ranks on GPU 0 \(H200\): is more than its 100 GiB"
    with pytest.raises(HpcMpError, match=refused):
        check_memory([50 * GIB, 10 * GIB, 51 * GIB, 10 * GIB], device)
    check_memory([2**60], choose("cuda", 1, (Gpu(0, "GB10", None),), True, GIB))  # of a size that is not known


# --- the plan and its words ---------------------------------------------------------------------------------


def test_a_plan_settles_what_was_auto(tmp_path: Path) -> None:
    given = spec_of(tmp_path, 2, 2, '[parallel]\ntensor = 2\n[slurm]\nsetup = ["module load x"]\n')
    plan = planned(given)
    assert given.parallel.order == given.job.device == "auto"
    assert plan.spec.job.device == "cpu" and set(plan.spec.parallel.order) == set("DPT")
    assert plan.placement.order == plan.spec.parallel.order and len(plan.record.state) == 4
    text = describe(plan, "emulated on this machine")
    for part in ("nodes(2) × ranks_per_node(2) = 4 ranks, emulated on this machine (so)",
                 "cpu (nvidia-smi finds no GPU)", "tensor(2) × pipeline(1) × data(2), ZeRO-1",
                 "slurm.setup has no effect here", "KiB per rank", "microbatches(1) × 4 sequences of 32 tokens"):
        assert part in text, text
    assert max(map(len, text.splitlines())) <= 120


MIXTRAL = ('model.config={ model_type = "mixtral", num_hidden_layers = 2, hidden_size = 32, num_attention_heads = 4, '
           "num_key_value_heads = 4, intermediate_size = 64, vocab_size = 320, num_local_experts = 4 }")
CASES = tomllib.loads(Path(__file__).with_name("plan.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("keys", "words", "absent"), CASES["shared"])
def test_who_shares_experts_and_what_tensor_ranks_hold_is_said(tmp_path: Path, keys: list[str], words: str, absent: str) -> None:
    text = words_of(planned(spec_of(tmp_path, 2, 2, "", *(MIXTRAL if key == "MIXTRAL" else key for key in keys))))
    assert words in text and absent not in text


@pytest.mark.parametrize(("keys", "value", "words"), table(__file__, "launch_plan.toml", "sums"))
def test_when_gradients_are_summed_is_said_with_what_it_sends(tmp_path: Path, keys: str, value: str, words: str) -> None:
    plan = planned(spec_of(tmp_path, 1, 2, f"[parallel]\n{keys}\n", "train.global_batch=8"))
    assert plan.spec.parallel.reduce == plan.spec.reduce == value
    assert ("parallel.reduce" in {choice.key for choice in plan.record.choices}) == bool(words)
    text = words_of(plan)
    assert words in text
    if "as requested" in words:  # both ways, with what each sends and holds
        sent = [data_size(traffic_of(replace(layout_of(plan.spec, plan.shape), reduce=way), plan.shape).data)
                for way in ("step", "microbatch")]
        assert sent[0] != sent[1]
        assert all(f"sends {each} per step over the data axis and holds" in text for each in sent)


def test_a_run_directory_says_how_it_was_cut_and_why(tmp_path: Path) -> None:
    given = spec_of(tmp_path, 2, 2, "[parallel]\npipeline = 2\n")
    plan = planned(given)
    with begin(plan, None) as begun:
        found = read_plan(begun.run)
        assert found == plan.record and found is not None and newest_run(given) == begun.run
        assert load_job(begun.run.job).parallel.partition == found.layers == (1, 1)
    assert given.parallel.partition == "auto" and len(found.state) == 4 and found.traffic.pp > 0 and found.link_time_s is None
    assert {choice.key for choice in found.choices} >= {"job.device", "parallel.partition", "parallel.order"}


@pytest.mark.parametrize("overtaken", [False, True])
def test_a_script_is_rendered_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overtaken: bool) -> None:
    """And again only if another launch has taken the directory for which it was rendered."""
    plan = planned(spec_of(tmp_path, 2, 2))
    render = Mock(side_effect=run_files.render)
    monkeypatch.setattr(run_files, "render", render)
    first = script(plan, *next_runs([plan], None))
    if overtaken:
        create_run(tmp_path / "runs", "t")
    with begin(plan, None, first) as begun:
        assert str(begun.run.path) in begun.run.script.read_text()
    assert [path.name for call in render.call_args_list for path in call.args[1]] == ["0001", *["0002"] * overtaken]


@pytest.mark.parametrize(("partition", "layers", "why"), table(__file__, "launch_plan.toml", "cuts"))
def test_every_way_to_cut_reaches_the_plan_and_the_ranks(tmp_path: Path, partition: object, layers: list[int], why: str) -> None:
    more = '\nprofile = "p.json"\nmemory_weight = 0' if partition == "profile" else ""
    given = spec_of(tmp_path, 2, 2, f"[parallel]\npipeline = 2\npartition = {json.dumps(partition)}{more}\n")
    first, block, last = (UnitProfile(seconds, 1, 1) for seconds in (0.0, 1.0, 4.0))
    write_profile(tmp_path / "p.json", ModelProfile("cpu", 1, measured_with(given, read_shape(given)), first, (block,), last))
    plan = planned(given)
    assert plan.record.layers == (cut := tuple(layers)) and plan.resolution.layers.why.startswith(why), plan.resolution.layers
    assert f"stages    {layers[0]}+{layers[1]} layers ({why}" in describe(plan, "here")
    (tmp_path / "p.json").unlink()
    with begin(plan, None) as begun:
        ranks = load_job(begun.run.job)
    assert (ranks.parallel.partition, ranks.parallel.profile, ranks.parallel.memory_weight) == (cut, None, None)
    assert layout_of(ranks, read_shape(ranks)).layers == cut


def test_a_resumed_run_keeps_its_cut_where_it_has_as_many_stages(tmp_path: Path) -> None:
    def layers(earlier: tuple[int, ...], *keys: str) -> tuple[int, ...]:
        deeper = spec_of(tmp_path, 2, 2, "", "model.config.n_layer=4", *(keys or ["parallel.pipeline=2"]))
        return planned(deeper, earlier=RunPlan(earlier, Traffic(), ())).record.layers

    assert layers((3, 1)) == (3, 1), "another release would have cut 2 + 2"
    assert layers((1, 1, 1, 1)) == layers((4, 1)) == (2, 2)  # another layout, another model
    assert layers((3, 1), "parallel.pipeline=4") == (1, 1, 1, 1)
    assert layers((3, 1), "parallel.pipeline=2", "parallel.partition=[1, 3]") == (1, 3)


@pytest.mark.parametrize(("chosen", "changed", "words"), CASES["rates"])
def test_a_rate_that_jumps_as_a_run_goes_on_is_said(tmp_path: Path, chosen: list[str], changed: list[str], words: str) -> None:
    chosen = ["train.learning_rate=0.001", *chosen]
    run = make_run(spec_of(tmp_path, 1, 1, "", *chosen), 4)
    given = spec_of(tmp_path, 1, 1, "", *chosen, *changed)
    plan = planned(given, resumed=newest_run(given))
    assert words in plan.resolution.schedule.why and bool(words) == bool(plan.resolution.schedule.why)
    shown = words_of(plan)
    assert words in shown and ("rate the" in shown) == bool(words)
    assert {choice.key for choice in plan.record.choices} >= ({"train.lr_schedule"} if words else set())
    assert planned(given).resolution.schedule.why == ""
    another = given.model_copy(update={"checkpoint": given.checkpoint.model_copy(update={"resume": str(run.path)})})
    write_json(run.checkpoint(4) / COUNTERS, counters_document(Counters(4, 0, 0, Origin({}, "adamw", "", "", 32, 0))))
    if given.train.steps > 4:
        shown = words_of(planned(another))
        assert words in shown and f"begins with step 5, from the newest checkpoint of {run.path}" in shown


def test_a_rate_goes_on_from_that_of_the_last_step_that_was_trained(tmp_path: Path) -> None:
    """And not from the end of a schedule that was asked for and found nothing to do."""
    cosine = ["train.learning_rate=0.001", "train.lr_schedule=cosine"]
    run = make_run(spec_of(tmp_path, 1, 1, "", *cosine, "train.steps=4"), 4)
    given = spec_of(tmp_path, 1, 1, "", *cosine, "train.steps=20")
    assert "jumps from 0.000146 in step 4" in planned(given, resumed=run).resolution.schedule.why
    run.metrics.write_text(line_of(StepMetrics(4, 7.0, 64, 3.0, 1234.0, 1.0, 1, learning_rate=0.000905)) + "\n")
    assert planned(given, resumed=run).resolution.schedule.why == ""


def test_defaults_are_those_keys_that_are_not_given(tmp_path: Path) -> None:
    shown = defaults(spec_of(tmp_path, more="[checkpoint]\nevery = 3\n"))
    keys = {f"{section}.{key}" for section, body in shown.items() for key in re.findall(r"(\w+) = ", re.sub(r"{.*?}", "", body))}
    assert {"train.learning_rate", "parallel.zero", "checkpoint.keep", "job.device", "train.betas"} <= keys
    assert not keys & {"checkpoint.every", "train.steps", "job.nodes", "data.sequence_length", "slurm.account"}


@pytest.mark.parametrize(("place", "keys", "words"), CASES["without_effect"])
def test_keys_without_effect_are_named(tmp_path: Path, place: Any, keys: list[str], words: str) -> None:
    assert (without_effect(spec_of(tmp_path, 1, 1, "", *keys), place) or "").removesuffix(" no effect here") == words


def test_what_is_said_of_a_key_is_decided_for_all_of_slurms() -> None:
    keys = {f"slurm.{key}" for key in Slurm.model_fields} | {f"environment.{key}" for key in Environment.model_fields}
    assert keys - PLACES.keys() == {"environment.set"}
    assert PLACES.keys() - keys == {"data.stage", "model.stage", "program.stage", "sweep.simultaneous", "notify.mail"}


def test_a_model_that_does_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpc_mp.planner.device.psutil.virtual_memory", lambda: SimpleNamespace(total=3 * 2**20))
    with pytest.raises(HpcMpError, match=r"MiB of model state .* 4 ranks on this machine: is more than its 3 MiB"):
        planned(spec_of(tmp_path))


@pytest.mark.parametrize(("key", "value"), [("layer_norm_epsilon", "1e-5"), ("dtype", "float31")])
def test_transformers_is_asked_about_a_config(key: str, value: str) -> None:
    config = {"model_type": "gpt2", key: value}
    for _ in range(2):
        with pytest.raises(HpcMpError, match=f"is refused by transformers .*{value if key == 'dtype' else key}"):
            check_model(config, 512)
    assert not acceptance(config).exists()


def test_what_was_accepted_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch then imports no transformers; other values, and another installation, are asked about anew."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    asked = []
    monkeypatch.setattr("hpc_mp.launch.model_check.validated", lambda config: asked.append(config) or {})
    one, other = ({"model_type": "gpt2", "n_layer": layers} for layers in (2, 3))
    for config in (one, one, other, one):
        check_model(config, 512)
    assert asked == [one, other]
    (tmp_path / "transformers.py").write_text("")
    monkeypatch.setattr("hpc_mp.launch.model_check.find_spec",
                        lambda _: SimpleNamespace(origin=str(tmp_path / "transformers.py")))
    check_model(one, 512)
    assert asked == [one, other, one]


def test_configs_that_transformers_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home that takes no file costs time alone."""
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    gpt2, llama = {"model_type": "gpt2"}, {"model_type": "llama"}
    assert check_model(gpt2 | {"hidden_size": 64, "n_layer": 2}, 512) == []
    assert check_model(llama | {"rope_theta": 5e5, "num_key_value_heads": 2}, 512) == []
    (warning,) = check_model(gpt2 | {"eos_token_id": 512}, 512)
    assert warning == "model.config.eos_token_id = 512 is beyond the vocabulary of 512"
