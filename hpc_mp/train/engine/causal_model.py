"""A model as transformers has it: its configuration, its modules without values, and the attention functions of its blocks.

Of the engine this module and what it imports alone import transformers, which takes seconds: the others only name its types.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, cast

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from hpc_mp.base.errors import HpcMpError
from hpc_mp.layout.models import Family, ModelShape
from hpc_mp.train.engine.attention_table import attention_function
from hpc_mp.train.engine.context import AttentionFunction
from hpc_mp.train.engine.recompute import attention_name
from hpc_mp.train.engine.stage import Driver


@dataclass(frozen=True, slots=True)
class CausalModel:
    """What is cut into stages.

    Attributes:
        config: Hugging Face's configuration.
    """

    config: PreTrainedConfig
    family: Family
    shape: ModelShape

    def skeleton(self) -> nn.Module:
        """Modules of Hugging Face without values, as of a model of one layer. Stages take what is at its ends, each once."""
        config = copy.copy(self.config)
        config.num_hidden_layers = 1
        with torch.device("meta"):
            whole = cast(nn.Module, AutoModelForCausalLM.from_config(config))
        _check_table(self.family, replace(self.shape, layers=1), whole)
        return whole

    @staticmethod
    def attention_function(name: str) -> AttentionFunction:
        """Return the function that blocks find under this name."""
        return attention_function(name)

    def driver(self, skeleton: nn.Module, layers: Sequence[Callable[..., Tensor]], replaced: Mapping[str, nn.Module]) -> Driver:
        """The forward of the model without its head, as a function of hidden states and positions.

        Args:
            layers: called in place of the model's own.
            replaced: path -> the module that takes its place.
        """
        path, _, name = self.family.blocks.rpartition(".")
        base = copy.copy(skeleton.get_submodule(path))
        base.config = self.config
        base._modules = {inner: module for inner, module in base._modules.items() if inner != name}
        for whole, module in replaced.items():
            base._modules[whole.removeprefix(f"{path}.")] = module
        base.__dict__[name] = list(layers)

        def drive(hidden: Tensor, positions: Tensor) -> Tensor:
            return cast(Tensor, base(inputs_embeds=hidden, position_ids=positions, use_cache=False).last_hidden_state)

        return drive

    def block(self, skeleton: nn.Module, layer: int) -> nn.Module:
        """A layer's module, without values: a rank makes those of its stages alone."""
        kind = type(skeleton.get_submodule(f"{self.family.blocks}.0"))
        with torch.device("meta"):
            return kind(skeleton.config, layer)


def hugging_face_config(config: Mapping[str, Any], family: Family, dropout: float | None,
                        recompute: str = "none") -> PreTrainedConfig:
    """The model's configuration; ``dropout`` overrides every probability. Attention weights that are dropped need our
    own attention function, all others use torch's fused one. Raises HpcMpError if the installed transformers is too old."""
    check_release(family)
    values = {key: value for key, value in config.items() if key not in ("model_type", "architectures")}
    if dropout is not None:
        values |= dict.fromkeys(family.dropouts, dropout)
    built = AutoConfig.for_model(family.model_type, **values)
    drops_attention = max(getattr(built, name) for name in family.dropouts if name.startswith("att")) > 0
    built._attn_implementation = attention_name(drops_attention, recompute)
    return built


def check_release(family: Family) -> None:
    """Raise HpcMpError if the installed transformers has another code for a family than the engine knows."""
    if Version(transformers.__version__) < Version(family.since):
        raise HpcMpError(f"transformers {transformers.__version__}", f"is too old for {family.model_type} models",
                         f"install transformers>={family.since}")


def _check_table(family: Family, shape: ModelShape, whole: nn.Module) -> None:
    """Raises RuntimeError when a family's table is not what transformers has."""
    given = {weight.name: prod(weight.shape) for weight in family.all_weights(shape)}
    found = {name: parameter.numel() for name, parameter in whole.named_parameters()}
    if given != found:
        different = sorted(dict(given.items() ^ found.items()))
        raise RuntimeError(f"the table of {family.model_type} does not match transformers: {', '.join(different)}")
