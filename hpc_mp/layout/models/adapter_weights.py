"""The weights of adapters, made from those of the projections beside which they lie.

An adapter is cut as its projection is. Beside a column projection, B is cut along the outputs and A is whole; beside a row
projection, A is cut along the inputs and B is whole. What is whole gets a share of its gradient on each tensor rank, because the
other factor is another one there. These shares are summed where gradients are reduced: in a pass tensor ranks send no more than
without adapters. The adapters of experts have a pair of matrices for each expert.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from hpc_mp.layout.models.adapters import Adapters
from hpc_mp.layout.models.family import Family, Weight
from hpc_mp.layout.models.shape import ModelShape
from hpc_mp.layout.models.tensor import matches

DOWN, UP = "lora_A", "lora_B"  # PEFT's names of the two factors
ALL = Adapters(1, 1.0, ("*",))  # beside everything that can have one


def target_of(weight: Weight) -> str | None:
    """Return the name by which the projection of a block's weight, or a parameter of experts, is chosen; None if it can have no
    adapter."""
    if weight.experts:
        return None if weight.transposed or weight.together > 1 or weight.name.endswith("_bias") else weight.name
    target, is_weight, _ = weight.name.rpartition(".weight")
    return target if is_weight and weight.cut is not None else None


def factors_of(weight: Weight, transposed: bool, rank: int) -> tuple[Weight, Weight]:
    """Return A and B of the adapter of a block's weight. ``transposed``: as in ``Family``, which holds for no experts."""
    experts, sizes = (weight.shape[:1], weight.shape[1:]) if weight.experts else ((), weight.shape)
    first = transposed and not weight.experts  # the inputs
    inputs, outputs = (sizes[0], sizes[1:]) if first else (sizes[-1], sizes[:-1])
    assert weight.cut is not None
    of_inputs = weight.cut == (0 if first else len(weight.shape) - 1)
    target = target_of(weight) or weight.name
    down = Weight(f"{target}.{DOWN}.weight", (*experts, rank, inputs), init="uniform", experts=weight.experts,
                  cut=len(experts) + 1 if of_inputs else None, partial=not of_inputs)
    up = Weight(f"{target}.{UP}.weight", (*experts, *outputs, rank), init="zeros", experts=weight.experts,
                most_parts=weight.most_parts, cut=None if of_inputs else weight.cut - first, partial=of_inputs)
    return down, up


def adapter_weights(family: Family, adapters: Adapters, weights: Iterable[Weight]) -> Iterator[Weight]:
    """Yield the factors of all adapters beside some weights of blocks."""
    for weight in weights:
        target = target_of(weight)
        if target is not None and adapters.adapts(target):
            yield from factors_of(weight, family.transposed, adapters.rank)


def adapted_weights(family: Family, shape: ModelShape) -> dict[str, tuple[Weight, Weight, Weight]]:
    """Return every weight of a model that has an adapter, with A and B, by the name that chooses it."""
    adapters = shape.adapters
    every = [weight for layer in range(shape.layers) for weight in family.layer_weights(shape, layer)] if adapters else []
    return {target: (weight, *factors_of(weight, family.transposed, adapters.rank)) for weight in every
            if adapters and (target := target_of(weight)) is not None and adapters.adapts(target)}


def trained_weights(family: Family, shape: ModelShape) -> list[Weight]:
    """Return what is trained of a model: its own weights, or the factors of its adapters and its new head."""
    if shape.adapters is None:
        return [weight for weight in family.all_weights(shape) if weight.trained]
    return [*(factor for _, *pair in adapted_weights(family, shape).values() for factor in pair), *head_beside(family, shape)]


def head_beside(family: Family, shape: ModelShape) -> list[Weight]:
    """Return the weights of a model's new head, which are trained beside adapters: PEFT's ``modules_to_save``."""
    return [weight for weight in family.all_weights(shape) if shape.adapters and matches(weight.name, family.fresh)]


def keeps_values(family: Family, shape: ModelShape) -> bool:
    """Return True if weights of the model keep their first values, which no checkpoint of a run has."""
    return shape.adapters is not None or not all(weight.trained for weight in family.all_weights(shape))


def targets(family: Family, shape: ModelShape) -> tuple[str, ...]:
    """Return the names of all that can have an adapter."""
    return tuple(adapted_weights(family, replace(shape, adapters=ALL)))
