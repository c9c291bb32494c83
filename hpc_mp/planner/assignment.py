"""The search for the hosts of a placement's nodes: all orders of a few hosts; of many, scipy's solver, and exchanges of two hosts.

An order is a row of indices: the host of every node. Its costs count one after another, each among orders that are equal by those
before it. Bytes are whole numbers and other sums are rounded, so that equal orders do not differ by rounding errors.
"""

from collections.abc import Callable, Sequence
from itertools import permutations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import quadratic_assignment

from hpc_mp.cluster.bandwidth import TieredRates
from hpc_mp.cluster.topology import SwitchTree, order_hosts
from hpc_mp.layout.placement import Placement
from hpc_mp.planner.links import flows, node_loads
from hpc_mp.rundir.plan import Traffic

Orders = NDArray[np.intp]
Cost = Callable[[Orders], NDArray[np.float64]]
ENUMERATED = 8
"""Maximum number of hosts whose orders are all tried."""
MOST_PAIRS = 20_000_000
"""Maximum number of pairs of nodes in all orders that are tried of more hosts: a second or two."""


def hosts_cost(placement: Placement, traffic: Traffic, tree: SwitchTree) -> Callable[[Sequence[str]], float]:
    """Return the cost function of an order of hosts, ``hosts[i]`` for node i: bytes per step out of the busiest leaf switch."""
    return lambda hosts: float(_switch_costs(placement, traffic, hosts, tree)[0](_given(hosts))[0])


def step_times(placement: Placement, traffic: Traffic, rates: TieredRates) -> Callable[[Sequence[str]], tuple[float, float]]:
    """Return the cost function of an order of hosts, ``hosts[i]`` for node i: (longest, all), both in seconds per optimizer step.

    With B(i→j) = the bytes that node i sends node j, r(i, j) = the rate between their hosts and R(i) = the best rate of the host
    of node i:

    - a pair takes max(B(i→j), B(j→i)) / r(i, j): directions do not delay each other;
    - a node takes Σⱼ B(i→j) / R(i): everything that leaves it passes its own cable;
    - longest = the maximum over pairs and nodes, because they all work at the same time;
    - all = Σ over pairs of (B(i→j) + B(j→i)) / r(i, j): among orders with the same longest it is least if the least traffic
      passes the slow links.
    """
    def cost(hosts: Sequence[str]) -> tuple[float, float]:
        longest, together = (float(cost(_given(hosts))[0]) for cost in _time_costs(placement, traffic, hosts, rates))
        return longest, together

    return cost


def cheapest_hosts(placement: Placement, traffic: Traffic, hosts: Sequence[str], tree: SwitchTree,
                   rates: TieredRates | None = None) -> tuple[str, ...]:
    """Return the order of hosts in which a step waits least by the rates (``step_times``), if they differ; of equal ones that in
    which the least leaves the busiest leaf switch, then that whose blocks of hosts span the fewest switches, then the most similar
    to the given one. Of up to ``ENUMERATED`` hosts no order is better; of more, neither the given nor the sorted one."""
    given, distance, uneven = _given(hosts), _levels(hosts, tree), rates is not None and rates.uneven(hosts)
    costs = [*_switch_costs(placement, traffic, hosts, tree), lambda orders: (orders != given).sum(1).astype(float)]
    if rates is not None and uneven:
        distance = _slowness(hosts, rates)
        costs = [*_time_costs(placement, traffic, hosts, rates), *costs]
    if len(hosts) <= ENUMERATED:
        best = _least(np.array([*permutations(range(len(hosts)))]), costs)
        return tuple(hosts[place] for place in best)
    sent = np.zeros(distance.shape)
    for (i, j), load in flows(placement, traffic).items():
        sent[i, j] = load.total
    index = {host: place for place, host in enumerate(hosts)}
    starts = [given[0], np.argsort(hosts), np.array([index[host] for host in order_hosts(hosts, tree)])]
    starts += [quadratic_assignment(sent**power, distance**power, options={"maxiter": 10}).col_ind for power in (1, 4)]
    tries = MOST_PAIRS // len(starts) // max(1, np.count_nonzero(sent))
    best = _least(np.array([*starts, *(_exchanged(start, costs, tries) for start in starts)]), costs)
    return tuple(hosts[place] for place in best)


def _least(orders: Orders, costs: Sequence[Cost]) -> Orders:
    """Return the cheapest order, the first of equal ones."""
    for cost in costs:
        prices = cost(orders)
        orders = orders[prices == prices.min()]
        if len(orders) == 1:
            break
    return orders[0]


def _exchanged(order: Orders, costs: Sequence[Cost], tries: int) -> Orders:
    """Exchange the hosts of two nodes as long as that lowers the cost: each node in turn with the best other one."""
    nodes, node, kept = np.arange(len(order)), 0, 0
    while kept < len(order) and tries > 0:
        near = np.tile(order, (len(order), 1))
        near[nodes, node], near[nodes, nodes] = order, order[node]
        best = _least(np.vstack([order, near]), costs)
        kept = kept + 1 if (best == order).all() else 0
        order, node, tries = best, (node + 1) % len(order), tries - len(order)
    return order


def _given(hosts: Sequence[str]) -> Orders:
    return np.arange(len(hosts))[None]


def _switch_costs(placement: Placement, traffic: Traffic, hosts: Sequence[str], tree: SwitchTree) -> list[Cost]:
    """Return the costs by switches: the bytes out of the busiest leaf, and ``crossings``."""
    sent = flows(placement, traffic)
    sender, receiver = np.array([*sent], dtype=np.intp).reshape(-1, 2).T
    size = np.rint([load.total for load in sent.values()])
    chains = [tree.above.get(host) or (host,) for host in hosts]
    depth = max(map(len, chains))
    levels = np.array([np.unique([chain[min(level, len(chain) - 1)] for chain in chains], return_inverse=True)[1]
                       for level in range(depth)])
    blocks = [block for block in range(2, len(hosts) + 1) if len(hosts) % block == 0]

    def leaving(orders: Orders) -> NDArray[np.float64]:
        leaf = levels[0][orders]
        unit = leaf + len(hosts) * np.arange(len(orders))[:, None]
        out = size * (leaf[:, sender] != leaf[:, receiver])
        return np.bincount(unit[:, sender].ravel(), out.ravel(), unit.size).reshape(leaf.shape).max(1)

    def crossing(orders: Orders) -> NDArray[np.float64]:
        spans = [np.diff(np.sort(levels[:, orders].reshape(depth, len(orders), -1, block))) != 0 for block in blocks]
        return sum((span.sum((0, 2, 3)) for span in spans), np.zeros(len(orders)))

    return [leaving, crossing]


def _time_costs(placement: Placement, traffic: Traffic, hosts: Sequence[str], rates: TieredRates) -> list[Cost]:
    """Return the costs by rates: ``step_times``."""
    sent = {way: round(load.total) for way, load in flows(placement, traffic).items()}
    pairs = sorted({(min(way), max(way)) for way in sent})
    ways = np.array([(sent.get((i, j), 0), sent.get((j, i), 0)) for i, j in pairs], dtype=float).reshape(-1, 2)
    i, j = np.array(pairs, dtype=np.intp).reshape(-1, 2).T
    slowness, larger, both = _slowness(hosts, rates), ways.max(1), ways.sum(1)
    out = np.array([round(load.total) for load in node_loads(placement, traffic)])
    end = np.array([1 / rates.end(host) / 1e9 for host in hosts])
    digit = 1e-12 * both.sum() * slowness.max()

    def longest(orders: Orders) -> NDArray[np.float64]:
        pair = (slowness[orders[:, i], orders[:, j]] * larger).max(1, initial=0.0)
        return np.maximum(pair, (end[orders] * out).max(1))

    def together(orders: Orders) -> NDArray[np.float64]:
        return np.rint(slowness[orders[:, i], orders[:, j]] @ both / digit) * digit

    return [longest, together if digit else longest]


def _slowness(hosts: Sequence[str], rates: TieredRates) -> NDArray[np.float64]:
    """Return the seconds per byte between hosts."""
    return np.array([[1 / rates.between(a, b) / 1e9 if a != b else 0.0 for b in hosts] for a in hosts])


def _levels(hosts: Sequence[str], tree: SwitchTree) -> NDArray[np.float64]:
    """Return the number of switches of a host that are not above the other one."""
    above = [frozenset(tree.above.get(host) or (host,)) for host in hosts]
    return np.array([[float(len(one - other)) for other in above] for one in above])
