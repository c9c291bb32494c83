"""Qwen2 and Qwen2.5: Llama's blocks, in which q, k and v have biases and no other projection has one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hpc_mp.base.errors import HpcMpError
from hpc_mp.layout.models import llama
from hpc_mp.layout.models.family import Weight
from hpc_mp.layout.models.fields import READ, ConfigField, only
from hpc_mp.layout.models.rotary import check_rotary
from hpc_mp.layout.models.shape import MOST_LAYERS, ConfigReader, ModelShape

FULL = "every token then sees all earlier ones"
FIELDS: Mapping[str, ConfigField] = {
    **{key: field for key, field in llama.FIELDS.items() if key not in ("attention_bias", "mlp_bias", "pretraining_tp")},
    "use_sliding_window": only(False, remedy=f"leave it out, or set it to false: {FULL}"),
    "layer_types": ConfigField(lambda value: value is None or set(value) == {"full_attention"}, "is not supported yet",
                         f"leave it out, or set full_attention for every layer: {FULL}"),
    **dict.fromkeys(("sliding_window", "max_window_layers"), READ),  # without effect unless use_sliding_window is set
    "use_mrope": only(False),
}


def read(config: Mapping[str, Any]) -> ModelShape:
    """Read the shape. Defaults: transformers' Qwen2Config."""
    c = ConfigReader(config)
    hidden = c.count("hidden_size", default=4096)
    heads = c.count("num_attention_heads", default=32)
    kv_heads = c.count("num_key_value_heads", default=heads if "num_key_value_heads" in config else 32)
    if config.get("head_dim") is None and hidden % heads:
        raise HpcMpError(f"the model's hidden_size({hidden}) / num_attention_heads({heads})", "must be a whole number",
                         "choose hidden_size as a multiple of num_attention_heads")
    if heads % kv_heads:
        raise HpcMpError(f"the model's num_attention_heads({heads}) / num_key_value_heads({kv_heads})",
                         "must be a whole number", "choose num_key_value_heads as a divisor of num_attention_heads")
    head_dim, vocabulary = c.count("head_dim", default=hidden // heads), c.count("vocab_size", default=151936)
    check_rotary(config, head_dim)
    c.row("pad_token_id", vocabulary)
    return ModelShape(
        model_type="qwen2", layers=c.count("num_hidden_layers", default=32, limit=MOST_LAYERS), hidden=hidden,
        heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        intermediate=c.count("intermediate_size", default=22016), vocabulary=vocabulary,
        positions=c.count("max_position_embeddings", default=32768), tied=c.flag("tie_word_embeddings", False),
        attention_bias=True, mlp_bias=False, gated_mlp=True, initializer_range=c.number("initializer_range", 0.02),
    )


def block_weights(s: ModelShape) -> tuple[Weight, ...]:
    return tuple(weight for weight in llama.block_weights(s) if weight.name != "self_attn.o_proj.bias")


QWEN2 = replace(
    llama.LLAMA,
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    modules=("transformers.models.qwen2.modeling_qwen2",),
    fields=FIELDS,
    read=read,
    block_weights=block_weights,
)
