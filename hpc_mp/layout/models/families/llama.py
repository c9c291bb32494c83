"""Llama: rotary positions, RMSNorm, gated MLP, grouped-query attention, head tied or not."""

from collections.abc import Mapping
from typing import Any

from hpc_mp.layout.models.family import Family, Weight, column, norm, row
from hpc_mp.layout.models.fields import ACTIVATION, COMMON, DROPOUT, EPSILON, READ, SIZES, Fields
from hpc_mp.layout.models.rotary import ROTARY_FIELDS, check_rotary
from hpc_mp.layout.models.shape import ModelShape, check_multiple, check_padding, read_sizes

SHARED: Fields = {  # with families that have its attention and MLP
    **COMMON,
    **ROTARY_FIELDS,
    **dict.fromkeys((*SIZES, "intermediate_size", "num_key_value_heads", "head_dim", "pad_token_id"), READ),
    "attention_dropout": DROPOUT,
    "hidden_act": ACTIVATION,
    "rms_norm_eps": EPSILON,
}
# pretraining_tp: number of pieces in which a product was once computed; the product is the same
FIELDS = SHARED | dict.fromkeys(("attention_bias", "mlp_bias", "pretraining_tp"), READ)
DEFAULT = ModelShape(  # of transformers' LlamaConfig (the 7 B model)
    model_type="llama", layers=32, hidden=4096, heads=32, kv_heads=0, head_dim=0, intermediate=11008, vocabulary=32000,
    positions=2048, tied=False, attention_bias=False, mlp_bias=False, gated_mlp=True)


def read(config: Mapping[str, Any]) -> ModelShape:
    """Read the shape. The heads divide the hidden size even with a ``head_dim``."""
    shape = read_decoder(config, DEFAULT)
    check_multiple("hidden_size", shape.hidden, "num_attention_heads", shape.heads)
    return shape


def read_decoder(config: Mapping[str, Any], default: ModelShape, derived: bool = True) -> ModelShape:
    """Read the shape of a family with Llama's attention and gated MLP. ``default``: see ``read_sizes``; ``derived``: see
    ``check_rotary``."""
    shape = read_sizes(config, default)
    check_rotary(config, shape.head_dim, derived)
    check_padding(config, shape.vocabulary)
    return shape


def block_weights(s: ModelShape, _: int) -> tuple[Weight, ...]:
    h, f, q, kv = s.hidden, s.intermediate, s.heads * s.head_dim, s.kv_heads * s.head_dim
    return (
        *norm("input_layernorm", h),
        *column("self_attn.q_proj", q, h, s.attention_bias),
        *column("self_attn.k_proj", kv, h, s.attention_bias, s.kv_heads),
        *column("self_attn.v_proj", kv, h, s.attention_bias, s.kv_heads),
        *row("self_attn.o_proj", h, q, s.attention_bias),
        *norm("post_attention_layernorm", h),
        *column("mlp.gate_proj", f, h, s.mlp_bias),
        *column("mlp.up_proj", f, h, s.mlp_bias),
        *row("mlp.down_proj", h, f, s.mlp_bias),
    )


FAMILY = Family(
    model_type="llama", architecture="LlamaForCausalLM",
    fields=FIELDS, read=read,
    embedding="model.embed_tokens", blocks="model.layers", norm="model.norm", head="lm_head",
    rotary=("model.rotary_emb",), attention="self_attn",
    block_weights=block_weights,
    embedding_weights=lambda s: column("model.embed_tokens", s.vocabulary, s.hidden),
    norm_weights=lambda s: norm("model.norm", s.hidden),
    head_weights=lambda s: column("lm_head", s.vocabulary, s.hidden),
)
