"""Groups of nodes that share a leaf, inferred from measured rates.

If a leaf's uplinks carry less than its nodes together, pairs across leaves are slower than pairs inside one leaf while all
communicate at once, as in the doctor's measurement. If uplinks carry everything, nothing can be inferred.
"""

import heapq
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from hpc_mp.base.text import data_rate
from hpc_mp.cluster.bandwidth import LinkRates
from hpc_mp.cluster.topology import Switch, Topology
from hpc_mp.cluster.topology.model import TopologyReading, group, listed, natural

APART, APART_FEW, FEW = 1.25, 1.6, 6
"""Minimum ratio of the rates of pairs inside to those across: smaller differences are noise, or a bad link. With fewer than
``FEW`` pairs inside the ratio must be larger, because a few rates can look like groups by chance."""

EDGE = 0.05  # maximum share of the pairs inside, and of those across, on the wrong side: bad links, and noise
COVERED = 0.5  # minimum share of the nodes in groups: a cluster has leaves everywhere or nowhere
CUTS = 5
"""Number of limits between the rates to try: pairs across have several rates, with an uplink of their own or a shared one."""

Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Seen:
    """The groups seen in rates."""

    groups: tuple[tuple[str, ...], ...]  # nodes that share a leaf, in natural order; empty if they cannot be seen
    unplaced: tuple[str, ...]  # measured nodes in none of the groups
    why: str  # the grounds of the groups, or the reason why none can be seen; one sentence


def infer(measured: LinkRates) -> Seen:
    """Return groups of nodes, only if rates inside and across differ clearly and fit disjoint groups."""
    rates = {(measured.nodes[i], measured.nodes[j]): rate for i, j, rate in measured.pairs if rate > 0}
    trials = (_try(rates, limit) for limit in _limits(sorted(rates.values())))
    best = max(trials, default=_Trial(), key=lambda trial: trial.worth)
    if not best.groups:
        return Seen((), tuple(sorted(measured.nodes, key=natural)),
                    f"rates of {len(rates)} pairs show no two groups of nodes: they do not distinguish leaves")
    groups = sorted((tuple(sorted(nodes, key=natural)) for nodes in best.groups), key=lambda nodes: natural(nodes[0]))
    placed = {node for nodes in groups for node in nodes}
    unplaced = tuple(sorted((node for node in measured.nodes if node not in placed), key=natural))
    why = (f"{data_rate(median(best.inside))} inside {len(groups)} groups, {data_rate(median(best.across))} across "
           f"({len(best.inside)} and {len(best.across)} pairs)")
    return Seen(tuple(groups), unplaced, why)


@dataclass(frozen=True, slots=True)
class _Trial:
    """Groups made by a limit between fast and slow, none if the rates do not support them; rates in order. ``worth``: number of
    pairs that fit, minus ten times the number of those that do not."""

    groups: tuple[set[str], ...] = ()
    inside: tuple[float, ...] = ()
    across: tuple[float, ...] = ()
    worth: int = 0

    @property
    def low(self) -> float:
        return self.inside[math.floor(EDGE * len(self.inside))]

    @property
    def high(self) -> float:
        return self.across[math.ceil((1 - EDGE) * len(self.across)) - 1]

    @property
    def apart(self) -> float:
        return self.low / self.high if self.inside and self.across else 0.0


def _try(rates: Mapping[Pair, float], limit: float) -> _Trial:
    signs = {pair: 1 if rate > limit else -1 for pair, rate in rates.items()}
    groups = _witnessed([members for members in _settled(groups_of(signs), signs) if len(members) > 1], signs)
    of = {node: number for number, members in enumerate(groups) for node in members}
    grouped = [(of[a] == of[b], rate) for (a, b), rate in rates.items() if a in of and b in of]
    trial = _Trial(tuple(groups), tuple(sorted(rate for same, rate in grouped if same)),
                   tuple(sorted(rate for same, rate in grouped if not same)))
    nodes = len({node for pair in rates for node in pair})
    if len(groups) < 2 or len(of) < COVERED * nodes or trial.apart < (APART if len(trial.inside) >= FEW else APART_FEW):
        return _Trial()
    middle = math.sqrt(trial.low * trial.high)
    fits = sum(same == (rate > middle) for same, rate in grouped)
    return replace(trial, worth=fits - 10 * (len(grouped) - fits))


def read_measured_topology(measured: LinkRates, origin: str) -> TopologyReading:
    """Return a tree with a leaf per group and a root, because groups reach each other; no topology if nothing can be seen."""
    inferred = infer(measured)
    notes = [inferred.why]
    if not inferred.groups:
        return TopologyReading((), origin, tuple(notes))
    if inferred.unplaced:
        notes.append(f"{listed(inferred.unplaced)}: rates do not show their leaf")
    leaves = [group(f"leaf{number}", nodes) for number, nodes in enumerate(inferred.groups, 1)]
    root = Switch("root", (), tuple(leaf.name for leaf in leaves))
    return TopologyReading((Topology(kind="tree", switches=(*leaves, root), default=True),), origin, tuple(notes))


def _limits(rates: Sequence[float]) -> list[float]:
    """Return limits between two kinds of rates: at the split of logarithms with the least spread, and in the widest gaps."""
    logs = [math.log(rate) for rate in rates]
    total, count, below, spread = sum(logs), len(logs), 0.0, []
    for cut in range(1, count):
        below += logs[cut - 1]
        spread.append((below / cut - (total - below) / (count - cut)) ** 2 * cut * (count - cut))
    cuts = sorted(range(1, count), key=lambda cut: spread[cut - 1])[-1:]
    cuts += sorted(range(1, count), key=lambda cut: logs[cut] - logs[cut - 1])[-CUTS:]
    return [math.sqrt(rates[cut - 1] * rates[cut]) for cut in dict.fromkeys(cuts)]


def groups_of(signs: Mapping[Pair, int]) -> list[set[str]]:
    """Return nodes that more of their pairs join (1) than separate (-1): pairs of each two groups decide by majority, the
    clearest first. A single pair does not join two groups of several nodes."""
    groups = {node: {node} for pair in signs for node in pair}
    votes: dict[str, Counter[str]] = {node: Counter() for node in groups}
    for (a, b), sign in signs.items():
        votes[a][b] += sign
        votes[b][a] = votes[a][b]
    waiting = [(-lead, a, b) for a in votes for b, lead in votes[a].items() if lead > 0 and a < b]
    heapq.heapify(waiting)
    while waiting:
        lead, one, other = heapq.heappop(waiting)
        if one not in groups or other not in groups or -lead != votes[one][other]:
            continue  # meanwhile joined, or outvoted
        if lead == -1 and len(groups[one]) > 1 and len(groups[other]) > 1:
            continue
        groups[one] |= groups.pop(other)
        del votes[one][other]
        for third, count in votes.pop(other).items():
            if third != one:
                del votes[third][other]
                votes[one][third] += count
                votes[third][one] = votes[one][third]
                if votes[one][third] > 0:
                    heapq.heappush(waiting, (-votes[one][third], one, third))
    return list(groups.values())


def _settled(groups: Sequence[set[str]], signs: Mapping[Pair, int]) -> list[set[str]]:
    """Remove nodes that another group claims equally or more: the first pair that joined them may have been an outlier."""
    of = {node: number for number, members in enumerate(groups) for node in members}
    votes: dict[str, Counter[int]] = {node: Counter() for node in of}
    for (a, b), sign in signs.items():
        votes[a][of[b]] += sign
        votes[b][of[a]] += sign
    return [{node for node in members if not any(count >= votes[node][number] for other, count in votes[node].items()
                                                 if other != number)} for number, members in enumerate(groups)]


def _witnessed(groups: Sequence[set[str]], signs: Mapping[Pair, int]) -> list[set[str]]:
    """Remove groups that the measured pairs do not separate from a larger one: both may be under one leaf."""
    ordered = sorted(groups, key=len, reverse=True)
    of = {node: number for number, members in enumerate(ordered) for node in members}
    votes = Counter[tuple[int, int]]()
    for (a, b), sign in signs.items():
        if a in of and b in of:
            votes[min(of[a], of[b]), max(of[a], of[b])] += sign
    separate: list[int] = []
    for number in range(len(ordered)):
        if all(votes[other, number] < 0 for other in separate):
            separate.append(number)
    return [ordered[number] for number in separate]
