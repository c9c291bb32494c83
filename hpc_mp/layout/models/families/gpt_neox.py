"""GPT-NeoX and Pythia: q, k and v fused head by head, attention and MLP side by side, rotary positions on a part of each head."""

from collections.abc import Mapping
from typing import Any

from hpc_mp.base.errors import HpcMpError
from hpc_mp.layout.models.family import Family, Weight
from hpc_mp.layout.models.fields import ACTIVATION, COMMON, EPSILON, PROBABILITY, READ, ConfigField, is_number, number
from hpc_mp.layout.models.rotary import ROTARY_FIELDS, check_rotary
from hpc_mp.layout.models.shape import MOST_LAYERS, ConfigReader, ModelShape

DROPOUTS = ("hidden_dropout", "attention_dropout")
PART = number("a number above 0, at most 1", lambda value: 0 < value <= 1)

FIELDS: Mapping[str, ConfigField] = {
    **COMMON,
    **ROTARY_FIELDS,
    "partial_rotary_factor": PART,
    **dict.fromkeys(("rotary_pct", "rotary_emb_base"), READ),  # the names of older releases
    **dict.fromkeys(("hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size", "vocab_size",
                     "max_position_embeddings", "initializer_range", "use_parallel_residual", "attention_bias"), READ),
    **dict.fromkeys(DROPOUTS, PROBABILITY),
    "classifier_dropout": READ,  # of the classification model
    "pad_token_id": READ,  # not part of the embedding
    "hidden_act": ACTIVATION,
    "layer_norm_eps": EPSILON,
}


def read(config: Mapping[str, Any]) -> ModelShape:
    """Read the shape. Defaults: transformers' GPTNeoXConfig (the 20 B model)."""
    c = ConfigReader(config)
    hidden, heads = c.count("hidden_size", default=6144), c.count("num_attention_heads", default=64)
    head_dim = c.quotient("hidden_size", hidden, "num_attention_heads", heads)
    settings = config.get("rope_parameters") or config.get("rope_scaling") or {}
    check_rotary(config, 2, part=True)  # heads of an odd size are no fault: the rotated part must be even
    part = settings.get("partial_rotary_factor", config.get("rotary_pct", 0.25))
    if not is_number(part) or not 0 < part <= 1 or int(head_dim * part) % 2 or int(head_dim * part) == 0:
        raise HpcMpError(f"the model's partial_rotary_factor({part})",
                         f"must rotate an even number of a head's {head_dim} elements", "write 1.0 to rotate whole heads")
    return ModelShape(
        model_type="gpt_neox", layers=c.count("num_hidden_layers", default=44, limit=MOST_LAYERS), hidden=hidden, heads=heads,
        kv_heads=heads, head_dim=head_dim, intermediate=c.count("intermediate_size", default=24576),
        vocabulary=c.count("vocab_size", default=50432), positions=c.count("max_position_embeddings", default=2048),
        tied=c.flag("tie_word_embeddings", False), attention_bias=c.flag("attention_bias", True), mlp_bias=True, gated_mlp=False,
        initializer_range=c.number("initializer_range", 0.02),
    )


def block_weights(s: ModelShape, _: int) -> tuple[Weight, ...]:
    """Rows of ``query_key_value`` are q, k and v of one head after the other, so that equal pieces hold whole heads."""
    h, f = s.hidden, s.intermediate
    sizes = {"attention.query_key_value": (3 * h, h), "attention.dense": (h, h), "mlp.dense_h_to_4h": (f, h),
             "mlp.dense_4h_to_h": (h, f)}
    weights = [Weight(f"{norm}_layernorm.{name}", (h,), init="ones" if name == "weight" else "zeros")
               for norm in ("input", "post_attention") for name in ("weight", "bias")]
    for name, (rows, columns) in sizes.items():
        column = PROJECTIONS[name] == "column"
        weights.append(Weight(f"{name}.weight", (rows, columns), cut=0 if column else 1))
        if s.attention_bias or name.startswith("mlp."):
            weights.append(Weight(f"{name}.bias", (rows,), cut=0 if column else None, init="zeros"))
    return tuple(weights)


PROJECTIONS: Mapping[str, Any] = {
    "attention.query_key_value": "column", "attention.dense": "row", "mlp.dense_h_to_4h": "column", "mlp.dense_4h_to_h": "row"}
FAMILY = Family(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    modules=("transformers.models.gpt_neox.modeling_gpt_neox",),
    fields=FIELDS,
    read=read,
    embedding="gpt_neox.embed_in",
    blocks="gpt_neox.layers",
    norm="gpt_neox.final_layer_norm",
    head="lm_head",
    rotary="gpt_neox.rotary_emb",
    behind_embedding=("gpt_neox.emb_dropout",),
    attention="attention",
    attention_dropout=None,
    projections=PROJECTIONS,
    transposed=False,
    enters=("attention", "mlp"),
    block_weights=block_weights,
    embedding_weights=lambda s: (Weight("gpt_neox.embed_in.weight", (s.vocabulary, s.hidden), cut=0),),
    norm_weights=lambda s: (
        Weight("gpt_neox.final_layer_norm.weight", (s.hidden,), init="ones"),
        Weight("gpt_neox.final_layer_norm.bias", (s.hidden,), init="zeros"),
    ),
    head_weights=lambda s: (Weight("lm_head.weight", (s.vocabulary, s.hidden), cut=0, stored=(((), "embed_out.weight"),)),),
    dropouts=DROPOUTS,
    since="5.24",
)
