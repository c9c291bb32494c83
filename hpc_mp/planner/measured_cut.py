"""The cut of a measured model into stages: even in time; even in time and memory if the fullest rank would not fit.

The step waits for the stage that computes longest, so only time counts as long as every rank fits into the memory of the measured
device. A rank holds its state (``memory``) and, for as many chunks as its schedule keeps at once, the measured activations of the
fullest of its stages. Tensor and context ranks have equal shares of activations, which are measured whole.
"""

from dataclasses import replace

from hpc_mp.base.text import memory_size
from hpc_mp.layout.flat import stage_spans
from hpc_mp.layout.layout import Layout
from hpc_mp.layout.model_profile import ModelProfile
from hpc_mp.layout.models import ModelShape
from hpc_mp.layout.schedule_of import schedule_of
from hpc_mp.layout.stages import Partition, StageCut, cut_stages
from hpc_mp.planner.activations import chunk_counts
from hpc_mp.planner.memory import state_bytes

WEIGHTS = tuple(tenths / 10 for tenths in range(11))  # of memory; the rest is the weight of time


def measured_cut(layout: Layout, shape: ModelShape, profile: ModelProfile) -> StageCut:
    """Return the stages of a measured model with the smallest weight of memory with which every rank fits into the measured
    device; if none fits, with the weight whose fullest rank holds least."""
    cuts = [cut_stages(layout, shape, Partition("profile", profile, weight)) for weight in WEIGHTS]
    if profile.memory is None:
        return cuts[0]
    needs = [fullest(replace(layout, layers=cut.layers), shape, profile) for cut in cuts]
    fits = next((number for number, need in enumerate(needs) if need <= profile.memory), None)
    if fits == 0:
        return cuts[0]
    chosen = needs.index(min(needs)) if fits is None else fits
    room = f"the {memory_size(profile.memory)} of a measured {profile.device}"
    beyond = f"; with time alone a rank would need {memory_size(needs[0])} of {room}"
    still = f", and it still needs {memory_size(needs[chosen])}" if fits is None else ""
    return replace(cuts[chosen], why=f"{cuts[chosen].why}; memory_weight {WEIGHTS[chosen]}{beyond}{still}")


def fullest(layout: Layout, shape: ModelShape, profile: ModelProfile) -> int:
    """Return the bytes of the rank that holds most: state and activations."""
    kinds = shape.kinds
    sizes = [profile.embedding.activations * span.first + sum(profile.blocks[kinds[layer]].activations for layer in span.layers)
            + profile.head.activations * span.last for span in stage_spans(layout.layers)]
    degrees = layout.degrees
    state, placement = state_bytes(layout, shape), schedule_of(layout).placement
    needs = []
    for rank, chunks in enumerate(chunk_counts(layout)):
        largest = max(size for size, holder in zip(sizes, placement, strict=True) if holder == rank)
        held = max(state[rank, tensor].total for tensor in range(degrees.tensor))
        needs.append(held + chunks.here * largest // (degrees.tensor * degrees.context))
    return max(needs)
