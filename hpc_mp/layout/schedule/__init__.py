"""Pipeline schedules as data: actions, generators, validator, simulation, partition, drawing. Pure Python."""

from hpc_mp.layout.schedule.actions import Action, Kind, Schedule
from hpc_mp.layout.schedule.generators import SCHEDULES, Reduce, build
from hpc_mp.layout.schedule.partition import partition
from hpc_mp.layout.schedule.simulate import Timeline, simulate
from hpc_mp.layout.schedule.validate import peak_in_flight, validate

__all__ = [
    "SCHEDULES",
    "Action",
    "Kind",
    "Reduce",
    "Schedule",
    "Timeline",
    "build",
    "partition",
    "peak_in_flight",
    "simulate",
    "validate",
]
