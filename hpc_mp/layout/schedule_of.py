"""The schedule of a layout: by name, or as a table that must have the layout's sizes."""

from pathlib import Path

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.text import counted
from hpc_mp.layout.layout import Layout
from hpc_mp.layout.schedule.actions import Schedule
from hpc_mp.layout.schedule.complete import Reduce, build
from hpc_mp.layout.schedule.names import is_table
from hpc_mp.layout.schedule.residency import distances
from hpc_mp.layout.schedule.table import check_table, read_table


def schedule_of(layout: Layout) -> Schedule:
    """Return the complete schedule of a layout. Gradients are synchronised after each or the last backward. Raises HpcMpError for
    sizes that the schedule does not support; a table that cannot be read, is not valid or has other sizes."""
    pipeline = layout.degrees.pipeline
    reduce: Reduce = "each" if layout.reduce == "microbatch" else "last"
    if not is_table(layout.schedule):
        return build(layout.schedule, pipeline, layout.microbatches, layout.virtual_stages, reduce)
    schedule = read_table(Path(layout.schedule), reduce)
    check_table(layout.schedule, schedule, ("parallel.pipeline", pipeline), ("parallel.microbatches", layout.microbatches),
                ("parallel.virtual_stages", layout.virtual_stages))
    return schedule


def check_schedule(layout: Layout) -> None:
    """Check that ``schedule_of`` returns a schedule, and that offloaded activations have the time for it. Named schedules were
    checked with the layout's arithmetic: only a table is read. Raises HpcMpError for the reasons of ``schedule_of``, or if no
    activations would be offloaded."""
    horizon = layout.offload_horizon
    if not is_table(layout.schedule) and horizon is None:
        return
    schedule = schedule_of(layout)
    largest = max(max(distances(actions).values()) for actions in schedule.ranks)
    if horizon is not None and largest <= horizon:
        lie = f"{counted(largest, 'other computation')} of a rank {'lies' if largest == 1 else 'lie'}"
        raise HpcMpError(f"parallel.offload_horizon = {horizon}",
                         f"leaves all activations on the device: at most {lie} between a forward and its backward",
                         f"set it to {largest - 1} or less, or leave activations out of parallel.offload" if largest else
                         "leave activations out of parallel.offload, or use more microbatches or another schedule")
