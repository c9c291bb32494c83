"""Mixtral: Llama's attention, optionally with a sliding window, and several MLPs, of which a router gives each token some.

All experts of a block are one parameter. Checkpoints store each expert separately: w1 is the gate, w3 goes up, w2 down.
"""

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

STORED = "block_sparse_moe"  # name of the module ``mlp`` in checkpoints

FIELDS: Mapping[str, ConfigField] = {
    **{key: field for key, field in llama.FIELDS.items() if key not in ("attention_bias", "mlp_bias", "pretraining_tp")},
    **dict.fromkeys(("num_local_experts", "num_experts", "num_experts_per_tok", "sliding_window"), READ),
    "output_router_logits": only(False, remedy="leave it out, or set it to false: train.router_balance and "
                                                       "train.router_z add losses of routers, the same on every layout"),
    "router_aux_loss_coef": READ,  # without effect unless output_router_logits is set
    "router_jitter_noise": only(0.0, remedy="leave it out, or set it to 0"),
}


def read(config: Mapping[str, Any]) -> ModelShape:
    """Read the shape. Defaults: transformers' MixtralConfig (the 8 x 7 B model)."""
    c = ConfigReader(config)
    hidden = c.count("hidden_size", default=4096)
    heads = c.count("num_attention_heads", default=32)
    kv_heads = c.count("num_key_value_heads", default=heads if "num_key_value_heads" in config else 8)
    if config.get("head_dim") is None and hidden % heads:
        raise HpcMpError(f"the model's hidden_size({hidden}) / num_attention_heads({heads})", "must be a whole number",
                         "choose hidden_size as a multiple of num_attention_heads, or give head_dim")
    if heads % kv_heads:
        raise HpcMpError(f"the model's num_attention_heads({heads}) / num_key_value_heads({kv_heads})",
                         "must be a whole number", "choose num_key_value_heads as a divisor of num_attention_heads")
    head_dim, vocabulary = c.count("head_dim", default=hidden // heads), c.count("vocab_size", default=32000)
    check_rotary(config, head_dim, derived=False)
    c.row("pad_token_id", vocabulary)
    experts = c.count("num_local_experts", "num_experts", default=8)
    chosen = c.count("num_experts_per_tok", default=2)
    if chosen > experts:
        raise HpcMpError(f"the model's num_experts_per_tok({chosen})", f"is more than its num_local_experts({experts})",
                         "send each token to fewer experts")
    return ModelShape(
        model_type="mixtral", layers=c.count("num_hidden_layers", default=32, limit=MOST_LAYERS), hidden=hidden,
        heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        intermediate=c.count("intermediate_size", default=14336), vocabulary=vocabulary,
        positions=c.count("max_position_embeddings", default=4096 * 32), tied=c.flag("tie_word_embeddings", False),
        attention_bias=False, mlp_bias=False, gated_mlp=True, initializer_range=c.number("initializer_range", 0.02),
        experts=experts, experts_per_token=chosen,
        window=None if config.get("sliding_window") is None else c.count("sliding_window", default=4096),
    )


def block_weights(s: ModelShape) -> tuple[Weight, ...]:
    h, f, experts = s.hidden, s.intermediate, range(s.experts)
    return (
        *(weight for weight in llama.block_weights(s) if not weight.name.startswith("mlp.")),
        Weight("mlp.gate.weight", (s.experts, h), partial=True, stored=(((), f"{STORED}.gate.weight"),)),
        Weight("mlp.experts.gate_up_proj", (s.experts, 2, f, h), cut=2, experts=True, stored=tuple(
            ((e, part), f"{STORED}.experts.{e}.{name}.weight") for e in experts for part, name in enumerate(("w1", "w3")))),
        Weight("mlp.experts.down_proj", (s.experts, h, f), cut=2, experts=True, stored=tuple(
            ((e,), f"{STORED}.experts.{e}.w2.weight") for e in experts)),
    )


MIXTRAL = replace(
    llama.LLAMA,
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    modules=("transformers.models.mixtral.modeling_mixtral",),
    fields=FIELDS,
    read=read,
    projections={name: how for name, how in llama.LLAMA.projections.items() if not name.startswith("mlp.")},
    enters=("self_attn", "mlp"),
    experts="mlp.experts",
    block_weights=block_weights,
)
