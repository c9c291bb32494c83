"""Models of masked tokens: on forked ranks, and in one process of plain transformers, on the same batches."""

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import transformers
from layouts import MASKED
from lists import SAMPLES, SEED, Flat, Reference, Report, apart, by_torch, on_rank
from ranks import run_ranks
from torch import Tensor, nn
from transformers.models.bert import modeling_bert

from hpc_mp.layout.layout import Layout
from hpc_mp.layout.models import FAMILIES, Family
from hpc_mp.train.model import initial
from hpc_mp.train.model.transformers_model import TransformersModel
from hpc_mp.train.model.transformers_modules import hugging_face_config
from hpc_mp.train.model.vocabulary import IGNORED
from hpc_mp.train.parallel.dropout import DropoutClock
from hpc_mp.train.parallel.fill import Source

LENGTH, STEPS, PADDING = 14, 3, 3
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Training:
    """A model and its batches.

    Attributes:
        config: keys of the configuration that differ from the table's.
        family: a change of the family's table.
        without: what batches lack: kinds of tokens, or the ends of samples that are filled up.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    family: Callable[[Family], Family] = lambda family: family
    without: frozenset[str] = frozenset()

    def model(self, recompute: str = "none") -> TransformersModel:
        config = tomllib.loads(f"config = {{ {MASKED['bert']} }}")["config"] | self.config
        family = self.family(FAMILIES[config["model_type"]])
        return TransformersModel(hugging_face_config(config, family, None, recompute), family, family.read(config))

    def batches(self) -> list[Batch]:
        """The global batch of every step."""
        return [{name: tensor for name, tensor in _batch(step, self.model().shape.vocabulary).items() if name not in self.without}
                for step in range(STEPS)]


def _batch(step: int, words: int) -> Batch:
    """Few tokens have labels. Tokens are of three kinds, and some samples end with padding, a document of its own."""
    generator, size = torch.Generator().manual_seed(step), (SAMPLES, LENGTH)
    ids, labels = (torch.randint(words, size, generator=generator) for _ in range(2))
    ids[:, ::5] = PADDING  # whose row of the embedding learns as the head's alone, wherever it stands
    ends = torch.randint(LENGTH // 2, LENGTH + 3, (SAMPLES, 1), generator=generator).clamp(max=LENGTH)
    padding = torch.arange(LENGTH) >= ends
    labels[(torch.rand(size, generator=generator) > 0.2) | padding] = IGNORED
    return {"ids": ids, "labels": labels, "token_types": torch.randint(3, size, generator=generator),
            "documents": torch.cat((torch.zeros_like(ends), ends), 1)}


def values(model: TransformersModel) -> Source:
    row = {f"{model.family.embedding}.weight": PADDING}
    return initial.drawn(SEED, model.shape.layers, model.shape.initializer_range, row)


def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float,
              **_: Any) -> tuple[Tensor, Tensor]:
    """The eager attention of transformers, with the dropout of the module."""
    scores = query @ key.transpose(2, 3) * scaling
    weights = (scores if attention_mask is None else scores + attention_mask).softmax(-1)
    return (module.get_submodule("dropout")(weights) @ value).transpose(1, 2).contiguous(), weights


def plain(training: Training) -> Reference:
    """Train one process of plain transformers, whose dropout drops the same."""
    torch.set_num_threads(1)
    model, clock = training.model(), DropoutClock(SEED)
    drops = model.config.attention_probs_dropout_prob > 0
    config = type(model.config)(**model.config.to_dict() | {"attn_implementation": "eager" if drops else "sdpa"})
    whole = getattr(transformers, model.family.architecture)(config).double()
    for path, module in list(whole.named_modules()):
        if isinstance(module, nn.Dropout):
            parent, leaf = path.rsplit(".", 1)
            layer = path.removeprefix("bert.encoder.layer.").removesuffix(".attention.self.dropout")
            site = f"attention.{layer}" if layer.isdigit() else path
            setattr(whole.get_submodule(parent), leaf, Flat(module, site, clock))
    if drops:
        modeling_bert.eager_attention_forward = attention
    weights, source, named = model.family.all_weights(model.shape), values(model), dict(whole.named_parameters())
    with torch.no_grad():
        for weight in weights:
            named[weight.name].copy_(source(weight, tuple(slice(0, size) for size in weight.shape)))
    assert named.keys() == {weight.name for weight in weights}

    def loss(batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        types, documents = batch.get("token_types"), batch.get("documents")
        mask = None if documents is None else (torch.arange(LENGTH) < documents[:, 1:]).long()
        logits = whole(batch["ids"], token_type_ids=types, attention_mask=mask).logits
        labels = batch["labels"]
        total = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
        return total, (labels != IGNORED).sum()

    first = {name: parameter.detach().clone() for name, parameter in named.items()}
    losses, norms, parameters = by_torch(loss, named, clock, training.batches())
    still = {name for name, parameter in parameters.items() if float((parameter - first[name]).abs().max()) < 1e-5}
    assert all(name.endswith("key.bias") for name in still), "all must move, or nothing is shown; this one moves no score"
    return losses, norms, parameters


def distance(layout: Layout, training: Training, reference: Training | None = None,
             before: Callable[[], None] = lambda: None) -> float:
    """Return the largest difference of any loss, norm or parameter between the engine and plain transformers.

    Args:
        before: called in every rank first.
    """
    def rank() -> Report:
        before()
        model = training.model(layout.recompute)
        return on_rank(replace(layout, sequence=LENGTH), model, values(model), training.batches())

    return apart(run_ranks(layout.ranks, rank), partial(plain, reference or training))
