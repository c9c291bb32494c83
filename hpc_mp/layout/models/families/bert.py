"""BERT: attention in both directions, three embeddings with a norm behind, norms behind the sums of a block. For masked tokens
there is a dense layer before the head, which is tied to the embedding and has a bias; for classification a pooler."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from hpc_mp.layout.models.family import POSITIONS, Family, Weight, column, norm, row
from hpc_mp.layout.models.fields import ACTIVATION, COMMON, DROPOUT, EPSILON, OLDER, READ, SIZES, ConfigField, only
from hpc_mp.layout.models.shape import ModelShape, check_padding, read_sizes

EMBEDDINGS, HEAD = "bert.embeddings", "cls.predictions"
FIELDS = {
    **COMMON,
    **dict.fromkeys((*SIZES, "intermediate_size", "type_vocab_size", "pad_token_id"), READ),
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"), DROPOUT),
    "hidden_act": ACTIVATION,
    "layer_norm_eps": EPSILON,
    "is_decoder": only(False),
    "is_causal": only(False),
    "tie_word_embeddings": only(True, rule="is not supported yet: the head of a BERT model is its embedding"),
    "chunk_size_feed_forward": only(0),
    # Fields that the first checkpoints of this family also contain.
    "position_embedding_type": ConfigField(lambda value: value == "absolute", "is not supported yet", "leave it out", False),
    **dict.fromkeys(("directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers",
                     "pooler_size_per_head", "pooler_type"), OLDER),
}
DEFAULT = ModelShape(  # of transformers' BertConfig (the 110 M model)
    model_type="bert", layers=12, hidden=768, heads=12, kv_heads=0, head_dim=0, intermediate=3072, vocabulary=30522,
    positions=512, tied=True, attention_bias=True, mlp_bias=True, gated_mlp=False, bidirectional=True, token_types=2)


def read(config: Mapping[str, Any]) -> ModelShape:
    shape = read_sizes(config, DEFAULT)
    check_padding(config, shape.vocabulary)
    return shape


def block_weights(s: ModelShape, _: int) -> tuple[Weight, ...]:
    h, f = s.hidden, s.intermediate
    return (
        *(weight for name in ("attention.output", "output") for weight in norm(f"{name}.LayerNorm", h, bias=True)),
        *(weight for name in ("query", "key", "value") for weight in column(f"attention.self.{name}", h, h, bias=True)),
        *row("attention.output.dense", h, h, bias=True),
        *column("intermediate.dense", f, h, bias=True),
        *row("output.dense", h, f, bias=True),
    )


def embedding_weights(s: ModelShape, path: str = EMBEDDINGS) -> tuple[Weight, ...]:
    return (
        *column(f"{path}.word_embeddings", s.vocabulary, s.hidden),
        Weight(f"{path}.position_embeddings.weight", (s.first_position + s.positions, s.hidden)),
        Weight(f"{path}.token_type_embeddings.weight", (s.token_types, s.hidden)),
        *norm(f"{path}.LayerNorm", s.hidden, bias=True),
    )


def whole(s: ModelShape, path: str, outputs: int, deviation: float | None = None) -> tuple[Weight, ...]:
    """Return the weights of a layer of hidden states that every rank computes in full."""
    return Weight(f"{path}.weight", (outputs, s.hidden), deviation=deviation), Weight(f"{path}.bias", (outputs,), init="zeros")


def dense_weights(s: ModelShape, path: str, last: str) -> tuple[Weight, ...]:
    return *whole(s, f"{path}.dense", s.hidden), *norm(f"{path}.{last}", s.hidden, bias=True)


def head_weights(s: ModelShape, path: str) -> tuple[Weight, ...]:
    return *column(f"{path}.decoder", s.vocabulary, s.hidden), Weight(f"{path}.bias", (s.vocabulary,), cut=0, init="zeros")


# The pooler's place is that of the last norm. It is made for the first token, and computed for all.
CLASSIFIER = {
    "norm": "bert.pooler", "output": "pooler_output", "first_token": True, "behind_norm": ("dropout",), "head": "classifier",
    "norm_weights": lambda s: whole(s, "bert.pooler.dense", s.hidden),
    "head_weights": lambda s: whole(s, "classifier", s.classes),
    "fresh": ("bert.pooler.*", "classifier.*"), "beside": ("cls.*", "bert.embeddings.position_ids"),
}
FAMILY = Family(
    model_type="bert", architecture="BertForMaskedLM", since="5.24", fields=FIELDS, read=read,
    embedding=f"{EMBEDDINGS}.word_embeddings", blocks="bert.encoder.layer", norm=f"{HEAD}.transform", head=f"{HEAD}.decoder",
    lookups={f"{EMBEDDINGS}.position_embeddings": POSITIONS, f"{EMBEDDINGS}.token_type_embeddings": "token_types"},
    behind_embedding=(f"{EMBEDDINGS}.LayerNorm", f"{EMBEDDINGS}.dropout"),
    attention="attention.self", attention_dropout="dropout", mlp="intermediate", cut_with={"output": "intermediate"},
    block_weights=block_weights, embedding_weights=embedding_weights, head_weights=partial(head_weights, path=HEAD),
    norm_weights=partial(dense_weights, path=f"{HEAD}.transform", last="LayerNorm"),
    older_names={r"LayerNorm\.weight$": "LayerNorm.gamma", r"LayerNorm\.bias$": "LayerNorm.beta"},
    beside=("bert.pooler.*", "cls.seq_relationship.*", f"{HEAD}.decoder.bias", "bert.embeddings.position_ids"),
    classifier=CLASSIFIER,
)
