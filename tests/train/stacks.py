"""T5 on forked ranks, and in one process of plain transformers, on the same prompts and responses."""

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from beside import SAMPLES, SEED, Flat, Reference, by_torch, distance_of
from layouts import STACKS
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration
from transformers.models.t5 import modeling_t5

from hpc_mp.layout.models import FAMILIES, family_of
from hpc_mp.train.device.precision import StaysDouble
from hpc_mp.train.model import initial
from hpc_mp.train.model.transformers_model import TransformersModel
from hpc_mp.train.model.transformers_modules import hugging_face_config
from hpc_mp.train.model.vocabulary import IGNORED
from hpc_mp.train.parallel.dropout import DropoutClock, HashDropout
from hpc_mp.train.parallel.fill import Source

PROMPT, RESPONSE, STEPS, START = 23, 18, 3, 5
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Training:
    """A model, by its name among ``STACKS``, and its batches.

    Attributes:
        config: keys of the configuration that differ.
        padded: True if prompts and responses have several lengths.
    """

    name: str = "t5"
    config: Mapping[str, Any] = field(default_factory=dict)
    padded: bool = True

    @property
    def fields(self) -> dict[str, Any]:
        return tomllib.loads(f"config = {{ {STACKS[self.name]} }}")["config"] | self.config

    def model(self, recompute: str = "none") -> TransformersModel:
        shape = replace(FAMILIES["t5"].read(self.fields), prompt=PROMPT)
        family = family_of(shape)
        return TransformersModel(hugging_face_config(self.fields, family, None, recompute), family, shape)

    def batches(self) -> list[Batch]:
        """The global batch of every step."""
        return [_batch(step, self.model().shape.vocabulary, self.padded) for step in range(STEPS)]


def _batch(step: int, words: int, padded: bool) -> Batch:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(words, (SAMPLES, PROMPT + RESPONSE), generator=generator)
    labels = torch.full_like(ids, IGNORED)
    labels[:, PROMPT:] = torch.randint(words, (SAMPLES, RESPONSE), generator=generator)
    ids[:, PROMPT] = START
    ids[:, PROMPT + 1:] = labels[:, PROMPT:-1]
    if not padded:
        return {"ids": ids, "labels": labels}
    ends, last = (torch.randint(2, size + 1, (SAMPLES, 1), generator=generator) for size in (PROMPT, RESPONSE))
    labels[:, PROMPT:][torch.arange(RESPONSE) >= last] = IGNORED
    return {"ids": ids, "labels": labels, "documents": torch.cat((torch.zeros_like(ends), ends), 1)}


def values(model: TransformersModel) -> Source:
    return initial.drawn(SEED, model.shape.layers, model.shape.initializer_range, {})


def rounded(right: Callable[..., Tensor], places: Tensor, **settings: Any) -> Tensor:
    """Return buckets as transformers computes them in all formats: in fp32."""
    with torch._C.DisableTorchFunction():
        return right(places, **settings)


def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
              position_bias: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    """The eager attention of transformers, with the dropout of the module."""
    scores = query @ key.transpose(2, 3) + position_bias
    weights = (scores if attention_mask is None else scores + attention_mask).softmax(-1)
    return (module.get_submodule("site")(weights) @ value).transpose(1, 2).contiguous(), weights


def plain_model(training: Training) -> T5ForConditionalGeneration:
    """Return the model of transformers with the first values."""
    model = training.model()
    keys = {key: value for key, value in training.fields.items() if key != "model_type"}
    whole = T5ForConditionalGeneration(T5Config(**keys, attn_implementation="eager")).double()
    if not model.shape.tied:
        whole.lm_head.weight = nn.Parameter(torch.empty_like(whole.lm_head.weight))
    weights, source, named = model.family.all_weights(model.shape), values(model), dict(whole.named_parameters())
    with torch.no_grad():
        for weight in weights:
            named[weight.name].copy_(source(weight, tuple(slice(0, size) for size in weight.shape)))
    assert named.keys() == {weight.name for weight in weights}
    return whole


def plain(training: Training) -> Reference:
    """Train one process of plain transformers, whose dropout drops the same."""
    torch.set_num_threads(1)
    whole, clock = plain_model(training), DropoutClock(SEED)
    for path, module in list(whole.named_modules()):
        if isinstance(module, nn.Dropout):
            parent, leaf = path.rsplit(".", 1)
            setattr(whole.get_submodule(parent), leaf, Flat(module, path, clock, 2 if parent in ("encoder", "decoder") else 1))
        elif isinstance(module, modeling_t5.T5Attention):
            module.site = HashDropout(module.dropout, path, clock, torch.arange(module.n_heads))
    modeling_t5.eager_attention_forward = attention
    modeling_t5.T5Attention._relative_position_bucket = staticmethod(
        partial(rounded, modeling_t5.T5Attention._relative_position_bucket))

    def loss(batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        ids, labels, documents = batch["ids"], batch["labels"][:, PROMPT:], batch.get("documents")
        mask = None if documents is None else (torch.arange(PROMPT) < documents[:, 1:]).long()
        with StaysDouble():
            logits = whole(ids[:, :PROMPT], attention_mask=mask, decoder_input_ids=ids[:, PROMPT:]).logits
        total = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
        return total, (labels != IGNORED).sum()

    named = dict(whole.named_parameters())
    first = {name: parameter.detach().clone() for name, parameter in named.items()}
    losses, norms, parameters = by_torch(loss, named, clock, training.batches())
    assert all(float((parameter - first[name]).abs().max()) > 1e-5 for name, parameter in parameters.items()), "all must move"
    return losses, norms, parameters


distance = distance_of(PROMPT + RESPONSE, values, plain)
