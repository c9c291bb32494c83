"""An order of hosts in which consecutive hosts stay under few switches.

Ranks fill nodes one after another, so the groups of an axis are in aligned blocks of consecutive nodes. The size of these blocks
depends on the layout; an order that is good for all sizes is good for any.
"""

from collections.abc import Callable, Iterator, Sequence

from hpc_mp.base.grouping import grouped
from hpc_mp.cluster.topology.model import SwitchTree

Cost = Callable[[Sequence[str]], tuple[float, ...]]


def order_hosts(hosts: Sequence[str], tree: SwitchTree, cost: Cost | None = None) -> tuple[str, ...]:
    """Return the cheapest of some orders, including the given one; at equal cost the hosts stay as they are. ``cost``: cost of an
    order; default: ``crossings``. The result is never worse than ``hosts`` by that cost."""
    price = cost or (lambda order: (crossings(order, tree),))
    best = tuple(hosts)
    while (cheapest := min(dict.fromkeys([best, *_candidates(best, tree)]), key=price)) != best:
        best = cheapest  # cheaper orders may exist near it
    return best


def crossings(hosts: Sequence[str], tree: SwitchTree) -> int:
    """Return the number of switches that aligned blocks of consecutive hosts span beyond the one they need.

    It is summed over block sizes (all divisors of the number of hosts), their blocks, and the levels of the tree. A host that the
    tree does not name is alone under a separate switch.
    """
    chains = [tree.above.get(host) or (host,) for host in hosts]
    depth = max(map(len, chains), default=0)
    levels = [[chain[min(level, len(chain) - 1)] for chain in chains] for level in range(depth)]
    return sum(len(set(level[first : first + size])) - 1
               for size in _divisors(len(hosts)) for level in levels for first in range(0, len(hosts), size))


def _candidates(hosts: Sequence[str], tree: SwitchTree) -> Iterator[tuple[str, ...]]:
    """Yield hosts leaf by leaf, and the same with every leaf cut into aligned pieces of decreasing size. Of 3 + 2 + 1 + 1 + 1
    hosts in blocks of two, leaf by leaf aa ab bc de spans a second leaf three times, in pieces aa bb ac de twice."""
    together = _together(list(hosts), tree, 0)
    yield tuple(host for leaf in together for host in leaf)
    for unit in _divisors(len(hosts)):
        sizes = [unit << power for power in reversed(range((len(hosts) // unit).bit_length()))]
        yield tuple(host for piece in _pieces(together, sizes) for host in piece)


def _together(hosts: list[str], tree: SwitchTree, from_root: int) -> list[list[str]]:
    """Return the hosts of every leaf; larger switches first, else in the order of their first host."""
    def switch(host: str) -> str:
        chain = tree.above.get(host, ())
        return chain[-1 - from_root] if from_root < len(chain) else ""

    groups = sorted(grouped((switch(host), host) for host in hosts).items(), key=lambda item: -len(item[1]))
    return [leaf for name, below in groups for leaf in (_together(below, tree, from_root + 1) if name else [below])]


def _pieces(leaves: list[list[str]], sizes: Sequence[int]) -> Iterator[list[str]]:
    """Yield every leaf cut greedily into pieces of the given sizes (descending), all large pieces before all smaller ones."""
    remaining = [list(leaf) for leaf in leaves]
    for size in sizes:
        for leaf in remaining:
            length = len(leaf) // size * size
            yield leaf[:length]
            del leaf[:length]
    yield [host for leaf in remaining for host in leaf]


def _divisors(number: int) -> list[int]:
    return [size for size in range(2, number + 1) if number % size == 0]
