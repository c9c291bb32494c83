"""Attribution of bad pairs to the node, link or uplink that explains them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Pair = tuple[str, str]

MOST = 0.75
"""Share of a node's judged pairs that must be bad before the node is blamed: its partners may have a fault of their own."""


@dataclass(frozen=True, slots=True)
class Blame:
    """A culprit. ``members``: nodes or leaf switches. Several mean that one of them is bad; a link is between its two nodes."""

    kind: Literal["node", "link", "uplink"]
    members: tuple[str, ...]
    pairs: tuple[Pair, ...]

    @property
    def certain(self) -> bool:
        return len(self.members) == (2 if self.kind == "link" else 1)


def blames(bad: Collection[Pair], good: Collection[Pair], leaves: Mapping[str, str]) -> tuple[Blame, ...]:
    """Return the fewest blames that explain the bad pairs.

    A node is blamed for at least two bad pairs if most of its pairs are bad. Each remaining bad pair is a bad link if both its
    nodes have good pairs; else the fault is at one of the nodes without good pairs.

    Args:
        leaves: leaf switch by node, as far as known.
    """
    if not bad:
        return ()
    if not good:
        return (Blame("node", tuple(sorted({node for pair in bad for node in pair})), tuple(sorted(bad))),)
    culprits, unexplained, fine = [], set(bad), _count(good)
    if switches := _uplinks(bad, good, leaves):
        crossing = tuple(sorted(pair for pair in unexplained if _crossed(pair, leaves) & {*switches}))
        together = len(switches) == len({*leaves.values()})
        culprits += [Blame("uplink", members, tuple(pair for pair in crossing if _crossed(pair, leaves) & {*members}))
                     for members in ([tuple(switches)] if together else [(switch,) for switch in switches])]
        unexplained -= {*crossing}
    while blamed := [node for node, count in _count(unexplained).items() if count >= 2 and count >= MOST * (count + fine[node])]:
        count = _count(unexplained)
        node = max(sorted(blamed), key=lambda node: (count[node] / (count[node] + fine[node]), count[node]))
        culprits.append(Blame("node", (node,), tuple(sorted(pair for pair in unexplained if node in pair))))
        unexplained -= {*culprits[-1].pairs}
    for pair in sorted(unexplained):
        unproven = tuple(node for node in pair if not fine[node])
        culprits.append(Blame("node", unproven, (pair,)) if unproven else Blame("link", pair, (pair,)))
    return tuple(culprits)


def _count(pairs: Iterable[Pair]) -> Counter[str]:
    return Counter(node for pair in pairs for node in pair)


def _crossed(pair: Pair, leaves: Mapping[str, str]) -> set[str]:
    """Return the leaves whose uplinks are on the path between the two nodes."""
    ends = {leaves.get(node, "") for node in pair}
    return ends if len(ends) > 1 and "" not in ends else set()


def _uplinks(bad: Collection[Pair], good: Collection[Pair], leaves: Mapping[str, str]) -> list[str]:
    """Return the leaves of which several nodes have pairs with several nodes outside, if none of these pairs is good. Nodes that
    are also bad within their leaf are ignored.
    """
    sick = {node for pair in bad if leaves.get(pair[0]) == leaves.get(pair[1]) for node in pair}
    out: dict[str, list[Pair]] = {}
    for pair in (*bad, *good):
        for leaf in _crossed(pair, leaves) if sick.isdisjoint(pair) else ():
            out.setdefault(leaf, []).append(pair)
    uplinks = []
    for leaf, pairs in sorted(out.items()):
        ends = {node for pair in pairs for node in pair}
        members = {node for node in ends if leaves[node] == leaf}
        if len(members) > 1 and len(ends - members) > 1 and not {*pairs} & {*good}:
            uplinks.append(leaf)
    return uplinks
