"""Results of a benchmark, as comparable numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from hpc_mp.doctor.bench.spec import ELEMENT, BenchSpec
from hpc_mp.planner.collectives import COLLECTIVES, PLACED, Placed

SPIKE = 1.5  # times the median from which on an iteration is a spike (default of nccl-tests' analyze_perf_json.py)


@dataclass(frozen=True, slots=True)
class Spike:
    """An iteration that took ``times`` the median, and the members of the group that took that long."""

    iteration: int
    times: float
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Timing:
    """The timing of one group, size and placement."""

    seconds: float  # duration of one operation in seconds, averaged over iterations and ranks (``-a 1`` of nccl-tests)
    algbw: float  # algorithm bandwidth in GB/s
    busbw: float  # bus bandwidth in GB/s
    wrong: int | None  # number of wrong elements on all ranks; None if they were not compared
    ranks: tuple[tuple[float, ...], ...]  # seconds of each iteration, by member of the group

    @property
    def iterations(self) -> tuple[float, ...]:
        """Seconds of each iteration on its slowest rank."""
        return tuple(max(times) for times in zip(*self.ranks, strict=True))

    @property
    def spikes(self) -> tuple[Spike, ...]:
        """Iterations that took ``SPIKE`` times the median or longer, the worst first."""
        times = self.iterations
        usual = median(times)
        if not usual:
            return ()
        spikes = (Spike(number, time / usual, tuple(member for member, durations in enumerate(self.ranks)
                                                    if durations[number] >= SPIKE * usual))
                  for number, time in enumerate(times) if time >= SPIKE * usual)
        return tuple(sorted(spikes, key=lambda spike: -spike.times))


def statistics(times: Sequence[float]) -> dict[str, float]:
    """Return the statistics of iterations as nccl-tests with ``-I 1`` writes them; percentiles are nearest ranks."""
    ordered, mean = sorted(times), fmean(times)
    deviation = math.sqrt(fmean((time - mean) ** 2 for time in times))
    places = {"min": 0, "max": -1, "p50": len(times) // 2,
              **{f"p{percent}": max(0, math.ceil(len(times) * percent / 100) - 1) for percent in (95, 99)}}
    return {**{f"{name}_us": ordered[place] * 1e6 for name, place in places.items()}, "avg_us": mean * 1e6,
            "stdev_us": deviation * 1e6, "cv_pct": 100 * deviation / mean if mean else 0.0}


@dataclass(frozen=True, slots=True)
class GroupResult:
    """The result of one group at one size: ``size`` in bytes and ``count`` in elements as in nccl-tests' table."""

    group: int
    members: tuple[int, ...]
    size: int
    count: int
    timings: dict[Placed, Timing]


@dataclass(frozen=True, slots=True)
class BenchRow:
    """The results of all groups at one size, measured at the same time."""

    groups: tuple[GroupResult, ...]
    native: Placed

    def busbw(self, result: GroupResult) -> float:
        """Return the bus bandwidth in the placement that the library offers without a copy."""
        return result.timings[self.native].busbw

    @property
    def worst(self) -> GroupResult:
        return min(self.groups, key=self.busbw)

    @property
    def median(self) -> float:
        """The median bus bandwidth of the groups in GB/s."""
        return median(map(self.busbw, self.groups))

    @property
    def wrong(self) -> int:
        return sum(timing.wrong or 0 for result in self.groups for timing in result.timings.values())


def row(spec: BenchSpec, size: int, ranks: Sequence[dict[str, Any]]) -> BenchRow:
    """Build a row from the event ``row``: mean, wrong elements and iterations of every rank, by placement."""
    collective, element = COLLECTIVES[spec.collective], ELEMENT[spec.dtype]
    results = []
    for number, members in enumerate(spec.groups):
        counts = collective.counts(size, len(members), element)
        bytes_ = counts.total * element
        timings: dict[Placed, Timing] = {}
        for placed in PLACED:
            means, wrong, iterations = zip(*(ranks[member][placed] for member in members), strict=True)
            seconds = fmean(means)
            timings[placed] = Timing(seconds, *collective.bandwidths(bytes_, seconds, len(members)),
                                     sum(wrong) if spec.check and placed in collective.checked else None,
                                     tuple(map(tuple, iterations)))
        results.append(GroupResult(number, members, bytes_, counts.param, timings))
    return BenchRow(tuple(results), collective.native)


def average(rows: Sequence[BenchRow]) -> float:
    """Return nccl-tests' "Avg bus bandwidth" in GB/s, over all sizes and both placements, of the slowest group at each size."""
    return fmean([timing.busbw for entry in rows for timing in entry.worst.timings.values()] or [0.0])
