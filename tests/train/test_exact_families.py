"""Families of one file each equal one process of plain transformers on every axis, in fp64 to 1e-12."""

import pytest
from exact import EXACT, LAYOUTS, Engine, Reference, cases
from layouts import FAMILIES, layout

AXES = {
    "tp2": LAYOUTS["tp2"],
    "tp8": layout(8),  # more ranks than key-value heads
    "pp2": LAYOUTS["pp2 1f1b M3"],
    "pp2 layers 1+4": LAYOUTS["pp2 layers 1+4"],
    "pp2 zero_bubble_v": LAYOUTS["pp2 zero_bubble_v M4"],
    "zero3": LAYOUTS["dp2 zero3"],
    "sequence": layout(2, sequence="true"),
    "tp2 pp2 dp2": LAYOUTS["tp2 pp2 dp2 zero2"],
    "recompute full": [*layout(2, 2), 'parallel.recompute="full"'],
    "recompute every-2": [*layout(1, 2), 'parallel.recompute="every-2"'],
    "selective": [*layout(2), 'parallel.recompute="selective"'],
    "attention whole": layout(2, sequence="true", tensor_modules='["*mlp*"]'),
}
QUICK = {("gpt_neox", "tp2"), ("gpt_neox", "tp2 pp2 dp2"), ("gpt_neox one after the other", "pp2"), ("gemma2", "sequence"),
         ("gemma2", "tp2 pp2 dp2"), ("gemma2", "recompute full"), ("qwen3_moe", "tp8"), ("qwen3_moe", "tp2 pp2 dp2")}


@pytest.mark.parametrize(("model", "name"), cases([(model, name) for model in FAMILIES for name in AXES], QUICK))
def test_a_family_equals_one_process(engine: Engine, reference: Reference, model: str, name: str) -> None:
    assert engine(model, *AXES[name]).distance(reference(model)) < EXACT


def test_the_bias_of_a_tied_head_is_cut_with_the_embedding(engine: Engine, reference: Reference) -> None:
    alone = engine("gptj, tied", *layout(2, tensor_modules='["transformer.wte"]'))
    assert alone.distance(reference("gptj, tied")) < EXACT


EXPERTS = {"ep2": layout(data=2, expert=2), "ep2 dp4 zero3": layout(data=4, expert=2, zero=3)}


@pytest.mark.parametrize("name", cases(EXPERTS, {"ep2"}))
def test_experts_in_some_layers_are_shared_out(engine: Engine, reference: Reference, name: str) -> None:
    assert engine("qwen3_moe", *EXPERTS[name]).distance(reference("qwen3_moe")) < EXACT
