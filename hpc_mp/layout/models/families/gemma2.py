"""Gemma 2: every other layer with a sliding window, soft caps on scores and logits, four norms around 1 in each block."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hpc_mp.base.errors import HpcMpError
from hpc_mp.layout.models.families import llama
from hpc_mp.layout.models.family import Weight, norm
from hpc_mp.layout.models.fields import ACTIVATION, OLDER, POSITIVE, READ, number, only
from hpc_mp.layout.models.shape import ModelShape, count

CAP = number("a number above 0, or null for none", lambda value: value > 0)
KINDS = ("sliding_attention", "full_attention")
FIELDS = {
    **llama.SHARED,
    **dict.fromkeys(("attention_bias", "sliding_window", "layer_types"), READ),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), CAP),
    **dict.fromkeys(("hidden_act", "sliding_window_size", "cache_implementation"), OLDER),  # without effect
    "hidden_activation": ACTIVATION,
    "query_pre_attn_scalar": POSITIVE,
    "use_bidirectional_attention": only(None, False),
}
DEFAULT = replace(  # of transformers' Gemma2Config (the 2 B model)
    llama.DEFAULT, model_type="gemma2", layers=26, hidden=2304, heads=8, kv_heads=4, head_dim=256, intermediate=9216,
    vocabulary=256000, positions=8192, tied=True)


def read(config: Mapping[str, Any]) -> ModelShape:
    shape = llama.read_decoder(config, DEFAULT)
    kinds = config.get("layer_types") or [KINDS[layer % 2] for layer in range(shape.layers)]
    if not isinstance(kinds, list) or len(kinds) != shape.layers or not set(kinds) <= set(KINDS):
        raise HpcMpError("the model's layer_types", f"must be one of {' and '.join(KINDS)} for each of {shape.layers} layers",
                         "leave it out: they alternate")
    window = count(config, "sliding_window", 4096)
    return replace(shape, windows=tuple(window if kind == KINDS[0] else None for kind in kinds))


def block_weights(s: ModelShape, layer: int) -> tuple[Weight, ...]:
    """Norms scale by 1 + weight."""
    norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    matrices = (weight for weight in llama.block_weights(s, layer) if "layernorm" not in weight.name)
    return *(weight for name in norms for weight in norm(f"{name}_layernorm", s.hidden, init="zeros")), *matrices


FAMILY = replace(
    llama.FAMILY,
    model_type="gemma2", architecture="Gemma2ForCausalLM", since="5.24",
    fields=FIELDS, read=read,
    block_weights=block_weights,
    norm_weights=lambda s: norm("model.norm", s.hidden, init="zeros"),
)
