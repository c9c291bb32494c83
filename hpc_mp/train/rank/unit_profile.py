"""Measurement of the embedding, a block of each kind, and the last norm with the head on a device, for ``partition = "profile"``.

The job's own engine runs on this single process: the model with one block of each kind, as stages of one rank, one for each unit.
A step passes one microbatch of the job's shape, with its precision, dropout and recomputation, through their forwards and
backwards. The pipeline notes their times and kept bytes. Parameters have arbitrary values, which take the same time.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist

from hpc_mp.job import JobSpec
from hpc_mp.job.layout import measured_with, undivided
from hpc_mp.layout.flat import FlatLayout, StageSpan
from hpc_mp.layout.layout import Layout
from hpc_mp.layout.model_profile import ModelProfile, UnitProfile
from hpc_mp.layout.models import ModelShape
from hpc_mp.layout.placement import place
from hpc_mp.layout.schedule import Action
from hpc_mp.layout.schedule_of import schedule_of
from hpc_mp.rundir.rank_env import RankEnv, node_name
from hpc_mp.train.model.transformers_model import TransformersModel
from hpc_mp.train.model.transformers_stage import TransformersStage
from hpc_mp.train.parallel.communicators import build, everyone
from hpc_mp.train.parallel.groups import Groups
from hpc_mp.train.parallel.surroundings import Surroundings
from hpc_mp.train.pipeline.pipeline import Pipeline, Span
from hpc_mp.train.pipeline.stage import Microbatches
from hpc_mp.train.rank.assemble import model_of, settings_of
from hpc_mp.train.rank.devices import device_choice, device_name, own_gpu, seat_of, taken
from hpc_mp.train.rank.rendezvous import process_group
from hpc_mp.train.step.engine import Engine
from hpc_mp.train.step.memory import limit_bytes

WARM_UP = 2  # steps that are not counted: libraries choose algorithms and allocate workspaces
VALUES = 0.02  # standard deviation of the parameters


@dataclass(frozen=True, slots=True)
class OneOfEachKind(TransformersModel):
    """A model without its layers, except for one of each kind. ``chosen``: their numbers in the whole model."""

    chosen: tuple[int, ...] = ()

    def units(self, layout: Layout, spans: Iterable[StageSpan], tensor: int, expert: int) -> Mapping[str, FlatLayout]:
        return TransformersModel.units(self, layout, map(self._chosen, spans), tensor, expert)

    def build(self, span: StageSpan, around: Surroundings) -> TransformersStage:
        return TransformersModel.build(self, self._chosen(span), around)

    def _chosen(self, span: StageSpan) -> StageSpan:
        """Return a stage of at most one layer with the layer's own number."""
        numbers = [self.chosen[layer] for layer in span.layers]
        return replace(span, layers=range(numbers[0], numbers[0] + 1) if numbers else range(0))


def measure(spec: JobSpec, shape: ModelShape, repetitions: int) -> ModelProfile:
    """Measure on the local device that ``job.device`` chooses. Raises HpcMpError if it requires a GPU and none exists."""
    alone_here = RankEnv(0, 1, 0, node_name(), "no launcher")
    gpu = own_gpu(spec.job.device, alone_here)
    device, backend = taken(gpu, device_choice(spec.job.device, [seat_of(alone_here, gpu)], False))
    chosen = tuple(map(shape.kinds.index, sorted({*shape.kinds})))
    layout = alone(undivided(spec), len(chosen))
    stages = range(layout.stages)
    with process_group(backend, rank=0, world_size=1, store=dist.HashStore()):
        only = build(place(layout.degrees, "DPT", 1), 1, device, backend, schedule_of(layout), None, everyone())
        engine = _engine(spec, shape, chosen, layout, only, device)
        activation_bytes = [0] * layout.stages
        pipeline = engine.passes.pipeline
        pipeline.perform["F"] = partial(_noted, pipeline, activation_bytes, pipeline.perform["F"])
        size = layout.samples, layout.sequence  # tokens are spread over the vocabulary
        tokens = torch.randint(shape.vocabulary, size, generator=torch.Generator().manual_seed(0)).to(device)
        work = Microbatches.artificial(layout, stages, lambda: tokens, spec.data.documents == "separate", device)
        steps = [engine.step(number, work, trace=True) for number in range(WARM_UP + repetitions)]
        seconds = [[_seconds(step.passed.spans, stage) for step in steps[WARM_UP:]] for stage in stages]
        sizes = [sum(unit.whole.nbytes for unit in pipeline.stages[stage].units.values()) for stage in stages]
    embedding, *blocks, head = (UnitProfile(median(took), activations, parameters, _spread(took))
                                for took, activations, parameters in zip(seconds, activation_bytes, sizes, strict=True))
    return ModelProfile(device_name(device), repetitions, measured_with(spec, shape), embedding, tuple(blocks), head,
                        limit_bytes(device, spec.job.ranks_per_node))


def alone(layout: Layout, blocks: int) -> Layout:
    """Return the layout of one microbatch on this process, with a stage for each unit."""
    layers = (0, *[1] * blocks, 0)
    return Layout(samples=layout.samples, sequence=layout.sequence, schedule="breadth_first", virtual_stages=len(layers),
                  layers=layers, zero=0, recompute=layout.recompute, precision=layout.precision,
                  optimizer_slots=layout.optimizer_slots, expert_capacity=layout.expert_capacity)


def _engine(spec: JobSpec, shape: ModelShape, chosen: tuple[int, ...], layout: Layout, only: Groups,
            device: torch.device) -> Engine:
    whole = model_of(spec, shape)
    settings = settings_of(spec, layout, schedule_of(layout))
    engine = Engine(OneOfEachKind(whole.config, whole.family, shape, chosen=chosen), settings, only, device)
    for unit in engine.data.units.values():
        unit.master.normal_(0.0, VALUES)
    engine.data.filled()
    return engine


def _noted(pipeline: Pipeline, activation_bytes: list[int], perform: Any, step: Any, action: Action) -> None:
    """Perform a forward and note the bytes that it keeps."""
    before = pipeline.activations.here
    perform(step, action)
    activation_bytes[action.stage] = pipeline.activations.here - before


def _spread(seconds: Sequence[float]) -> float:
    """Return the distance of the quartiles, relative to the median."""
    if len(seconds) < 2 or not median(seconds):
        return 0.0
    first, middle, third = quantiles(seconds, method="inclusive")
    return (third - first) / middle


def _seconds(spans: Sequence[Span], stage: int) -> float:
    return sum(end - begin for kind, where, _, begin, end in spans if where == stage and kind in ("F", "B"))
