"""The modules of a model of transformers, without values, and its configuration."""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, cast

import torch
import transformers
from packaging.version import Version
from torch import nn
from transformers import AutoConfig, PreTrainedConfig

from hpc_mp.base.errors import HpcMpError
from hpc_mp.layout.models import Family, ModelShape, Weight
from hpc_mp.train.model.attention_table import BIASED, attention_name
from hpc_mp.train.model.vocabulary import LossFunction


@dataclass(frozen=True, slots=True)
class TransformersModules:
    """A model that stages are built from."""

    config: PreTrainedConfig  # Hugging Face's configuration
    family: Family
    shape: ModelShape
    loss: LossFunction | None = None  # function of the logits and the batch; None: the cross entropy of the next token

    @property
    def padding(self) -> dict[str, int]:
        """The name of an embedding -> its row that stays zero; empty if the model has no such row."""
        skeleton, paths = self.skeleton(), (self.family.embedding, *self.family.lookups)
        rows = {f"{path}.weight": cast(nn.Embedding, skeleton.get_submodule(path)).padding_idx for path in paths}
        return {name: row for name, row in rows.items() if row is not None}

    def skeleton(self) -> nn.Module:
        """Return the modules of a model without values, from which a stage takes those at its ends; with one layer if others are
        alike."""
        config, layers = copy.copy(self.config), 1 if self.family.alike else self.shape.layers
        if self.family.alike:
            config.num_hidden_layers = 1
        whole = without_values(self.family, config)
        _check_table(self.family, self.family.all_weights(replace(self.shape, layers=layers)), whole)
        return whole

    def block(self, skeleton: nn.Module, layer: int) -> nn.Module:
        """Return a layer's module, without values. A rank makes only those of its own stages."""
        if not self.family.alike:
            return skeleton.get_submodule(self.family.path(layer))
        kind = type(skeleton.get_submodule(f"{self.family.blocks}.0"))
        with torch.device("meta"):
            block: nn.Module = kind(self.config, layer)
        _check_table(self.family, self.family.block_weights(self.shape, layer), block)
        return block


def hugging_face_config(config: Mapping[str, Any], family: Family, dropout: float | None,
                        recompute: str = "none") -> PreTrainedConfig:
    """Return the model's configuration, with the attention function that its settings need.

    Attention with dropped weights or capped scores needs the engine's own function; all other models use torch's fused one.

    Args:
        dropout: overrides all probabilities; None: those of ``config``.

    Raises:
        HpcMpError: the installed transformers is older than the engine's code of the family.
    """
    if Version(transformers.__version__) < Version(family.since):
        raise HpcMpError(f"transformers {transformers.__version__}", f"is too old for {family.model_type} models",
                         f"install transformers>={family.since}")
    values = {key: value for key, value in config.items() if key not in ("model_type", "architectures")}
    if dropout is not None:
        values |= dict.fromkeys(family.dropouts, dropout)
    built = AutoConfig.for_model(family.model_type, **values)
    drops_attention = family.attention_probability(built) > 0
    caps_scores = getattr(built, "attn_logit_softcapping", None) is not None  # torch's fused attention has no cap
    built._experts_implementation = "eager"  # of a model that was read; ours replace those of a table
    own = family.own_attention
    built._attn_implementation = "eager" if own else attention_name(drops_attention or caps_scores, recompute)
    if family.decoder is not None:
        built._attn_implementation = BIASED
    return built


def without_values(family: Family, config: PreTrainedConfig) -> nn.Module:
    """Return a model of the family on the meta device."""
    with torch.device("meta"):
        model = getattr(transformers, family.architecture)(config)
    if not getattr(config, "scale_decoder_outputs", True):  # transformers makes every head of T5 with a tie, also that of 1.1
        model.lm_head.weight = nn.Parameter(torch.empty_like(model.lm_head.weight))
    return cast(nn.Module, model)


def _check_table(family: Family, weights: Iterable[Weight], module: nn.Module) -> None:
    """Raise RuntimeError if a family's table of weights does not match a module of transformers."""
    table = {weight.name: prod(weight.shape) for weight in weights}
    actual = {name: parameter.numel() for name, parameter in module.named_parameters()}
    actual |= {name: buffer.numel() for name, buffer in module.named_buffers() if name in table}
    if table != actual:
        different = sorted(dict(table.items() ^ actual.items()))
        raise RuntimeError(f"the table of {family.model_type} does not match transformers: {', '.join(different)}")
