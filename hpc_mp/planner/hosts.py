"""Which host is which node of a placement: the cost of an order of hosts under their switches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict

from hpc_mp.base.errors import HpcMpError
from hpc_mp.cluster.bandwidth import TieredRates
from hpc_mp.cluster.topology import SwitchTree, crossings, order_hosts
from hpc_mp.layout.placement.cost import AXES, Traffic, flows, node_edges, unit_loads
from hpc_mp.layout.placement.grid import Placement
from hpc_mp.planner.search import cheapest
from hpc_mp.planner.times import step_times

LOOKS = 400_000
"""At so many hosts' places the search for an order looks: all orders of 8 hosts, and a second or two for any number."""
SLOW_SHOWN = 3


def leaves(placement: Placement, hosts: Sequence[str], tree: SwitchTree) -> tuple[str, ...]:
    """The leaf switch of every rank; a host that the tree does not name counts as a leaf by itself.

    Raises:
        HpcMpError: fewer hosts than the placement has nodes.
    """
    if len(hosts) < placement.nodes:
        raise HpcMpError(f"{len(hosts)} hosts", f"are fewer than the {placement.nodes} nodes of the placement",
                         f"name {placement.nodes} hosts")
    return tuple(tree.leaf(hosts[place.node]) or hosts[place.node] for place in placement.ranks)


def uplinks(placement: Placement, traffic: Traffic, hosts: Sequence[str], tree: SwitchTree) -> dict[str, Traffic]:
    """Bytes per axis that leave each leaf switch in one optimizer step. Raises HpcMpError as ``leaves`` does."""
    return unit_loads(placement, traffic, leaves(placement, hosts, tree))


def hosts_cost(placement: Placement, traffic: Traffic, tree: SwitchTree) -> Callable[[Sequence[str]], float]:
    """The cost of an order of hosts, ``hosts[i]`` for node i: bytes that leave the busiest leaf switch in one step."""
    edges = node_edges(placement)
    weights: dict[str, float] = asdict(traffic)

    def cost(hosts: Sequence[str]) -> float:
        leaf = [tree.leaf(host) or host for host in hosts]
        out: Counter[tuple[str, str]] = Counter()
        for (axis, sender, receiver), count in edges.items():
            if leaf[sender] != leaf[receiver]:
                out[leaf[sender], axis] += count
        return max(sum(out[each, axis] * weight for axis, weight in weights.items()) for each in leaf)

    return cost


def best_hosts(placement: Placement, traffic: Traffic, hosts: Sequence[str], tree: SwitchTree,
               rates: TieredRates | None = None) -> tuple[str, ...]:
    """The order of hosts for the nodes of a placement.

    By switches: the one in which least leaves the busiest leaf switch, of equal ones one with hosts of a leaf side by side.
    Where some order lets a step wait less by the rates (``step_times``): the one in which it waits least, and of equal ones
    the best by switches.
    """
    leaving = hosts_cost(placement, traffic, tree)

    def switched(order: Sequence[str]) -> tuple[float, ...]:
        return leaving(order), crossings(order, tree)

    ordered = order_hosts(hosts, tree, switched)
    if rates is None or not (uneven := rates.uneven(hosts)):
        return ordered
    timed = step_times(placement, traffic, rates)
    found = cheapest((ordered, rates.chained(hosts)), timed, switched, uneven, LOOKS // len(hosts))
    return found if timed(found) < timed(ordered) else ordered


def host_words(placement: Placement, traffic: Traffic, given: Sequence[str], ordered: Sequence[str],
               tree: SwitchTree) -> str:
    """``rank map: n1 n3 n2 n4 → 8.1 MB per step out of the busiest leaf switch, 12.3 MB in the order given``."""
    cost = hosts_cost(placement, traffic, tree)
    before, after = cost(given) / 1e6, cost(ordered) / 1e6
    return (f"rank map: {' '.join(ordered)} → {after:,.1f} MB per step out of the busiest leaf switch, "
            f"{before:,.1f} MB in the order given")


def rate_words(placement: Placement, traffic: Traffic, given: Sequence[str], ordered: Sequence[str], rates: TieredRates,
               when: str) -> str:
    """``rank map: n1 n2 n4 n3 → 0.39 s per step … at the rates measured 3 days ago, 0.81 s in the order given; n2–n3 has …``."""
    cost = step_times(placement, traffic, rates)
    (after, _), (before, _) = cost(ordered), cost(given)
    sent = flows(placement, traffic)
    node = {host: number for number, host in enumerate(ordered)}

    def carried(members: tuple[str, ...]) -> str:
        ways = [load for (a, b), load in sent.items()
                if {node[host] for host in members} == ({a, b} if len(members) == 2 else {a})]
        axes = [axis for axis in AXES if any(getattr(load, axis) for load in ways)]
        return f"{'carries' if len(members) == 2 else 'sends'} {' and '.join(axes) or 'nothing'}{' only' * (len(axes) == 1)}"

    slow = [f"{words}: {carried(members)}" for members, words in slow_words(rates, ordered)]
    return "; ".join([f"rank map: {' '.join(ordered)} → {after:.2g} s per step on the busiest way at the rates measured {when}, "
                      f"{before:.2g} s in the order given", *_some(slow)])


def foreseen(rates: TieredRates, hosts: Sequence[str]) -> str:
    """``n2–n3 has 38 % of the usual rate``: what is slow among ``hosts``; empty where nothing is."""
    return ", ".join(_some([words for _, words in slow_words(rates, hosts)]))


def slow_words(rates: TieredRates, hosts: Sequence[str]) -> list[tuple[tuple[str, ...], str]]:
    """The host or the two hosts, and ``n2–n3 has 38 % of the usual rate``."""
    return [(members, f"{'–'.join(members)} has {100 * share:.0f} % of the usual rate")
            for members, share in rates.slow(hosts).items()]


def _some(words: list[str]) -> list[str]:
    more = len(words) - SLOW_SHOWN
    return [*words[:SLOW_SHOWN], *([f"and {more} more"] if more > 0 else [])]
