"""Wrong calls of ``hpc_mp.parallel``: refused before ranks meet, with the value, the rule and the remedy."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lists import LAYERS, objective
from ranks import run_ranks
from test_parallel import CONFIG
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

import hpc_mp
from hpc_mp.base.errors import HpcMpError

LLAMA = {"model_type": "llama", **CONFIG}
NO_CUTS = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))

# words of the message: the model, and the keywords; four ranks
WRONG: dict[str, tuple[Any, dict[str, Any]]] = {
    "hpc_mp.parallel(tp=…): has no such keyword. Did you mean 'tp_size'?": (LLAMA, {"tp": 2}),
    "tp_size = 0: must be at least 1. Write tp_size = 1 or more": (LLAMA, {"tp_size": 0}),
    "tp_size = '2': must be a whole number": (LLAMA, {"tp_size": "2"}),
    "tp_size(3) × pp_size(1) × cp_size(1) = 3: does not divide 4 ranks.": (LLAMA, {"tp_size": 3}),
    "tp_size = 4: is more than the model's 3 attention heads": (
        LLAMA | {"num_key_value_heads": 3, "num_attention_heads": 3, "hidden_size": 48}, {"tp_size": 4}),
    "zero = 4: must be at most 3": (LLAMA, {"zero": 4}),
    "dp_shard_size = 3: does not divide the data degree": (LLAMA, {"dp_shard_size": 3}),
    "ep_size = 2: has nothing to share out": (LLAMA, {"ep_size": 2}),
    "microbatches = 3: interleaved_1f1b needs a multiple": (
        LLAMA, {"pp_size": 2, "schedule": "interleaved_1f1b", "virtual_stages": 2, "microbatches": 3}),
    "schedule = '2f2b': is not a schedule": (LLAMA, {"pp_size": 2, "schedule": "2f2b"}),
    "partition = [3, 3]: has 6 layers, but the model has 4": (LLAMA, {"pp_size": 2, "partition": (3, 3)}),
    "sequence_parallel = True: has no effect with tp_size = 1": (LLAMA, {"sequence_parallel": True}),
    "precision = 'int8': must be": (LLAMA, {"precision": "int8"}),
    "optimizer = {'rate': …}: has no such key": (LLAMA, {"optimizer": {"rate": 1.0}}),
    "optimizer[\"name\"] = 'lion': must be": (LLAMA, {"optimizer": {"name": "lion"}}),
    'optimizer["lr"] = -1': (LLAMA, {"optimizer": {"lr": -1.0}}),
    "optimizer[\"lr_schedule\"] = 'cosine': falls to zero at a step that is not given": (
        LLAMA, {"optimizer": {"lr_schedule": "cosine"}}),
    "batches = 'mine': must be 'global' or 'replica'": (LLAMA, {"batches": "mine"}),
    'optimizer["lr_schedule"], optimizer["warmup_steps"]: have no effect: lr is a function of the step': (
        LLAMA, {"optimizer": {"lr": lambda step: 0.1, "warmup_steps": 2, "lr_schedule": "constant"}}),
    'optimizer["betas"]: has no effect with sgd': (LLAMA, {"optimizer": {"name": "sgd", "betas": (0.9, 0.9)}}),
    "partition = 'profile': needs a profile": (LLAMA, {"pp_size": 2, "partition": "profile"}),
    'optimizer["momentum"] = 0.9: has no effect with optimizer["name"] = \'adamw\'': (LLAMA, {"optimizer": {"momentum": 0.9}}),
    'loss_scale = 3: must be a dict. Write loss_scale={…}': (LLAMA, {"loss_scale": 3}),
    "offload = True: must be": (LLAMA, {"offload": True}),
    "model = None: cannot be divided": (None, {}),
    "the model's hidden_act = 3": (LLAMA | {"hidden_act": 3}, {}),
    "outputs = 3: must be a tuple of names": (LLAMA, {"outputs": 3}),
    "cut = {'*.up': 'row'}: has no effect on this model: it is for modules": (LLAMA, {"cut": {"*.up": "row"}}),
    "inputs = ('mask',): has no effect on this model: it is for modules with cut points": (
        NO_CUTS, {"inputs": ("mask",), "loss_fn": objective}),
    "loss_fn = 3: must be a function": (LLAMA, {"loss_fn": 3}),
    "cp_size = 2: gives each rank only some of the tokens": (LLAMA, {"cp_size": 2, "loss_fn": objective}),
    "is no causal language model of transformers": ({"model_type": "lama"}, {}),
    "does not name the model's family": ({"hidden_size": 8}, {}),
    "hiden_size": (LLAMA | {"hiden_size": 8}, {}),
    "model = 7: cannot be divided between ranks": (7, {}),
    "loss_fn: is required: a list of LayerSpec has no loss": (LAYERS, {}),
    "has no place at which it can be cut": (nn.Linear(2, 2), {"loss_fn": objective}),
    "pp_size = 4: makes 4 stages of 2 layers": (NO_CUTS, {"pp_size": 4, "loss_fn": objective}),
    "tp_size = 2: has nothing to cut": (NO_CUTS, {"tp_size": 2, "loss_fn": objective}),
    "cp_size = 2: has no effect on layers": (NO_CUTS, {"cp_size": 2, "loss_fn": objective}),
}


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_call_is_refused_before_ranks_meet(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    model, keywords = WRONG[words]
    with pytest.raises(HpcMpError) as refused:
        hpc_mp.parallel(model, **keywords)
    assert words in str(refused.value)
    assert "parallel." not in str(refused.value).replace("hpc_mp.parallel", "") and "train." not in str(refused.value)


@pytest.mark.parametrize(("name", "value", "words"), [
    ("RANK", "a", "RANK = a: is no whole number"), ("MASTER_PORT", "", "MASTER_PORT = : is no whole number"),
    ("RANK", "4", "RANK = 4: is no rank of WORLD_SIZE = 4")])
def test_a_wrong_variable_of_a_launcher_is_refused(name: str, value: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, text in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", name: value}.items():
        monkeypatch.setenv(variable, text)
    with pytest.raises(HpcMpError) as refused:
        hpc_mp.parallel(LLAMA)
    assert words in str(refused.value)


def test_a_directory_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HpcMpError, match=r"config\.json"):
        hpc_mp.parallel(tmp_path)


IDS = torch.zeros(4, 8, dtype=torch.int64)
HIDDEN = torch.ones(4, 8, dtype=torch.int64)
BATCHES: dict[str, Any] = {
    "must be a dict of tensors": [IDS],
    "must be a tensor whose first dimension counts samples": {"input_ids": IDS.tolist()},
    "must have as many samples in each tensor": {"input_ids": IDS, "labels": IDS[:2]},
    "a batch of 3 samples: is not a multiple of replicas(1) × microbatches(2) = 2": {"input_ids": IDS[:3], "labels": IDS[:3]},
    "has no labels": {"input_ids": IDS},
    "does not use": {"input_ids": IDS, "labels": IDS, "token_type_ids": IDS},
    "must be whole numbers (samples, tokens)": {"input_ids": IDS.float(), "labels": IDS},
    "input_ids of shape (4, 0): has no tokens": {"input_ids": IDS[:, :0], "labels": IDS[:, :0]},
    "labels of shape (4, 7)": {"input_ids": IDS, "labels": IDS[:, 1:]},
    "labels from -1 to -1": {"input_ids": IDS, "labels": IDS - 1},
    "attention_mask of shape (4, 7)": {"input_ids": IDS, "labels": IDS, "attention_mask": HIDDEN[:, 1:]},
    "are not in the model's vocabulary, 0 to 60": {"input_ids": IDS + 61, "labels": IDS},
    "tokens of a sample = 40: is longer than the model's 32 positions": {
        "input_ids": IDS.repeat(1, 5), "labels": IDS.repeat(1, 5)},
    "hides tokens before others that it shows": {
        "input_ids": IDS, "labels": IDS, "attention_mask": HIDDEN.index_fill(1, torch.tensor([0]), 0)},
    "count at positions that attention_mask hides": {
        "input_ids": IDS, "labels": IDS, "attention_mask": HIDDEN.index_fill(1, torch.tensor([7]), 0)},
}


def refused() -> dict[str, str]:
    """The message about each batch; the run goes on behind them."""
    run = hpc_mp.parallel(LLAMA, microbatches=2)
    before = float(run.evaluate({"input_ids": IDS, "labels": IDS}))
    messages = {}
    for words, batch in BATCHES.items():
        try:
            run.step(batch)
        except HpcMpError as error:
            messages[words] = str(error)
    assert run.progress.step == 0 and float(run.step({"input_ids": IDS, "labels": IDS})) == before
    run.close()
    return messages


def test_a_wrong_batch_is_refused_and_nothing_has_changed() -> None:
    messages = run_ranks(1, refused)[0]
    assert messages.keys() == BATCHES.keys()
    for words, message in messages.items():
        assert words in message


def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**CONFIG))


def frozen() -> LlamaForCausalLM:
    model = llama()
    model.model.embed_tokens.requires_grad_(False)
    return model


def hooked() -> LlamaForCausalLM:
    model = llama()
    model.model.layers[0].register_forward_hook(lambda *_: None)
    return model


def untied() -> LlamaForCausalLM:
    model = LlamaForCausalLM(LlamaConfig(**CONFIG, tie_word_embeddings=True))
    model.lm_head.weight = nn.Parameter(torch.zeros(61, 32))
    return model


class Squared(LlamaMLP):
    """Computes something else with the same parameters."""

    def forward(self, x: Any) -> Any:
        return super().forward(x).square()


def changed(model: LlamaForCausalLM, name: str, module: nn.Module) -> LlamaForCausalLM:
    setattr(model.model.layers[1], name, module)
    return model


def patched() -> LlamaForCausalLM:
    model = llama()
    model.model.layers[0].mlp.forward = lambda x: x
    return model


class Other(LlamaForCausalLM):
    """Computes something else."""


IN_MEMORY: dict[str, Any] = {
    "has parameters that are not to be trained (model.embed_tokens.weight)": frozen,
    "has hooks": hooked,
    "or a forward of an instance": patched,
    "model.layers.1.mlp = Squared()": lambda: changed(llama(), "mlp", Squared(LlamaConfig(**CONFIG))),
    "model.layers.1.input_layernorm = LlamaRMSNorm((32,), eps=0.1)": lambda: changed(
        llama(), "input_layernorm", LlamaRMSNorm(32, eps=0.1)),
    "lm_head.weight is not the embedding": untied,
    "is not LlamaForCausalLM": lambda: Other(LlamaConfig(**CONFIG)),
    "model of type LlamaModel: is not LlamaForCausalLM": lambda: LlamaModel(LlamaConfig(**CONFIG)),
}


@pytest.mark.parametrize("words", IN_MEMORY)
def test_a_model_that_is_not_what_its_configuration_says_is_refused(words: str) -> None:
    with pytest.raises(HpcMpError) as refused:
        hpc_mp.parallel(IN_MEMORY[words]())
    assert words in str(refused.value)


LOSSES: dict[str, Any] = {
    "is not a pair": lambda outputs, batch: outputs.sum(),
    "has no sum that is a tensor of one number": lambda outputs, batch: (outputs, 1),
    "has a sum without a gradient": lambda outputs, batch: (outputs.sum().detach(), 1),
    "has a count that is no number": lambda outputs, batch: (outputs.sum(), None),
}


def losses() -> dict[str, str]:
    """The message about each loss; a count that is a number of Python will do."""
    messages, batch = {}, {"input": torch.ones(2, 3)}
    for words, loss in {**LOSSES, "": lambda outputs, batch: (outputs.sum(), 4)}.items():
        torch.manual_seed(0)
        run = hpc_mp.parallel(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), loss_fn=loss)
        try:
            messages[words] = str(float(run.step(batch)))
        except HpcMpError as error:
            messages[words] = str(error)
    return messages


def test_a_wrong_result_of_a_loss_is_refused() -> None:
    messages = run_ranks(1, losses)[0]
    assert all(words in messages[words] for words in LOSSES)
    assert abs(float(messages[""])) < 10


def message_of(call: Callable[[], Any]) -> str:
    """The message with which a call is refused."""
    try:
        return str(call())
    except HpcMpError as error:
        return str(error)


DIFFERENT = {
    "seed": "has other values on other ranks",
    "values": "the batch of rank 1: has other values than that of rank 0. Pass the same global batch",
    "later values": "the batch of step 2: had different values on different ranks",
    "shapes": "a batch of input_ids (4, 8), labels (4, 8) on rank 0: is one of input_ids (4, 7), labels (4, 7) on rank 1",
    "later shapes": "the batch of this evaluation: had different samples and tokens on different ranks",
    "checkpoint": "is of another model: head_dim is 8, and should be 4",
}


def different(checkpoint: Path) -> dict[str, str]:
    """What two ranks are told of models and batches that are not the same, and of a checkpoint that is not of the model."""
    rank = int(os.environ["SLURM_PROCID"])
    torch.manual_seed(rank)
    messages = {"seed": message_of(lambda: hpc_mp.parallel(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), loss_fn=objective))}
    run = hpc_mp.parallel(LLAMA)
    messages["values"] = message_of(lambda: run.step({"input_ids": IDS + rank, "labels": IDS}))
    run.step({"input_ids": IDS, "labels": IDS})
    run.step({"input_ids": IDS + rank, "labels": IDS})
    messages["later values"] = message_of(lambda: run.progress)
    run.checkpoint(checkpoint)
    parts = hpc_mp.parallel({**LLAMA, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4}, batches="replica")
    short = {"input_ids": IDS[:, rank:], "labels": IDS[:, rank:]}
    messages["shapes"] = message_of(lambda: parts.step(short))
    parts.step({"input_ids": IDS + rank, "labels": IDS})
    messages["later shapes"] = message_of(lambda: parts.evaluate({name: ids[rank:] for name, ids in short.items()}))
    messages["checkpoint"] = message_of(lambda: parts.resume(checkpoint))
    return messages


def test_what_ranks_do_not_have_alike_is_refused(tmp_path: Path) -> None:
    for messages in run_ranks(2, different, tmp_path / "at"):
        for what, words in DIFFERENT.items():
            assert words in messages[what]
