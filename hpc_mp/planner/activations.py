"""Chunks of activations between a forward and its backward; their bytes are in ``planner/footprint.py``."""

from hpc_mp.layout.layout import Layout
from hpc_mp.layout.schedule import Residency, peak_in_flight, peaks, residency
from hpc_mp.layout.schedule_of import schedule_of
from hpc_mp.rundir.plan import ChunkCounts


def chunk_counts(layout: Layout) -> tuple[ChunkCounts, ...]:
    """Return for every pipeline rank its peak number of chunks between forward and backward, and where their activations are."""
    counts = []
    for actions in schedule_of(layout).ranks:
        plan = Residency() if layout.offload_horizon is None else residency(actions, layout.offload_horizon)
        counts.append(ChunkCounts(peak_in_flight(actions), *peaks(actions, plan)))
    return tuple(counts)
