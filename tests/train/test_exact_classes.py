"""Models for classification equal one process of plain transformers on every axis, in fp64 to 1e-12."""

from dataclasses import replace

import pytest
from classes import LENGTH, Batch, Training, distance
from exact import EXACT, WRONG, cases
from planting import wrapped
from test_exact_masked import LAYOUTS

from hpc_mp.train.model import transformers_stage
from hpc_mp.train.parallel.dropout import HashDropout

QUICK = {("modernbert, mean", "sequence"), ("llama", "pp2 layers 1+4"), ("gpt2", "tp2")}
AXES = ("tp2", "pp2 layers 1+4", "zero3", "sequence", "tp2 pp2 dp2")
MEAN = {"classifier_pooling": "mean"}
TRAININGS = {"modernbert, mean": Training("modernbert", MEAN)}
BERT_DROPS = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.3, "classifier_dropout": 0.4}
DROPS = {"bert": BERT_DROPS, "roberta": BERT_DROPS, "modernbert": MEAN | {
    "embedding_dropout": 0.2, "attention_dropout": 0.3, "classifier_dropout": 0.4}}
MORE = ("one", *AXES, "pp3 layers 0+5+0", "sequence tp4 zero3", "recompute full", "ulysses")
EVERY = [*((model, name) for model in ("bert", "roberta", "llama", "gpt2", "qwen2") for name in MORE), ("bert", "tp8"),
         *((model, name) for model in ("modernbert", "modernbert, mean") for name in MORE if name != "ulysses"),
         *((model, name) for model in ("mistral", "gemma2", "gpt_neox", "qwen3_moe") for name in AXES)]


@pytest.mark.parametrize(("model", "name"), cases(EVERY, QUICK))
def test_classification_equals_one_process(model: str, name: str) -> None:
    assert distance(LAYOUTS[name], TRAININGS.get(model) or Training(model)) < EXACT


@pytest.mark.prove
@pytest.mark.parametrize("heads", [1, 2])
def test_ranks_share_key_value_heads(heads: int) -> None:
    assert distance(LAYOUTS["sequence tp4 zero3"], Training("llama", {"num_key_value_heads": heads})) < EXACT


@pytest.mark.prove
@pytest.mark.parametrize("name", ["recompute full", "sequence tp4 zero3", "tp2 pp2 dp2"])
@pytest.mark.parametrize("model", ["bert", "roberta", "modernbert"])
def test_dropout_before_the_classifier_is_that_of_one_process(model: str, name: str) -> None:
    assert distance(LAYOUTS[name], Training(model, DROPS[model])) < EXACT


@pytest.mark.prove
def test_context_ranks_share_the_mean_of_a_row() -> None:
    assert distance(LAYOUTS["ulysses"], Training("modernbert", MEAN | {"local_attention": 2 * LENGTH})) < EXACT


def one_before(batch: Batch) -> Batch:
    """The class of a row is that of the token before its last one."""
    return batch | {"labels": batch["labels"].roll(-1, 1)}


def none_filled_up(batch: Batch) -> Batch:
    """Rows see what fills them up."""
    return {name: tensor for name, tensor in batch.items() if name != "documents"}


def one_behind(batch: Batch) -> Batch:
    """The class of a row is that of the token behind its first one."""
    return batch | {"labels": batch["labels"].roll(1, 1)}


ROBERTA, MODERNBERT, DROPPED = Training("roberta"), Training("modernbert", MEAN), Training("roberta", DROPS["roberta"])
alike = wrapped(HashDropout, "__init__", lambda init: lambda dropout, *given: init(dropout, *given[:4]))
own_means = wrapped(transformers_stage, "sum_over", lambda _: lambda values, axes: values)
CONTROLS = {  # the layout, what is wrong, the right training, and a fault of the ranks
    "another token": ("one", Training("llama", change=one_before), Training("llama")),
    "another than the first": ("one", Training("bert", change=one_behind), Training("bert")),
    "another than RoBERTa's first": ("one", replace(ROBERTA, change=one_behind), ROBERTA),
    "padding is seen": ("one", Training("bert", change=none_filled_up), Training("bert")),
    "padding is in the mean": ("one", replace(MODERNBERT, change=none_filled_up), MODERNBERT),
    "the first token in place of the mean": ("one", Training("modernbert"), MODERNBERT),
    "means of some tokens": ("sequence", MODERNBERT, MODERNBERT, own_means),
    "both dropouts drop the same": ("one", DROPPED, DROPPED, alike)}


@pytest.mark.parametrize("control", cases(CONTROLS, ("another token",)))
def test_a_wrong_token_is_seen(control: str) -> None:
    name, *trainings = CONTROLS[control]
    assert distance(LAYOUTS[name], *trainings) > WRONG
