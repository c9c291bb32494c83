"""Models for classification equal one process of plain transformers on every axis, in fp64 to 1e-12."""

import pytest
from classes import Batch, Training, distance
from exact import EXACT, WRONG, cases
from lists import lay
from test_exact_masked import LAYOUTS

MODELS = ("bert", "llama", "gpt2", "qwen2", "mistral", "gemma2", "gpt_neox", "qwen3_moe")
QUICK = {("bert", "sequence"), ("llama", "pp2 layers 1+4"), ("gpt2", "tp2")}
TESTED = {name: layout for name, layout in LAYOUTS.items() if name in (
    "one", "tp2", "tp8", "pp2 layers 1+4", "pp3 layers 0+5+0", "zero3", "sequence", "sequence tp4 zero3", "tp2 pp2 dp2",
    "recompute full", "ulysses")}


@pytest.mark.parametrize(("model", "name"), cases([(model, name) for model in MODELS for name in TESTED], QUICK))
def test_classification_equals_one_process(model: str, name: str) -> None:
    assert distance(TESTED[name], Training(model)) < EXACT


@pytest.mark.prove
@pytest.mark.parametrize("name", TESTED)
def test_dropout_before_the_classifier_is_that_of_one_process(name: str) -> None:
    drops = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.3, "classifier_dropout": 0.4}
    assert distance(TESTED[name], Training("bert", drops)) < EXACT


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
