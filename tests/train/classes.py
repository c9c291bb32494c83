"""Models for classification: on forked ranks, and in one process of plain transformers, on the same rows."""

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import torch
import transformers
from beside import SAMPLES, SEED, Flat, Reference, by_torch, distance_of
from layouts import FAMILIES as OTHERS
from layouts import MASKED, MODELS
from masked import attention
from torch import Tensor, nn

from hpc_mp.layout.models import family_of
from hpc_mp.layout.models.reading import model_shape
from hpc_mp.train.device.precision import StaysDouble
from hpc_mp.train.model import initial
from hpc_mp.train.model.transformers_model import TransformersModel
from hpc_mp.train.model.transformers_modules import hugging_face_config
from hpc_mp.train.model.vocabulary import IGNORED
from hpc_mp.train.parallel.dropout import DropoutClock
from hpc_mp.train.parallel.fill import Source

LENGTH, STEPS, CLASSES, PADDING = 14, 3, 3, 3
MISTRAL = ('model_type = "mistral", num_hidden_layers = 5, hidden_size = 32, num_attention_heads = 8, num_key_value_heads = 4, '
           'intermediate_size = 102, vocab_size = 307, max_position_embeddings = 32, sliding_window = 7')
CONFIGS = MODELS | OTHERS | MASKED | {"mistral": MISTRAL}
Batch = dict[str, Tensor]


def unchanged(batch: Batch) -> Batch:
    return batch


@dataclass(frozen=True)
class Training:
    """A model and its rows. ``config``: keys of the configuration that differ. ``change``: of each batch."""

    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    change: Callable[[Batch], Batch] = unchanged

    def model(self, recompute: str = "none") -> TransformersModel:
        config = tomllib.loads(f"config = {{ {CONFIGS[self.name]} }}")["config"] | {"pad_token_id": PADDING} | self.config
        shape = model_shape(config, "a checkpoint").of_classes(CLASSES)
        family, labels = family_of(shape), {f"{number}": f"class {number}" for number in range(CLASSES)}
        config |= {"id2label": labels, "initializer_range": 0.2}
        built = hugging_face_config(config, family, None, recompute)
        return TransformersModel(built, family, replace(shape, initializer_range=0.2))

    def batches(self) -> list[Batch]:
        """The global batch of every step."""
        shape = self.model().shape
        return [self.change(_batch(step, shape.vocabulary, shape.bidirectional)) for step in range(STEPS)]


def _batch(step: int, words: int, first: bool) -> Batch:
    """Rows of several lengths; the end of one is no padding."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(PADDING + 1, words, (SAMPLES, LENGTH), generator=generator)
    sizes = torch.randint(1, LENGTH + 3, (SAMPLES, 1), generator=generator).clamp(max=LENGTH)
    classes = torch.randint(CLASSES, (SAMPLES, 1), generator=generator)
    places = torch.arange(LENGTH)
    batch = {"ids": ids.where(places < sizes, PADDING), "token_types": (places > sizes // 2).long(),
             "labels": classes.where(places == (0 if first else sizes - 1), IGNORED)}
    return batch | ({"documents": torch.cat((torch.zeros_like(sizes), sizes), 1)} if first else {})


def values(model: TransformersModel) -> Source:
    return initial.drawn(SEED, model.shape.layers, model.shape.initializer_range, model.padding)


class First(Flat):
    """Dropout of the first tokens of samples, (samples, hidden)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.unsqueeze(1)).squeeze(1)


def drop(whole: nn.Module, model: TransformersModel, clock: DropoutClock) -> None:
    """Make a model drop the same. Outside of its base a dropout is of first tokens, and may be called twice."""
    family, probability = model.family, model.family.attention_probability(model.config)
    sites = {f"{family.path(layer)}.{family.attention}": f"attention.{layer}" for layer in range(model.shape.layers)}
    for path in sites:
        whole.get_submodule(path).dropout = nn.Dropout(probability)  # some models have it already
    for path, module in list(whole.named_modules()):
        if isinstance(module, nn.Dropout):
            parent, _, leaf = path.rpartition(".")
            kind = Flat if path.startswith(f"{family.base}.") else First
            site, times = sites.get(path.removesuffix(".dropout"), path), 2 if path == "classifier.dropout" else 1
            setattr(whole.get_submodule(parent), leaf, kind(module, site, clock, times))
    if probability:
        import_module(family.modules[0]).eager_attention_forward = attention  # type: ignore[attr-defined]


def plain(training: Training) -> Reference:
    """Train one process of plain transformers, whose dropout drops the same."""
    torch.set_num_threads(1)
    model, clock = training.model(), DropoutClock(SEED)
    drops = model.family.attention_probability(model.config) > 0
    caps = getattr(model.config, "attn_logit_softcapping", None) is not None
    with StaysDouble():
        config = type(model.config)(**model.config.to_dict() | {"attn_implementation": "eager" if drops or caps else "sdpa"})
        config._experts_implementation = "eager"  # the other implementations of transformers do not support fp64
        whole = getattr(transformers, model.family.architecture)(config).double()
    if model.shape.bidirectional:
        drop(whole, model, clock)
    source, named = values(model), dict(whole.named_parameters())
    with torch.no_grad():
        for weight in model.family.all_weights(model.shape):
            drawn = source(weight, tuple(slice(0, size) for size in weight.shape))
            named[weight.name].copy_(drawn.reshape(named[weight.name].shape))

    def loss(batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        types = {"token_type_ids": batch["token_types"]} if model.shape.token_types else {}
        labels = batch["labels"][batch["labels"] != IGNORED]
        with StaysDouble():
            output = whole(batch["ids"], attention_mask=(batch["ids"] != PADDING).long(), labels=labels, **types)
        return output.loss * len(labels), torch.tensor(len(labels))

    first = {name: parameter.detach().clone() for name, parameter in named.items()}
    losses, norms, parameters = by_torch(loss, named, clock, training.batches())
    still = {name for name, parameter in parameters.items() if float((parameter - first[name]).abs().max()) < 1e-5}
    assert all(name.endswith(("key.bias", "k_proj.bias")) for name in still), still  # which move no score
    stored = {weight.name: weight.shape for weight in model.family.all_weights(model.shape)}
    return losses, norms, {name: values.reshape(stored[name]) for name, values in parameters.items()}


distance = distance_of(LENGTH, values, plain)
