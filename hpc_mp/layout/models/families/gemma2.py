"""Gemma 2: every other layer with a sliding window, soft caps on scores and logits, four norms around 1 in each block."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hpc_mp.base.errors import HpcMpError
from hpc_mp.layout.models.families import llama
from hpc_mp.layout.models.family import Weight
from hpc_mp.layout.models.fields import ACTIVATION, READ, ConfigField, number, only
from hpc_mp.layout.models.shape import ConfigReader, ModelShape

CAP = number("a number above 0, or null for none", lambda value: value > 0)
KINDS = ("sliding_attention", "full_attention")
FIELDS: Mapping[str, ConfigField] = {
    **{key: field for key, field in llama.FIELDS.items() if key not in ("hidden_act", "mlp_bias", "pretraining_tp")},
    "hidden_activation": ACTIVATION,
    "hidden_act": ConfigField(in_job=False),  # of older releases, without effect
    "query_pre_attn_scalar": number("a number above 0", lambda value: value > 0),
    **dict.fromkeys(("sliding_window", "layer_types"), READ),
    "sliding_window_size": ConfigField(in_job=False),
    "cache_implementation": ConfigField(in_job=False),
    "attn_logit_softcapping": CAP,
    "final_logit_softcapping": CAP,
    "use_bidirectional_attention": only(None, False),
}


def read(config: Mapping[str, Any]) -> ModelShape:
    """Read the shape. Defaults: transformers' Gemma2Config (the 2 B model)."""
    sizes = {"hidden_size": 2304, "num_attention_heads": 8, "num_hidden_layers": 26, "head_dim": 256, "tie_word_embeddings": True}
    values = {key: value for key, value in config.items() if value is not None}
    shape = llama.read_decoder({**sizes, **values}, "gemma2", kv_heads=4, intermediate=9216, vocabulary=256000, positions=8192)
    kinds = config.get("layer_types") or [KINDS[layer % 2] for layer in range(shape.layers)]
    if not isinstance(kinds, list) or len(kinds) != shape.layers or not set(kinds) <= set(KINDS):
        raise HpcMpError("the model's layer_types", f"must be one of {' and '.join(KINDS)} for each of {shape.layers} layers",
                         "leave it out: they alternate")
    window = ConfigReader(config).count("sliding_window", default=4096)
    return replace(shape, windows=tuple(window if kind == KINDS[0] else None for kind in kinds))


def block_weights(s: ModelShape, layer: int) -> tuple[Weight, ...]:
    """Norms scale by 1 + weight."""
    norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    matrices = (weight for weight in llama.block_weights(s, layer) if "layernorm" not in weight.name)
    return *(Weight(f"{name}_layernorm.weight", (s.hidden,), init="zeros") for name in norms), *matrices


FAMILY = replace(
    llama.FAMILY,
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    modules=("transformers.models.gemma2.modeling_gemma2",),
    fields=FIELDS,
    read=read,
    since="5.24",
    block_weights=block_weights,
    norm_weights=lambda s: (Weight("model.norm.weight", (s.hidden,), init="zeros"),),
)
