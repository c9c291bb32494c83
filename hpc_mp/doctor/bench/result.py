"""Results of a benchmark as comparable numbers, and their comparison with expected bandwidth, with a verdict for each size."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

from hpc_mp.catalogue import catalogue
from hpc_mp.doctor.bench.spec import ELEMENT, BenchSpec, nodes_of
from hpc_mp.planner.collectives import COLLECTIVES, PLACED, Expectation, Placed, expect, expect_gloo, nic_share
from hpc_mp.planner.fabrics import Fabric, fabric, fabrics

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


# Errors of the model on healthy systems (docs/user/bench.md has the residuals): if bandwidth dominates, and otherwise.
REACH = 0.8  # fraction of the asymptotic bandwidth from which on bandwidth dominates
TOLERANCE = 0.15
TOLERANCE_OF_LATENCY = 0.5


@dataclass(frozen=True, slots=True)
class Judged:
    """The slowest group's verdict at one size, in GB/s. ``share``: least rate of a GPU's NICs in an all-reduce, else None."""

    size: int
    measured: float
    expected: float
    verdict: str
    algorithm: str
    share: float | None

    @property
    def ratio(self) -> float:
        return self.measured / self.expected if self.expected else 0.0


@dataclass(frozen=True, slots=True)
class Yardstick:
    """The reference: ``fabric`` for NCCL, ``node_rate`` (GB/s) for gloo; None: unknown."""

    fabric: Fabric | None = None
    node_rate: float | None = None


def yardstick(name: str | None, node_rate: float | None) -> Yardstick:
    """Return the user's reference. ``node_rate`` overrides the fabric's own figure. Raises HpcMpError."""
    named_fabric = None if name is None else fabric(name)
    if named_fabric is not None and node_rate is not None:
        named_fabric = replace(named_fabric, nics=max(1, named_fabric.nics), nic=node_rate / max(1, named_fabric.nics))
    return Yardstick(named_fabric, node_rate)


def guess(reference: Yardstick, spec: BenchSpec, names: Iterable[str]) -> Yardstick:
    """Guess the fabric inside a node from the GPU's name, if all matching fabrics agree. ``names``: devices of all ranks."""
    inside = all(nodes_of(group, spec.ranks_per_node) == 1 for group in spec.groups)
    if reference.fabric is not None or spec.backend != "nccl" or not inside:
        return reference
    models = {catalogue().gpu(name) for name in names}
    matches = [entry for entry in fabrics() if all(model is not None and model.name == entry.gpu for model in models)]
    figures = {(entry.links, entry.link, entry.nvls, entry.mesh, entry.ll, entry.gpus) for entry in matches}
    return replace(reference, fabric=matches[0]) if len(figures) == 1 else reference


def judge(spec: BenchSpec, rows: Sequence[BenchRow], against: Yardstick) -> tuple[Judged, ...]:
    """Judge the slowest group of each size; sizes without an expectation are left out."""
    judgements = []
    for row in rows:
        result = row.worst
        nodes = nodes_of(result.members, spec.ranks_per_node)
        expectation = _expect(spec, result, nodes, against)
        if expectation is None or expectation.busbw == 0:
            continue
        measured = row.busbw(result)
        crosses = spec.collective == "all_reduce" and nodes > 1
        share = nic_share(measured, nodes, len(result.members) // nodes) if crosses else None
        judgements.append(Judged(result.size, measured, expectation.busbw, _verdict(measured, expectation),
                                 expectation.algorithm, share))
    return tuple(judgements)


def _expect(spec: BenchSpec, result: GroupResult, nodes: int, against: Yardstick) -> Expectation | None:
    per_node = -(-len(result.members) // nodes)
    own_nodes = {member // spec.ranks_per_node for member in result.members}
    beside = max(sum(any(member // spec.ranks_per_node == node for member in group) for group in spec.groups
                     if nodes_of(group, spec.ranks_per_node) > 1) for node in own_nodes)
    if spec.backend == "nccl":
        if against.fabric is None:
            return None
        return expect(spec.collective, result.size, nodes, per_node, against.fabric, max(1, beside))
    if against.node_rate is None or nodes == 1:
        return None
    return expect_gloo(spec.collective, result.size, nodes, per_node, against.node_rate, beside)


def _verdict(measured: float, expectation: Expectation) -> str:
    bandwidth = expectation.reach >= REACH
    tolerance = TOLERANCE if bandwidth else TOLERANCE_OF_LATENCY
    ratio = measured / expectation.busbw
    if ratio < 1 - tolerance:
        return "slow" if bandwidth else "slow to start"
    if ratio > 1 + tolerance:
        return "faster than expected"
    return "as expected"
