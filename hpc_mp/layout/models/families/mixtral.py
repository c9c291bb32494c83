"""Mixtral: Llama's attention, optionally with a sliding window, and several MLPs, of which a router gives each token some.

All experts of a block are one parameter. Checkpoints store each expert separately: w1 is the gate, w3 goes up, w2 down.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hpc_mp.base.errors import HpcMpError
from hpc_mp.layout.models.families import llama
from hpc_mp.layout.models.family import Weight
from hpc_mp.layout.models.fields import READ, ConfigField, only
from hpc_mp.layout.models.shape import ConfigReader, ModelShape

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
    shape = llama.read_decoder(config, "mixtral", kv_heads=8, intermediate=14336, vocabulary=32000, positions=4096 * 32,
                               derived=False)
    c = ConfigReader(config)
    experts = c.count("num_local_experts", "num_experts", default=8)
    chosen = c.count("num_experts_per_tok", default=2)
    if chosen > experts:
        raise HpcMpError(f"the model's num_experts_per_tok({chosen})", f"is more than its num_local_experts({experts})",
                         "send each token to fewer experts")
    window = None if config.get("sliding_window") is None else c.count("sliding_window", default=4096)
    return replace(shape, experts=experts, experts_per_token=chosen, expert_intermediate=shape.intermediate, windows=(window,))


def block_weights(s: ModelShape, layer: int) -> tuple[Weight, ...]:
    h, f, experts = s.hidden, s.expert_intermediate, range(s.experts)
    return (
        *(weight for weight in llama.block_weights(s, layer) if not weight.name.startswith("mlp.")),
        Weight("mlp.gate.weight", (s.experts, h), partial=True, stored=(((), f"{STORED}.gate.weight"),)),
        Weight("mlp.experts.gate_up_proj", (s.experts, 2, f, h), cut=2, experts=True, stored=tuple(
            ((e, part), f"{STORED}.experts.{e}.{name}.weight") for e in experts for part, name in enumerate(("w1", "w3")))),
        Weight("mlp.experts.down_proj", (s.experts, h, f), cut=2, experts=True, stored=tuple(
            ((e,), f"{STORED}.experts.{e}.w2.weight") for e in experts)),
    )


FAMILY = replace(
    llama.FAMILY,
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    modules=("transformers.models.mixtral.modeling_mixtral",),
    fields=FIELDS,
    read=read,
    projections={name: how for name, how in llama.FAMILY.projections.items() if not name.startswith("mlp.")},
    enters=("self_attn", "mlp"),
    experts="mlp.experts",
    block_weights=block_weights,
)
