"""Hosts of irregular clusters: uneven leaves, slow links and hosts, pairs that nobody measured. No order of few hosts is better
than the chosen one, and of many neither the given nor the sorted order, whatever the letters."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations
from math import inf
from random import Random

import pytest

from hpc_mp.cluster.bandwidth import LinkRates, TieredRates, rates
from hpc_mp.cluster.topology import SwitchTree
from hpc_mp.layout.placement import ORDERS, ORDERS_WITH_CONTEXT, Degrees, Placement, place
from hpc_mp.planner.assignment import ENUMERATED, cheapest_hosts
from hpc_mp.planner.links import flows
from hpc_mp.rundir.plan import Traffic

SIZES = (3, 4, 5, 6, 8, 8, 12, 16, 24, 32, 64, 128)  # hosts
BRUTE = 6  # hosts of which this file tries all orders for all letters; of more for the first letters only


@dataclass(frozen=True)
class Irregular:
    hosts: tuple[str, ...]
    per_node: int
    tree: SwitchTree
    rates: TieredRates | None
    degrees: Degrees
    traffic: Traffic

    def placements(self) -> list[Placement]:
        """One placement for each letter order."""
        orders = ORDERS if self.degrees.context == 1 else ORDERS_WITH_CONTEXT
        return [place(self.degrees, order, self.per_node) for order in orders]


def divisor(random: Random, number: int, most: int) -> int:
    return random.choice([size for size in range(1, min(number, most) + 1) if number % size == 0])


def irregular(seed: int) -> Irregular:
    """A cluster and a job that fills it but for some ranks of the last node: up to 512 ranks."""
    random = Random(seed)
    number = SIZES[seed % len(SIZES)]
    names = [f"n{host}" for host in random.sample(range(1000), number)]
    per_node = random.choice([size for size in (1, 2, 4, 8) if size * number <= 512])
    above, rest = dict[str, tuple[str, ...]](), list(names)
    while rest:
        leaf, rest = rest[:(cut := random.randint(1, number // 2))], rest[cut:]
        above |= {host: (f"leaf {leaf[0]}", f"spine {random.randint(1, 3)}") for host in leaf}
    for host in random.sample(names, random.choice((0, 0, 1))):
        del above[host]  # a host that the topology does not name
    far = random.choice((1.0, 0.6, 0.4))  # rate between leaves, relative to that inside
    slow_host = {host: random.uniform(0.2, 0.7) for host in random.sample(names, random.choice((0, 1, 1 + number // 10)))}
    slow_link = {frozenset(random.sample(names, 2)): random.uniform(0.05, 0.7) for _ in range(random.choice((0, 1, number // 2)))}
    measured = []
    for i, j in combinations(range(number), 2):
        a, b = names[i], names[j]
        share = min(slow_host.get(a, 1.0), slow_host.get(b, 1.0)) * slow_link.get(frozenset((a, b)), 1.0)
        share *= 1.0 if above.get(a, a) == above.get(b, b) else far
        if number < 5 or random.random() < 0.95:
            measured.append((i, j, 25 * share * random.uniform(0.97, 1.03)))
    found = rates(LinkRates("cluster", 0.0, tuple(names), tuple(measured))) if seed % 5 else None
    world = per_node * number - (random.randrange(per_node) if seed % 4 == 0 else 0)
    tensor = divisor(random, world, 8)
    pipeline = divisor(random, world // tensor, 8)
    context = divisor(random, world // tensor // pipeline, 4) if seed % 3 == 0 else 1
    data = world // tensor // pipeline // context
    expert = divisor(random, data * context, 8) if seed % 2 else 1
    shards = divisor(random, data * context, data * context)

    def size(share: float = 1.0) -> float:
        return share * random.choice((0, 1, 1)) * 10 ** random.uniform(7, 10)

    traffic = Traffic(tp=size(), pp=size(), dp=size(), cp=size(), cp_pairs=size(0.1), ep=size(0.1), replicas=size(),
                      tied=size(0.1), expert_dp=size(), shards=None if shards == data * context else shards)
    return Irregular(tuple(names), per_node, SwitchTree(above if seed % 7 else {}), found,
                     Degrees(tensor, pipeline, data, context, expert), traffic)


def price(case: Irregular, placement: Placement) -> Callable[[Sequence[str]], float]:
    """The cost that counts first, link by link: seconds on the slowest path, or without rates bytes out of the busiest leaf."""
    sent = {way: round(load.total) for way, load in flows(placement, case.traffic).items()}
    out = Counter[int]()
    for (a, _), size in sent.items():
        out[a] += size

    def seconds(order: Sequence[str]) -> float:
        assert case.rates is not None
        paths = (size / case.rates.between(order[a], order[b]) for (a, b), size in sent.items())
        return max([*paths, *(size / case.rates.end(order[a]) for a, size in out.items())], default=0.0) / 1e9

    def leaving(order: Sequence[str]) -> float:
        leaves, of_leaf = [case.tree.leaf(host) or host for host in order], Counter[str]()
        for (a, b), size in sent.items():
            of_leaf[leaves[a]] += size * (leaves[a] != leaves[b])
        return max(of_leaf.values(), default=0)

    return seconds if case.rates is not None and case.rates.uneven(case.hosts) else leaving


def check(seed: int) -> tuple[float, float]:
    """Check a case for all letters; return the cost of the best with the given or the sorted hosts, and the chosen cost."""
    case, letters, chosen = irregular(seed), inf, inf
    for number, placement in enumerate(case.placements()):
        cost = price(case, placement)
        ordered = cheapest_hosts(placement, case.traffic, case.hosts, case.tree, case.rates)
        assert sorted(ordered) == sorted(case.hosts)
        usual = min(cost(case.hosts), cost(sorted(case.hosts)))
        assert cost(ordered) <= usual * (1 + 1e-9), placement.order
        if len(case.hosts) <= BRUTE or (len(case.hosts) <= ENUMERATED and number == 0):
            assert cost(ordered) == pytest.approx(min(map(cost, permutations(case.hosts))), rel=1e-9), placement.order
        letters, chosen = min(letters, usual), min(chosen, cost(ordered))
    return letters, chosen


@pytest.mark.parametrize("seed", [1, 2, 5, 7])
def test_few_hosts_are_assigned_best_and_many_no_worse_than_by_letters(seed: int) -> None:
    check(seed)


def test_hosts_that_are_all_alike_or_idle_stay_as_they_are() -> None:
    hosts, placement = tuple(f"n{host}" for host in range(16)), place(Degrees(2, 4, 16), "DPT", 8)
    one_leaf = SwitchTree({host: ("leaf",) for host in hosts})
    assert cheapest_hosts(placement, Traffic(tp=1e9, pp=3e8, dp=2e9), hosts, one_leaf) == hosts
    slow = rates(LinkRates("cluster", 0.0, hosts, ((0, 1, 25.0), (0, 2, 5.0), (1, 2, 25.0))))
    assert cheapest_hosts(placement, Traffic(), hosts, one_leaf, slow) == hosts


def test_letters_alone_lose() -> None:
    """Negative control: where a link is slow, the best letters with the given or the sorted hosts are not the best."""
    letters, chosen = check(3)
    assert chosen < 0.9 * letters


@pytest.mark.prove
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("seed", range(50))
def test_fifty_irregular_clusters(seed: int) -> None:
    check(seed)
