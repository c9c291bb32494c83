"""The operations of a model and its utilization of devices, beside torch's own count of plain transformers."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from layouts import job
from torch.utils.flop_counter import FlopCounterMode

from hpc_mp.job.layout import read_shape
from hpc_mp.layout.models import ModelShape, family_of
from hpc_mp.layout.models.adapters import Adapters
from hpc_mp.layout.models.operations import training_operations
from hpc_mp.layout.models.reading import model_shape
from hpc_mp.train.rank import utilization
from hpc_mp.train.rank.devices import NCCL, SHARED

SAMPLES, TOKENS = 2, 24
LLAMA = {"model_type": "llama", "num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 128}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": LLAMA, "gpt2": {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 96},
    "gemma2": LLAMA | {"model_type": "gemma2", "head_dim": 32, "sliding_window": 8},
    "bert": {"model_type": "bert", "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48,
             "vocab_size": 96},
}


def counted(config: dict[str, Any], shape: ModelShape, frozen: bool) -> float:
    """Return the operations of products for a token that torch counts, forward and backward. Its attention computes all keys of
    a sample."""
    with torch.device("meta"):
        model = getattr(transformers, family_of(shape).architecture)._from_config(
            transformers.AutoConfig.for_model(**config), attn_implementation="eager")
        ids = torch.zeros(SAMPLES, TOKENS, dtype=torch.int64)
    model.requires_grad_(not frozen)
    model.enable_input_require_grads()
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids).logits.sum().backward()
    return counter.get_total_flops() / SAMPLES / TOKENS


def all_keys(shape: ModelShape) -> ModelShape:
    return replace(shape, bidirectional=True, windows=())


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_operations_are_those_that_torch_counts(name: str, frozen: bool) -> None:
    shape = all_keys(model_shape(CONFIGS[name], None))
    beside_adapters = replace(shape, adapters=Adapters(4, 1.0, ("nothing",))) if frozen else shape
    assert training_operations(beside_adapters, TOKENS) == counted(CONFIGS[name], shape, frozen)


@pytest.mark.parametrize("window", [None, 1, 5, TOKENS, 2 * TOKENS])
def test_tokens_see_no_keys_behind_them_nor_before_their_window(window: int | None) -> None:
    shape = model_shape(LLAMA, None)
    seen = sum(min(token + 1, window or TOKENS) for token in range(TOKENS)) / TOKENS
    width = 12 * shape.heads * shape.head_dim * shape.layers
    full = training_operations(all_keys(shape), TOKENS)
    keys = TOKENS - (full - training_operations(replace(shape, windows=(window,)), TOKENS)) / width
    assert keys == pytest.approx(seen, abs=0.5) and keys < TOKENS
    chunks = training_operations(replace(shape, windows=(6,), chunked=True), TOKENS)
    assert TOKENS - (full - chunks) / width == 3


def test_a_token_meets_its_own_experts_and_the_adapters() -> None:
    moe = model_shape(LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}, None)
    more = replace(moe, experts=8)
    assert training_operations(more, TOKENS) - training_operations(moe, TOKENS) == 6 * 4 * moe.hidden * moe.layers, "the router"
    rank = replace(model_shape(LLAMA, None), adapters=Adapters(4, 1.0, ("q_proj",)))
    without = replace(rank, adapters=Adapters(4, 1.0, ("nothing",)))
    assert training_operations(rank, TOKENS) - training_operations(without, TOKENS) == 6 * 4 * (64 + 64) * 3


@pytest.mark.parametrize(("device", "gpu", "backend", "precision", "tflops"), [
    ("cuda", "NVIDIA H100 80GB HBM3", NCCL, "bf16", 989.4),
    ("cuda", "NVIDIA H100 80GB HBM3", NCCL, "tf32", 494.7),
    ("cuda", "NVIDIA H100 80GB HBM3", SHARED, "bf16", math.nan),
    ("cuda", "A card", NCCL, "bf16", math.nan), ("cuda", "Tesla V100-SXM2-16GB", NCCL, "bf16", math.nan),
    ("cpu", "cpu", "gloo", "bf16", math.nan)])
def test_a_peak_is_that_of_the_catalogue_or_unknown(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, device: str, gpu: str,
                                                    backend: str, precision: str, tflops: float) -> None:
    monkeypatch.setattr(utilization, "device_name", lambda _: gpu)  # there is no such GPU here
    spec = job(tmp_path, "llama", [f'train.precision="{precision}"', "job.ranks_per_node=2", 'job.device="cuda"'])
    shape = read_shape(spec)
    speed = utilization.peak_speed(spec, shape, torch.device(device), backend)
    expected = spec.ranks * tflops * 1e12 / training_operations(shape, spec.data.sequence_length)
    assert speed == expected or (math.isnan(speed) and math.isnan(expected))
