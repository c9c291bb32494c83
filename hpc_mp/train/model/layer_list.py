"""A model as a list of layers: what each layer is made of, which named tensors it uses and gives, and what is cut in it.

Any stage may begin before any layer: what earlier layers have given and later ones use crosses to it. Shapes and formats of these
tensors come from one computation without values (torch's meta device).
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hpc_mp.base.errors import HpcMpError
from hpc_mp.layout.models import Weight
from hpc_mp.train.pipeline.stage import Batch, Carried

Objective = Callable[[Mapping[str, Tensor], Batch], tuple[Tensor, Tensor]]
Cut = Literal["column", "row"]


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """A layer."""

    name: str  # of its own
    make: Callable[[], nn.Module]  # makes the module
    # what it is called with, in this order: tensors of the batch, or of an earlier layer. The first dimension counts samples.
    uses: tuple[str, ...] = ("hidden",)
    gives: tuple[str, ...] = ("hidden",)  # names of what it returns; several: a tuple
    # linear module inside -> what tensor ranks cut of it: "column" its outputs, "row" its inputs
    cut: Mapping[str, Cut] = field(default_factory=dict)
    # parameter inside -> the parameter of another layer that it is, layer.parameter
    tied: Mapping[str, str] = field(default_factory=dict)
    prefix: str | None = None  # of its parameters' names in the model; None: its name and a full stop

    def own(self, path: str) -> str:
        """Return the name in the model of a module or parameter inside."""
        return f"{f'{self.name}.' if self.prefix is None else self.prefix}{path}".removesuffix(".")


@dataclass(frozen=True, slots=True)
class MetaLayer:
    """A layer without values."""

    spec: LayerSpec
    module: nn.Module  # on torch's meta device
    weights: tuple[Weight, ...]  # its own parameters, without those that are another layer's

    @property
    def names(self) -> tuple[str, ...]:
        """The names in the model of all parameters that it computes with."""
        return *(weight.name for weight in self.weights), *self.spec.tied.values()

    def full_name(self, parameter: str) -> str:
        """Return the name of the parameter in the model."""
        return self.spec.tied.get(parameter, self.spec.own(parameter))


@dataclass(frozen=True, slots=True)
class Trace:
    """A computation of a layer without values."""

    carried: Mapping[str, Carried]  # the tensors that it gives for a microbatch
    # path of each dropout inside -> the shapes, without samples, of the inputs of its calls
    dropouts: Mapping[str, Sequence[tuple[int, ...]]]


def refuse(names: Iterable[str], what: str, rule: str, remedy: str) -> None:
    """Raise HpcMpError if there are names, which end its value. ``what``: the beginning of the value."""
    if names := list(names):
        raise HpcMpError(f"{what}{', '.join(names)}", rule, remedy)


@contextmanager
def unchanged_buffers(module: nn.Module, what: str) -> Iterator[None]:
    """Raise HpcMpError if the block changes buffers of a module. ``what``: computes there."""
    before = {name: (buffer, buffer._version) for name, buffer in module.named_buffers()}
    yield
    refuse([name for name, (buffer, version) in before.items()
            if module.get_buffer(name) is not buffer or buffer._version != version], f"{what} changes the buffers ",
           "which every replica and microbatch would change for itself",
           "use a model without running statistics: with LayerNorm or GroupNorm, for example")


def meta_layers(layers: Sequence[LayerSpec]) -> Iterator[MetaLayer]:
    """Make every layer without values. Raises HpcMpError for names that are not unique words, and for wrong ties and cuts."""
    names = [spec.name for spec in layers]
    refuse([repr(name) for name in names if "." in name or not name], "layer name ", "must be a word without a full stop",
           "choose another name")
    refuse(sorted({name for name in names if names.count(name) > 1}), "layers ", "are several of one name",
           "give each layer a name of its own")
    for spec in layers:
        with torch.device("meta"):
            module = spec.make()
        spec = replace(spec, tied={**_inner_ties(spec, module), **spec.tied})
        module.to("meta")
        for inner in module.modules():  # tensors that are neither parameters nor buffers
            vars(inner).update({name: value.to("meta") for name, value in vars(inner).items() if isinstance(value, Tensor)})
        yield MetaLayer(spec, module, tuple(_weights(spec, module)))


def traces(layers: Sequence[MetaLayer], batch: Mapping[str, Carried]) -> Iterator[Trace]:
    """Compute every layer without values.

    Args:
        batch: the tensors of a microbatch.

    Raises:
        HpcMpError: layers do not fit together, or cannot be computed in parts.
    """
    tensors = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in batch.items()}
    for layer in layers:
        spec = layer.spec
        refuse([name for name in spec.uses if name not in tensors], f"layer {spec.name}: uses = ",
               "is neither in the batch nor given by an earlier layer", f"there are {', '.join(tensors)}")
        refuse([name for name in spec.gives if name in batch], f"layer {spec.name}: gives = ",
               "is the name of a tensor of the batch", "choose another name")
        trace, results = _trace(layer, [tensors[name] for name in spec.uses])
        tensors |= results
        yield trace


def _trace(layer: MetaLayer, arguments: Sequence[Tensor]) -> tuple[Trace, dict[str, Tensor]]:
    spec, module, where = layer.spec, layer.module, f"layer {layer.spec.name}"
    calls: defaultdict[str, list[tuple[int, ...]]] = defaultdict(list)  # of dropouts and cut modules
    hooks = [inner.eval().register_forward_pre_hook(lambda _, args, path=path: calls[path].append(args[0].shape[1:]))
             for path, inner in module.named_modules() if type(inner) is nn.Dropout or path in spec.cut]
    versions = [argument._version for argument in arguments]
    try:
        with unchanged_buffers(module, f"{where}: its forward"), torch.device("meta"), _NoChance(where):
            returned = module(*arguments)
    except (RuntimeError, NotImplementedError) as error:
        raise HpcMpError(where, f"cannot be computed without values: {str(error).partition('. ')[0]}",
                         "shapes must not depend on values: the other stages do not know these") from error
    finally:
        for hook in hooks:
            hook.remove()
    refuse([name for name, argument, version in zip(spec.uses, arguments, versions, strict=True) if argument._version != version],
           f"{where}: its forward changes in place ", "which is another layer's or the batch's",
           "compute a new tensor, in modules such as nn.ReLU without inplace")
    refuse([path for path in spec.cut if len(calls[path]) > 1], f"{where}: cut = ", "is called several times in a forward",
           "leave it out of cut")
    results = returned if isinstance(returned, tuple) else (returned,)
    if len(results) != len(spec.gives) or not all(isinstance(result, Tensor) for result in results):
        raise HpcMpError(f"{where}: gives = {', '.join(spec.gives)}",
                         f"but it returns {', '.join(type(result).__name__ for result in results)}",
                         "name every tensor that it returns; all must be tensors")
    tensors = dict(zip(spec.gives, results, strict=True))
    carried = {name: Carried(tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for name, tensor in tensors.items()}
    return Trace(carried, {path: shapes for path, shapes in calls.items() if path not in spec.cut}), tensors


class _NoChance(TorchDispatchMode):
    """Refuses what draws random numbers: other ranks would draw others."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in operation.tags:
            raise HpcMpError(f"{self.where}: its forward draws random numbers ({operation})",
                             "which differ from layout to layout", "use nn.Dropout, whose numbers do not")
        return operation(*args, **(kwargs or {}))


def _inner_ties(spec: LayerSpec, module: nn.Module) -> dict[str, str]:
    """Return the parameters that are another one of the same layer, each with that one's name in the model."""
    first: dict[int, str] = {}
    paths = {path: first.setdefault(id(parameter), path) for path, parameter in module.named_parameters(remove_duplicate=False)}
    return {path: spec.tied.get(other, spec.own(other)) for path, other in paths.items() if path != other}


def _weights(spec: LayerSpec, module: nn.Module) -> Iterator[Weight]:
    where, modules = f"layer {spec.name}: ", dict(module.named_modules())
    parameters = dict(module.named_parameters(remove_duplicate=False))
    cuts = {f"{path}.weight".lstrip("."): 0 if how == "column" else 1 for path, how in spec.cut.items()}
    cuts |= {f"{path}.bias".lstrip("."): 0 for path, how in spec.cut.items() if how == "column"}
    refuse([path for path in spec.cut if not isinstance(modules.get(path), nn.Linear)], f"{where}cut = ", "is no nn.Linear",
           "name linear modules only")
    refuse(sorted(cuts.keys() & spec.tied.keys()), f"{where}tied = ", "is a parameter of a linear module that is cut",
           "leave it out of cut: a tied parameter is whole on every rank")
    refuse(sorted(spec.tied.keys() - parameters.keys()), f"{where}tied = ", "is no parameter of it",
           f"it has {', '.join(parameters)}")
    refuse([name for name, parameter in parameters.items() if not parameter.requires_grad], where,
           "requires no gradient, but all parameters are trained", "make it a buffer")
    for name, parameter in parameters.items():
        if name not in spec.tied:
            yield Weight(spec.own(name), tuple(parameter.shape), cut=cuts.get(name))
