"""Qwen3-MoE: Llama's attention with a norm on every head's q and k, experts in some layers and a dense MLP in the others."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hpc_mp.base.errors import HpcMpError
from hpc_mp.layout.models.families import llama, mixtral
from hpc_mp.layout.models.family import Weight
from hpc_mp.layout.models.fields import OLDER, READ, only
from hpc_mp.layout.models.shape import ModelShape, count

FIELDS = {
    **mixtral.SHARED,
    **dict.fromkeys(("attention_bias", "moe_intermediate_size", "norm_topk_prob"), READ),
    **dict.fromkeys(("decoder_sparse_step", "mlp_only_layers"), READ),
    "use_sliding_window": only(None, False),
    "max_window_layers": OLDER,  # without effect unless use_sliding_window is set
}
DEFAULT = replace(llama.DEFAULT, model_type="qwen3_moe", layers=24, hidden=2048, kv_heads=4, intermediate=6144,
                  vocabulary=151936, positions=32768, experts=128, experts_per_token=8,
                  expert_intermediate=768)  # of transformers' Qwen3MoeConfig


def read(config: Mapping[str, Any]) -> ModelShape:
    shape = llama.read_decoder(config, DEFAULT)
    mixtral.check_experts(shape, "num_experts")
    named, step = config.get("mlp_only_layers") or [], count(config, "decoder_sparse_step", 1)
    if not isinstance(named, list) or not all(isinstance(layer, int) and 0 <= layer < shape.layers for layer in named):
        raise HpcMpError(f"the model's mlp_only_layers = {named!r}", f"must be a list of layers from 0 to {shape.layers - 1}",
                         "name the layers without experts")
    return replace(shape, dense=tuple(layer for layer in range(shape.layers) if layer in named or (layer + 1) % step))


def block_weights(s: ModelShape, layer: int) -> tuple[Weight, ...]:
    norms = (Weight(f"self_attn.{name}_norm.weight", (s.head_dim,), init="ones", partial=True) for name in "qk")
    weights = (*llama.block_weights(s, layer), *norms)
    return weights if layer in s.dense else mixtral.with_experts(s, weights, "mlp", "gate_proj", "up_proj", "down_proj")


FAMILY = replace(
    llama.FAMILY,
    model_type="qwen3_moe", architecture="Qwen3MoeForCausalLM", since="5.24",
    fields=FIELDS, read=read,
    experts="mlp.experts", block_weights=block_weights,
)
