"""How many bytes the ranks of a job send each other in an optimizer step, by axis, as the engine sends them.

With m microbatches, A the bytes of one activation (microbatch × sequence × hidden), T, D the tensor and data degrees, s the
shard degree and R = D / s, a rank sends:

======== ============================ ==========================================================================================
axis     to                           bytes per step
======== ============================ ==========================================================================================
tp       its neighbour in a ring      2 (T−1)/T × m × (4 per layer, 1 for the embedding, 1 for the head) × A, and 3 numbers per
                                      token for the loss: all-reduces forward and backward
pp       the next and previous stage  m × A each
dp       its neighbour in the ring of without shards 2 (D−1)/D × the stage's gradients; with them (s−1) × its part of the stage ×
         its shard group              (all-gathers in the compute format + reduce-scatters in the master format)
replicas its neighbour in the ring of 2 (R−1)/R × its part of the gradients, in the master format
         ranks with the same part
tied     the other end of a pipeline  its part of the embedding's gradient, where the head is a copy of it
======== ============================ ==========================================================================================

All-gathers and reduce-scatters per step: ZeRO-0 and 1 have one of each, ZeRO-2 one and m, ZeRO-3 2 m and m. Under bf16 the
master format is fp32, so ZeRO-1 moves 2 + 4 bytes per parameter and ZeRO-0, which all-reduces, 8. Parts are those of the first
shard, the largest: FSDP2 pads the others to it. tests/planner/test_traffic.py counts the same bytes in running ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpc_mp.job import JobSpec
from hpc_mp.layout.models import ModelShape, family_of
from hpc_mp.layout.placement import Degrees
from hpc_mp.planner.memory import BYTES, elements
from hpc_mp.rundir.plan import Traffic

AXES = ("tp", "pp", "dp", "replicas", "tied")
LOSS_NUMBERS = 3  # per token and microbatch: the greatest logit, the sum of exponentials, the label's logit


@dataclass(frozen=True, slots=True)
class CollectiveLibrary:
    """How a communication library treats the data axis.

    Attributes:
        reduce_scatter: the bytes of a reduce-scatter, relative to a ring's.
        in_turn: a reduction holds up the backward it belongs to, and with it the stages before: stages use the links
            one after another. Otherwise they do so side by side.
    """

    reduce_scatter: int
    in_turn: bool


NCCL = CollectiveLibrary(reduce_scatter=1, in_turn=False)
GLOO = CollectiveLibrary(reduce_scatter=2, in_turn=True)
"""torch's gloo makes a reduce-scatter of an all-reduce, and FSDP2 has no streams on CPUs. Both were measured on four
nodes at 200 Mbit/s: 11.4 MB left each node per step, where a ring reduce-scatter makes 7.9; and the data axis took
twice as long where a node holds two ranks of one stage as where it holds one rank of each of two stages."""


def degrees_of(spec: JobSpec) -> Degrees:
    p = spec.parallel
    return Degrees(tensor=p.tensor, pipeline=p.pipeline, data=spec.data_degree, context=p.context, expert=p.expert)


def library_of(spec: JobSpec) -> CollectiveLibrary:
    """That of the ranks of a job whose device is chosen: those on CPUs talk through gloo, those on GPUs through NCCL."""
    return GLOO if spec.job.device == "cpu" else NCCL


def traffic_of(spec: JobSpec, shape: ModelShape, layers: tuple[int, ...], library: CollectiveLibrary | None = None) -> Traffic:
    """Of every axis what the stage sends that sends most. ``layers``: of every stage; ``library``: default that of the job."""
    stages = [stage_traffic(spec, shape, layers, stage, library or library_of(spec)) for stage in range(len(layers))]
    return Traffic(**{axis: max(getattr(stage, axis) for stage in stages) for axis in AXES}, shards=stages[0].shards)


def stage_traffic(
    spec: JobSpec, shape: ModelShape, layers: tuple[int, ...], stage: int, library: CollectiveLibrary,
) -> Traffic:
    """What the first rank of a stage sends along each axis."""
    p, m = spec.parallel, spec.microbatches
    master, computed, _ = BYTES[spec.train.precision]
    first, last = stage == 0, stage == len(layers) - 1
    tokens = spec.microbatch_size * spec.data.sequence_length
    activation = tokens * shape.hidden * computed
    begin = sum(layers[:stage])
    family = family_of(shape.model_type)
    weights = family.stage_weights(shape, range(begin, begin + layers[stage]), first, last)
    embedding = [weight for weight in weights if weight.name == f"{family.embedding}.weight"]
    copied = shape.tied and p.pipeline > 1 and (first or last)
    reduced = (4 * layers[stage] + first + last) * activation + (LOSS_NUMBERS * tokens * max(4, computed) if last else 0)
    dp, replicas = _data_axis(spec, sum(elements(w, spec, 0, 1) for w in weights),
                              sum(elements(w, spec, 0, spec.shard_degree) for w in weights), library)
    return Traffic(
        tp=_ring_all_reduce(p.tensor) * m * reduced,
        pp=float(m * activation) if p.pipeline > 1 else 0.0,
        dp=dp, replicas=replicas,
        tied=float(sum(elements(w, spec, 0, spec.shard_degree) for w in embedding) * master) if copied else 0.0,
        shards=spec.shard_degree if 1 < spec.shard_degree < spec.data_degree else None)


def _data_axis(spec: JobSpec, whole: int, part: int, library: CollectiveLibrary) -> tuple[float, float]:
    """Bytes of ``dp`` and of ``replicas`` for a stage of which a rank holds ``part`` of ``whole`` parameters."""
    master, computed, _ = BYTES[spec.train.precision]
    zero, m, shards = spec.parallel.zero, spec.microbatches, spec.shard_degree
    if shards == 1:
        return _ring_all_reduce(spec.data_degree) * whole * master, 0.0
    gathers, scatters = {1: (1, 1), 2: (1, m), 3: (2 * m, m)}[zero]
    sharded = (gathers * computed + scatters * library.reduce_scatter * master) * (shards - 1) * part
    return float(sharded), _ring_all_reduce(spec.data_degree // shards) * part * master


def _ring_all_reduce(ranks: int) -> float:
    """What a rank sends in a ring's all-reduce, relative to the bytes that are reduced."""
    return 2 * (ranks - 1) / ranks
