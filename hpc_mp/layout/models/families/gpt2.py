"""GPT-2: learned positions, Conv1D projections stored (in, out), q, k and v fused, head tied to the embedding."""

from collections.abc import Mapping
from typing import Any

from hpc_mp.layout.models.family import POSITIONS, Family, Weight
from hpc_mp.layout.models.fields import ACTIVATION, COMMON, EPSILON, PROBABILITY, READ, ConfigField, only
from hpc_mp.layout.models.shape import MOST_LAYERS, ConfigReader, ModelShape

DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")

SUMMARY = ("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout")
SHARED: Mapping[str, ConfigField] = {  # with GPT-J
    **COMMON,
    **dict.fromkeys(("n_embd", "n_head", "n_inner", "n_layer", "n_positions", "vocab_size", "initializer_range"), READ),
    **dict.fromkeys(("hidden_size", "num_attention_heads", "num_hidden_layers", "max_position_embeddings"), READ),  # second names
    **dict.fromkeys(DROPOUTS, PROBABILITY),
    "pad_token_id": READ,  # not part of the embedding, unlike in Llama
    "activation_function": ACTIVATION,
    "layer_norm_epsilon": EPSILON,
}
FIELDS: Mapping[str, ConfigField] = {
    **SHARED,
    **dict.fromkeys(("scale_attn_weights", "scale_attn_by_inverse_layer_idx"), READ),
    **dict.fromkeys(SUMMARY, READ),  # of the classification model, not of a language model
    "reorder_and_upcast_attn": only(False),
}


def read(config: Mapping[str, Any]) -> ModelShape:
    """Read the shape. Defaults: transformers' GPT2Config (the 124 M model)."""
    return read_gpt(config, "gpt2", hidden=768, heads=12, layers=12, vocabulary=50257, positions=1024, tied=True,
                    attention_bias=True)


def read_gpt(config: Mapping[str, Any], model_type: str, *, hidden: int, heads: int, layers: int, vocabulary: int,
             positions: int, tied: bool, attention_bias: bool) -> ModelShape:
    """Read the shape of a family with GPT-2's names of sizes. ``hidden`` to ``tied`` are the family's defaults."""
    c = ConfigReader(config)
    hidden = c.count("n_embd", "hidden_size", default=hidden)
    heads = c.count("n_head", "num_attention_heads", default=heads)
    head_dim = c.quotient("n_embd", hidden, "n_head", heads)
    return ModelShape(
        model_type=model_type, layers=c.count("n_layer", "num_hidden_layers", default=layers, limit=MOST_LAYERS),
        hidden=hidden, heads=heads, kv_heads=heads, head_dim=head_dim,
        intermediate=c.count("n_inner", default=4 * hidden), vocabulary=c.count("vocab_size", default=vocabulary),
        positions=c.count("n_positions", "max_position_embeddings", default=positions),
        tied=c.flag("tie_word_embeddings", tied), attention_bias=attention_bias, mlp_bias=True, gated_mlp=False,
        initializer_range=c.number("initializer_range", 0.02),
    )


def block_weights(s: ModelShape, _: int) -> tuple[Weight, ...]:
    h, f = s.hidden, s.intermediate
    return (
        Weight("ln_1.weight", (h,), init="ones"),
        Weight("ln_1.bias", (h,), init="zeros"),
        Weight("attn.c_attn.weight", (h, 3, h), cut=2),
        Weight("attn.c_attn.bias", (3, h), cut=1, init="zeros"),
        Weight("attn.c_proj.weight", (h, h), cut=0, init="residual"),
        Weight("attn.c_proj.bias", (h,), init="zeros"),
        Weight("ln_2.weight", (h,), init="ones"),
        Weight("ln_2.bias", (h,), init="zeros"),
        Weight("mlp.c_fc.weight", (h, f), cut=1),
        Weight("mlp.c_fc.bias", (f,), cut=0, init="zeros"),
        Weight("mlp.c_proj.weight", (f, h), cut=0, init="residual"),
        Weight("mlp.c_proj.bias", (h,), init="zeros"),
    )


FAMILY = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    modules=("transformers.models.gpt2.modeling_gpt2",),
    fields=FIELDS,
    read=read,
    embedding="transformer.wte",
    blocks="transformer.h",
    norm="transformer.ln_f",
    head="lm_head",
    rotary=None,
    lookups={"transformer.wpe": POSITIONS},
    behind_embedding=("transformer.drop",),
    attention="attn",
    attention_dropout="attn_dropout",
    projections={"attn.c_attn": "fused", "attn.c_proj": "row", "mlp.c_fc": "column", "mlp.c_proj": "row"},
    transposed=True,
    enters=("attn", "mlp"),
    block_weights=block_weights,
    embedding_weights=lambda s: (
        Weight("transformer.wte.weight", (s.vocabulary, s.hidden), cut=0),
        Weight("transformer.wpe.weight", (s.positions, s.hidden)),
    ),
    norm_weights=lambda s: (
        Weight("transformer.ln_f.weight", (s.hidden,), init="ones"),
        Weight("transformer.ln_f.bias", (s.hidden,), init="zeros"),
    ),
    head_weights=lambda s: (Weight("lm_head.weight", (s.vocabulary, s.hidden), cut=0),),
    dropouts=DROPOUTS,
    checkpoint_prefixes=("transformer.",),
)
