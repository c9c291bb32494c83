"""The schedule of a job file: by name, or as a table that must have the job's sizes.

This module is separate because it is the only part of the schedules that knows a job.
"""

from pathlib import Path

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.text import counted
from hpc_mp.job import JobSpec
from hpc_mp.job.schedules import is_table
from hpc_mp.layout.schedule.actions import Schedule
from hpc_mp.layout.schedule.complete import Reduce, build
from hpc_mp.layout.schedule.residency import distances
from hpc_mp.layout.schedule.table import read_table


def schedule_of(spec: JobSpec) -> Schedule:
    """Return the complete schedule of a job. Gradients are synchronised after each or the last backward, by the job. Raises
    HpcMpError for sizes that the schedule does not support; a table that cannot be read, is not valid or has other sizes."""
    p = spec.parallel
    reduce: Reduce = "each" if spec.reduce == "microbatch" else "last"
    if not is_table(p.schedule):
        return build(p.schedule, p.pipeline, spec.microbatches, p.virtual_stages, reduce)
    schedule = read_table(Path(p.schedule), reduce)
    check_table(p.schedule, schedule, ("parallel.pipeline", p.pipeline), ("parallel.microbatches", spec.microbatches),
                ("parallel.virtual_stages", p.virtual_stages))
    return schedule


def check_schedule(spec: JobSpec) -> None:
    """Check that ``schedule_of`` returns a schedule, and that offloaded activations have the time for it.

    Named schedules were checked with the job's arithmetic: only a table is read. Raises HpcMpError for the reasons of
    ``schedule_of``, or if no activations would be offloaded.
    """
    horizon = spec.offload_horizon
    if not is_table(spec.parallel.schedule) and horizon is None:
        return
    schedule = schedule_of(spec)
    largest = max(max(distances(actions).values()) for actions in schedule.ranks)
    if horizon is not None and largest <= horizon:
        lie = f"{counted(largest, 'other computation')} of a rank {'lies' if largest == 1 else 'lie'}"
        raise HpcMpError(f"parallel.offload_horizon = {horizon}",
                         f"leaves all activations on the device: at most {lie} between a forward and its backward",
                         f"set it to {largest - 1} or less, or leave activations out of parallel.offload" if largest else
                         "leave activations out of parallel.offload, or use more microbatches or another schedule")


def check_table(name: str, schedule: Schedule, ranks: tuple[str, int | None], microbatches: tuple[str, int | None],
                stages_per_rank: tuple[str, int | None]) -> None:
    """Check that a table has the requested sizes, each (the key by which the user knows it, its value or None for any). Raises
    HpcMpError for the first that differs."""
    count = len(schedule.ranks)
    for (key, value), size, what in ((ranks, count, "pipeline ranks"), (microbatches, schedule.microbatches, "microbatches"),
                                     (stages_per_rank, schedule.stages / count, "stages per rank")):
        if value is not None and value != size:
            raise HpcMpError(f"{key} = {value}", f"the table {name} is for {size:g} {what}",
                             f"set {key} to {size:g}" if size == int(size) else "give every rank the same number of stages")
