"""ModernBERT: windows on both sides in two of three layers, rotary positions of two kinds, q, k and v fused, a
gated MLP, and no norm before the first attention."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hpc_mp.base.errors import HpcMpError
from hpc_mp.layout.models.families import bert
from hpc_mp.layout.models.families.gemma2 import KINDS
from hpc_mp.layout.models.family import Family, Weight, column, norm, row
from hpc_mp.layout.models.fields import ACTIVATION, COMMON, DROPOUT, EPSILON, OLDER, POSITIVE, READ, SIZES, only
from hpc_mp.layout.models.rotary import check_rotary
from hpc_mp.layout.models.shape import ModelShape, check_padding, count, read_sizes

FIELDS = {
    **COMMON,
    **dict.fromkeys((*SIZES, "intermediate_size", "pad_token_id", "attention_bias", "mlp_bias", "layer_types", "local_attention",
                     "global_attn_every_n_layers", "rope_parameters", "initializer_cutoff_factor"), READ),
    **dict.fromkeys(("sparse_prediction", "sparse_pred_ignore_index", "deterministic_flash_attn", "cls_token_id",
                     "sep_token_id"), READ),  # of transformers' own loss and kernels, and of tokenizers
    **dict.fromkeys(("attention_dropout", "embedding_dropout", "classifier_dropout"), DROPOUT),
    "classifier_pooling": only("cls", "mean", rule="is not known", remedy='choose "cls", the first token, or "mean"'),
    **dict.fromkeys(("hidden_activation", "classifier_activation"), ACTIVATION),
    **dict.fromkeys(("global_rope_theta", "local_rope_theta"), POSITIVE),
    "norm_eps": EPSILON,
    "mlp_dropout": only(0, rule="is not supported: it drops what tensor ranks have parts of", remedy="set it to 0"),
    **dict.fromkeys(("norm_bias", "classifier_bias"), only(False)),
    **dict.fromkeys(("decoder_bias", "tie_word_embeddings"), only(True)),
    **{name: bert.FIELDS[name] for name in ("is_causal", "is_decoder", "position_embedding_type")},
    **dict.fromkeys(("layer_norm_eps", "reference_compile", "repad_logits_with_grad"), OLDER),
}
DEFAULT = replace(  # of transformers' ModernBertConfig (the 149 M model)
    bert.DEFAULT, model_type="modernbert", layers=22, intermediate=1152, vocabulary=50368, positions=8192, attention_bias=False,
    mlp_bias=False, gated_mlp=True, token_types=0)


def read(config: Mapping[str, Any]) -> ModelShape:
    """Read the sizes. A window counts a token and half of ``local_attention`` on either side."""
    shape = read_sizes(config, DEFAULT)
    check_padding({"pad_token_id": 50283, **config}, shape.vocabulary)
    every, window = count(config, "global_attn_every_n_layers", 3), count(config, "local_attention", 128) // 2 + 1
    kinds = config.get("layer_types") or [KINDS[layer % every == 0] for layer in range(shape.layers)]
    if not isinstance(kinds, list) or len(kinds) != shape.layers or not set(kinds) <= set(KINDS):
        raise HpcMpError("the model's layer_types", f"must be one of {' and '.join(KINDS)} for each of {shape.layers} layers",
                         "leave it out: two of three layers have windows")
    tables = config.get("rope_parameters") or {}
    for settings in tables.values() if isinstance(tables, Mapping) else (tables,):
        check_rotary({"rope_parameters": settings}, shape.head_dim)
    return replace(shape, windows=tuple(window if kind == KINDS[0] else None for kind in kinds))


def block_weights(s: ModelShape, layer: int) -> tuple[Weight, ...]:
    h, f = s.hidden, s.intermediate
    fused = (("attn.Wqkv", (3, h), s.attention_bias), ("mlp.Wi", (2, f), s.mlp_bias))  # parts side by side
    return (
        *(norm("attn_norm", h) if layer else ()),
        *norm("mlp_norm", h),
        *(Weight(f"{name}.weight", (*parts, h), cut=1) for name, parts, _ in fused),
        *(Weight(f"{name}.bias", parts, cut=1, init="zeros") for name, parts, bias in fused if bias),
        *row("attn.Wo", h, h, s.attention_bias, "residual"),
        *row("mlp.Wo", h, f, s.mlp_bias, "residual"),
    )


CLASSIFIER = {
    "behind_norm": ("head", "drop"), "head": "classifier", "fresh": ("classifier.*",),
    "head_weights": lambda s: bert.whole(s, "classifier", s.classes, s.hidden**-0.5),
}
FAMILY = Family(
    model_type="modernbert", architecture="ModernBertForMaskedLM", since="5.24",
    fields=FIELDS, read=read,
    embedding="model.embeddings.tok_embeddings", blocks="model.layers", norm="model.final_norm", head="decoder",
    behind_embedding=("model.embeddings.norm", "model.embeddings.drop"), rotary=("model.rotary_emb",),
    attention="attn", alike=False, behind_norm=("head",), classifier=CLASSIFIER,
    block_weights=block_weights,
    embedding_weights=lambda s: (
        *column("model.embeddings.tok_embeddings", s.vocabulary, s.hidden), *norm("model.embeddings.norm", s.hidden)),
    norm_weights=lambda s: (
        *norm("model.final_norm", s.hidden), Weight("head.dense.weight", (s.hidden, s.hidden)), *norm("head.norm", s.hidden)),
    head_weights=lambda s: column("decoder", s.vocabulary, s.hidden, bias=True),
)
