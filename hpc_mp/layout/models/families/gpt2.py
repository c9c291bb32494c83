"""GPT-2: learned positions, Conv1D projections stored (in, out), q, k and v fused, head tied to the embedding."""

from hpc_mp.layout.models.family import POSITIONS, Family, Weight, column, norm
from hpc_mp.layout.models.fields import ACTIVATION, COMMON, DROPOUT, EPSILON, READ, SIZES, Fields, only
from hpc_mp.layout.models.shape import ModelShape, read_sizes

OWN = {"n_layer": "layers", "n_embd": "hidden", "n_head": "heads", "n_positions": "positions", "n_inner": "intermediate"}
SHARED: Fields = {  # with GPT-J
    **COMMON,
    **dict.fromkeys((*OWN, *SIZES), READ),
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), DROPOUT),
    "pad_token_id": READ,  # not part of the embedding, unlike in Llama
    "activation_function": ACTIVATION,
    "layer_norm_epsilon": EPSILON,
}
# Of the classification model, not of a language model.
SUMMARY = ("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout")
FIELDS: Fields = {
    **SHARED,
    **dict.fromkeys(("scale_attn_weights", "scale_attn_by_inverse_layer_idx", *SUMMARY), READ),
    "reorder_and_upcast_attn": only(False),
}
DEFAULT = ModelShape(  # of transformers' GPT2Config (the 124 M model)
    model_type="gpt2", layers=12, hidden=768, heads=12, kv_heads=0, head_dim=0, intermediate=0, vocabulary=50257,
    positions=1024, tied=True, attention_bias=True, mlp_bias=True, gated_mlp=False)


def block_weights(s: ModelShape, _: int) -> tuple[Weight, ...]:
    """q, k and v are side by side, and cut inside each of the three."""
    h, f = s.hidden, s.intermediate
    return (
        *norm("ln_1", h, bias=True),
        Weight("attn.c_attn.weight", (h, 3, h), cut=2),
        Weight("attn.c_attn.bias", (3, h), cut=1, init="zeros"),
        Weight("attn.c_proj.weight", (h, h), cut=0, init="residual", row=True),
        Weight("attn.c_proj.bias", (h,), init="zeros", row=True),
        *norm("ln_2", h, bias=True),
        Weight("mlp.c_fc.weight", (h, f), cut=1),
        Weight("mlp.c_fc.bias", (f,), cut=0, init="zeros"),
        Weight("mlp.c_proj.weight", (f, h), cut=0, init="residual", row=True),
        Weight("mlp.c_proj.bias", (h,), init="zeros", row=True),
    )


FAMILY = Family(
    model_type="gpt2", architecture="GPT2LMHeadModel",
    fields=FIELDS, read=lambda config: read_sizes(config, DEFAULT, OWN),
    embedding="transformer.wte", blocks="transformer.h", norm="transformer.ln_f", head="lm_head",
    lookups={"transformer.wpe": POSITIONS},
    behind_embedding=("transformer.drop",),
    attention="attn", attention_dropout="attn_dropout", transposed=True,
    block_weights=block_weights,
    embedding_weights=lambda s: (
        *column("transformer.wte", s.vocabulary, s.hidden),
        Weight("transformer.wpe.weight", (s.positions, s.hidden)),
    ),
    norm_weights=lambda s: norm("transformer.ln_f", s.hidden, bias=True),
    head_weights=lambda s: column("lm_head", s.vocabulary, s.hidden),
    older_names={r"^transformer\.": ""},  # bare checkpoints
)
