"""GPT-NeoX and Pythia: q, k and v fused head by head, attention and MLP side by side, rotary positions on a part of each head."""

from collections.abc import Mapping
from typing import Any

from hpc_mp.base.errors import HpcMpError
from hpc_mp.layout.models.family import Family, Weight, column, norm, row
from hpc_mp.layout.models.fields import ACTIVATION, COMMON, DROPOUT, EPSILON, READ, SIZES, is_number, only
from hpc_mp.layout.models.rotary import ROTARY_FIELDS, check_rotary
from hpc_mp.layout.models.shape import ModelShape, read_sizes

FIELDS = {
    **COMMON,
    **ROTARY_FIELDS,
    "partial_rotary_factor": only(None, rule="has no effect beside the other settings", remedy="write rotary_pct"),
    **dict.fromkeys(("rotary_pct", "rotary_emb_base"), READ),  # the names of older releases
    **dict.fromkeys((*SIZES, "intermediate_size", "use_parallel_residual", "attention_bias"), READ),
    **dict.fromkeys(("hidden_dropout", "attention_dropout"), DROPOUT),
    "classifier_dropout": READ,  # of the classification model
    "pad_token_id": READ,  # not part of the embedding
    "hidden_act": ACTIVATION,
    "layer_norm_eps": EPSILON,
}
DEFAULT = ModelShape(  # of transformers' GPTNeoXConfig (the 20 B model)
    model_type="gpt_neox", layers=44, hidden=6144, heads=64, kv_heads=0, head_dim=0, intermediate=24576, vocabulary=50432,
    positions=2048, tied=False, attention_bias=True, mlp_bias=True, gated_mlp=False)


def read(config: Mapping[str, Any]) -> ModelShape:
    shape = read_sizes(config, DEFAULT)
    settings = config.get("rope_parameters") or config.get("rope_scaling")
    part = (settings if isinstance(settings, Mapping) else {}).get("partial_rotary_factor", config.get("rotary_pct", 0.25))
    if not is_number(part) or not 0 < part <= 1 or int(shape.head_dim * part) % 2 or int(shape.head_dim * part) == 0:
        raise HpcMpError(f"the model's partial_rotary_factor({part})",
                         f"must rotate an even number of a head's {shape.head_dim} elements", "write 1.0 to rotate whole heads")
    check_rotary(config, int(shape.head_dim * part), part=True)
    return shape


def block_weights(s: ModelShape, _: int) -> tuple[Weight, ...]:
    """Rows of ``query_key_value`` are q, k and v of one head after the other, so that equal pieces hold whole heads."""
    h, f = s.hidden, s.intermediate
    return (
        *norm("input_layernorm", h, bias=True),
        *norm("post_attention_layernorm", h, bias=True),
        *column("attention.query_key_value", 3 * h, h, s.attention_bias),
        *row("attention.dense", h, h, s.attention_bias),
        *column("mlp.dense_h_to_4h", f, h, bias=True),
        *row("mlp.dense_4h_to_h", h, f, bias=True),
    )


FAMILY = Family(
    model_type="gpt_neox", architecture="GPTNeoXForCausalLM", since="5.24",
    fields=FIELDS, read=read,
    embedding="gpt_neox.embed_in", blocks="gpt_neox.layers", norm="gpt_neox.final_layer_norm", head="lm_head",
    behind_embedding=("gpt_neox.emb_dropout",), rotary=("gpt_neox.rotary_emb",), attention="attention",
    block_weights=block_weights,
    embedding_weights=lambda s: column("gpt_neox.embed_in", s.vocabulary, s.hidden),
    norm_weights=lambda s: norm("gpt_neox.final_layer_norm", s.hidden, bias=True),
    head_weights=lambda s: (Weight("lm_head.weight", (s.vocabulary, s.hidden), cut=0, stored=(((), "embed_out.weight"),)),),
)
