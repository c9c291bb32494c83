"""The search for the hosts of a placement's nodes: all orders of a few hosts; of many, scipy's solver, and exchanges of two.

An order is a row of indices: the host of every node. Its costs count one after another, each among orders that are equal by
those before it. Bytes are whole numbers and other sums are rounded, so that equal orders do not differ by rounding errors.
"""

from collections.abc import Callable, Sequence
from itertools import permutations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import quadratic_assignment

from hpc_mp.cluster.bandwidth import TieredRates
from hpc_mp.cluster.topology import SwitchTree, crossings, order_hosts
from hpc_mp.layout.placement import Placement
from hpc_mp.planner.links import flows
from hpc_mp.rundir.plan import Traffic

Orders = NDArray[np.intp]
Matrix = NDArray[np.float64]
Cost = Callable[[Orders], Matrix]
ENUMERATED = 8  # hosts of which all orders are tried
MOST_PAIRS = 12_000_000  # pairs of nodes in all orders that are tried of more hosts: a second or so


def hosts_cost(placement: Placement, traffic: Traffic, tree: SwitchTree) -> Callable[[Sequence[str]], float]:
    """Return the cost function of an order of hosts, ``hosts[i]`` for node i: bytes per step out of the busiest leaf switch."""
    sent = _sent(placement, traffic)
    return lambda hosts: float(_leaving(sent, hosts, tree)(np.arange(len(hosts))[None])[0])


def step_times(placement: Placement, traffic: Traffic, rates: TieredRates) -> Callable[[Sequence[str]], tuple[float, ...]]:
    """Return the cost function of an order of hosts, ``hosts[i]`` for node i: (longest, all), both in seconds per optimizer step.

    A pair of nodes takes the bytes of its larger direction over the rate between their hosts: directions do not delay each other.
    A node takes all bytes that leave it over its host's best rate: they pass its own cable. longest = the maximum over pairs and
    nodes, because they work at the same time. all = the sum over pairs of the bytes of both directions over the rate: among
    orders with the same longest it is least if the least traffic passes the slow links.
    """
    sent = _sent(placement, traffic)
    return lambda hosts: tuple(float(cost(np.arange(len(hosts))[None])[0]) for cost in _times(sent, _slowness(hosts, rates)))


def cheapest_hosts(placement: Placement, traffic: Traffic, hosts: Sequence[str], tree: SwitchTree,
                   rates: TieredRates | None = None) -> tuple[str, ...]:
    """Return the order of hosts in which a step waits least by the rates (``step_times``), if they differ; of equal ones that in
    which the least leaves the busiest leaf switch, then the most similar to a given order with the hosts of a leaf side by side.
    Of up to ``ENUMERATED`` hosts no order is better; of more, neither the given order nor the sorted one."""
    sent, leaving = _sent(placement, traffic), hosts_cost(placement, traffic, tree)
    beside = order_hosts(hosts, tree, lambda order: (leaving(order), crossings(order, tree)))
    leaf = np.array([tree.leaf(host) or host for host in beside])
    costs, distance = [_leaving(sent, beside, tree)], (leaf[:, None] != leaf).astype(float)
    if rates is not None and rates.uneven(hosts):
        distance = _slowness(beside, rates)
        costs = [*_times(sent, distance), *costs]
    costs.append(lambda orders: (orders != np.arange(len(beside))).sum(1).astype(float))
    if len(hosts) <= ENUMERATED:
        orders = np.array([*permutations(range(len(hosts)))])
    else:
        starts = [np.array([beside.index(host) for host in order]) for order in (beside, hosts, sorted(hosts))]
        apart = distance * (1 - np.eye(len(hosts))) / (distance.max() or 1.0)
        solver = {"maxiter": 10, "rng": np.random.default_rng(0)}  # a high power of all paths is near that of the longest
        starts += [quadratic_assignment(sent**power, apart**power, options=solver).col_ind for power in (1, 4)]
        tries = MOST_PAIRS // len(starts) // (int(np.count_nonzero(sent)) or 1)
        orders = np.array([*starts, *(_exchanged(start, costs, tries) for start in starts)])
    return tuple(beside[place] for place in _least(orders, costs))


def _least(orders: Orders, costs: Sequence[Cost]) -> Orders:
    """Return the cheapest order, the first of equal ones."""
    for cost in costs:
        orders = orders[(prices := cost(orders)) == prices.min()]
    return np.asarray(orders[0])


def _exchanged(order: Orders, costs: Sequence[Cost], tries: int) -> Orders:
    """Exchange the hosts of two nodes as long as that lowers the cost: of each node in turn, with the best other one."""
    nodes, node, unchanged = np.arange(len(order)), 0, 0
    while unchanged < len(order) <= tries:
        near = np.tile(order, (len(order), 1))
        near[nodes, node], near[nodes, nodes] = order, order[node]
        best = _least(np.vstack([order, near]), costs)
        unchanged = unchanged + 1 if (best == order).all() else 0
        order, node, tries = best, (node + 1) % len(order), tries - len(order)
    return order


def _sent(placement: Placement, traffic: Traffic) -> Matrix:
    """Return the bytes that each node sends each other one."""
    sent = np.zeros((placement.nodes, placement.nodes))
    for way, load in flows(placement, traffic).items():
        sent[way] = round(load.total)
    return sent


def _leaving(sent: Matrix, hosts: Sequence[str], tree: SwitchTree) -> Cost:
    (a, b), leaves = np.nonzero(sent), np.unique([tree.leaf(host) or host for host in hosts], return_inverse=True)[1]

    def cost(orders: Orders) -> Matrix:
        leaf = leaves[orders]
        out = sent[a, b] * (leaf[:, a] != leaf[:, b])
        unit = leaf[:, a] + len(hosts) * np.arange(len(orders))[:, None]
        return np.asarray(np.bincount(unit.ravel(), out.ravel(), leaf.size).reshape(leaf.shape).max(1))

    return cost


def _times(sent: Matrix, slowness: Matrix) -> list[Cost]:
    """Return the two costs of ``step_times``."""
    larger, both, out = np.triu(np.maximum(sent, sent.T)), np.triu(sent + sent.T), sent.sum(1)
    (i, j), end = np.nonzero(both), np.diag(slowness)
    digit = 1e-12 * both.sum() * slowness.max() or 1.0

    def longest(orders: Orders) -> Matrix:
        pairs = slowness[orders[:, i], orders[:, j]] * larger[i, j]
        return np.asarray(np.maximum(pairs.max(1, initial=0.0), (end[orders] * out).max(1)))

    return [longest, lambda orders: np.rint(slowness[orders[:, i], orders[:, j]] @ both[i, j] / digit) * digit]


def _slowness(hosts: Sequence[str], rates: TieredRates) -> Matrix:
    """Return the seconds per byte between hosts; at [i, i] out of host i."""
    return np.array([[1 / (rates.between(a, b) if a != b else rates.end(a)) / 1e9 for b in hosts] for a in hosts])
