"""Models for classification equal one process of plain transformers on every axis, in fp64 to 1e-12."""

import pytest
from classes import Batch, Training, distance
from exact import EXACT, WRONG, cases
from lists import lay
from test_exact_masked import LAYOUTS

QUICK = {("bert", "sequence"), ("llama", "pp2 layers 1+4"), ("gpt2", "tp2")}
AXES = ("tp2", "pp2 layers 1+4", "zero3", "sequence", "tp2 pp2 dp2")
MORE = ("one", *AXES, "pp3 layers 0+5+0", "sequence tp4 zero3", "recompute full", "ulysses")
EVERY = [*((model, name) for model in ("bert", "llama", "gpt2", "qwen2") for name in MORE), ("bert", "tp8"),
         *((model, name) for model in ("mistral", "gemma2", "gpt_neox", "qwen3_moe") for name in AXES)]


@pytest.mark.parametrize(("model", "name"), cases(EVERY, QUICK))
def test_classification_equals_one_process(model: str, name: str) -> None:
    assert distance(LAYOUTS[name], Training(model)) < EXACT


@pytest.mark.prove
@pytest.mark.parametrize("heads", [1, 2])
def test_ranks_share_key_value_heads(heads: int) -> None:
    assert distance(LAYOUTS["sequence tp4 zero3"], Training("llama", {"num_key_value_heads": heads})) < EXACT


@pytest.mark.prove
@pytest.mark.parametrize("name", ["recompute full", "sequence tp4 zero3", "tp2 pp2 dp2"])
def test_dropout_before_the_classifier_is_that_of_one_process(name: str) -> None:
    drops = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.3, "classifier_dropout": 0.4}
    assert distance(LAYOUTS[name], Training("bert", drops)) < EXACT


def one_before(batch: Batch) -> Batch:
    """The class of a row is that of the token before its last one."""
    return batch | {"labels": batch["labels"].roll(-1, 1)}


def none_filled_up(batch: Batch) -> Batch:
    """Rows see what fills them up."""
    return {name: tensor for name, tensor in batch.items() if name != "documents"}


CONTROLS = {"another token": ("llama", one_before), "another than the first": ("bert", lambda batch: batch | {
    "labels": batch["labels"].roll(1, 1)}), "padding is seen": ("bert", none_filled_up)}


@pytest.mark.parametrize("control", cases(CONTROLS, ("another token",)))
def test_a_wrong_token_is_seen(control: str) -> None:
    model, change = CONTROLS[control]
    assert distance(lay(layers=(5,)), Training(model, change=change), Training(model)) > WRONG
