"""GPT-J: attention and MLP side by side behind one norm, rotary positions on a part of each head, a biased head."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from packaging.version import Version

from hpc_mp.base.errors import HpcMpError
from hpc_mp.layout.models.family import Family, Weight
from hpc_mp.layout.models.fields import ACTIVATION, COMMON, EPSILON, PROBABILITY, READ, ConfigField
from hpc_mp.layout.models.shape import MOST_LAYERS, ConfigReader, ModelShape

DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")

FIELDS: Mapping[str, ConfigField] = {
    **COMMON,
    **dict.fromkeys(("n_embd", "n_head", "n_inner", "n_layer", "n_positions", "vocab_size", "initializer_range"), READ),
    "rotary_dim": READ,
    **dict.fromkeys(("hidden_size", "num_attention_heads", "num_hidden_layers", "max_position_embeddings"), READ),  # second names
    **dict.fromkeys(DROPOUTS, PROBABILITY),
    "pad_token_id": READ,  # not part of the embedding, unlike in Llama
    "activation_function": ACTIVATION,
    "layer_norm_epsilon": EPSILON,
    # Fields that the first checkpoints of this family also contain; transformers does the first two always.
    **dict.fromkeys(("rotary", "scale_attn_weights"),
                    ConfigField(lambda value: value is True, "is not supported yet", "leave it out", in_job=False)),
    **dict.fromkeys(("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels",
                     "summary_first_dropout"), ConfigField(in_job=False)),
}


def read(config: Mapping[str, Any]) -> ModelShape:
    """Read the shape. Defaults: transformers' GPTJConfig (the 6 B model)."""
    c = ConfigReader(config)
    hidden = c.count("n_embd", "hidden_size", default=4096)
    heads = c.count("n_head", "num_attention_heads", default=16)
    head_dim = c.quotient("n_embd", hidden, "n_head", heads)
    rotary = 0 if config.get("rotary_dim", 64) is None else c.count("rotary_dim", default=64)
    if rotary % 2 or not 0 < rotary <= head_dim:
        raise HpcMpError(f"the model's rotary_dim({rotary or 'null'})",
                         f"must be even and from 2 to the size of a head, n_embd / n_head = {head_dim}",
                         f"write rotary_dim = {head_dim} to rotate whole heads")
    return ModelShape(
        model_type="gptj", layers=c.count("n_layer", "num_hidden_layers", default=28, limit=MOST_LAYERS),
        hidden=hidden, heads=heads, kv_heads=heads, head_dim=head_dim,
        intermediate=c.count("n_inner", default=4 * hidden), vocabulary=c.count("vocab_size", default=50400),
        positions=c.count("n_positions", "max_position_embeddings", default=2048),
        tied=c.flag("tie_word_embeddings", False), attention_bias=False, mlp_bias=True, gated_mlp=False,
        initializer_range=c.number("initializer_range", 0.02),
    )


def block_weights(s: ModelShape) -> tuple[Weight, ...]:
    h, f = s.hidden, s.intermediate
    return (
        Weight("ln_1.weight", (h,), init="ones"),
        Weight("ln_1.bias", (h,), init="zeros"),
        *(Weight(f"attn.{name}.weight", (h, h), cut=0) for name in ("q_proj", "k_proj", "v_proj")),
        Weight("attn.out_proj.weight", (h, h), cut=1),
        Weight("mlp.fc_in.weight", (f, h), cut=0),
        Weight("mlp.fc_in.bias", (f,), cut=0, init="zeros"),
        Weight("mlp.fc_out.weight", (h, f), cut=1),
        Weight("mlp.fc_out.bias", (h,), init="zeros"),
    )


def _own_attention() -> bool:
    """Return True before transformers 5.24, whose attention did not use the table of attention functions and looked its
    positions up. Without transformers installed, as on machines without ranks, a new release is assumed."""
    try:
        return Version(version("transformers")) < Version("5.24")
    except PackageNotFoundError:
        return False


OWN_ATTENTION = _own_attention()
GPTJ = Family(
    model_type="gptj",
    architecture="GPTJForCausalLM",
    modules=("transformers.models.gptj.modeling_gptj",),
    fields=FIELDS,
    read=read,
    embedding="transformer.wte",
    position=None,
    blocks="transformer.h",
    norm="transformer.ln_f",
    head="lm_head",
    rotary=None if OWN_ATTENTION else "transformer.rotary_emb",
    embedding_dropout="transformer.drop",
    attention="attn",
    attention_dropout="attn_dropout" if OWN_ATTENTION else None,
    projections={
        "attn.q_proj": "column", "attn.k_proj": "column", "attn.v_proj": "column", "attn.out_proj": "row",
        "mlp.fc_in": "column", "mlp.fc_out": "row",
    },
    transposed=False,
    enters=("attn", "mlp"),
    own_attention=OWN_ATTENTION,
    block_weights=block_weights,
    embedding_weights=lambda s: (Weight("transformer.wte.weight", (s.vocabulary, s.hidden), cut=0),),
    norm_weights=lambda s: (
        Weight("transformer.ln_f.weight", (s.hidden,), init="ones"),
        Weight("transformer.ln_f.bias", (s.hidden,), init="zeros"),
    ),
    head_weights=lambda s: (
        Weight("lm_head.weight", (s.vocabulary, s.hidden), cut=0),
        Weight("lm_head.bias", (s.vocabulary,), cut=0, init="zeros"),
    ),
    dropouts=DROPOUTS,
)
