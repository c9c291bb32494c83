"""Collectives: the counts and formulas of nccl-tests, and the expected busbw of a healthy fabric.

nccl-tests 2.19.6: ``doc/PERFORMANCE.md`` (bandwidths) and ``src/*.cu`` (counts, columns of the table). A size S is that of the
whole array: what all ranks together hold for all-gather, reduce-scatter and all-to-all.

The expected busbw is that of the fastest of NCCL's algorithms on the fabric's links and NICs, at this payload.

An operation takes ``base + steps × latency + S/A + 2·√(fill · S/A)``: its start, the steps that a byte goes through, the bytes S
at the algorithm's rate A, and the filling of the pipeline (with chunks of the best size, pipelining p steps of latency L costs
2·√(pL·S/A)). Latencies are those of NCCL's own tuner; rates follow from the traffic over each link:

- ring: every link and the NICs of every node carry the busbw itself, 2(n−1)/n · S in the time of an all-reduce.
- tree between k nodes: S leaves a node of 2, 2·S one of more (in two trees, each node is inside one and a leaf of the other).
- NVLS: NVSwitch adds up, each GPU sends S·(n+1)/n, so busbw is 2(n−1)/(n+1) of the links' rate (nccl-tests' PERFORMANCE.md).

Without reduction in the network 2(k−1)/k · S has to leave a node, so a GPU's share of the NICs carries at least (k−1)/(n−1) of
busbw (``nic_share``).

``tests/planner/test_collectives.py`` compares the model with published measurements, row by row.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from hpc_mp.base.errors import HpcMpError
from hpc_mp.planner.fabrics import Fabric, NcclModel, Protocol, TcpModel, nccl_model, tcp_model

ALIGN = 16  # bytes: a rank's part is a multiple of it

Placed = Literal["out_of_place", "in_place"]
PLACED: tuple[Placed, Placed] = ("out_of_place", "in_place")


@dataclass(frozen=True, slots=True)
class Counts:
    """Elements of one operation in a group. ``param`` is the library's argument, the table's ``count``; ``total`` the whole
    array, whose bytes are the ``size``."""

    param: int
    total: int
    send: int
    receive: int


@dataclass(frozen=True, slots=True)
class Collective:
    """One operation."""

    name: str
    program: str  # in nccl-tests
    reduces: bool  # True if it sums the ranks' data
    rooted: bool  # True if rank 0 of the group is its root
    # send_part, receive_part: True if each rank sends or receives a part of the array instead of all of it
    send_part: bool
    receive_part: bool
    split: bool  # True if the array consists of a part for each rank
    checked: tuple[Placed, ...] = PLACED  # placements whose data are compared; the others are only timed, as in nccl-tests
    native: Placed = "out_of_place"  # that libraries offer; torch reduces and broadcasts in place, else it has to copy first

    def counts(self, size: int, ranks: int, element: int) -> Counts:
        """Return the counts for at most ``size`` bytes of elements of ``element`` bytes."""
        total = size // element
        if not self.split:
            return Counts(total, total, total, total)
        part = (total // ranks) & ~(ALIGN // element - 1)
        total = part * ranks
        return Counts(part, total, part if self.send_part else total, part if self.receive_part else total)

    def factor(self, ranks: int) -> float:
        """Return busbw / algbw: the share of the array that the busiest link has to carry."""
        if not self.split and not self.reduces:
            return 1.0
        return (1 if self.split else 2) * (ranks - 1) / ranks

    def bandwidths(self, size: int, seconds: float, ranks: int) -> tuple[float, float]:
        """Return algbw and busbw in GB/s (10⁹) of an operation on ``size`` bytes; 0 for an operation that took no time."""
        algorithm = size / seconds / 1e9 if seconds > 0 else 0.0
        return algorithm, algorithm * self.factor(ranks)


COLLECTIVES: dict[str, Collective] = {entry.name: entry for entry in (
    Collective("all_reduce", "all_reduce_perf", True, False, False, False, False, native="in_place"),
    Collective("all_gather", "all_gather_perf", False, False, True, False, True),
    Collective("reduce_scatter", "reduce_scatter_perf", True, False, False, True, True),
    Collective("all_to_all", "alltoall_perf", False, False, False, False, True, ("out_of_place",)),
    Collective("broadcast", "broadcast_perf", False, True, False, False, False, native="in_place"),
    Collective("sendrecv", "sendrecv_perf", False, False, False, False, False, ("out_of_place",)),
)}


def collective(name: str) -> Collective:
    """Return a collective. Raises HpcMpError for a name that is not in ``COLLECTIVES``."""
    if name not in COLLECTIVES:
        raise HpcMpError(f"collective {name!r}", f"must be {', '.join(COLLECTIVES)}", "name one of them")
    return COLLECTIVES[name]


@dataclass(frozen=True, slots=True)
class Expectation:
    """The expected performance: ``busbw`` in GB/s, ``seconds`` of an operation, the fastest algorithm, and ``reach``: the
    share of the busbw of an infinite payload. Near 1 bandwidth dominates, near 0 latency does."""

    busbw: float
    seconds: float
    algorithm: str
    reach: float


def expected(collective: str, size: int, nodes: int, ranks_per_node: int, fabric: Fabric, beside: int = 1) -> float:
    """Return the busbw in GB/s over NCCL; see ``expect``."""
    return expect(collective, size, nodes, ranks_per_node, fabric, beside).busbw


def expect(collective: str, size: int, nodes: int, ranks_per_node: int, fabric: Fabric, beside: int = 1) -> Expectation:
    """Return the expectation over NCCL (or RCCL). Raises HpcMpError if the group spans several nodes, and the fabric has no
    network between them. ``size``: bytes of the whole array. ``nodes``, ``ranks_per_node``: size of the group. ``beside``: number
    of groups on each node that use its NICs at the same time, including this one."""
    n = nodes * ranks_per_node
    if n <= max(fabric.domain, ranks_per_node):
        nodes, ranks_per_node = 1, n
    if n == 1 or size == 0:
        return Expectation(0.0, 0.0, "none", 0.0)
    if nodes > 1 and fabric.nics == 0:
        raise HpcMpError(f"--fabric {fabric.name}", f"has no network between nodes, but the group spans {nodes}",
                         "measure inside the nodes (--split node), or name another fabric")
    if fabric.gloo:
        return expect_gloo(collective, size, nodes, ranks_per_node, fabric.nics * fabric.nic, beside, fabric)
    shape = _Shape(n, ranks_per_node, nodes, _inside(fabric, ranks_per_node), _outside(fabric, ranks_per_node, beside))
    factor = COLLECTIVES[collective].factor(n)
    algorithms = [algorithm for protocol in nccl_model().protocols
                  for algorithm in _algorithms(collective, shape, fabric, protocol, nccl_model())]
    best = min(algorithms, key=lambda algorithm: algorithm.seconds(size, factor))
    seconds = best.seconds(size, factor)
    busbw = size / seconds / 1e9 * factor
    return Expectation(busbw, seconds, best.name, busbw / max(algorithm.busbw for algorithm in algorithms))


def expect_gloo(collective: str, size: int, nodes: int, ranks_per_node: int, node_rate: float, beside: int = 1,
                measured: Fabric | None = None) -> Expectation:
    """Return the expectation over gloo between nodes whose network carries ``node_rate`` GB/s each way. ``measured``: the rate
    inside a node and the seconds of a step; then a reduce-scatter is the engine's, which sends what a ring does."""
    data, inside = tcp_model(), math.inf
    if measured is not None:
        data, inside = replace(data, step=measured.hop or data.step, gloo_reduce_scatter=1.0), measured.link
    n = nodes * ranks_per_node
    factor = COLLECTIVES[collective].factor(n)
    shape = _Shape(n, ranks_per_node, nodes, inside, node_rate * data.payload / beside)
    rate = _ring_rate(collective, shape)
    if collective == "sendrecv":
        rate *= ranks_per_node  # a single rank sends to the next node and has all of the network
    rate *= _gloo_share(collective, n, nodes, beside, data)
    turns = {"all_reduce": 2 * (n - 1), "reduce_scatter": 2 * (n - 1), "all_gather": n - 1}
    seconds = turns.get(collective, 1) * data.step * 1e-6 + size * factor / rate / 1e9
    busbw = size / seconds / 1e9 * factor
    return Expectation(busbw, seconds, "gloo", busbw / rate)


def nic_share(busbw: float, nodes: int, ranks_per_node: int) -> float:
    """Return the least GB/s that a GPU's share of its node's NICs carried during an all-reduce of this busbw."""
    return busbw * (nodes - 1) / (nodes * ranks_per_node - 1)


@dataclass(frozen=True, slots=True)
class _Shape:
    """n ranks on k nodes, g on each; GB/s from a GPU to the others of its node, and of the network available to this group."""

    n: int
    g: int
    k: int
    inside: float
    network: float


def _inside(fabric: Fabric, ranks: int) -> float:
    """Return the GB/s from a GPU to the others of its node; no limit if a node has no other rank."""
    if ranks == 1:
        return math.inf
    return fabric.link * (min(fabric.links, ranks - 1) if fabric.mesh else fabric.links)


def _outside(fabric: Fabric, ranks: int, beside: int) -> float:
    """Return the GB/s of the NICs that ``ranks`` GPUs of a node reach (each its share, or a shared one), among ``beside``
    groups."""
    return fabric.nic * min(max(1.0, fabric.nics * min(1.0, ranks / fabric.gpus)), fabric.nics / beside)


@dataclass(frozen=True, slots=True)
class _Way:
    """An algorithm with a protocol: busbw in GB/s, seconds before the first byte arrives, seconds to fill its pipeline."""

    name: str
    busbw: float
    latency: float
    fill: float

    def seconds(self, size: int, factor: float) -> float:
        moving = size * factor / self.busbw / 1e9
        return self.latency + moving + 2 * math.sqrt(self.fill * moving)


def _algorithms(collective: str, shape: _Shape, fabric: Fabric, protocol: Protocol, model: NcclModel) -> Iterator[_Way]:
    """Yield the algorithm of a protocol, if it supports the operation on this shape."""
    levels = 2 * math.ceil(math.log2(shape.k))
    if protocol.algorithm == "ring":
        rate = _ring_rate(collective, _Shape(shape.n, shape.g, shape.k, shape.inside, shape.network * model.nic_ring))
        cap = fabric.ll if protocol.protocol == "LL" and shape.k == 1 else protocol.most
        yield _way(protocol, min(rate * protocol.share, cap), *_ring_steps(collective, shape), fabric)
    elif collective == "all_reduce" and protocol.algorithm == "tree" and shape.k > 1:
        rate = min(model.tree_inside * shape.inside * (shape.n - 1) / shape.n, _tree_rate(shape, model))
        yield _way(protocol, min(rate * protocol.share, protocol.most), 2 * (shape.g - 1), levels, fabric)
    elif collective == "all_reduce" and protocol.algorithm.startswith("NVLS") and fabric.nvls and shape.g > 1:
        rate = COLLECTIVES[collective].factor(shape.n) * shape.inside * fabric.nvls * shape.g / (shape.g + 1)
        if (shape.k > 1) == (protocol.algorithm == "NVLS tree"):
            yield _way(protocol, rate if shape.k == 1 else min(rate, _tree_rate(shape, model)), 0, levels, fabric)


def _ring_rate(collective: str, shape: _Shape) -> float:
    if shape.k == 1:
        return shape.inside
    if collective == "sendrecv":  # only the last rank of a node sends to the next node
        return min(shape.inside, shape.network / shape.g)
    if collective == "all_to_all":  # (n − g) / n of a rank's data leaves the node, together with that of g − 1 others
        inside = shape.inside * (shape.n - 1) / max(1, shape.g - 1)
        return min(inside, shape.network / shape.g * (shape.n - 1) / (shape.n - shape.g))
    return min(shape.inside, shape.network)


def _ring_steps(collective: str, shape: _Shape) -> tuple[int, int]:
    """Return the steps inside nodes, and between them."""
    if collective in ("sendrecv", "all_to_all"):
        return int(shape.g > 1), int(shape.k > 1)
    turns = 2 if collective == "all_reduce" else 1
    between = turns * (shape.k - 1)
    return turns * (shape.n - 1) - between, between


def _tree_rate(shape: _Shape, model: NcclModel) -> float:
    leaves = 1 if shape.k == 2 else 2  # × S leave a node
    return shape.network * model.nic_tree * COLLECTIVES["all_reduce"].factor(shape.n) / leaves


def _way(protocol: Protocol, rate: float, inside: int, between: int, fabric: Fabric) -> _Way:
    hops = 2 if protocol.protocol == "Simple" else 1  # Simple flushes a NIC's writes, which takes another hop
    latency = protocol.base + inside * protocol.inside + between * (protocol.between + hops * fabric.hop)
    return _Way(f"{protocol.algorithm} {protocol.protocol}", rate, latency * 1e-6, protocol.fill * 1e-6)


def _gloo_share(collective: str, n: int, nodes: int, beside: int, data: TcpModel) -> float:
    """Return the share of the rate that is left for the data that must be sent."""
    if collective == "all_to_all" or (collective == "all_gather" and n == 2):
        return data.gloo_crossing if beside == 1 else 1.0
    sent = {"reduce_scatter": data.gloo_reduce_scatter, "broadcast": math.ceil(math.log2(nodes))}
    return 1.0 / sent.get(collective, 1.0)
