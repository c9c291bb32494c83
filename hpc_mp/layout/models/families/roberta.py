"""RoBERTa: BERT whose positions begin behind the number of the padding and leave padding out. Its heads are modules with a layer
before them."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from hpc_mp.base.errors import HpcMpError
from hpc_mp.layout.models.families import bert
from hpc_mp.layout.models.family import POSITIONS
from hpc_mp.layout.models.fields import ConfigField
from hpc_mp.layout.models.shape import ModelShape, check_padding, read_sizes

EMBEDDINGS, HEAD = "roberta.embeddings", "lm_head"
FIELDS = {
    **bert.FIELDS,
    "pad_token_id": ConfigField(lambda value: type(value) is int and value >= 0, "must be the number of a token: positions are "
                                "counted behind it", "write pad_token_id = 1"),
}
DEFAULT = replace(bert.DEFAULT, model_type="roberta", vocabulary=50265)  # of transformers' RobertaConfig


def read(config: Mapping[str, Any]) -> ModelShape:
    shape, padding = read_sizes(config, DEFAULT), config.get("pad_token_id", 1)
    check_padding(config, shape.vocabulary)
    if shape.positions <= padding + 1:
        raise HpcMpError(f"the model's max_position_embeddings = {shape.positions}",
                         f"leaves no positions behind pad_token_id = {padding}", f"choose at least {padding + 2}")
    return replace(shape, positions=shape.positions - padding - 1, first_position=padding + 1)


BESIDE = "roberta.pooler.*", f"{EMBEDDINGS}.position_ids"
CLASSIFIER = {
    "norm": "classifier", "first_token": True, "twice": "classifier.dropout", "head": "classifier.out_proj",
    "norm_weights": lambda s: bert.whole(s, "classifier.dense", s.hidden),
    "head_weights": lambda s: bert.whole(s, "classifier.out_proj", s.classes),
    "fresh": ("classifier.*",), "beside": (*BESIDE, f"{HEAD}.*"),
}
FAMILY = replace(
    bert.FAMILY,
    model_type="roberta", architecture="RobertaForMaskedLM",
    fields=FIELDS, read=read,
    embedding=f"{EMBEDDINGS}.word_embeddings", blocks="roberta.encoder.layer", norm=HEAD, head=f"{HEAD}.decoder",
    lookups={f"{EMBEDDINGS}.position_embeddings": POSITIONS, f"{EMBEDDINGS}.token_type_embeddings": "token_types"},
    behind_embedding=(f"{EMBEDDINGS}.LayerNorm", f"{EMBEDDINGS}.dropout"),
    embedding_weights=partial(bert.embedding_weights, path=EMBEDDINGS),
    norm_weights=partial(bert.dense_weights, path=HEAD, last="layer_norm"),
    head_weights=partial(bert.head_weights, path=HEAD),
    older_names={}, classifier=CLASSIFIER,
    beside=(*BESIDE, f"{HEAD}.decoder.bias"),
)
