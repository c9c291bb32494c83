"""A model made from a list of layers, and its stages, as the pipeline runs them."""

import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Self

import torch
from torch import Tensor, nn

from hpc_mp.base.errors import HpcMpError
from hpc_mp.layout.flat import FlatLayout, StageSpan, Tie, blocks_together, flat_units, stage_spans
from hpc_mp.layout.layout import Layout
from hpc_mp.layout.models import Weight
from hpc_mp.layout.models.tensor import TensorPart, cut_part, matches
from hpc_mp.train.device.precision import Precision
from hpc_mp.train.device.spans import profiled
from hpc_mp.train.model.layer_list import LayerSpec, MetaLayer, Objective, Trace, crossing, inside, meta_layers, traces
from hpc_mp.train.model.recompute import computed_again, groups_of
from hpc_mp.train.parallel.data_axis import Unit
from hpc_mp.train.parallel.dropout import HashDropout
from hpc_mp.train.parallel.fill import Source
from hpc_mp.train.parallel.projection import Projection, TensorAxis
from hpc_mp.train.parallel.surroundings import Surroundings
from hpc_mp.train.parallel.unshard import Prefetch, unsharded
from hpc_mp.train.pipeline.stage import Batch, Boundary, Carried

TIE = "tied "  # prefix of the name of a unit with which several layers compute


@dataclass(frozen=True)
class ListedModel:
    """A list of layers that ends in an objective.

    Attributes:
        objective: called with the tensors named in ``outputs``, and the batch.
        seed: of the first values.
        outputs: of the layers; empty: those of the last one.
        batch: the tensors of a microbatch; parameters do not depend on them.
        defaults: arguments of a module's forward that keep their default values: no tensor of the batch may have such a name.
    """

    layers: tuple[LayerSpec, ...]
    objective: Objective
    seed: int
    outputs: tuple[str, ...] = ()
    batch: Mapping[str, Carried] = field(default_factory=dict)
    defaults: tuple[str, ...] = ()
    experts: int = 0

    @cached_property
    def meta(self) -> tuple[MetaLayer, ...]:
        """The layers without values."""
        return tuple(meta_layers(self.layers))

    @cached_property
    def traced(self) -> tuple[Trace, ...]:
        if taken := self.batch.keys() & self.defaults:
            raise HpcMpError(f"the batch's {', '.join(sorted(taken))}", "is an argument of the forward that keeps its default",
                             "name it in `given` of layers_of, or leave it out of the batch")
        return tuple(traces(self.meta, self.batch))

    @cached_property
    def crossing(self) -> list[dict[str, Carried]]:
        return crossing(self.layers, self.traced, self.given, self.batch)

    @property
    def given(self) -> tuple[str, ...]:
        """The names that the objective gets, in this order."""
        return self.outputs or self.layers[-1].gives

    @cached_property
    def weights(self) -> dict[str, Weight]:
        """Every parameter once, by name."""
        return {weight.name: weight for layer in self.meta for weight in layer.weights}

    def ties(self, layout: Layout) -> dict[str, tuple[int, ...]]:
        """Return the stages of every parameter with which several layers compute."""
        stages: dict[str, list[int]] = {}
        tied = {name for layer in self.meta for name in layer.spec.tied.values()}
        if unknown := tied - self.weights.keys():
            raise HpcMpError(f"tied = {', '.join(sorted(unknown))}", "is no parameter of a layer", "write layer.parameter")
        if cut := [name for name in sorted(tied) if self.weights[name].cut is not None]:
            raise HpcMpError(f"tied = {', '.join(cut)}", "is a parameter of a linear module that is cut", "cut others")
        for stage, span in enumerate(stage_spans(layout.layers)):
            for name in sorted(tied & {name for layer in span.layers for name in self._names(self.meta[layer])}):
                stages.setdefault(name, []).append(stage)
        return {name: tuple(found) for name, found in stages.items()}

    def capacity(self, layout: Layout) -> int | None:
        return None

    def units(self, layout: Layout, spans: Iterable[StageSpan], tensor: int, expert: int) -> Mapping[str, FlatLayout]:
        if layout.sequence_parallel or layout.degrees.context > 1 or layout.degrees.expert > 1 or layout.recompute == "selective":
            raise HpcMpError("a list of layers", "has no sequence, context or expert axis and no selective recomputation",
                             "cut it along the tensor, pipeline and data axes")
        ties, spans, cut = self.ties(layout), list(spans), layout.tensor_cut(tensor)
        mine = {stage for stage, span in enumerate(stage_spans(layout.layers)) if span in spans}
        groups: dict[str, list[Weight]] = {}
        for layer in (self.meta[number] for span in spans for number in span.layers):
            own = [weight for weight in layer.weights if weight.name not in ties]
            groups |= {layer.spec.name: own} if own else {}
            groups |= {f"{TIE}{name}": [self.weights[name]] for name in self._names(layer) if name in ties}

        def part(weight: Weight) -> TensorPart:
            return cut_part(weight, cut, cut.size > 1 and matches(weight.name.rpartition(".")[0], cut.modules))

        return flat_units(layout, groups, part, layout.expert_cut(), {
            f"{TIE}{name}": Tie(stages, stages[0] in mine) for name, stages in ties.items()})

    def received(self, layout: Layout, stage: int, tokens: int, dtype: torch.dtype) -> Mapping[str, Carried]:
        """Floating-point tensors have the format that computes."""
        return {name: Carried(tensor.shape, dtype if tensor.dtype.is_floating_point else tensor.dtype, tensor.differentiable)
                for name, tensor in self.crossing[sum(layout.layers[:stage])].items()}

    def build(self, span: StageSpan, around: Surroundings) -> "ListedStage":
        return ListedStage(self, span, around)

    def made(self, spec: LayerSpec) -> nn.Module:
        """Make a layer with its first values, which depend on the seed and its name."""
        key = hashlib.blake2b(f"{self.seed} {spec.name}".encode(), digest_size=7).digest()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int.from_bytes(key))
            return spec.make()

    def first_values(self) -> Source:
        """Return the values that layers are made with. One layer at a time is in memory."""
        owners = {weight.name: layer.spec for layer in self.meta for weight in layer.weights}
        made: dict[str, Tensor] = {}

        def source(weight: Weight, box: tuple[slice, ...]) -> Tensor:
            if weight.name not in made:
                made.clear()
                spec = owners[weight.name]
                made.update({spec.own(path): parameter.detach()
                             for path, parameter in self.made(spec).named_parameters(remove_duplicate=False)})
            return made[weight.name][box]

        return source

    @staticmethod
    def _names(layer: MetaLayer) -> list[str]:
        return [*(weight.name for weight in layer.weights), *layer.spec.tied.values()]


class WideDropout(HashDropout):
    """Dropout that is the same on every layout, of any tensors (samples, …), which tensor ranks may cut along any dimension.

    Args:
        shapes: of what each of its calls in a forward drops in the whole model, without samples.
    """

    def __init__(self, p: float, site: str, around: Surroundings, shapes: Sequence[tuple[int, ...]]) -> None:
        super().__init__(p, site, around.clock, torch.empty(0))
        self.sites = [self.site, *(zlib.crc32(f"{site} {call}".encode()) for call in range(1, len(shapes)))]
        self.shapes, self.tensor, self.calls = shapes, around.tensor, 0
        self.cuts: dict[int, dict[int, int]] = {}  # call -> dimension that is cut -> its size in the whole model

    def forward(self, x: Tensor) -> Tensor:
        call = self.calls % len(self.shapes)
        self.calls, self.site, sizes = self.calls + 1, self.sites[call], x.shape[1:]
        if call not in self.cuts:
            whole = self.shapes[call] if self.tensor.size > 1 else sizes
            self.cuts[call] = {place: size for place, size in enumerate(whole) if size != sizes[place]}
        index = torch.zeros((), dtype=torch.int32, device=x.device)
        for place, size in enumerate(sizes):
            whole_size = self.cuts[call].get(place, size)
            begin = self.tensor.part(whole_size)[0] if place in self.cuts[call] else 0
            index = index.unsqueeze(-1) * whole_size + torch.arange(begin, begin + size, dtype=torch.int32, device=x.device)
        return self.dropped(x, index)

    def restart(self) -> None:
        """A forward begins."""
        self.calls = 0


class ListedStage(nn.Module):
    """Some layers of the list, one behind the other."""

    def __init__(self, model: ListedModel, span: StageSpan, around: Surroundings) -> None:
        super().__init__()
        self.model, self.span, self.around = model, span, around
        self.units: dict[str, Unit] = {}
        self.layers = [model.meta[number] for number in span.layers]
        self.dropouts = {model.layers[number].name: model.traced[number].dropouts for number in span.layers}
        self.groups = list(groups_of([layer.spec.name for layer in self.layers], around.recompute))
        self.projections: list[Projection] = []
        self.inner = nn.ModuleDict({layer.spec.name: self._prepared(layer) for layer in self.layers})
        self.modes = [(module, module.training) for module in self.inner.modules()]

    def train(self, mode: bool = True) -> Self:
        """Put every module into the mode that it has been given in, or all of them into evaluation."""
        for module, own in self.modes:
            module.training = own and mode
        return self

    @property
    def precision(self) -> Precision:
        return self.around.precision

    def _prepared(self, layer: MetaLayer) -> nn.Module:
        """Make a layer with its buffers; parameters come with ``adopt``."""
        module = self.model.made(layer.spec).to(self.around.context.positions.device, self.precision.compute)
        dropouts: dict[int, WideDropout] = {}
        shapes = self.dropouts[layer.spec.name]
        for path, inner in list(module.named_modules(remove_duplicate=False)):
            parent, _, leaf = path.rpartition(".")
            replaced: nn.Module | None = None
            if path in layer.spec.cut:
                replaced = self._projection(layer, path, inner)
            elif id(inner) in dropouts:
                replaced = dropouts[id(inner)]
            elif path in shapes:
                replaced = dropouts[id(inner)] = WideDropout(inner.p, layer.spec.own(path), self.around, shapes[path])
                replaced.train(inner.training)
            if replaced is not None:
                module = _put(module, parent, leaf, replaced)
        module.register_forward_pre_hook(partial(_restarted, tuple(dropouts.values())))
        for name, parameter in list(module.named_parameters(remove_duplicate=False)):  # values are the units'
            parent, _, leaf = name.rpartition(".")
            module.get_submodule(parent).register_parameter(leaf, nn.Parameter(parameter.to("meta")))
        return module

    def _projection(self, layer: MetaLayer, path: str, linear: nn.Module) -> Projection:
        """A column or row projection, which enters and leaves by itself."""
        how, tensor = layer.spec.cut[path], self.around.tensor
        weight = layer.full_name(inside(path, "weight"))
        if not (tensor.size > 1 and matches(weight.rpartition(".")[0], tensor.cut.modules)):
            tensor = tensor.alone
        bias = None if linear.bias is None else layer.full_name(inside(path, "bias"))
        projection = Projection(weight, bias, False, how == "row", tensor)
        if how == "column":
            projection.register_forward_pre_hook(partial(_entered, tensor))
        self.projections.append(projection)
        return projection

    def adopt(self, units: Mapping[str, Unit]) -> None:
        self.units = dict(units)
        parameters = {name: parameter for unit in units.values() for name, parameter in unit.parameters.items()}
        sinks = {name: sink for unit in units.values() for name, sink in unit.sinks.items()}
        collects: set[str] = set()
        for projection in self.projections:
            projection.adopt(parameters, sinks)
            collects |= {*filter(None, projection.names)} - projection.owned
        for layer in self.layers:
            module = self.inner[layer.spec.name]
            for name, _ in list(module.named_parameters(remove_duplicate=False)):
                parent, _, leaf = name.rpartition(".")
                holder = module.get_submodule(parent)
                if not isinstance(holder, Projection):
                    holder.register_parameter(leaf, parameters[layer.full_name(name)])
                    collects.add(layer.full_name(name))
        for unit in units.values():
            for name in unit.parameters.keys() & collects:
                unit.collect(name)

    def tensors(self) -> Iterator[Tensor]:
        yield from (unit.whole for unit in self.units.values())
        yield from self.buffers()

    def forward(self, received: Boundary, batch: Batch) -> Boundary | tuple[Tensor, Tensor]:
        original, batch, there = batch, self._converted(batch), dict(received)
        for number in range(len(self.groups)):
            there |= self._group(number, there, batch)
        if not self.span.last:
            return self._converted({name: there[name] for name in self.model.crossing[self.span.layers.stop]})
        known = {**batch, **there}
        return self.model.objective({name: _wide(known[name]) for name in self.model.given}, original)

    def _converted(self, tensors: Batch) -> Boundary:
        """Return floating-point tensors in the format that computes."""
        return {name: tensor.to(self.precision.compute) if tensor.is_floating_point() else tensor
                for name, tensor in tensors.items()}

    def _group(self, number: int, there: Boundary, batch: Batch) -> Boundary:
        """Compute layers that are recomputed together. Returns what they give."""
        layers = [layer for layer in self.layers if layer.spec.name in self.groups[number]]
        given = list(dict.fromkeys(name for layer in layers for name in layer.spec.gives))
        used = [name for name in dict.fromkeys(name for layer in layers for name in layer.spec.uses) if name in there]

        def compute(*tensors: Tensor) -> tuple[Tensor, ...]:
            known = {**batch, **dict(zip(used, tensors, strict=True))}
            with self.precision.computing():
                for layer in layers:
                    with profiled(layer.spec.name):
                        result = self.inner[layer.spec.name](*(known[name] for name in layer.spec.uses))
                    known |= dict(zip(layer.spec.gives, result if isinstance(result, tuple) else (result,), strict=True))
            return tuple(known[name] for name in given)

        again = blocks_together(self.around.recompute) is not None
        function: Callable[..., tuple[Tensor, ...]] = partial(computed_again, compute) if again else compute
        results = unsharded(self._units_of(number), self._prefetch(number), function, *(there[name] for name in used))
        return dict(zip(given, results, strict=True))

    def _units_of(self, number: int) -> Sequence[Unit]:
        layers = [layer for layer in self.layers if layer.spec.name in self.groups[number]]
        names = {name for layer in layers for name in (layer.spec.name, *(f"{TIE}{name}" for name in self.model._names(layer)))}
        return [unit for name, unit in self.units.items() if name in names]

    def _prefetch(self, number: int) -> Prefetch:
        behind = self._units_of(number + 1) if number + 1 < len(self.groups) else ()
        return Prefetch(behind, self._units_of(number - 1) if number else ())


def _wide(tensor: Tensor) -> Tensor:
    """Return a tensor in a format in which losses can be summed."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32)) if tensor.is_floating_point() else tensor


def _put(module: nn.Module, parent: str, leaf: str, inner: nn.Module) -> nn.Module:
    """Return the module with another one inside, or that one if it takes the whole place."""
    if not leaf:
        return inner
    setattr(module.get_submodule(parent), leaf, inner)
    return module


def _entered(tensor: TensorAxis, _: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tensor.enter(arguments[0]), *arguments[1:]


def _restarted(dropouts: Sequence[WideDropout], *_: object) -> None:
    for dropout in dropouts:
        dropout.restart()
