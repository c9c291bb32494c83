"""Qwen3-MoE: Llama's attention with a norm on every head's q and k, experts in some layers and a dense MLP in the others."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hpc_mp.base.errors import HpcMpError
from hpc_mp.layout.models.families import llama, mixtral
from hpc_mp.layout.models.family import Weight
from hpc_mp.layout.models.fields import READ, ConfigField, only
from hpc_mp.layout.models.shape import ConfigReader, ModelShape

FIELDS: Mapping[str, ConfigField] = {
    **{key: field for key, field in mixtral.FIELDS.items() if key != "router_jitter_noise"},
    **dict.fromkeys(("attention_bias", "moe_intermediate_size", "norm_topk_prob"), READ),
    **dict.fromkeys(("decoder_sparse_step", "mlp_only_layers"), READ),
    "use_sliding_window": only(None, False),
    "max_window_layers": ConfigField(in_job=False),  # without effect unless use_sliding_window is set
}


def read(config: Mapping[str, Any]) -> ModelShape:
    """Read the shape. Defaults: transformers' Qwen3MoeConfig."""
    sizes = {"hidden_size": 2048, "num_hidden_layers": 24}
    values = {key: value for key, value in config.items() if value is not None}
    shape = llama.read_decoder({**sizes, **values}, "qwen3_moe", kv_heads=4, intermediate=6144, vocabulary=151936,
                               positions=32768)
    c = ConfigReader(config)
    experts, chosen = c.count("num_experts", "num_local_experts", default=128), c.count("num_experts_per_tok", default=8)
    if chosen > experts:
        raise HpcMpError(f"the model's num_experts_per_tok({chosen})", f"is more than its num_experts({experts})",
                         "send each token to fewer experts")
    named, step = config.get("mlp_only_layers") or [], c.count("decoder_sparse_step", default=1)
    if not isinstance(named, list) or not all(isinstance(layer, int) and 0 <= layer < shape.layers for layer in named):
        raise HpcMpError(f"the model's mlp_only_layers = {named!r}", f"must be a list of layers from 0 to {shape.layers - 1}",
                         "name the layers without experts")
    dense = tuple(layer for layer in range(shape.layers) if layer in named or (layer + 1) % step)
    return replace(shape, experts=experts, experts_per_token=chosen, dense=dense,
                   expert_intermediate=c.count("moe_intermediate_size", default=768))


def block_weights(s: ModelShape, layer: int) -> tuple[Weight, ...]:
    norms = (Weight(f"self_attn.{name}_norm.weight", (s.head_dim,), init="ones", partial=True) for name in "qk")
    weights = (*llama.block_weights(s, layer), *norms)
    if layer in s.dense:
        return weights
    h, f, experts = s.hidden, s.expert_intermediate, range(s.experts)
    return (
        *(weight for weight in weights if not weight.name.startswith("mlp.")),
        Weight("mlp.gate.weight", (s.experts, h), partial=True),
        Weight("mlp.experts.gate_up_proj", (s.experts, 2, f, h), cut=2, experts=True, stored=tuple(
            ((e, part), f"mlp.experts.{e}.{name}_proj.weight") for e in experts for part, name in enumerate(("gate", "up")))),
        Weight("mlp.experts.down_proj", (s.experts, h, f), cut=2, experts=True, stored=tuple(
            ((e,), f"mlp.experts.{e}.down_proj.weight") for e in experts)),
    )


FAMILY = replace(
    llama.FAMILY,
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    modules=("transformers.models.qwen3_moe.modeling_qwen3_moe",),
    fields=FIELDS,
    read=read,
    since="5.24",
    experts="mlp.experts",
    block_weights=block_weights,
)
