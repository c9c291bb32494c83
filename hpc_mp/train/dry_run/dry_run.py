"""A dry run: one rank of a layout of up to thousands, built and stepped in this process on tensors without values;
and the longest sample with which a step fits into a memory, by dry runs of several lengths.

Engine, schedule and groups are the real ones. Tensors are torch's fake tensors, which have shapes and no memory. The back end of
torch.distributed is its fake one, whose messages go nowhere. Allocations and messages of the step are counted at torch's
dispatcher. Attention is torch's flash attention for CPUs, which keeps as many bytes for its backward as the one for GPUs. Memory
that libraries hold for themselves (a CUDA context, workspaces) and gaps between allocations are not counted; NCCL's buffers are
estimated beside it.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job import JobSpec
from hpc_mp.job.layout import layout_of
from hpc_mp.layout.layout import Layout
from hpc_mp.layout.models import ModelShape, kv_copies
from hpc_mp.layout.placement import Placement, RankPlace
from hpc_mp.layout.schedule import Action, Schedule
from hpc_mp.layout.schedule_of import schedule_of
from hpc_mp.rundir.plan import StateBytes
from hpc_mp.train.dry_run.host import Loading, OpenSockets, Saving, loading, open_sockets, saving
from hpc_mp.train.dry_run.recorder import Peak, Recorder, SentMessages
from hpc_mp.train.parallel.communicators import build, everyone
from hpc_mp.train.parallel.data_axis import DataAxis
from hpc_mp.train.parallel.groups import Groups
from hpc_mp.train.pipeline.stage import Microbatches
from hpc_mp.train.rank.assemble import assemble
from hpc_mp.train.rank.rendezvous import process_group
from hpc_mp.train.step.engine import Engine
from hpc_mp.train.step.memory import state_bytes

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class UnitElements:
    """A unit of this rank in elements: its weights including padding, and the part of it that this rank updates."""

    unit: str
    padded: int
    part: int


@dataclass(frozen=True, slots=True)
class DryStep:
    """The memory and messages of one rank in one step."""

    units: tuple[UnitElements, ...]
    state: StateBytes  # parameters, gradients and optimizer state between steps
    rest: int  # bytes on the device before the step: the state, and small tensors such as rotary tables
    peaks: dict[str, Peak]  # peak of each kind of action; "optimizer" is the time after the last action
    messages: tuple[SentMessages, ...]  # all messages of the step, by axis, kind and size
    in_flight: int  # peak number of chunks (stage, microbatch) with activations in memory

    @property
    def peak(self) -> Peak:
        return max(self.peaks.values(), key=lambda peak: peak.bytes)


@dataclass(frozen=True, slots=True)
class DryRun:
    """The result of a dry run of one rank. ``layers``: layers of every stage of the pipeline; ``stages``: the stages of this
    rank. ``groups``: (axis, ranks) of every group that this rank is in. ``seconds``: duration of the dry run."""

    place: RankPlace
    world: int
    device: str
    layers: tuple[int, ...]
    stages: tuple[int, ...]
    step: DryStep
    groups: tuple[tuple[str, int], ...]
    sockets: OpenSockets
    loading: Loading
    saving: Saving
    seconds: float


def dry_run(spec: JobSpec, shape: ModelShape, placement: Placement, rank: int) -> DryRun:
    """Build and step one rank. It has a GPU and uses NCCL unless ``job.device`` is "cpu"."""
    began, on_gpu = time.perf_counter(), spec.job.device != "cpu"
    layout = layout_of(spec, shape)
    schedule = schedule_of(layout)
    with process_group("fake", rank=rank, world_size=spec.ranks):
        new = partial(_fake_group, rank)
        groups = build(placement, layout.shard_degree, CPU, "cpu:gloo,cuda:nccl" if on_gpu else "gloo", schedule, None,
                       everyone(new=new), kv_copies(shape, layout.degrees.tensor), new, layout.expert_cut().shards)
        with FakeTensorMode(allow_non_fake_inputs=True):  # longrope makes a tensor from a list
            engine, step = _stepped_without_disk(spec, shape, layout, groups, schedule)
            return DryRun(
                placement.ranks[rank], spec.ranks, "cuda" if on_gpu else "cpu", layout.layers,
                tuple(schedule.stages_of(groups.pipeline)), step, tuple(sorted(axis for _, axis in _axes(groups))),
                open_sockets(groups, placement, rank, spec.job.heartbeat_timeout), loading(spec, shape, engine, rank),
                saving(engine, groups, rank, on_gpu, spec.checkpoint.background), time.perf_counter() - began)


def stepped(spec: JobSpec, shape: ModelShape, layout: Layout, groups: Groups, schedule: Schedule) -> tuple[Engine, DryStep]:
    """Build this rank's engine and step it once, on the current kind of tensors and back end; real ranks can call it too."""
    recorder = Recorder({name: axis for name, (axis, _) in _axes(groups)})
    with recorder:
        engine = assemble(spec, shape, layout, groups, schedule, CPU)
        units = engine.data.units
        state = StateBytes(**state_bytes(units.values(), engine.optimizer))
        recorder.gathers(unit.whole.untyped_storage() for unit in units.values() if unit.gathers)
        recorder.on_host(array.untyped_storage() for array in _on_host(engine))
        recorder.slabs = partial(_slab_bytes, engine.data)
        rest = recorder.live
        performers = engine.passes.pipeline.perform
        performers |= {kind: partial(_noted, recorder, perform) for kind, perform in performers.items()}
        recorder.at("begin", "the beginning of the step")
        recorder.peaks.clear()
        tokens = partial(torch.zeros, (layout.samples, layout.sequence), dtype=torch.int64)  # only token 0
        separate = spec.data.documents == "separate"
        share = Microbatches.artificial(layout, engine.data.stages, tokens, separate, CPU)
        result = engine.step(0, share, partial(_over, recorder))
    return engine, DryStep(
        tuple(UnitElements(name, unit.layout.padded, unit.layout.part) for name, unit in units.items()), state, rest,
        recorder.peaks, tuple(recorder.sent()), result.passed.most_held)


def _stepped_without_disk(spec: JobSpec, shape: ModelShape, layout: Layout, groups: Groups,
                          schedule: Schedule) -> tuple[Engine, DryStep]:
    """Step without opening a file: optimizer state that would be in a file is fake tensors on the host."""
    engine, step = stepped(spec, shape, replace(layout, offload_directory=None), groups, schedule)
    if layout.offload_directory is None:
        return engine, step
    disk_bytes = engine.optimizer.home.nbytes.host
    return engine, replace(step, state=replace(step.state, host=step.state.host - disk_bytes, disk=disk_bytes))


def _noted(recorder: Recorder, perform: Any, step: Any, action: Action) -> None:
    recorder.at(action.kind, f"{action.kind} of stage {action.stage}, microbatch {action.microbatch}")
    perform(step, action)


def _over(recorder: Recorder) -> Sequence[float]:
    """Record the end of the last backward. Return as many notes as the trainer."""
    recorder.at("optimizer", "the optimizer")
    return 0.0, 0.0, 0.0


def _on_host(engine: Engine) -> Iterator[Tensor]:
    """Yield the tensors that the rank keeps in host memory, or in a mapped file, between steps."""
    for unit in engine.data.units.values():
        yield from unit.away.arrays if unit.away else ()
    home = engine.optimizer.home
    for slots in home.arrays().values() if home.nbytes.host or home.nbytes.disk else ():
        yield from slots.values()


def _slab_bytes(data: DataAxis) -> int:
    taken = [unit.gradient.whole for unit in data.trained.values() if not unit.gradient.kept]
    slabs = [*data.slabs.free, *(slab for _, slab in data.slabs.running), *(buffer for buffer in taken if buffer is not None)]
    return sum(slab.nbytes for slab in slabs)


def _axes(groups: Groups) -> Iterator[tuple[str, tuple[str, int]]]:
    """Yield torch's name for each group of this rank, with the axis and its number of ranks."""
    axes = {} if groups.world.through_host else {"world": groups.world.block}
    axes |= {"block of the world": groups.host.block, "blocks of the world": groups.host.heads}
    axes |= {name: getattr(groups, name) for name in ("tensor", "context", "shard", "replicate", "kv", "expert")}
    axes |= {"shard of experts": groups.experts.shard, "replicate of experts": groups.experts.replicate}
    for name, axis in (*axes.items(), *(("tied", axis) for axis in groups.ties.values())):
        if axis.group is not None:
            yield axis.group.group_name, (name, axis.size)
    for (sender, receiver, payload), channel in groups.channels.groups.items():
        assert channel is not None
        yield channel.group_name, (f"pipeline {sender}→{receiver} {payload}", 2)


def _fake_group(rank: int, ranks: list[int], **options: Any) -> dist.ProcessGroup | None:
    """Create a fake group if this rank is in it. It is called for all groups of the world."""
    return dist.new_group(ranks, backend="fake") if rank in ranks else None


CONTEXT = 1 << 30  # bytes of a CUDA context with its loaded kernels and workspaces of matrix products, about
HALVINGS = 3  # of the doubling between a length that fits and one that does not


@dataclass(frozen=True, slots=True)
class Fit:
    """The result of a search.

    Attributes:
        memory: bytes of the device.
        tokens: of the longest sample tried that fits; 0: none does. ``bytes``: that its step needs.
        more: of the shortest sample tried that does not fit; None: the job allows no longer one. ``more_bytes``: as ``bytes``.
        limit: why the job allows no longer one.
    """

    memory: int
    tokens: int
    bytes: int
    more: int | None
    more_bytes: int
    limit: str


def needed(result: DryRun) -> int:
    """Return the bytes of the device that a step needs: the peak, and on a GPU what libraries hold for themselves, about."""
    return result.step.peak.bytes + result.sockets.buffers + (CONTEXT if result.device == "cuda" else 0)


def longest(at: Callable[[int], DryRun], first: int, unit: int, memory: int) -> Fit:
    """Search for the longest sample that fits: double or halve the length, then bisect. ``at``: tokens of a sample -> the dry run
    of a rank. Raises HpcMpError if the job does not allow this length. ``first``: length to begin with. ``unit``: whose multiples
    are tried."""
    sizes: dict[int, int] = {0: 0}  # tokens -> bytes, of samples that fit
    beyond: dict[int, int] = {}  # and of those that do not
    limits: dict[int, str] = {}

    def fits(tokens: int) -> bool:
        try:
            size = needed(at(tokens))
        except HpcMpError as error:
            limits[tokens] = str(error)
            return False
        (sizes if size <= memory else beyond)[tokens] = size
        return size <= memory

    low = high = max(unit, first // unit * unit)
    if fits(low):
        while fits(high := 2 * low):
            low = high
    else:
        while low >= 2 * unit and not fits(low := low // 2 // unit * unit):
            high = low
    if low in sizes:
        for _ in range(HALVINGS):
            between = (low + high) // 2 // unit * unit
            if between <= low:
                break
            low, high = (between, high) if fits(between) else (low, between)
    best, more = max(sizes), min(beyond, default=None)
    limit = limits[min(limits)] if limits and (more is None or min(limits) < more) else ""
    return Fit(memory, best, sizes[best], more, beyond[more] if more is not None else 0, limit)
