"""The search for what is bad: rounds, one after another, and a verdict after each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from random import Random

import numpy as np

from hpc_mp.base.errors import HpcMpError
from hpc_mp.doctor.localise import rounds
from hpc_mp.doctor.localise.analysis import State, analyse
from hpc_mp.doctor.localise.cluster import Cluster
from hpc_mp.doctor.localise.fit import RULE, Rule
from hpc_mp.doctor.localise.groups import LEARNT, seeking
from hpc_mp.doctor.localise.links import Links, links
from hpc_mp.doctor.localise.load import EARLY
from hpc_mp.doctor.localise.record import Record, Round
from hpc_mp.doctor.localise.retest import Retests
from hpc_mp.doctor.localise.sample import Measure, Pair, Verdict
from hpc_mp.doctor.localise.silence import Silence, silence
from hpc_mp.doctor.localise.verdict import verdict


class Search:
    """What is known so far. ``state`` and ``silence`` are those after the last round."""

    def __init__(self, cluster: Cluster, seed: int, rule: Rule) -> None:
        self.cluster, self.rule = cluster, rule
        self.random = Random(seed)
        self.record = Record(cluster.rails)
        self.leaves: list[list[int]] = []
        if cluster.leaf is not None:
            everybody = self.random.sample(range(cluster.size), cluster.size)
            self.leaves = [[node for node in everybody if cluster.leaf[node] == leaf] for leaf in range(len(cluster.leaf_names))]
        self.state: State
        self.silence: Silence = silence(self.record)

    @property
    def active(self) -> list[int]:
        """Nodes that answer."""
        missing = self.silence.down | self.silence.aside
        return [node for node in range(self.cluster.size) if node not in missing]

    @property
    def links(self) -> Links:
        return links(self.state, self.cluster, self.rule)

    def first_pass(self) -> Iterator[Round]:
        if self.cluster.leaf is not None:
            planned_ones = rounds.known(self.leaves, self.cluster.leaf)
            yield from (round_ for planned in planned_ones if (round_ := self.only(planned)).pairs)
        elif self.cluster.size <= rounds.ALL_PAIRS:
            members = self.random.sample(range(self.cluster.size), self.cluster.size)
            yield from (round_ for planned in rounds.everybody(members) if (round_ := self.only(planned)).pairs)
        else:
            learnt = self.cluster.size <= LEARNT
            for turn in range(rounds.most_rounds(self.cluster.size)):
                few = turn in (1, 3) if learnt else turn % 2 and (turn == 1 or self.state.load.tapered)
                yield self.few(turn) if few else rounds.all_crowded(self.crowd(turn))

    def few(self, turn: int) -> Round:
        """So few random pairs that they do not disturb each other; everybody gets a turn."""
        nodes = self.active
        room = rounds.light(len(nodes))
        order = Random(len(nodes)).sample(nodes, len(nodes))
        start = turn // 2 * 2 * room % len(order)
        chosen = (order[start:] + order[:start])[: 2 * room]
        return self.undisturbed(rounds.matching(chosen, self.random))

    def crowd(self, turn: int = 0) -> list[Pair]:
        """Pairs of all nodes; where crowds are slow, such that leaves are learnt and those known talk to others only."""
        nodes = self.active
        if len(nodes) % 2:
            nodes.remove(nodes[turn % len(nodes)])
        if self.record.rounds and self.state.load.score.size and len(np.unique(self.state.load.table.round)) >= EARLY:
            return seeking(nodes, self.state.load.group, self.state.load.score, self.random)
        return rounds.matching(nodes, self.random)

    def crowded(self, pairs: Sequence[Pair]) -> Round:
        """Many pairs: those inside a known leaf are undisturbed all the same."""
        leaf = self.cluster.leaf
        return Round(tuple(pairs), tuple(leaf is not None and bool(leaf[a] == leaf[b]) for a, b in pairs), leaf is None)

    def undisturbed(self, pairs: Sequence[Pair]) -> Round:
        """A few pairs: inside a leaf they count as alone; across known leaves only if both uplinks are cleared."""
        leaf = self.cluster.leaf
        if leaf is None:
            return Round(tuple(pairs), (True,) * len(pairs))
        clear = np.asarray(self.state.load.health.healthy.all(axis=1))
        return Round(tuple(pairs), tuple(bool(leaf[a] == leaf[b] or (clear[leaf[a]] and clear[leaf[b]])) for a, b in pairs))

    def only(self, round_: Round) -> Round:
        """The round without those that do not answer."""
        active = {*self.active}
        kept = [(pair, alone) for pair, alone in zip(round_.pairs, round_.alone, strict=True) if active.issuperset(pair)]
        return Round(tuple(pair for pair, _ in kept), tuple(alone for _, alone in kept), round_.full)

    def note(self, round_: Round, measure: Measure) -> None:
        self.record.add(round_, measure(round_.pairs))
        self.state = analyse(self.record, self.cluster, self.rule)
        self.silence = silence(self.record)


def localise(nodes: Sequence[str], measure: Measure, leaves: Mapping[str, str] | None = None, rails: int = 1, seed: int = 0, *,
             healthy: float | None = None, taper: float | None = None, rule: Rule = RULE) -> Iterator[Verdict]:
    """A verdict after every round; the last one is complete.

    Args:
        nodes: names.
        measure: measures one round of disjoint pairs of indices into ``nodes``.
        leaves: leaf switch of every node; None: not known.
        rails: NICs of every node that are measured one by one.
        seed: of the random rounds.
        healthy: GB/s per rail that a healthy pair must reach, if known. Without it, all is relative to the fastest pairs,
            and two nodes with one rail cannot be slow.
        taper: oversubscription of healthy uplinks, if known. Three and more leaves show it themselves; two count as 1:1.

    Raises:
        HpcMpError: fewer than two nodes, or a node without a leaf.
    """
    if len(nodes) < 2:
        raise HpcMpError(f"{len(nodes)} nodes", "a pair is the least that can be measured", "give at least two nodes")
    if leaves is not None and (lost := [node for node in nodes if node not in leaves]):
        raise HpcMpError(f"node {lost[0]} has no leaf", "leaves are known of all nodes or of none",
                         "complete the topology or leave it out")
    leaf_names = tuple(sorted({leaves[node] for node in nodes})) if leaves is not None else ()
    number = {name: index for index, name in enumerate(leaf_names)}
    leaf = np.array([number[leaves[node]] for node in nodes]) if leaves is not None else None
    search = Search(Cluster(tuple(nodes), leaf, leaf_names, rails, healthy, taper), seed, rule)
    first = 0
    for round_ in search.first_pass():
        search.note(round_, measure)
        first += 1
        yield verdict(search, retests=0, complete=False)
    for round_ in Retests(search):
        search.note(round_, measure)
        yield verdict(search, retests=search.record.rounds - first, complete=False)
    yield verdict(search, retests=search.record.rounds - first, complete=True)
