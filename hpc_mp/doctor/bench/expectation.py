"""Comparison of measured with expected bandwidth, with a verdict for each size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hpc_mp.catalogue import catalogue
from hpc_mp.doctor.bench.result import BenchRow, GroupResult
from hpc_mp.doctor.bench.spec import BenchSpec, nodes_of
from hpc_mp.planner.collectives import Expectation, expect, expect_gloo, nic_share
from hpc_mp.planner.fabrics import Fabric, fabric, fabrics

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
