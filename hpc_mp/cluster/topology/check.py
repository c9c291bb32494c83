"""Comparison of Slurm's leaves with measured rates."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Literal

from hpc_mp.base.text import data_rate
from hpc_mp.cluster.bandwidth import LinkRates
from hpc_mp.cluster.topology import SwitchTree
from hpc_mp.cluster.topology.inferred import APART, COVERED, EDGE, Pair, Seen, groups_of, infer
from hpc_mp.cluster.topology.model import listed, natural

Verdict = Literal["agrees", "disagrees", "cannot tell"]
ENOUGH = 12  # minimum number of pairs of each kind that identify Slurm's leaves
DECIDES = 2  # factor by which the pairs for a statement about a node must outnumber those against it
SURE = 2 * DECIDES  # the same factor for a leaf
NONE = ""  # the switch of a host that is under no switch in Slurm


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Nodes that Slurm has elsewhere than their rates indicate."""

    nodes: tuple[str, ...]
    believed: str  # the switch that Slurm has them under; empty: none
    measured: str  # a node whose rates with them are like those inside one leaf
    home: str  # the switch that Slurm has ``measured`` under

    def __str__(self) -> str:
        believed = f"under {self.believed}" if self.believed else "under no switch"
        beside = f"of {self.home}" if self.home and self.home != self.believed else f"around {self.measured}"
        return f"{listed(self.nodes)}: Slurm has them {believed}, but rates put them with the nodes {beside}"


@dataclass(frozen=True, slots=True)
class Agreement:
    """The verdict of a comparison. ``why``: its grounds, one sentence. ``unplaced``: nodes that the rates cannot place."""

    verdict: Verdict
    why: str
    odd: tuple[Mismatch, ...] = ()
    unplaced: tuple[str, ...] = ()


def agreement(tree: SwitchTree, measured: LinkRates) -> Agreement:
    """Compare the tree with the rates. Inferred groups may match any storey: the best fit counts, the lowest first."""
    inferred = infer(measured)
    if not inferred.groups:
        return _leaf_by_leaf(tree, measured) or Agreement("cannot tell", inferred.why, unplaced=inferred.unplaced)
    if not any(map(tree.leaf, measured.nodes)):
        grouped = tuple(node for nodes in inferred.groups for node in nodes)
        odd = Mismatch(grouped, NONE, inferred.groups[0][0], NONE)
        return Agreement("disagrees", f"Slurm knows no switch above the measured nodes, but rates show: {inferred.why}", (odd,),
                         inferred.unplaced)
    storeys = max(len(tree.above.get(node, ())) for node in measured.nodes)
    mismatches = min((_compare(_storey(tree, inferred, storey), inferred) for storey in range(storeys)),
                     key=lambda odd: sum(len(mismatch.nodes) for mismatch in odd))
    if not mismatches:
        return Agreement("agrees", inferred.why, unplaced=inferred.unplaced)
    return Agreement("disagrees", inferred.why, tuple(mismatches), inferred.unplaced)


def _leaf_by_leaf(tree: SwitchTree, measured: LinkRates) -> Agreement | None:
    """Compare leaf by leaf, if too few pairs were measured to find groups; None if the pairs do not show Slurm's leaves.

    A node is misplaced if most of its pairs under its leaf are slow, and most of those with another leaf fast. Of the remaining
    nodes, a leaf counts as two if pairs separate its groups, and two leaves count as one if pairs join them.
    """
    leaf = {node: tree.leaf(node) or NONE for node in measured.nodes}
    pairs = [(measured.nodes[i], measured.nodes[j], rate) for i, j, rate in measured.pairs]
    inside = [rate for a, b, rate in pairs if leaf[a] == leaf[b] != NONE]
    across = [rate for a, b, rate in pairs if leaf[a] != leaf[b] and NONE not in (leaf[a], leaf[b])]
    if len(inside) < ENOUGH or len(across) < ENOUGH or median(inside) < APART * median(across):
        return None
    limit = math.sqrt(median(inside) * median(across))
    signs = {(a, b): 1 if rate > limit else -1 for a, b, rate in pairs}
    votes: dict[str, Counter[str]] = {node: Counter() for node in leaf}  # by the other node's leaf: fast pairs minus slow ones
    for (a, b), sign in signs.items():
        votes[a][leaf[b]] += sign
        votes[b][leaf[a]] += sign
    odd: list[Mismatch] = []
    unplaced: list[str] = []
    for node, tally in votes.items():
        own_votes = -DECIDES if leaf[node] == NONE else tally[leaf[node]]
        home, support = max(((name, count) for name, count in tally.items() if name not in (NONE, leaf[node])),
                            key=lambda claim: claim[1], default=(NONE, 0))
        if own_votes <= -DECIDES and support >= DECIDES:
            mate = next(other for pair, sign in signs.items() if node in pair and sign > 0
                        for other in pair if leaf[other] == home)
            odd.append(Mismatch((node,), leaf[node], mate, home))
        elif own_votes < DECIDES:
            unplaced.append(node)
    gone = {node for mismatch in odd for node in mismatch.nodes}
    settled = {pair: sign for pair, sign in signs.items() if gone.isdisjoint(pair) and NONE not in (leaf[pair[0]], leaf[pair[1]])}
    odd += _whole_leaves(leaf, settled)
    gone |= {node for mismatch in odd for node in mismatch.nodes}
    unplaced = [node for node in unplaced if node not in gone]
    placed = {pair: sign for pair, sign in settled.items() if gone.union(unplaced).isdisjoint(pair)}
    if not _fits(leaf, placed) or (len(unplaced) > (1 - COVERED) * len(leaf) and not _fits(leaf, settled)):
        return None
    why = (f"{data_rate(median(inside))} under one switch, {data_rate(median(across))} across "
           f"({len(inside)} and {len(across)} pairs)")
    return Agreement("disagrees" if odd else "agrees", why, tuple(odd), tuple(sorted(unplaced, key=natural)))


def _fits(leaf: Mapping[str, str], signs: Mapping[Pair, int]) -> bool:
    """Return True if pairs under one leaf are fast and others slow, with a few exceptions."""
    fit = sum((leaf[a] == leaf[b]) == (sign > 0) for (a, b), sign in signs.items())
    return fit >= (1 - 2 * EDGE) * len(signs) > 0


def _whole_leaves(leaf: Mapping[str, str], signs: Mapping[Pair, int]) -> Iterator[Mismatch]:
    """Yield leaves that are really two, and pairs of leaves that are really one. The smaller part is named."""
    inside: dict[str, dict[Pair, int]] = {}
    between: Counter[frozenset[str]] = Counter()
    members: dict[str, dict[str, None]] = {}
    for (a, b), sign in signs.items():
        members.setdefault(leaf[a], {})[a] = None
        members.setdefault(leaf[b], {})[b] = None
        if leaf[a] == leaf[b]:
            inside.setdefault(leaf[a], {})[a, b] = sign
        else:
            between[frozenset((leaf[a], leaf[b]))] += sign
    for name, pairs in inside.items():
        largest, *others = sorted(groups_of(pairs), key=len, reverse=True)
        for group in others:
            parted = sum(sign for (a, b), sign in pairs.items() if (a in largest and b in group) or (b in largest and a in group))
            if len(group) > 1 and parted <= -SURE:
                yield Mismatch(tuple(sorted(group, key=natural)), name, min(group, key=natural), NONE)
    for names, votes in between.items():
        if votes >= SURE:
            larger, smaller = sorted(names, key=lambda name: (-len(members[name]), natural(name)))
            yield Mismatch(tuple(sorted(members[smaller], key=natural)), smaller, min(members[larger], key=natural), larger)


def _storey(tree: SwitchTree, inferred: Seen, storey: int) -> dict[str, str]:
    """Return for every grouped node the switch ``storey`` levels above its leaf, or its highest switch."""
    chains = {node: tree.above.get(node, ()) for nodes in inferred.groups for node in nodes}
    return {node: chain[min(storey, len(chain) - 1)] if chain else NONE for node, chain in chains.items()}


def _compare(switch: Mapping[str, str], inferred: Seen) -> list[Mismatch]:
    """Return mismatches. A group's home is the switch above most of it, unless a larger part of another group is there."""
    claims = sorted(((count, group, name) for group, nodes in enumerate(inferred.groups)
                     for name, count in Counter(switch[node] for node in nodes).items() if name != NONE),
                    key=lambda claim: (-claim[0], claim[1]))
    home: dict[int, str] = {}
    for _, group, name in claims:
        if group not in home and name not in home.values():
            home[group] = name
    odd = []
    for group, nodes in enumerate(inferred.groups):
        home_switch = home.get(group, NONE)
        settled = [node for node in nodes if switch[node] == home_switch != NONE]
        for name in sorted({switch[node] for node in nodes} - ({home_switch} if home_switch else set()), key=natural):
            strangers = tuple(node for node in nodes if switch[node] == name)
            odd.append(Mismatch(strangers, name, next(iter(settled or nodes)), home_switch))
    return odd
