"""Comparison of the fit's suspects with the spread of the pairs without suspects."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import comb, exp, inf, log

import numpy as np

from hpc_mp.base.text import data_rate
from hpc_mp.cluster.slurm.nodelist import expand
from hpc_mp.doctor.localise import uneven
from hpc_mp.doctor.localise.analysis import NetworkState
from hpc_mp.doctor.localise.fit import RULE
from hpc_mp.doctor.localise.record import LINK, ClusterLayout, Pair, Suspect

OF_NODES = ("node", "rail")  # kinds of suspects for or against which all pairs of a node speak
ODDS = {True: log(5000), False: log(200)}
"""Log odds for a verdict on nodes, of which each has a part in many pairs, and on a pair."""
SUSPICION = log(20)
"""Log odds for a suspicion of nodes that the fit convicts: three nodes that are alike cannot give the odds for a verdict."""


@dataclass(frozen=True, slots=True)
class SuspectPart:
    """The pairs that a member of a suspect affects: all pairs of a node, one pair, or those that cross an uplink."""

    nodes: frozenset[int] = frozenset()
    pairs: frozenset[Pair] = frozenset()
    rail: int | None = None

    def rate(self, pairs: uneven.Pairs) -> float | None:
        """Return the fastest rate of a node, or the median of pairs; None if there are none."""
        rates = [rate for pair, rate in pairs.rate.items() if pair in self.pairs or not self.nodes.isdisjoint(pair)]
        return None if not rates else max(rates) if self.nodes else float(np.median(rates))


@dataclass(frozen=True, slots=True)
class Weighed:
    """A suspect with the parts that its members affect."""

    suspect: Suspect
    parts: tuple[SuspectPart, ...]

    @property
    def nodes(self) -> frozenset[int]:
        return frozenset().union(*(part.nodes for part in self.parts))

    @property
    def pairs(self) -> frozenset[Pair]:
        return frozenset().union(*(part.pairs for part in self.parts))

    def explained(self, faults: uneven.Outstanding) -> bool:
        """Return True if outstanding nodes or links explain the suspect."""
        ends = self.nodes | {node for pair in self.pairs for node in pair}
        return self.suspect.kind != "uplink" and not (ends.isdisjoint(faults.nodes) and self.pairs.isdisjoint(faults.links))


@dataclass(frozen=True, slots=True)
class Basis:
    """The pairs without suspects."""

    rest: uneven.Spread | None  # their spread; None if there are no such pairs
    nodes: float  # log odds that the nodes, by their fastest pairs, are alike
    pairs: float  # log odds that the pairs are alike
    # Both are less the log of the number of possible choices of suspects: of enough pairs some are always alike.

    def odds(self, suspect: Suspect, of_nodes: bool, rate: float) -> float:
        """Return the log odds for a verdict of the fit: a healthy cluster of uneven pairs is unlikely to have other pairs this
        alike and a rate this far below theirs. A rate among the others is never a verdict, however often it was measured.
        Pairs of uneven nodes may look alike because most have the rate of the same few nodes: no pair is convicted then."""
        if self.rest is None or (suspect.kind != "uplink" and rate >= self.rest.slowest):
            return -inf
        mixed = suspect.certain and self.nodes < 0
        return (min(self.nodes, self.pairs) if of_nodes or mixed else self.pairs) + uneven.away(self.rest.level - rate)


def weighed(suspects: Sequence[Suspect], state: NetworkState, cluster: ClusterLayout) -> Iterator[Suspect]:
    """Yield the suspects that remain. A slow link of a convicted node is the node's, and one across a convicted uplink the
    uplink's: among their pairs, one is always the slowest."""
    remaining = tuple(_remaining(suspects, state, cluster))
    convicted = {member.split(" ")[0] for suspect in remaining if suspect.certain and suspect.kind in (*OF_NODES, "uplink")
                 for member in suspect.members}
    yield from (suspect for suspect in remaining
                if suspect.kind != "link" or suspect.factor == 0 or convicted.isdisjoint(_path_of(suspect.members[0], cluster)))


def _path_of(link: str, cluster: ClusterLayout) -> set[str]:
    """Return the names of all that a link passes: its nodes, and their leaves if they differ."""
    ends = link.split(LINK)
    leaves = set() if cluster.leaf is None else {cluster.leaf_names[cluster.leaf[cluster.names.index(end)]] for end in ends}
    return {*ends, *(leaves if len(leaves) > 1 else ())}


def _remaining(suspects: Sequence[Suspect], state: NetworkState, cluster: ClusterLayout) -> Iterator[Suspect]:
    """Yield outstanding nodes and links, and the suspects that these do not explain. A suspect is unchanged if it stands even if
    pairs may be uneven, else it is kept as far as their spread permits. Suspects that did not answer at all are unchanged."""
    pairs = uneven.best(state, cluster)
    faults = uneven.outstanding(pairs, _alone_in_leaf(cluster))
    fit = [Weighed(suspect, tuple(_part(suspect, member, pairs, cluster) for member in suspect.members)) for suspect in suspects]
    basis = _basis(fit, pairs, state)
    confirmed = {entry.suspect: entry.nodes for entry in fit if entry.suspect.certain and entry.suspect.kind in OF_NODES
                 and entry.suspect.factor and entry.nodes <= {*faults.nodes}}
    yield from (_node(node, faults, pairs, cluster) for node in faults.nodes
                if not any(node in nodes for nodes in confirmed.values()))
    for link in faults.links:
        yield Suspect("link", (LINK.join(cluster.names[node] for node in link),), exp(pairs.rate[link] - faults.level), True,
                      f"{_rate(pairs.rate[link])}, though both nodes are faster with others; {_others(faults.left)}")
    for entry in fit:
        if entry.suspect in confirmed and entry.suspect.kind == "node" and min(basis.nodes, basis.pairs) < RULE.clear:
            # If pairs differ, the fit's fraction of "the" healthy rate means little.
            yield from (_node(node, faults, pairs, cluster) for node in entry.nodes)
        elif entry.suspect in confirmed or entry.suspect.factor == 0 or (
                entry.suspect.kind == "uplink" and entry.suspect.certain and cluster.leaf is not None):
            yield entry.suspect  # the evidence of a known leaf's uplink is the total rate of its nodes, not single pairs
        elif not entry.explained(faults):
            # The uplink of an unknown leaf is a set of nodes.
            of_nodes = entry.suspect.kind in OF_NODES or (entry.suspect.kind == "uplink" and cluster.leaf is None)
            rates = [rate for part in entry.parts if (rate := part.rate(_of_rail(pairs, part.rail, state, cluster))) is not None]
            odds = basis.odds(entry.suspect, of_nodes, max(rates, default=inf))
            likely = entry.suspect.kind in OF_NODES and entry.suspect.certain and odds >= SUSPICION
            yield from [entry.suspect] if odds >= ODDS[of_nodes] else _beside(entry, likely, faults.left, state, cluster)


def _basis(fit: Sequence[Weighed], pairs: uneven.Pairs, state: NetworkState) -> Basis:
    nodes, links = (frozenset().union(*sets) for sets in ([entry.nodes for entry in fit], [entry.pairs for entry in fit]))
    rest, single = pairs.without(nodes, links), sum(entry.suspect.kind == "link" for entry in fit)
    # There are at most as many leaves as nodes.
    choices = comb(pairs.nodes, sum(len(entry.parts) for entry in fit) - single) * comb(len(pairs.rate), single)
    if not rest.rate or not choices:
        return Basis(None, -inf, -inf)
    rates = uneven.measured(state, rest)
    independent = len(rest.ends()) - 1  # if each pair has the rate of its slower end: the fastest node's never shows
    return Basis(uneven.spread(rest), uneven.alike(uneven.fastest(rates).values(), independent) - log(choices),
                 uneven.alike(rates.values(), len(rates)) - log(choices))


def _of_rail(pairs: uneven.Pairs, rail: int | None, state: NetworkState, cluster: ClusterLayout) -> uneven.Pairs:
    if rail is None:
        return pairs
    rates = uneven.best(state, cluster, rail).rate
    return replace(pairs, rate={pair: rates[pair] for pair in pairs.rate})


def _beside(entry: Weighed, likely: bool, left: uneven.Pairs, state: NetworkState, cluster: ClusterLayout) -> Iterator[Suspect]:
    """Yield the suspect if it is likely or a member is slower than likely for healthy ones; certain only if all members are
    slower than possible."""
    slow, certain = zip(*(_slow(part, left, state, cluster) for part in entry.parts), strict=True)
    if likely or any(slow):
        yield replace(entry.suspect, certain=entry.suspect.certain and all(certain))


def _slow(part: SuspectPart, left: uneven.Pairs, state: NetworkState, cluster: ClusterLayout) -> tuple[bool, bool]:
    """Return (likely, certain): True if the part is slow. Without any pairs to compare with, it is likely but not certain."""
    left = _of_rail(left, part.rail, state, cluster)
    rest, rate = left.without(part.nodes, part.pairs), part.rate(left)
    if rate is None or not rest.rate:
        return True, False
    usual = uneven.spread_of_nodes(rest) if part.nodes else uneven.spread(rest)
    return rate < usual.likely, rate < (usual.node if part.nodes else usual.link)


def _part(suspect: Suspect, member: str, pairs: uneven.Pairs, cluster: ClusterLayout) -> SuspectPart:
    name, _, rail = member.partition(" rail ")
    number = {name: index for index, name in enumerate(cluster.names)}
    if suspect.kind == "link":
        one, other = sorted(number[end] for end in name.split(LINK))
        return SuspectPart(pairs=frozenset({(one, other)}))
    if suspect.kind != "uplink" and name in number:
        return SuspectPart(nodes=frozenset({number[name]}), rail=int(rail) if rail else None)
    behind = ({number[node] for node in expand(name)} if cluster.leaf is None
              else {*np.flatnonzero(cluster.leaf == cluster.leaf_names.index(name)).tolist()})
    return SuspectPart(pairs=frozenset(pair for pair in pairs.rate if len(behind & {*pair}) == 1))


def _alone_in_leaf(cluster: ClusterLayout) -> frozenset[int]:
    """Return nodes that cannot be distinguished from the uplink of their leaf."""
    if cluster.leaf is None or not cluster.leaf.max():
        return frozenset()
    return frozenset(np.flatnonzero(np.bincount(cluster.leaf)[cluster.leaf] == 1).tolist())


def _node(node: int, faults: uneven.Outstanding, pairs: uneven.Pairs, cluster: ClusterLayout) -> Suspect:
    rates = pairs.of(node)
    return Suspect("node", (cluster.names[node],), exp(float(np.median(rates)) - faults.level), True,
                   f"{_rate(max(rates))} at most, with anybody; {_others(faults.left)}")


def _rate(logarithm: float) -> str:
    return data_rate(exp(logarithm))


def _others(left: uneven.Pairs) -> str:
    rates = left.rate.values()
    return f"the other pairs have {_rate(min(rates))} to {_rate(max(rates))}"
