"""The cut of a measured model into stages: even in time; even in time and memory if the fullest rank would not fit.

The step waits for the stage that computes longest, so only time counts as long as every rank fits into the memory of the measured
device. A rank holds its state (``memory``) and, for as many chunks as its schedule keeps at once, the measured activations of the
fullest of its stages. Tensor and context ranks have equal shares of activations, which are measured whole.
"""

from dataclasses import replace

from hpc_mp.base.text import memory_size
from hpc_mp.job import JobSpec
from hpc_mp.layout.flat import stage_spans
from hpc_mp.layout.models import ModelProfile, ModelShape, StageCut, read_profile, stage_cut
from hpc_mp.layout.schedule import schedule_of
from hpc_mp.planner.activations import chunk_counts
from hpc_mp.planner.memory import state_bytes

WEIGHTS = tuple(tenths / 10 for tenths in range(11))  # of memory; the rest is the weight of time


def measured_cut(spec: JobSpec, shape: ModelShape) -> StageCut:
    """Return the stages of a job with ``partition = "profile"``.

    ``memory_weight`` counts as the job states it. If it is left out, the smallest weight with which every rank fits is taken; if
    none fits, the weight whose fullest rank holds least. Raises HpcMpError if the profile is missing, or is a profile of
    something else.
    """
    profile = read_profile(spec, shape)
    if spec.parallel.memory_weight is not None or profile.memory is None:
        return stage_cut(spec, shape)
    cuts = [stage_cut(_weighed(spec, weight), shape) for weight in WEIGHTS]
    needs = [fullest(cut.layers, profile, spec, shape) for cut in cuts]
    fits = next((number for number, need in enumerate(needs) if need <= profile.memory), None)
    if fits == 0:
        return cuts[0]
    chosen = needs.index(min(needs)) if fits is None else fits
    room = f"the {memory_size(profile.memory)} of a measured {profile.device}"
    beyond = f"; with time alone a rank would need {memory_size(needs[0])} of {room}"
    still = f", and it still needs {memory_size(needs[chosen])}" if fits is None else ""
    return replace(cuts[chosen], why=f"{cuts[chosen].why}; memory_weight {WEIGHTS[chosen]}{beyond}{still}")


def _weighed(spec: JobSpec, weight: float) -> JobSpec:
    return spec.model_copy(update={"parallel": spec.parallel.model_copy(update={"memory_weight": weight})})


def fullest(layers: tuple[int, ...], profile: ModelProfile, spec: JobSpec, shape: ModelShape) -> int:
    """Return the bytes of the rank that holds most: state and activations."""
    sizes = [profile.embedding.activations * span.first + profile.block.activations * len(span.layers)
            + profile.head.activations * span.last for span in stage_spans(layers)]
    shares = spec.parallel.tensor * spec.parallel.context
    state, placement = state_bytes(shape, spec, layers), schedule_of(spec).placement
    needs = []
    for rank, chunks in enumerate(chunk_counts(spec)):
        largest = max(size for size, holder in zip(sizes, placement, strict=True) if holder == rank)
        held = max(state[rank, tensor].total for tensor in range(spec.parallel.tensor))
        needs.append(held + chunks.here * largest // shares)
    return max(needs)
