"""How long a step waits for the ways between hosts, where the rates of these are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import fsum

from hpc_mp.cluster.bandwidth import TieredRates
from hpc_mp.layout.placement.cost import Traffic, flows, node_loads
from hpc_mp.layout.placement.grid import Placement


def step_times(placement: Placement, traffic: Traffic, rates: TieredRates) -> Callable[[Sequence[str]], tuple[float, float]]:
    """The cost of an order of hosts, ``hosts[i]`` for node i: (longest, all), both in seconds per optimizer step.

    With B(i→j) = the bytes that node i sends node j, r(i, j) = the rate between their hosts and R(i) = the best rate of the
    host of node i:

    - a pair takes max(B(i→j), B(j→i)) / r(i, j): directions do not hold each other up;
    - a node takes Σⱼ B(i→j) / R(i): all that leaves it passes its own cable;
    - longest = the most that any pair or node takes, for they all work at the same time;
    - all = Σ over pairs of (B(i→j) + B(j→i)) / r(i, j): of orders with the same longest it is least where least passes
      the slow ways.

    Where all rates are equal, all orders cost the same to the last bit.
    """
    sent = flows(placement, traffic)
    pairs = tuple((i, j, max(one, other), one + other) for i, j in sorted({(min(way), max(way)) for way in sent})
                  for one, other in [(_bytes(sent, i, j), _bytes(sent, j, i))])
    out = tuple(load.total for load in node_loads(placement, traffic))

    def cost(hosts: Sequence[str]) -> tuple[float, float]:
        rate = [rates.between(hosts[i], hosts[j]) * 1e9 for i, j, _, _ in pairs]
        nodes = (load / (rates.end(host) * 1e9) for load, host in zip(out, hosts, strict=False))
        longest = max(*nodes, *(most / r for (_, _, most, _), r in zip(pairs, rate, strict=True)), 0.0)
        return longest, fsum(both / r for (_, _, _, both), r in zip(pairs, rate, strict=True))

    return cost


def _bytes(sent: dict[tuple[int, int], Traffic], i: int, j: int) -> float:
    return sent[i, j].total if (i, j) in sent else 0.0
