"""Localisation from binary samples: bad and good pairs, named by the node, link or uplink that explains them. Pure."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping

from hpc_mp.base.grouping import grouped
from hpc_mp.base.text import several
from hpc_mp.doctor.localise.record import LINK, Suspect, SuspectKind

Names = tuple[str, str]  # the names of two nodes

MOST = 0.75
"""Share of a node's judged pairs that must be bad before the node is named: its partners may have a fault of their own."""


def of_pairs(bad: Collection[Names], good: Collection[Names], leaves: Mapping[str, str]) -> Iterator[Suspect]:
    """Yield the fewest suspects that explain the bad pairs. ``leaves``: leaf switch by node, as far as known.

    A node is named for at least two bad pairs if most of its pairs are bad. Each remaining bad pair is a bad link if both its
    nodes have good pairs; else the fault is at one of the nodes without good pairs.
    """
    if bad and not good:
        yield _suspect("node", sorted({node for pair in bad for node in pair}), bad)
        return
    unexplained, fine = set(bad), _count(good)
    switches = _uplinks(bad, good, leaves)
    together = len(switches) == len({*leaves.values()})
    for members in [switches] if switches and together else [[switch] for switch in switches]:
        yield _suspect("uplink", members, [pair for pair in unexplained if _crossed(pair, leaves) & {*members}])
    unexplained -= {pair for pair in unexplained if _crossed(pair, leaves) & {*switches}}
    while blamed := [node for node, count in _count(unexplained).items() if count >= 2 and count >= MOST * (count + fine[node])]:
        count = _count(unexplained)
        node = max(sorted(blamed), key=lambda node: (count[node] / (count[node] + fine[node]), count[node]))
        pairs = {pair for pair in unexplained if node in pair}
        yield _suspect("node", [node], pairs)
        unexplained -= pairs
    for pair in sorted(unexplained):
        unproven = [node for node in pair if not fine[node]]
        yield _suspect("node", unproven, [pair]) if unproven else _suspect("link", [LINK.join(pair)], [pair])


def _suspect(kind: SuspectKind, members: Collection[str], pairs: Iterable[Names]) -> Suspect:
    between = several([f"{one} and {other}" for one, other in sorted(pairs)])
    return Suspect(kind, tuple(members), 0.0, len(members) == 1, f"between {between}")


def _count(pairs: Iterable[Names]) -> Counter[str]:
    return Counter(node for pair in pairs for node in pair)


def _crossed(pair: Names, leaves: Mapping[str, str]) -> set[str]:
    """Return the leaves whose uplinks are on the path between the two nodes."""
    ends = {leaves.get(node, "") for node in pair}
    return ends if len(ends) > 1 and "" not in ends else set()


def _uplinks(bad: Collection[Names], good: Collection[Names], leaves: Mapping[str, str]) -> list[str]:
    """Return the leaves of which several nodes have pairs with several nodes outside, if none of these pairs is good. Nodes that
    are also bad within their leaf are ignored.
    """
    sick = {node for pair in bad if leaves.get(pair[0]) == leaves.get(pair[1]) for node in pair}
    out = grouped((leaf, pair) for pair in (*bad, *good) if sick.isdisjoint(pair) for leaf in _crossed(pair, leaves))
    uplinks = []
    for leaf, pairs in sorted(out.items()):
        ends = {node for pair in pairs for node in pair}
        members = {node for node in ends if leaves[node] == leaf}
        if len(members) > 1 and len(ends - members) > 1 and not {*pairs} & {*good}:
            uplinks.append(leaf)
    return uplinks
