"""A model of transformers: its configuration, its modules without values, and the attention functions of its blocks.

In the engine only this module and its imports import transformers, which takes seconds; other modules only name its types.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, cast

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig

from hpc_mp.base.errors import HpcMpError
from hpc_mp.layout.models import Family, ModelShape, Weight
from hpc_mp.train.model.attention_table import attention_function
from hpc_mp.train.model.layers import Driver, driver_of
from hpc_mp.train.model.logits import LossFunction
from hpc_mp.train.model.recompute import attention_name
from hpc_mp.train.parallel.context import AttentionFunction


@dataclass(frozen=True, slots=True)
class CausalModel:
    """The parts of a model.

    Attributes:
        config: Hugging Face's configuration.
        loss: function of the logits and the batch; None: the cross entropy of the next token.
    """

    config: PreTrainedConfig
    family: Family
    shape: ModelShape
    loss: LossFunction | None = None

    @property
    def padding(self) -> dict[str, int]:
        """The embedding's name -> its row that stays zero; empty if the model has no such row."""
        row = cast(nn.Embedding, self.skeleton().get_submodule(self.family.embedding)).padding_idx
        return {} if row is None else {f"{self.family.embedding}.weight": row}

    def skeleton(self) -> nn.Module:
        """Return the modules of a model with one layer, without values, from which a stage takes those at its ends."""
        config = copy.copy(self.config)
        config.num_hidden_layers = 1
        whole = without_values(self.family, config)
        _check_table(self.family, self.family.all_weights(replace(self.shape, layers=1)), whole)
        return whole

    @property
    def logit_cap(self) -> float | None:
        """The soft cap of the head's logits, see ``soft_cap``."""
        return getattr(self.config, "final_logit_softcapping", None)

    def embedding_scale(self, skeleton: nn.Module) -> float:
        """Return the factor by which the embedding multiplies hidden states."""
        return float(getattr(skeleton.get_submodule(self.family.embedding), "scalar_embed_scale", 1.0))

    @staticmethod
    def attention_function(name: str) -> AttentionFunction:
        """Return the attention function with this name in transformers' table."""
        return attention_function(name)

    def driver(self, skeleton: nn.Module, layers: Sequence[Callable[..., Tensor]], replaced: Mapping[str, nn.Module]) -> Driver:
        """Return the model's forward without its head, as a function of hidden states and positions.

        Args:
            layers: called in place of the model's own layers.
            replaced: path -> replacement of the module there; paths outside of the forward have no effect.
        """
        path, _, name = self.family.blocks.rpartition(".")
        base = copy.copy(skeleton.get_submodule(path))
        base.config = self.config
        base._modules = {inner: module for inner, module in base._modules.items() if inner != name}
        for whole, module in replaced.items():
            if whole.startswith(f"{path}."):
                base._modules[whole.removeprefix(f"{path}.")] = module
        base.__dict__[name] = list(layers)
        return driver_of(base, self.family.hidden_argument)

    def block(self, skeleton: nn.Module, layer: int) -> nn.Module:
        """Return a layer's module, without values. A rank makes only those of its own stages."""
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
        HpcMpError: the installed transformers is too old.
    """
    check_release(family)
    values = {key: value for key, value in config.items() if key not in ("model_type", "architectures")}
    if dropout is not None:
        values |= dict.fromkeys(family.dropouts, dropout)
    built = AutoConfig.for_model(family.model_type, **values)
    drops_attention = max(getattr(built, name) for name in family.dropouts if name.startswith("att")) > 0
    caps_scores = getattr(built, "attn_logit_softcapping", None) is not None  # torch's fused attention has no cap
    built._attn_implementation = attention_name(drops_attention or caps_scores, recompute)
    return built


def check_release(family: Family) -> None:
    """Raise HpcMpError if the installed transformers is older than the engine's code for a family."""
    if Version(transformers.__version__) < Version(family.since):
        raise HpcMpError(f"transformers {transformers.__version__}", f"is too old for {family.model_type} models",
                         f"install transformers>={family.since}")


def without_values(family: Family, config: PreTrainedConfig) -> nn.Module:
    """Return a model of the family on the meta device."""
    with torch.device("meta"):
        return cast(nn.Module, getattr(transformers, family.architecture)(config))


def _check_table(family: Family, weights: Iterable[Weight], module: nn.Module) -> None:
    """Raise RuntimeError if a family's table of weights does not match a module of transformers."""
    table = {weight.name: prod(weight.shape) for weight in weights}
    actual = {name: parameter.numel() for name, parameter in module.named_parameters()}
    if table != actual:
        different = sorted(dict(table.items() ^ actual.items()))
        raise RuntimeError(f"the table of {family.model_type} does not match transformers: {', '.join(different)}")
