"""BERT for masked tokens: attention in both directions, three embeddings with a norm behind, norms behind the sums of a block,
and a dense layer before the head, which is tied to the embedding and has a bias."""

from collections.abc import Mapping
from typing import Any

from hpc_mp.layout.models.family import POSITIONS, Family, Projection, Weight
from hpc_mp.layout.models.fields import ACTIVATION, COMMON, EPSILON, PROBABILITY, READ, ConfigField, only
from hpc_mp.layout.models.shape import MOST_LAYERS, ConfigReader, ModelShape

DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob")
EMBEDDINGS, HEAD = "bert.embeddings", "cls.predictions"

FIELDS: Mapping[str, ConfigField] = {
    **COMMON,
    **dict.fromkeys(("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
                     "max_position_embeddings", "type_vocab_size", "initializer_range", "pad_token_id"), READ),
    **dict.fromkeys(DROPOUTS, PROBABILITY),
    "hidden_act": ACTIVATION,
    "layer_norm_eps": EPSILON,
    "classifier_dropout": READ,  # of the classification model
    "is_decoder": only(False),
    "is_causal": only(False),
    "tie_word_embeddings": only(True, rule="is not supported yet: the head of a BERT model is its embedding"),
    "chunk_size_feed_forward": only(0),
    # Fields that the first checkpoints of this family also contain.
    "position_embedding_type": ConfigField(lambda value: value == "absolute", "is not supported yet", "leave it out", False),
    **dict.fromkeys(("directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers",
                     "pooler_size_per_head", "pooler_type"), ConfigField(in_job=False)),
}


def read(config: Mapping[str, Any]) -> ModelShape:
    """Read the shape. Defaults: transformers' BertConfig (the 110 M model)."""
    c = ConfigReader(config)
    hidden, heads = c.count("hidden_size", default=768), c.count("num_attention_heads", default=12)
    vocabulary = c.count("vocab_size", default=30522)
    c.row("pad_token_id", vocabulary)
    return ModelShape(
        model_type="bert", layers=c.count("num_hidden_layers", default=12, limit=MOST_LAYERS), hidden=hidden, heads=heads,
        kv_heads=heads, head_dim=c.quotient("hidden_size", hidden, "num_attention_heads", heads),
        intermediate=c.count("intermediate_size", default=3072), vocabulary=vocabulary,
        positions=c.count("max_position_embeddings", default=512), tied=True, attention_bias=True, mlp_bias=True, gated_mlp=False,
        initializer_range=c.number("initializer_range", 0.02), token_types=c.count("type_vocab_size", default=2),
        bidirectional=True,
    )


def norm(name: str, hidden: int) -> tuple[Weight, Weight]:
    return Weight(f"{name}.weight", (hidden,), init="ones"), Weight(f"{name}.bias", (hidden,), init="zeros")


def block_weights(s: ModelShape, _: int) -> tuple[Weight, ...]:
    h, f = s.hidden, s.intermediate
    sizes = dict.fromkeys(PROJECTIONS, (h, h)) | {"intermediate.dense": (f, h), "output.dense": (h, f)}
    weights = [*norm("attention.output.LayerNorm", h), *norm("output.LayerNorm", h)]
    for name, how in PROJECTIONS.items():
        column = how == "column"
        weights.append(Weight(f"{name}.weight", sizes[name], cut=0 if column else 1))
        weights.append(Weight(f"{name}.bias", sizes[name][:1], cut=0 if column else None, init="zeros"))
    return tuple(weights)


PROJECTIONS: Mapping[str, Projection] = {
    "attention.self.query": "column", "attention.self.key": "column", "attention.self.value": "column",
    "attention.output.dense": "row", "intermediate.dense": "column", "output.dense": "row"}
FAMILY = Family(
    model_type="bert",
    architecture="BertForMaskedLM",
    modules=("transformers.models.bert.modeling_bert",),
    fields=FIELDS,
    read=read,
    embedding=f"{EMBEDDINGS}.word_embeddings",
    lookups={f"{EMBEDDINGS}.position_embeddings": POSITIONS, f"{EMBEDDINGS}.token_type_embeddings": "token_types"},
    behind_embedding=(f"{EMBEDDINGS}.LayerNorm", f"{EMBEDDINGS}.dropout"),
    blocks="bert.encoder.layer",
    hidden_argument="hidden_states",
    norm=f"{HEAD}.transform",
    head=f"{HEAD}.decoder",
    rotary=None,
    attention="attention.self",
    attention_dropout="dropout",
    projections=PROJECTIONS,
    transposed=False,
    enters=("attention.self", "intermediate"),
    cut_with={"output": "intermediate"},
    block_weights=block_weights,
    embedding_weights=lambda s: (
        Weight(f"{EMBEDDINGS}.word_embeddings.weight", (s.vocabulary, s.hidden), cut=0),
        Weight(f"{EMBEDDINGS}.position_embeddings.weight", (s.positions, s.hidden)),
        Weight(f"{EMBEDDINGS}.token_type_embeddings.weight", (s.token_types, s.hidden)),
        *norm(f"{EMBEDDINGS}.LayerNorm", s.hidden),
    ),
    norm_weights=lambda s: (
        Weight(f"{HEAD}.transform.dense.weight", (s.hidden, s.hidden)),
        Weight(f"{HEAD}.transform.dense.bias", (s.hidden,), init="zeros"),
        *norm(f"{HEAD}.transform.LayerNorm", s.hidden),
    ),
    head_weights=lambda s: (
        Weight(f"{HEAD}.decoder.weight", (s.vocabulary, s.hidden), cut=0),
        Weight(f"{HEAD}.bias", (s.vocabulary,), cut=0, init="zeros"),
    ),
    dropouts=DROPOUTS,
    since="5.24",
    older_endings={"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"},
    beside=("bert.pooler.*", "cls.seq_relationship.*", f"{HEAD}.decoder.bias", "bert.embeddings.position_ids"),
)
