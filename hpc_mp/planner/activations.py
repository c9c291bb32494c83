"""Activations that ranks keep between forwards and backwards: the number of chunks at once, and their size if predictable.

With b sequences of s tokens in a microbatch, h hidden units and c bytes of a number in the compute format, a chunk keeps

=================== ==============================================================================================================
recompute           of the blocks of its stage
=================== ==============================================================================================================
full                b s h c for each block: its input
every-N             b s h c for each group of N blocks; in its backward, a group temporarily keeps what ``none`` does
none, selective     what the modules of the family save; counted in the step that a rank traces, see the report
=================== ==============================================================================================================

In addition, the first stage keeps the token ids and the last one what the norm, the head and the loss need, about (h + V / T)
numbers for each token. These are few chunks under 1F1B, whose last stage holds one. tests/train/test_recompute.py counts the
same.
"""

from hpc_mp.layout.flat import blocks_together
from hpc_mp.layout.layout import Layout
from hpc_mp.layout.models import ModelShape
from hpc_mp.layout.schedule import Residency, peak_in_flight, peaks, residency
from hpc_mp.layout.schedule_of import schedule_of
from hpc_mp.planner.memory import BYTES
from hpc_mp.rundir.plan import ChunkCounts


def chunk_counts(layout: Layout) -> tuple[ChunkCounts, ...]:
    """Return for every pipeline rank its peak number of chunks between forward and backward, and where their activations are."""
    counts = []
    for actions in schedule_of(layout).ranks:
        plan = Residency() if layout.offload_horizon is None else residency(actions, layout.offload_horizon)
        counts.append(ChunkCounts(peak_in_flight(actions), *peaks(actions, plan)))
    return tuple(counts)


def kept_inputs(layout: Layout, shape: ModelShape) -> int | None:
    """Return the bytes of the inputs that a chunk of the stage with most layers keeps, under ``full`` and ``every-N``; None
    otherwise, because those bytes are counted and not predicted."""
    together = blocks_together(layout.recompute)
    if together is None:
        return None
    _, computed = BYTES[layout.precision]
    return -(-max(layout.layers) // together) * layout.samples * layout.sequence * shape.hidden * computed
