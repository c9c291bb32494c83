"""Pipeline schedules as data: actions, generators, tables, validator, simulation, partition, drawing. Pure Python."""

from hpc_mp.layout.schedule.actions import Action, Kind, Schedule
from hpc_mp.layout.schedule.arrivals import arrivals
from hpc_mp.layout.schedule.complete import Reduce, build, posted_ahead
from hpc_mp.layout.schedule.partition import most_stages, partition
from hpc_mp.layout.schedule.residency import Chunk, Residency, peaks, residency
from hpc_mp.layout.schedule.simulate import Timeline, simulate
from hpc_mp.layout.schedule.validate import peak_in_flight, validate

__all__ = [
    "Action", "Chunk", "Kind", "Reduce", "Residency", "Schedule", "Timeline", "arrivals", "build", "most_stages", "partition",
    "peak_in_flight", "peaks", "posted_ahead", "residency", "simulate", "validate",
]
