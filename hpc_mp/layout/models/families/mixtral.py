"""Mixtral: Llama's attention, optionally with a sliding window, and several MLPs, of which a router gives each token some.

All experts of a block are one parameter. Checkpoints store each expert separately: w1 is the gate, w3 goes up, w2 down.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hpc_mp.base.errors import HpcMpError
from hpc_mp.layout.models.families import llama
from hpc_mp.layout.models.family import Weight
from hpc_mp.layout.models.fields import READ, Fields, only
from hpc_mp.layout.models.shape import ModelShape, count

SHARED: Fields = {  # with families that have its experts
    **llama.SHARED,
    **dict.fromkeys(("num_local_experts", "num_experts", "num_experts_per_tok", "sliding_window"), READ),
    "output_router_logits": only(False, remedy="leave it out, or set it to false: train.router_balance and "
                                                       "train.router_z add losses of routers, the same on every layout"),
    "router_aux_loss_coef": READ,  # without effect unless output_router_logits is set
}
DEFAULT = replace(llama.DEFAULT, model_type="mixtral", kv_heads=8, intermediate=14336, positions=4096 * 32, experts=8,
                  experts_per_token=2)  # of transformers' MixtralConfig (the 8 x 7 B model)


def read(config: Mapping[str, Any]) -> ModelShape:
    shape = llama.read_decoder(config, DEFAULT, derived=False)
    check_experts(shape, "num_local_experts")
    window = None if config.get("sliding_window") is None else count(config, "sliding_window", 4096)
    return replace(shape, expert_intermediate=shape.intermediate, windows=(window,))


def check_experts(shape: ModelShape, name: str) -> None:
    """Raise HpcMpError if a token uses more experts than there are. ``name``: of their number."""
    if shape.experts_per_token > shape.experts:
        raise HpcMpError(f"the model's num_experts_per_tok({shape.experts_per_token})",
                         f"is more than its {name}({shape.experts})", "send each token to fewer experts")


def with_experts(s: ModelShape, weights: tuple[Weight, ...], module: str, gate: str, up: str, down: str) -> tuple[Weight, ...]:
    """Return a block's weights with a router and experts in place of its MLP.

    Args:
        module: the name of ``mlp`` in checkpoints.
        gate, up, down: names of an expert's three projections in checkpoints.
    """
    path = f"{llama.FAMILY.blocks}.{{}}.{module}"
    experts = [f"{path}.experts.{number}" for number in range(s.experts)]
    return (
        *(weight for weight in weights if not weight.name.startswith("mlp.")),
        Weight("mlp.gate.weight", (s.experts, s.hidden), partial=True, stored=(((), f"{path}.gate.weight"),)),
        Weight("mlp.experts.gate_up_proj", (s.experts, 2, s.expert_intermediate, s.hidden), cut=2, experts=True, stored=tuple(
            ((e, part), f"{expert}.{name}.weight") for e, expert in enumerate(experts) for part, name in enumerate((gate, up)))),
        Weight("mlp.experts.down_proj", (s.experts, s.hidden, s.expert_intermediate), cut=2, experts=True, stored=tuple(
            ((e,), f"{expert}.{down}.weight") for e, expert in enumerate(experts))),
    )


FAMILY = replace(
    llama.FAMILY,
    model_type="mixtral", architecture="MixtralForCausalLM",
    fields=SHARED | {"router_jitter_noise": only(0.0, remedy="leave it out, or set it to 0")},
    read=read,
    experts="mlp.experts",
    block_weights=lambda s, layer: with_experts(s, llama.block_weights(s, layer), "block_sparse_moe", "w1", "w3", "w2"),
)
