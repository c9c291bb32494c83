"""What ranks keep between forwards and backwards: how many chunks at once, and of what size where that can be told.

With b sequences of s tokens in a microbatch, h hidden units and c bytes of a number as it is computed with, a chunk keeps

=================== ==============================================================================================================
recompute           of the blocks of its stage
=================== ==============================================================================================================
full                b s h c for each block: its input
every-N             b s h c for each group of N blocks; in its backward, a group keeps for a while what ``none`` does
none, selective     what the modules of the family happen to save; counted in the step that a rank traces, see the report
=================== ==============================================================================================================

Besides, the first stage keeps the token ids and the last one what the norm, the head and the loss need, about (h + V / T) numbers
for each token; these are few chunks under 1F1B, whose last stage holds one. tests/train/test_activations.py counts the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpc_mp.job import JobSpec
from hpc_mp.layout.flat import blocks_together
from hpc_mp.layout.models import ModelShape
from hpc_mp.layout.schedule import Residency, peak_away, peak_in_flight, peak_resident, residency, schedule_of
from hpc_mp.planner.memory import BYTES
from hpc_mp.rundir.plan import ChunkCounts


def chunk_counts(spec: JobSpec) -> tuple[ChunkCounts, ...]:
    """Of every pipeline rank, how many chunks it is between forward and backward of, and where their activations are."""
    found = []
    for actions in schedule_of(spec).ranks:
        plan = Residency() if spec.offload_horizon is None else residency(actions, spec.offload_horizon)
        found.append(ChunkCounts(peak_in_flight(actions), peak_resident(actions, plan), peak_away(actions, plan)))
    return tuple(found)


def kept_inputs(shape: ModelShape, spec: JobSpec, layers: Sequence[int]) -> int | None:
    """Bytes of the inputs that a chunk of the stage with most layers keeps, under ``full`` and ``every-N``; None with others,
    whose bytes are counted and not predicted."""
    together = blocks_together(spec.parallel.recompute)
    if together is None:
        return None
    _, computed = BYTES[spec.train.precision]
    return -(-max(layers) // together) * spec.microbatch_size * spec.data.sequence_length * shape.hidden * computed
