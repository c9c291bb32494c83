"""Measurement of the embedding, one block, and the last norm with the head on a device, for ``partition = "profile"``.

The job's own engine runs on this single process: the model with one block, as three stages of one rank, one for each kind of
unit. A step passes one microbatch of the job's shape, with its precision, dropout and recomputation, through their forwards and
backwards. The pipeline notes their times and kept bytes. Parameters have arbitrary values, which take the same time.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist

from hpc_mp.job import JobSpec
from hpc_mp.layout.models import ModelProfile, ModelShape, UnitProfile, conditions
from hpc_mp.layout.placement import Degrees, place
from hpc_mp.layout.schedule import Action, Schedule, build
from hpc_mp.rundir.rank_env import RankEnv, node_name
from hpc_mp.train.engine import groups
from hpc_mp.train.engine.causal_model import CausalModel
from hpc_mp.train.engine.dropout import Moment
from hpc_mp.train.engine.engine import Engine, Microbatches
from hpc_mp.train.engine.optimizer_state import OnDevice
from hpc_mp.train.engine.pipeline import Span
from hpc_mp.train.engine.section import Batch
from hpc_mp.train.rank.assemble import model_of, settings_of
from hpc_mp.train.rank.devices import choose_device, device_memory, device_name
from hpc_mp.train.rank.rendezvous import process_group

STAGES = (0, 1, 0)  # layers: only the embedding, a block, only the head
WARM_UP = 2  # steps that are not counted: libraries choose algorithms and allocate workspaces
VALUES = 0.02  # standard deviation of the parameters


def measure(spec: JobSpec, shape: ModelShape, repetitions: int) -> ModelProfile:
    """Measure on the local device that ``job.device`` chooses. Raises HpcMpError if it requires a GPU and none exists."""
    device, backend = choose_device(spec.job.device, RankEnv(0, 1, 0, node_name(), "no launcher"), 1)
    schedule = build("breadth_first", 1, 1, len(STAGES), "last")
    with process_group(backend, rank=0, world_size=1, store=dist.HashStore()):
        alone = groups.build(place(Degrees(1, 1, 1), "DPT", 1), 1, device, backend, schedule, None, groups.everyone())
        engine = _engine(spec, shape, schedule, alone, device)
        activation_bytes = [0] * len(STAGES)
        engine.pipeline.perform["F"] = partial(_noted, engine, activation_bytes, engine.pipeline.perform["F"])
        work = _microbatch(spec, shape, device)
        steps = [engine.step(number, work, trace=True) for number in range(WARM_UP + repetitions)]
        seconds = [[_seconds(step.spans, stage) for step in steps[WARM_UP:]] for stage in range(len(STAGES))]
        sizes = [sum(unit.whole.nbytes for unit in engine.pipeline.sections[stage].units.values())
                 for stage in range(len(STAGES))]
    embedding, block, head = (UnitProfile(median(took), activations, parameters, _spread(took))
                              for took, activations, parameters in zip(seconds, activation_bytes, sizes, strict=True))
    return ModelProfile(device_name(device), repetitions, conditions(spec, shape), embedding, block, head,
                        device_memory(device, spec.job.ranks_per_node))


def _engine(spec: JobSpec, shape: ModelShape, schedule: Schedule, alone: groups.Groups, device: torch.device) -> Engine:
    whole = model_of(spec, shape)
    whole.config.num_hidden_layers = 1
    settings = replace(settings_of(spec, schedule, STAGES), zero=0, sequence_parallel=False, tensor_modules=("*",),
                       home=OnDevice, host_parameters=False, offload_horizon=None)
    engine = Engine(CausalModel(whole.config, whole.family, replace(shape, layers=1)), settings, alone, device)
    for unit in engine.data.units.values():
        unit.master.normal_(0.0, VALUES)
    engine.data.publish()
    return engine


def _microbatch(spec: JobSpec, shape: ModelShape, device: torch.device) -> Microbatches:
    """Return one microbatch of the job's shape, with samples of one document. Its tokens are spread over the vocabulary."""
    size, last = (spec.microbatch_size, spec.data.sequence_length), len(STAGES) - 1
    tokens = torch.randint(shape.vocabulary, size, generator=torch.Generator().manual_seed(0)).to(device)

    begins = torch.zeros(size, dtype=torch.int64, device=device) if spec.data.documents == "separate" else None

    def batch(stage: int, microbatch: int) -> Batch:
        return Batch(tokens if stage == 0 else None, tokens if stage == last else None, begins)

    def moment(microbatch: int) -> Moment:
        return Moment(0, tuple(range(spec.microbatch_size)))

    return Microbatches(batch, moment, tokens.numel())


def _noted(engine: Engine, activation_bytes: list[int], perform: Any, step: Any, action: Action) -> None:
    """Perform a forward and note the bytes that it keeps."""
    before = engine.pipeline.activations.here
    perform(step, action)
    activation_bytes[action.stage] = engine.pipeline.activations.here - before


def _spread(seconds: Sequence[float]) -> float:
    """Return the distance of the quartiles, relative to the median."""
    if len(seconds) < 2 or not median(seconds):
        return 0.0
    first, middle, third = quantiles(seconds, method="inclusive")
    return (third - first) / middle


def _seconds(spans: Sequence[Span], stage: int) -> float:
    return sum(end - begin for kind, where, _, begin, end in spans if where == stage and kind in ("F", "B"))
