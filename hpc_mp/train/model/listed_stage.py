"""A model made from a list of layers, and its stages, as the pipeline runs them."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Self, cast

import torch
from torch import Tensor, nn

from hpc_mp.base.errors import HpcMpError
from hpc_mp.layout.flat import FlatLayout, StageSpan, Tie, flat_units, stage_spans
from hpc_mp.layout.layout import Layout
from hpc_mp.layout.models import Weight
from hpc_mp.layout.models.tensor import TensorPart, cut_part
from hpc_mp.train.device.spans import profiled
from hpc_mp.train.model.compilation import compile_block
from hpc_mp.train.model.layer_list import LayerSpec, MetaLayer, Objective, Trace, meta_layers, refuse, traces
from hpc_mp.train.model.unit_stage import UnitStage, replace_parameters
from hpc_mp.train.parallel.data_axis import Unit
from hpc_mp.train.parallel.dropout import WideDropout
from hpc_mp.train.parallel.fill import Source
from hpc_mp.train.parallel.projection import Projection
from hpc_mp.train.parallel.surroundings import Surroundings
from hpc_mp.train.pipeline.stage import Batch, Boundary, Carried

TIE = "tied "  # prefix of the name of a unit with which several layers compute


@dataclass(frozen=True)
class ListedModel:
    """A list of layers that ends in an objective."""

    layers: tuple[LayerSpec, ...]
    objective: Objective  # called with the tensors named in outputs, and the batch
    seed: int  # of the first values
    outputs: tuple[str, ...] = ()  # of the layers; empty: those of the last one
    batch: Mapping[str, Carried] = field(default_factory=dict)  # the tensors of a microbatch; parameters do not depend on them
    # arguments of a module's forward that keep their default values: no tensor of the batch may have such a name
    defaults: tuple[str, ...] = ()
    experts: int = 0

    @cached_property
    def meta(self) -> tuple[MetaLayer, ...]:
        """The layers without values."""
        return tuple(meta_layers(self.layers))

    @cached_property
    def traced(self) -> tuple[Trace, ...]:
        refuse(sorted(self.batch.keys() & self.defaults), "the batch's ", "is an argument of the forward that keeps its default",
               "name it in `inputs`, or leave it out of the batch")
        return tuple(traces(self.meta, self.batch))

    @property
    def results(self) -> tuple[str, ...]:
        """The names of the objective's tensors, in order."""
        return self.outputs or self.layers[-1].gives

    @cached_property
    def weights(self) -> dict[str, Weight]:
        """Every parameter once, by name."""
        return {weight.name: weight for layer in self.meta for weight in layer.weights}

    def ties(self, layout: Layout) -> dict[str, tuple[int, ...]]:
        """Return the stages of every parameter with which several layers compute."""
        tied = sorted({name for layer in self.meta for name in layer.spec.tied.values()})
        refuse([name for name in tied if name not in self.weights], "tied = ", "is no parameter of a layer",
               "write layer.parameter")
        refuse([name for name in tied if self.weights[name].cut is not None], "tied = ",
               "is a parameter of a linear module that is cut", "cut others")
        names = [{name for layer in span.layers for name in self.meta[layer].names} for span in stage_spans(layout.layers)]
        return {tie: tuple(stage for stage, used in enumerate(names) if tie in used) for tie in tied}

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
            groups |= {f"{TIE}{name}": [self.weights[name]] for name in layer.names if name in ties}

        def part(weight: Weight) -> TensorPart:
            return cut_part(weight, cut, cut.cuts(weight.name.rpartition(".")[0]))

        return flat_units(layout, groups, part, layout.expert_cut(), {
            f"{TIE}{name}": Tie(stages, stages[0] in mine) for name, stages in ties.items()})

    def module_shapes(self, spans: Iterable[StageSpan]) -> Mapping[str, tuple[int, ...]]:
        return {name: weight.shape for name, weight in self.weights.items()}

    def crossing(self, begin: int) -> dict[str, Carried]:
        """Return the tensors that cross to a stage that begins with this layer."""
        needed = set(self.results)
        for layer in reversed(self.layers[begin:]):
            needed = (needed - {*layer.gives}) | {*layer.uses}
        return {name: tensor for trace in self.traced[:begin] for name, tensor in trace.carried.items() if name in needed}

    def received(self, layout: Layout, stage: int, tokens: int, dtype: torch.dtype) -> Mapping[str, Carried]:
        """Return the tensors that a stage receives. Floating-point tensors have the format that computes."""
        return {name: Carried(tensor.shape, dtype if tensor.dtype.is_floating_point else tensor.dtype, tensor.differentiable)
                for name, tensor in self.crossing(sum(layout.layers[:stage])).items()}

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
        values: dict[str, Tensor] = {}

        def source(weight: Weight, box: tuple[slice, ...]) -> Tensor:
            if weight.name not in values:
                values.clear()
                spec = owners[weight.name]
                values.update({spec.own(path): parameter.detach()
                               for path, parameter in self.made(spec).named_parameters(remove_duplicate=False)})
            return values[weight.name][box]

        return source


class ListedStage(UnitStage):
    """Some layers of the list, one behind the other."""

    def __init__(self, model: ListedModel, span: StageSpan, around: Surroundings) -> None:
        super().__init__(span, around, [model.layers[number].name for number in span.layers])
        self.model, self.inner, self.sends = model, nn.ModuleList(), [*model.crossing(span.layers.stop)]
        self.layers = dict(zip(self.blocks, (model.meta[number] for number in span.layers), strict=True))
        for number in span.layers:
            self._append(model.meta[number], model.traced[number].dropouts)
        self.modes = [(module, module.training) for module in self.inner.modules()]

    def train(self, mode: bool = True) -> Self:
        """Put every module into the mode in which its layer was made, or all of them into evaluation."""
        for module, own in self.modes:
            module.training = own and mode
        return self

    def _append(self, layer: MetaLayer, shapes: Mapping[str, Sequence[tuple[int, ...]]]) -> None:
        """Make a layer with its buffers, its dropouts of these shapes, and its projections; parameters come with ``adopt``."""
        spec, around = layer.spec, self.around
        module = self.model.made(spec).to(around.context.positions.device, self.precision.compute)
        replace_parameters(module, lambda _, parameter: nn.Parameter(parameter.to("meta")))
        path = f"inner.{len(self.inner)}"
        self.inner.append(module)
        dropouts = {}
        for inner, calls in shapes.items():
            dropout = cast(nn.Dropout, module.get_submodule(inner))
            dropouts[id(dropout)] = WideDropout(dropout.p, spec.own(inner), around.clock, calls, around.tensor)
            dropouts[id(dropout)].train(dropout.training)
        for inner, part in list(module.named_modules(remove_duplicate=False)):
            replacement = self._projection(layer, inner, part) if inner in spec.cut else dropouts.get(id(part))
            if replacement is not None:
                self.set_submodule(f"{path}.{inner}".rstrip("."), replacement)
        for wide in dropouts.values():
            self.get_submodule(path).register_forward_pre_hook(wide.restart)
        if around.compile:
            compile_block(self.get_submodule(path))

    def _projection(self, layer: MetaLayer, path: str, linear: nn.Module) -> Projection:
        """Return a column or row projection, which enters and leaves by itself."""
        module, how = layer.spec.own(path), layer.spec.cut[path]
        tensor = self.around.tensor if self.around.tensor.cut.cuts(module) else self.around.tensor.alone
        bias = None if linear.bias is None else f"{module}.bias"
        projection = Projection(f"{module}.weight", bias, transposed=False, row=how == "row", tensor=tensor)
        if how == "column":
            projection.register_forward_pre_hook(lambda _, arguments: (tensor.enter(arguments[0]), *arguments[1:]))
        return projection

    def weight_name(self, path: str) -> str:
        _, number, inner = path.split(".", 2)
        return self.layers[self.blocks[int(number)]].full_name(inner)

    def units_of(self, blocks: Sequence[str]) -> list[Unit]:
        return super().units_of([*blocks, *(f"{TIE}{name}" for block in blocks for name in self.layers[block].names)])

    def forward(self, received: Boundary, batch: Batch, gradient: Tensor | None) -> Boundary | tuple[Tensor, Tensor]:
        inputs, tensors = self._converted(batch), dict(received)
        for number in range(len(self.groups)):
            tensors |= self._group(number, tensors, inputs)
        if not self.span.last:
            return self._converted({name: tensors[name] for name in self.sends})
        tensors |= inputs
        return self.model.objective({name: _wide(tensors[name]) for name in self.model.results}, batch)

    def _converted(self, tensors: Batch) -> Boundary:
        """Return floating-point tensors in the format that computes."""
        return {name: tensor.to(self.precision.compute) if tensor.is_floating_point() else tensor
                for name, tensor in tensors.items()}

    def _group(self, number: int, tensors: Boundary, inputs: Boundary) -> Boundary:
        """Return what layers that are recomputed together give."""
        layers = [(self.layers[name].spec, self.inner[self.blocks.index(name)]) for name in self.groups[number]]
        gives = list(dict.fromkeys(name for spec, _ in layers for name in spec.gives))
        uses = list(dict.fromkeys(name for spec, _ in layers for name in spec.uses if name in tensors))

        def compute(*arguments: Tensor) -> tuple[Tensor, ...]:
            values = {**inputs, **dict(zip(uses, arguments, strict=True))}
            with self.precision.computing():
                for spec, module in layers:
                    with profiled(spec.name):
                        result = module(*(values[name] for name in spec.uses))
                    values |= dict(zip(spec.gives, result if isinstance(result, tuple) else (result,), strict=True))
            return tuple(values[name] for name in gives)

        return dict(zip(gives, self.compute(number, compute, [tensors[name] for name in uses]), strict=True))


def _wide(tensor: Tensor) -> Tensor:
    """Return a tensor in a format in which losses can be summed."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32)) if tensor.is_floating_point() else tensor
