"""What a search knows so far, and the rounds that it plans with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

import numpy as np

from hpc_mp.doctor.localise import rounds
from hpc_mp.doctor.localise.analysis import NetworkState, analyse
from hpc_mp.doctor.localise.fit import DecisionRule
from hpc_mp.doctor.localise.groups import LEARNT, seeking
from hpc_mp.doctor.localise.links import Links, Silence, links, silence
from hpc_mp.doctor.localise.load import EARLY
from hpc_mp.doctor.localise.record import ClusterLayout, Measure, Pair, Round, RoundLog


class Search:
    """What is known so far. ``state`` and ``silence`` are those after the last round."""

    def __init__(self, cluster: ClusterLayout, seed: int, rule: DecisionRule) -> None:
        self.cluster, self.rule = cluster, rule
        self.random = Random(seed)
        self.record = RoundLog(cluster.rails)
        self.leaves: list[list[int]] = []
        if cluster.leaf is not None:
            everybody = self.random.sample(range(cluster.size), cluster.size)
            self.leaves = [[node for node in everybody if cluster.leaf[node] == leaf] for leaf in range(len(cluster.leaf_names))]
        self.state: NetworkState
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
