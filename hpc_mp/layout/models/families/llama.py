"""Llama: rotary positions, RMSNorm, gated MLP, grouped-query attention, head tied or not."""

from collections.abc import Mapping
from typing import Any

from hpc_mp.layout.models.family import Family, Weight
from hpc_mp.layout.models.fields import ACTIVATION, COMMON, EPSILON, PROBABILITY, READ, ConfigField
from hpc_mp.layout.models.rotary import ROTARY_FIELDS, check_rotary
from hpc_mp.layout.models.shape import MOST_LAYERS, ConfigReader, ModelShape

DROPOUTS = ("attention_dropout",)

FIELDS: Mapping[str, ConfigField] = {
    **COMMON,
    **ROTARY_FIELDS,
    **dict.fromkeys(("hidden_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers", "head_dim",
                     "intermediate_size", "vocab_size", "max_position_embeddings", "initializer_range"), READ),
    **dict.fromkeys(("attention_bias", "mlp_bias", "pad_token_id"), READ),
    **dict.fromkeys(DROPOUTS, PROBABILITY),
    "hidden_act": ACTIVATION,
    "rms_norm_eps": EPSILON,
    "pretraining_tp": READ,  # number of pieces in which a product was once computed: the product is the same
}


def read(config: Mapping[str, Any]) -> ModelShape:
    """Read the shape. Defaults: transformers' LlamaConfig (the 7 B model). It divides the heads even with a ``head_dim``."""
    shape = read_decoder(config, "llama", intermediate=11008, vocabulary=32000, positions=2048)
    ConfigReader.quotient("hidden_size", shape.hidden, "num_attention_heads", shape.heads)
    return shape


def read_decoder(config: Mapping[str, Any], model_type: str, *, intermediate: int, vocabulary: int, positions: int,
                 kv_heads: int | None = None, derived: bool = True) -> ModelShape:
    """Read the shape of a family with Llama's attention and gated MLP.

    Args:
        intermediate, vocabulary, positions, kv_heads: defaults of the family's configuration class; ``kv_heads`` None: all heads.
        derived: see ``check_rotary``.
    """
    c = ConfigReader(config)
    hidden = c.count("hidden_size", default=4096)
    heads = c.count("num_attention_heads", default=32)
    if config.get("head_dim") is None:
        c.quotient("hidden_size", hidden, "num_attention_heads", heads)
    kv = c.count("num_key_value_heads", default=heads if kv_heads is None or "num_key_value_heads" in config else kv_heads)
    c.quotient("num_attention_heads", heads, "num_key_value_heads", kv)
    head_dim, rows = c.count("head_dim", default=hidden // heads), c.count("vocab_size", default=vocabulary)
    check_rotary(config, head_dim, derived)
    c.row("pad_token_id", rows)
    return ModelShape(
        model_type=model_type, layers=c.count("num_hidden_layers", default=32, limit=MOST_LAYERS), hidden=hidden,
        heads=heads, kv_heads=kv, head_dim=head_dim,
        intermediate=c.count("intermediate_size", default=intermediate), vocabulary=rows,
        positions=c.count("max_position_embeddings", default=positions), tied=c.flag("tie_word_embeddings", False),
        attention_bias=c.flag("attention_bias", False), mlp_bias=c.flag("mlp_bias", False), gated_mlp=True,
        initializer_range=c.number("initializer_range", 0.02),
    )


def block_weights(s: ModelShape, _: int) -> tuple[Weight, ...]:
    h, f, q, kv = s.hidden, s.intermediate, s.heads * s.head_dim, s.kv_heads * s.head_dim
    weights = [Weight("input_layernorm.weight", (h,), init="ones")]
    for name, out, parts in (("q_proj", q, None), ("k_proj", kv, s.kv_heads), ("v_proj", kv, s.kv_heads)):
        weights.append(Weight(f"self_attn.{name}.weight", (out, h), cut=0, most_parts=parts))
        if s.attention_bias:
            weights.append(Weight(f"self_attn.{name}.bias", (out,), cut=0, init="zeros", most_parts=parts))
    weights.append(Weight("self_attn.o_proj.weight", (h, q), cut=1))
    if s.attention_bias:
        weights.append(Weight("self_attn.o_proj.bias", (h,), init="zeros"))
    weights.append(Weight("post_attention_layernorm.weight", (h,), init="ones"))
    for name in ("gate_proj", "up_proj"):
        weights.append(Weight(f"mlp.{name}.weight", (f, h), cut=0))
        if s.mlp_bias:
            weights.append(Weight(f"mlp.{name}.bias", (f,), cut=0, init="zeros"))
    weights.append(Weight("mlp.down_proj.weight", (h, f), cut=1))
    if s.mlp_bias:
        weights.append(Weight("mlp.down_proj.bias", (h,), init="zeros"))
    return tuple(weights)


FAMILY = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    modules=("transformers.models.llama.modeling_llama",),
    fields=FIELDS,
    read=read,
    embedding="model.embed_tokens",
    blocks="model.layers",
    norm="model.norm",
    head="lm_head",
    rotary="model.rotary_emb",
    attention="self_attn",
    attention_dropout=None,
    projections={
        "self_attn.q_proj": "column", "self_attn.k_proj": "column", "self_attn.v_proj": "column",
        "self_attn.o_proj": "row",
        "mlp.gate_proj": "column", "mlp.up_proj": "column", "mlp.down_proj": "row",
    },
    transposed=False,
    enters=("self_attn", "mlp"),
    block_weights=block_weights,
    embedding_weights=lambda s: (Weight("model.embed_tokens.weight", (s.vocabulary, s.hidden), cut=0),),
    norm_weights=lambda s: (Weight("model.norm.weight", (s.hidden,), init="ones"),),
    head_weights=lambda s: (Weight("lm_head.weight", (s.vocabulary, s.hidden), cut=0),),
    dropouts=DROPOUTS,
)
