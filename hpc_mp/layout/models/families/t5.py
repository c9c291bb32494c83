"""T5, an encoder and a decoder: layers of the encoder are the first ones, those of the decoder follow.

Stages carry two named tensors, the encoder's hidden states and the decoder's, which all begin with ``shared`` on the first stage.
What several stages need of a few numbers, the two tables of relative positions and the norm behind the encoder, is also held by
the first stage alone and travels beside them. The gradients come back the same way, as sums: no stage has a copy of a weight but
of ``shared`` as the head. In T5 1.1 (MLPs with a gate) the head is a matrix of its own, and hidden states are not scaled.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.text import shown
from hpc_mp.layout.models.family import Decoder, Family, Weight, column, norm, row
from hpc_mp.layout.models.fields import ACTIVATIONS, COMMON, DROPOUT, EPSILON, OLDER, READ, ConfigField, Fields, only
from hpc_mp.layout.models.shape import MOST, ModelShape, count, read_sizes
from hpc_mp.layout.models.sheet import ReadShape

OWN = {"d_model": "hidden", "num_heads": "heads", "num_layers": "layers", "d_kv": "head_dim", "d_ff": "intermediate"}
GATED, BUCKETS = "gated-", 32
TABLE = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
FIELDS: Fields = {
    **COMMON,
    **dict.fromkeys((*OWN, "hidden_size", "num_attention_heads", "num_hidden_layers", "head_dim", "num_decoder_layers",
                     "vocab_size", "relative_attention_num_buckets", "relative_attention_max_distance", "pad_token_id",
                     "decoder_start_token_id", "classifier_dropout", "scale_decoder_outputs"), READ),
    # The first two follow from another field; of the last one only first values depend.
    **dict.fromkeys(("dense_act_fn", "is_gated_act", "n_positions", "initializer_factor"), OLDER),
    "dropout_rate": DROPOUT,
    "layer_norm_epsilon": EPSILON,
    "feed_forward_proj": ConfigField(lambda value: str(value).removeprefix(GATED) in ACTIVATIONS, "is not a supported activation",
                                     'use for example "relu" or "gated-gelu"'),
    "is_encoder_decoder": only(True),
    "is_decoder": only(False),
}
DEFAULT = ModelShape(  # of transformers' T5Config (the 60 M model)
    model_type="t5", layers=6, hidden=512, heads=8, kv_heads=0, head_dim=64, intermediate=2048, vocabulary=32128, positions=MOST,
    tied=True, attention_bias=False, mlp_bias=False, gated_mlp=False)
REASON = "the tokens of a sample are those of a prompt, or those of a response"


def read(config: Mapping[str, Any]) -> ReadShape:
    """Return the shape, with a family that has this model's number of layers and buckets."""
    shape = read_sizes(config, DEFAULT, OWN)
    tied = config.get("scale_decoder_outputs", config.get("tie_word_embeddings")) is not False  # transformers writes the former
    # transformers' T5 says that the decoder usually starts with padding, which is 0.
    names = "decoder_start_token_id", "pad_token_id"
    start = next((config[name] for name in names if config.get(name) is not None), 0)
    if type(start) is not int or not 0 <= start < shape.vocabulary:
        raise HpcMpError(f"the model's decoder_start_token_id = {shown(start)}",
                         f"must be a whole number from 0 to {shape.vocabulary - 1}", "set it to that of padding")
    family = replace(
        FAMILY, decoder=replace(DECODER, first=shape.layers), head_scale=shape.hidden**-0.5 if tied else 1.0,
        embedding_weights=partial(embedding_weights, count(config, "relative_attention_num_buckets", BUCKETS)))
    values = {field.name: getattr(shape, field.name) for field in fields(shape)} | {
        "encoder": shape.layers, "layers": shape.layers + count(config, "num_decoder_layers", shape.layers),
        "tied": tied, "start": start, "gated_mlp": str(config.get("feed_forward_proj")).startswith(GATED)}
    return ReadShape(**values, family=family)


def _matrix(make: Callable[..., tuple[Weight, ...]], name: str, out: int, inner: int, deviation: float) -> Weight:
    return replace(make(name, out, inner)[0], deviation=deviation)


def block_weights(s: ModelShape, layer: int) -> tuple[Weight, ...]:
    h, f, inner = s.hidden, s.intermediate, s.heads * s.head_dim
    attentions = ["layer.0.SelfAttention", *(["layer.1.EncDecAttention"] if layer >= s.encoder else [])]
    mlp = f"layer.{len(attentions)}.DenseReluDense"
    return (
        *(norm(f"layer.{place}.layer_norm", h)[0] for place in range(len(attentions) + 1)),
        *(_matrix(column, f"{attention}.{name}", inner, h, h**-0.5 * (s.head_dim**-0.5 if name == "q" else 1.0))
          for attention in attentions for name in "qkv"),
        *(_matrix(row, f"{attention}.o", h, inner, inner**-0.5) for attention in attentions),
        *(_matrix(column, f"{mlp}.{name}", f, h, h**-0.5) for name in (("wi_0", "wi_1") if s.gated_mlp else ("wi",))),
        _matrix(row, f"{mlp}.wo", h, f, f**-0.5),
    )


def embedding_weights(buckets: int, s: ModelShape) -> tuple[Weight, ...]:
    tables = (Weight(f"{stack}.{TABLE}", (buckets, s.heads), cut=1, deviation=s.hidden**-0.5) for stack in ("encoder", "decoder"))
    return _matrix(column, "shared", s.vocabulary, s.hidden, 1.0), *tables, *norm("encoder.final_layer_norm", s.hidden)


DECODER = Decoder("decoder.block", 0, "layer.1.EncDecAttention", "layer.2.DenseReluDense")
FAMILY = Family(
    model_type="t5", architecture="T5ForConditionalGeneration", since="5.24",
    fields=FIELDS, read=read,
    embedding="shared", blocks="encoder.block", norm="decoder.final_layer_norm", head="lm_head", decoder=DECODER, depth=3,
    attention="layer.0.SelfAttention", mlp="layer.1.DenseReluDense", alike=False, needs_samples=REASON, needs_tokens=REASON,
    block_weights=block_weights, embedding_weights=partial(embedding_weights, BUCKETS),
    norm_weights=lambda s: norm("decoder.final_layer_norm", s.hidden),
    head_weights=lambda s: (_matrix(column, "lm_head", s.vocabulary, s.hidden, 1.0),),
    older_names={r"^shared\.": "encoder.embed_tokens."},
    beside=("*coder.embed_tokens.weight", "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"),
)
