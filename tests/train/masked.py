"""Models of masked tokens: on forked ranks, and in one process of plain transformers, on the same batches."""

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from itertools import pairwise
from typing import Any

import torch
import transformers
from beside import SAMPLES, SEED, Flat, Reference, by_torch, distance_of
from layouts import MASKED
from torch import Tensor, nn

from hpc_mp.layout.models import FAMILIES, Family
from hpc_mp.train.device.precision import StaysDouble
from hpc_mp.train.model import initial
from hpc_mp.train.model.transformers_model import TransformersModel
from hpc_mp.train.model.transformers_modules import hugging_face_config
from hpc_mp.train.model.vocabulary import IGNORED
from hpc_mp.train.parallel.dropout import DropoutClock
from hpc_mp.train.parallel.fill import Source

LENGTH, STEPS, PADDING = 14, 3, 3
Batch = dict[str, Tensor]


def unchanged(family: Family) -> Family:
    return family


@dataclass(frozen=True)
class Training:
    """A model and its batches.

    Attributes:
        config: keys of the configuration that differ from the table's.
        family: a change of the family's table.
        without: what batches lack: kinds of tokens, or the ends of samples that are filled up.
        kind: of the model.
        packed: True if samples are two documents each, besides padding.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    family: Callable[[Family], Family] = unchanged
    without: frozenset[str] = frozenset()
    kind: str = "bert"
    packed: bool = False

    def model(self, recompute: str = "none") -> TransformersModel:
        config = tomllib.loads(f"config = {{ {MASKED[self.kind]} }}")["config"] | self.config
        family = self.family(FAMILIES[config["model_type"]])
        return TransformersModel(hugging_face_config(config, family, None, recompute), family, family.read(config))

    def batches(self) -> list[Batch]:
        """The global batch of every step."""
        shape = self.model().shape
        lacking = self.without if shape.token_types else {*self.without, "token_types"}
        return [{name: tensor for name, tensor in _batch(step, shape.vocabulary, self.packed).items() if name not in lacking}
                for step in range(STEPS)]


def _batch(step: int, words: int, packed: bool) -> Batch:
    """Few tokens have labels. Tokens are of three kinds, and some samples end with padding, a document of its own."""
    generator, size = torch.Generator().manual_seed(step), (SAMPLES, LENGTH)
    ids, labels = (torch.randint(words, size, generator=generator) for _ in range(2))
    ids[:, ::5] = PADDING  # whose row of the embedding learns as the head's alone, wherever it stands
    ends = torch.randint(LENGTH // 2, LENGTH + 3, (SAMPLES, 1), generator=generator).clamp(max=LENGTH)
    padding = torch.arange(LENGTH) >= ends
    labels[(torch.rand(size, generator=generator) > 0.2) | padding] = IGNORED
    begins = torch.cat((torch.zeros_like(ends), ends // 2, ends), 1)
    return {"ids": ids, "labels": labels, "token_types": torch.randint(3, size, generator=generator),
            "documents": begins if packed else begins[:, ::2]}


def values(model: TransformersModel) -> Source:
    rows = {**model.padding, f"{model.family.embedding}.weight": PADDING}
    return initial.drawn(SEED, model.shape.layers, model.shape.initializer_range, rows)


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
    family, drops = model.family, model.family.attention_probability(model.config)
    config = type(model.config)(**model.config.to_dict() | {"attn_implementation": "eager" if drops else "sdpa"})
    with StaysDouble():
        whole = getattr(transformers, family.architecture)(config).double()
    sites = {f"{family.blocks}.{layer}.{family.attention}": f"attention.{layer}" for layer in range(model.shape.layers)}
    for path in sites:
        whole.get_submodule(path).dropout = nn.Dropout(drops)  # some models have it already
    for path, module in list(whole.named_modules()):
        if isinstance(module, nn.Dropout):
            parent, leaf = path.rsplit(".", 1)
            setattr(whole.get_submodule(parent), leaf, Flat(module, sites.get(path.removesuffix(".dropout"), path), clock))
    if drops:
        import_module(family.modules[0]).eager_attention_forward = attention  # type: ignore[attr-defined]
    weights, source, named = family.all_weights(model.shape), values(model), dict(whole.named_parameters())
    with torch.no_grad():
        for weight in weights:
            named[weight.name].copy_(source(weight, tuple(slice(0, size) for size in weight.shape)).view_as(named[weight.name]))
    assert named.keys() == {weight.name for weight in weights}

    def scores(ids: Tensor, mask: Tensor | None, kinds: Mapping[str, Tensor]) -> Tensor:
        logits: Tensor = whole(ids, attention_mask=mask, **kinds).logits
        return logits

    def loss(batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        ids, labels, documents = batch["ids"], batch["labels"], batch.get("documents")
        kinds = {"token_type_ids": batch["token_types"]} if "token_types" in batch else {}
        if training.packed and documents is not None:  # each by itself
            logits = torch.cat([scores(ids[at:at + 1, begin:end], None, {
                name: values[at:at + 1, begin:end] for name, values in kinds.items()})
                for at, row in enumerate(documents.tolist()) for begin, end in pairwise((*row, LENGTH)) if begin < end], 1)
        else:
            logits = scores(ids, None if documents is None else (torch.arange(LENGTH) < documents[:, 1:]).long(), kinds)
        total = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
        return total, (labels != IGNORED).sum()

    first = {name: parameter.detach().clone() for name, parameter in named.items()}
    with StaysDouble():
        losses, norms, parameters = by_torch(loss, named, clock, training.batches())
    still = {name for name, parameter in parameters.items() if float((parameter - first[name]).abs().max()) < 1e-5}
    assert all(name.endswith("key.bias") for name in still), "all must move, or nothing is shown; this one moves no score"
    return losses, norms, {weight.name: parameters[weight.name].view(weight.shape) for weight in weights}


distance = distance_of(LENGTH, values, plain)
