"""Ranks hold the state that the planner predicts, also where a unit has no part for them."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import run_engine
from exact import COVER, EXACT, GPT2, GPTJ, LAYOUTS, LLAMA, MIXTRAL, Engine, Plain, cases, check_state, pairs
from layouts import job, layout, write_text

STATE = ["dp2 zero0", "dp4 zero1", "dp2 zero3",
         "dp4 zero3 shard2 once", "pp2 dp2 zero2 1f1b once", "dp2 zero3 M1 once", "dp4 zero1 shard2", "tp2 pp2 dp2 zero2", "tp4"]


@pairs([*STATE, "pp3 dp2 zero1 layers 0+5+0"], (GPT2, LLAMA, GPTJ, MIXTRAL), COVER | {"tp2 pp2 dp2 zero2": (GPT2, MIXTRAL)})
def test_the_predicted_state_is_what_ranks_hold(place: Path, engine: Engine, model: str, name: str) -> None:
    check_state(job(place, model, LAYOUTS[name]), engine(model, *LAYOUTS[name]))


FEW_NUMBERS = [f"model.config.{key}={value}" for key, value in {
    "num_hidden_layers": 1, "hidden_size": 4, "intermediate_size": 6, "num_attention_heads": 2, "num_key_value_heads": 1}.items()]


@pytest.mark.parametrize("ranks", cases((6, 192), (6,)))
def test_ranks_without_any_part_of_a_unit_train_too(tmp_path: Path, plain: Plain, ranks: int) -> None:
    """The last norm has four numbers for all of them."""
    few = [*FEW_NUMBERS, "train.steps=2", f"train.global_batch={ranks}"]
    write_text(tmp_path)
    found = run_engine(job(tmp_path, LLAMA, [*few, *layout(data=ranks, zero=1)]))
    assert found.distance(plain(job(tmp_path, LLAMA, few))) < EXACT
