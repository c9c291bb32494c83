"""Replicas of every ZeRO stage equal one process, in fp64 to 1e-12, and hold the state that the planner predicts."""

from __future__ import annotations

from pathlib import Path

import pytest
from exact import COVER, EXACT, GPT2, GPTJ, LAYOUTS, LLAMA, MIXTRAL, ONCE, OPTIMIZERS, ZERO, Engine, Reference, pairs
from layouts import job, layout, run_engine, run_plain, write_text

from hpc_mp.layout.models import read_shape, stage_layers
from hpc_mp.planner.memory import state_bytes
from hpc_mp.rundir import read_json, read_lines


@pairs(ZERO | ONCE)
def test_replicas_equal_one_process(engine: Engine, reference: Reference, model: str, name: str) -> None:
    assert engine(model, *LAYOUTS[name])[0].distance(reference(model)) < EXACT


SGD = {"tp2": (GPT2,), "pp2 1f1b M3": (LLAMA,), "dp2 zero0": (), "dp2 zero1": (LLAMA,), "dp2 zero3": (GPT2,),
       "tp2 pp2 dp2 zero1": ()}


@pairs(SGD, (GPT2, LLAMA), SGD)
def test_sgd_equals_one_process(engine: Engine, reference: Reference, model: str, name: str) -> None:
    assert engine(model, *OPTIMIZERS["sgd"], *LAYOUTS[name])[0].distance(reference(model, "sgd")) < EXACT


STATE = ["dp2 zero0", "dp4 zero1", "dp2 zero3",
         "dp4 zero3 shard2 once", "pp2 dp2 zero2 1f1b once", "dp2 zero3 M1 once", "dp4 zero1 shard2", "tp2 pp2 dp2 zero2", "tp4"]


@pairs([*STATE, "pp3 dp2 zero1 layers 0+5+0"], (GPT2, LLAMA, GPTJ, MIXTRAL), COVER | {"tp2 pp2 dp2 zero2": (GPT2, MIXTRAL)})
def test_the_predicted_state_is_what_ranks_hold(place: Path, engine: Engine, model: str, name: str) -> None:
    spec = job(place, model, LAYOUTS[name])
    _, run = engine(model, *LAYOUTS[name])
    shape = read_shape(spec)
    predicted = state_bytes(shape, spec, stage_layers(spec, shape))
    first_of_shards = [line for line in read_lines(run.ranks) if line["dp"] == line["cp"] == 0]
    assert len(first_of_shards) == spec.parallel.tensor * spec.parallel.pipeline
    for line in first_of_shards:
        held, fullest = read_json(run.trace(line["rank"]))["memory"], predicted[line["pp"], line["tp"]]
        assert held["optimizer"] == fullest.optimizer
        if spec.parallel.zero <= 2:  # ZeRO-3 holds more of these while a step computes
            assert held["parameters"] == fullest.parameters
        if spec.reduce == "step":  # else a rank holds more of these
            assert held["gradients"] == fullest.gradients


FEW_NUMBERS = [f"model.config.{key}={value}" for key, value in {
    "num_hidden_layers": 1, "hidden_size": 4, "intermediate_size": 6, "num_attention_heads": 2, "num_key_value_heads": 1}.items()]


@pytest.mark.parametrize("ranks", [6, pytest.param(192, marks=pytest.mark.prove)])
def test_ranks_without_any_part_of_a_unit_train_too(tmp_path: Path, ranks: int) -> None:
    """The last norm has four numbers for all of them."""
    few = [*FEW_NUMBERS, "train.steps=2", f"train.global_batch={ranks}"]
    write_text(tmp_path)
    found = run_engine(job(tmp_path, LLAMA, [*few, *layout(data=ranks, zero=1)]))
    assert found.distance(run_plain(job(tmp_path, LLAMA, few))) < EXACT
