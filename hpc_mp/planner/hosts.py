"""The assignment of hosts to the nodes of a placement: by the switches between them, by measured rates, with the reason."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import combinations, islice, permutations
from math import factorial, fsum
from operator import ne

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.text import data_size, duration
from hpc_mp.cluster.bandwidth import COUNTS_DAYS, LinkRates, TieredRates, rates
from hpc_mp.cluster.topology import SwitchTree, crossings, order_hosts
from hpc_mp.layout.placement import Placement, RankMap
from hpc_mp.planner.links import AXES, flows, node_edges, node_loads, unit_loads
from hpc_mp.rundir.plan import Traffic

MOST_VISITS = 400_000
"""Maximum number of hosts' places in the search for an order: all orders of 8 hosts; a second or two for any number."""
SLOW_SHOWN = 3
Order = tuple[str, ...]
Cost = Callable[[Sequence[str]], tuple[float, ...]]


def choose_host_order(placement: Placement, traffic: Traffic, hosts: tuple[str, ...], tree: SwitchTree,
                      measured: LinkRates | None = None) -> tuple[tuple[str, ...], str]:
    """Return the host of every node of the placement, and the reason: by measured rates between hosts and by the switches."""
    host_rates = rates(measured) if measured is not None and measured.recent() else None
    uneven = host_rates is not None and host_rates.uneven(hosts)
    if not uneven and not tree.above:
        return hosts, "rank map: in Slurm's order of hosts"
    ordered = cheapest_hosts(placement, traffic, hosts, tree, host_rates)
    if measured is None or host_rates is None or not uneven:
        return ordered, host_words(placement, traffic, hosts, ordered, tree)
    return ordered, rate_words(placement, traffic, hosts, ordered, host_rates, measured.when())


def kept_order_words(hosts: Sequence[str], measured: LinkRates | None) -> str:
    """Describe an order of hosts that a program's ranks keep, and the slow links, which this order does not avoid."""
    host_rates = rates(measured) if measured is not None and measured.recent() else None
    slow = ", ".join(_some([text for _, text in slow_words(host_rates, hosts)])) if host_rates is not None else ""
    return ("rank map: in Slurm's order of hosts: each rank is the task of the same number, and its traffic is unknown"
            + (f"; it does not avoid slow links, measured {measured.when()}: {slow}" if measured is not None and slow else ""))


def expected_slow_links(rank_map: RankMap, nodes: int, measured: LinkRates | None) -> str | None:
    """Describe the slow links of the cluster that ``choose_host_order`` will handle, before the job's nodes are known."""
    if measured is None or rank_map != "auto" or nodes == 1:
        return None
    if not measured.recent():
        return f"rates were measured {measured.when()} and are used for {COUNTS_DAYS} days: run `hpc-mp doctor` again"
    host_rates = rates(measured)
    slow = ", ".join(_some([text for _, text in slow_words(host_rates, measured.nodes)])) if host_rates is not None else ""
    return f"slow links will carry the least: measured {measured.when()}, {slow}" if slow else None


def leaves(placement: Placement, hosts: Sequence[str], tree: SwitchTree) -> tuple[str, ...]:
    """Return the leaf switch of every rank; a host that the tree does not name counts as a separate leaf. Raises HpcMpError for
    fewer hosts than the placement has nodes."""
    if len(hosts) < placement.nodes:
        raise HpcMpError(f"{len(hosts)} hosts", f"are fewer than the {placement.nodes} nodes of the placement",
                         f"name {placement.nodes} hosts")
    return tuple(tree.leaf(hosts[place.node]) or hosts[place.node] for place in placement.ranks)


def uplinks(placement: Placement, traffic: Traffic, hosts: Sequence[str], tree: SwitchTree) -> dict[str, Traffic]:
    """Return the bytes per axis that leave each leaf switch in one optimizer step. Raises HpcMpError like ``leaves``."""
    return unit_loads(placement, traffic, leaves(placement, hosts, tree))


def hosts_cost(placement: Placement, traffic: Traffic, tree: SwitchTree) -> Callable[[Sequence[str]], float]:
    """Return the cost function of an order of hosts, ``hosts[i]`` for node i: bytes per step out of the busiest leaf switch."""
    edges = node_edges(placement, traffic)
    weights = {axis: float(getattr(traffic, axis)) for axis in AXES}

    def cost(hosts: Sequence[str]) -> float:
        leaf = [tree.leaf(host) or host for host in hosts]
        out: Counter[tuple[str, str]] = Counter()
        for (axis, sender, receiver), count in edges.items():
            if leaf[sender] != leaf[receiver]:
                out[leaf[sender], axis] += count
        return max(sum(out[switch, axis] * weight for axis, weight in weights.items()) for switch in leaf)

    return cost


def cheapest_hosts(placement: Placement, traffic: Traffic, hosts: Sequence[str], tree: SwitchTree,
               rates: TieredRates | None = None) -> tuple[str, ...]:
    """Return the order of hosts for the nodes of a placement. By switches, it is the order in which the least leaves the busiest
    leaf switch, and of equal ones an order with the hosts of a leaf side by side. If some order makes a step wait less by the
    rates (``step_times``), it is the order with the least wait, and of equal ones the best by switches."""
    leaving = hosts_cost(placement, traffic, tree)

    def switched(order: Sequence[str]) -> tuple[float, ...]:
        return leaving(order), crossings(order, tree)

    ordered = order_hosts(hosts, tree, switched)
    if rates is None or not (uneven := rates.uneven(hosts)):
        return ordered
    timed = step_times(placement, traffic, rates)
    candidate = cheapest((ordered, rates.chained(hosts)), timed, switched, uneven, MOST_VISITS // len(hosts))
    return candidate if timed(candidate) < timed(ordered) else ordered


def host_words(placement: Placement, traffic: Traffic, initial: Sequence[str], ordered: Sequence[str],
               tree: SwitchTree) -> str:
    """Return ``rank map: n1 n3 n2 n4 → 8.1 MB per step out of the busiest leaf switch, 12.3 MB in the order given``."""
    cost = hosts_cost(placement, traffic, tree)
    before, after = cost(initial), cost(ordered)
    leaves = f"{data_size(after)} per step out of the busiest leaf switch" if after else "no traffic leaves a leaf switch"
    return f"rank map: {' '.join(ordered)} → {leaves}" + (f", {data_size(before)} in the order given" if before else "")


def rate_words(placement: Placement, traffic: Traffic, initial: Sequence[str], ordered: Sequence[str], rates: TieredRates,
               when: str) -> str:
    """Describe an order of hosts and its slow links by measured rates: ``rank map: n1 n2 n4 n3 → 390 ms per step … at the rates
    measured 3 d ago, 810 ms in the order given; n2–n3 has …``."""
    cost = step_times(placement, traffic, rates)
    (after, _), (before, _) = cost(ordered), cost(initial)
    sent = flows(placement, traffic)
    node = {host: number for number, host in enumerate(ordered)}

    def carried(members: tuple[str, ...]) -> str:
        crossing = [load for (a, b), load in sent.items()
                if {node[host] for host in members} == ({a, b} if len(members) == 2 else {a})]
        axes = dict.fromkeys(kind for axis, (kind, _) in AXES.items() if any(getattr(load, axis) for load in crossing))
        return f"{'carries' if len(members) == 2 else 'sends'} {' and '.join(axes) or 'nothing'}{' only' * (len(axes) == 1)}"

    slow = [f"{text}: {carried(members)}" for members, text in slow_words(rates, ordered)]
    return "; ".join([f"rank map: {' '.join(ordered)} → {duration(after)} per step on the busiest path "
                      f"at the rates measured {when}, {duration(before)} in the order given", *_some(slow)])


def slow_words(rates: TieredRates, hosts: Sequence[str]) -> list[tuple[tuple[str, ...], str]]:
    """Return the host or the two hosts, and ``n2–n3 has 38 % of the usual rate``."""
    return [(members, f"{'–'.join(members)} has {100 * share:.0f} % of the usual rate")
            for members, share in rates.slow(hosts).items()]


def _some(texts: list[str]) -> list[str]:
    more = len(texts) - SLOW_SHOWN
    return [*texts[:SLOW_SHOWN], *([f"and {more} more"] if more > 0 else [])]


def step_times(placement: Placement, traffic: Traffic, rates: TieredRates) -> Callable[[Sequence[str]], tuple[float, float]]:
    """Return the cost function of an order of hosts, ``hosts[i]`` for node i: (longest, all), both in seconds per optimizer step.

    With B(i→j) = the bytes that node i sends node j, r(i, j) = the rate between their hosts and R(i) = the best rate of the host
    of node i:

    - a pair takes max(B(i→j), B(j→i)) / r(i, j): directions do not delay each other;
    - a node takes Σⱼ B(i→j) / R(i): everything that leaves it passes its own cable;
    - longest = the maximum over pairs and nodes, because they all work at the same time;
    - all = Σ over pairs of (B(i→j) + B(j→i)) / r(i, j): among orders with the same longest it is least if the least traffic
      passes the slow links.

    If all rates are equal, all orders cost the same to the last bit.
    """
    sent = flows(placement, traffic)
    pairs = tuple((i, j, max(forward, backward), forward + backward) for i, j in sorted({(min(way), max(way)) for way in sent})
                  for forward, backward in [(_bytes(sent, i, j), _bytes(sent, j, i))])
    out = tuple(load.total for load in node_loads(placement, traffic))

    def cost(hosts: Sequence[str]) -> tuple[float, float]:
        rate = [rates.between(hosts[i], hosts[j]) * 1e9 for i, j, _, _ in pairs]
        nodes = (load / (rates.end(host) * 1e9) for load, host in zip(out, hosts, strict=False))
        longest = max(*nodes, *(larger / r for (_, _, larger, _), r in zip(pairs, rate, strict=True)), 0.0)
        return longest, fsum(both / r for (_, _, _, both), r in zip(pairs, rate, strict=True))

    return cost


def _bytes(sent: dict[tuple[int, int], Traffic], i: int, j: int) -> float:
    return sent[i, j].total if (i, j) in sent else 0.0


def cheapest(starts: Sequence[Order], first: Cost, then: Cost, movable: Collection[str], tries: int) -> Order:
    """Return the order with the least cost by ``first``, among equal ones by ``then``, then the most similar to ``starts[0]``.

    Args:
        starts: candidate orders, tried unchanged and dealt out: as the rows of a grid that is read by columns.
        then: called only for orders that are equal by ``first``, and so may be slower.
        movable: an exchange of two hosts must involve one of these.
        tries: limit of further orders that are tried.
    """
    def likely(order: Sequence[str]) -> tuple[float, ...]:
        return *then(order), sum(map(ne, order, starts[0]))

    begin = list(dict.fromkeys([*starts, *(dealt for start in starts for dealt in _dealt(start))]))
    if factorial(len(begin[0])) <= tries:
        return _least([*begin, *permutations(begin[0])], first, likely)
    ends = {_descended(start, first, likely, movable, tries // 2): None for start in (starts[0], _least(begin, first, likely))}
    return _least([*ends], first, likely)


def _descended(order: Order, first: Cost, then: Cost, movable: Collection[str], tries: int) -> Order:
    """Exchange two hosts repeatedly, as long as that lowers the cost."""
    while near := [*islice(_exchanged(order, movable), tries)]:
        tries -= len(near)
        best = _least([order, *near], first, then)
        if first(best) == first(order):
            break
        order = best
    return order


def _least(orders: Sequence[Order], first: Cost, then: Cost) -> Order:
    prices = [first(order) for order in orders]
    least = min(prices)
    equal = [order for order, price in zip(orders, prices, strict=True) if price == least]
    return min(equal, key=then)


def _dealt(order: Order) -> Iterator[Order]:
    for rows in range(2, len(order)):
        if len(order) % rows == 0:
            yield tuple(host for row in range(rows) for host in order[row::rows])


def _exchanged(order: Order, movable: Collection[str]) -> Iterator[Order]:
    for i, j in combinations(range(len(order)), 2):
        if order[i] in movable or order[j] in movable:
            yield (*order[:i], order[j], *order[i + 1 : j], order[i], *order[j + 1 :])
