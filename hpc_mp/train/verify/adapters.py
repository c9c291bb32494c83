"""Adapters beside the projections of Hugging Face's own model, as LoRA defines them, with the factors in the engine's shapes."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from hpc_mp.layout.models import ModelShape, family_of
from hpc_mp.layout.models.adapter_weights import DOWN, UP, adapted_weights, head_beside
from hpc_mp.train.parallel.fill import Source
from hpc_mp.train.verify.observed import whole

Drop = Callable[[Tensor, float, str], Tensor]  # (input, probability, site) -> the input with elements dropped
PREFIX, WRAPPED = "base_model.model.", ".base_layer"  # of PEFT's names


class ExpertSum(nn.Module):
    """A parameter of experts with its adapters: W + scale × B A of each expert."""

    def __init__(self, down: nn.Parameter, up: nn.Parameter, scale: float) -> None:
        super().__init__()
        self.down, self.up, self.scale = down, up, scale

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.scale * (self.up.flatten(1, -2) @ self.down).reshape(weight.shape)


def attach(model: nn.Module, shape: ModelShape, source: Source, drop: Drop) -> dict[str, nn.Parameter]:
    """Attach the adapters of a shape to a model, whose own weights but a new head then keep their values. Return what is trained,
    by name."""
    adapters, factors = shape.adapters, dict[str, nn.Parameter]()
    assert adapters is not None
    model.requires_grad_(False)
    head = {weight.name: model.get_parameter(weight.name) for weight in head_beside(family_of(shape), shape)}
    for own in head.values():
        own.requires_grad_(True)
    for target, (weight, *pair) in adapted_weights(family_of(shape), shape).items():
        down, up = (nn.Parameter(source(factor, whole(factor.shape)).clone()) for factor in pair)
        factors |= dict(zip((factor.name for factor in pair), (down, up), strict=True))
        if weight.experts:
            path, _, parameter = target.rpartition(".")
            parametrize.register_parametrization(model.get_submodule(path), parameter, ExpertSum(down, up, adapters.scale))
        else:
            dropped = partial(_dropped, drop, adapters.dropout, f"{target}.{DOWN}")
            model.get_submodule(target).register_forward_hook(partial(_added, down, up, adapters.scale, dropped))
    return factors | head


def _dropped(drop: Drop, probability: float, site: str, x: Tensor) -> Tensor:
    return drop(x, probability, site)


def _added(down: Tensor, up: Tensor, scale: float, dropped: Callable[[Tensor], Tensor], _: nn.Module, args: tuple[Any, ...],
           output: Tensor) -> Tensor:
    return output + dropped(args[0]) @ down.t() @ up.flatten(0, -2).t() * scale


def as_peft(shape: ModelShape, factors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return factors by the names and in the shapes of PEFT's files, where the outermost wrap of a module of experts is that of
    its last parameter."""
    adapted, stored = adapted_weights(family_of(shape), shape), {
        f"{PREFIX}{weight.name}": factors[weight.name].detach() for weight in head_beside(family_of(shape), shape)}
    for target, (weight, down, up) in adapted.items():
        a, b = (factors[factor.name].detach() for factor in (down, up))
        path = target
        if weight.experts:
            path = target.rpartition(".")[0]
            wraps = [name for name, (other, *_) in adapted.items() if other.experts and name.rpartition(".")[0] == path]
            path += WRAPPED * (len(wraps) - 1 - wraps.index(target))
            a, b = a.flatten(0, 1), b.flatten(1, -2).permute(1, 2, 0).flatten(1)
        else:
            b = b.flatten(0, -2)
        stored |= {f"{PREFIX}{path}.{DOWN}.weight": a, f"{PREFIX}{path}.{UP}.weight": b}
    return stored
