"""The knowledge after a round of the search, and the rounds that follow from it."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from hpc_mp.doctor.localise import rounds
from hpc_mp.doctor.localise.analysis import Links, NetworkState, Silence, links
from hpc_mp.doctor.localise.fit import DecisionRule
from hpc_mp.doctor.localise.load import EARLY, seeking
from hpc_mp.doctor.localise.record import ClusterLayout, Pair, Round, RoundLog


@dataclass(frozen=True, slots=True)
class Known:
    """The knowledge after a round."""

    cluster: ClusterLayout
    rule: DecisionRule
    leaves: Sequence[Sequence[int]]  # the nodes of every known leaf, in random order; empty if leaves are unknown
    record: RoundLog  # all rounds so far
    analysed: NetworkState | None  # analysis of nodes and uplinks; None before the first round
    silence: Silence  # nodes and pairs that do not answer

    @property
    def state(self) -> NetworkState:
        assert self.analysed is not None, "nothing was measured yet"
        return self.analysed

    @property
    def active(self) -> list[int]:
        """The nodes that answer."""
        missing = self.silence.down | self.silence.aside
        return [node for node in range(self.cluster.size) if node not in missing]

    @property
    def links(self) -> Links:
        return links(self.state, self.cluster, self.rule)

    def crowd(self, random: Random, turn: int = 0) -> list[Pair]:
        """Return pairs of all nodes. If crowds are slow, the pairs are chosen to learn leaves and cross the known ones."""
        nodes = self.active
        if len(nodes) % 2:
            nodes.remove(nodes[turn % len(nodes)])
        load = self.analysed.load if self.analysed is not None else None
        if load is not None and load.score.size and len(np.unique(load.table.round)) >= EARLY:
            return seeking(nodes, load.group, load.score, random)
        return rounds.matching(nodes, random)

    def crowded(self, pairs: Sequence[Pair]) -> Round:
        """Return a round of many pairs. Only pairs inside a known leaf count as undisturbed."""
        leaf = self.cluster.leaf
        return Round(tuple(pairs), tuple(leaf is not None and bool(leaf[a] == leaf[b]) for a, b in pairs), leaf is None)

    def undisturbed(self, pairs: Sequence[Pair]) -> Round:
        """Return a round of a few pairs. Across known leaves they count as undisturbed only if both uplinks are cleared."""
        leaf = self.cluster.leaf
        if leaf is None:
            return Round(tuple(pairs), (True,) * len(pairs))
        clear = np.asarray(self.state.load.health.healthy.all(axis=1))
        return Round(tuple(pairs), tuple(bool(leaf[a] == leaf[b] or (clear[leaf[a]] and clear[leaf[b]])) for a, b in pairs))

    def only(self, round_: Round) -> Round:
        """Return the round without pairs of nodes that do not answer."""
        active = {*self.active}
        remaining = [(pair, alone) for pair, alone in zip(round_.pairs, round_.alone, strict=True) if active.issuperset(pair)]
        return Round(tuple(pair for pair, _ in remaining), tuple(alone for _, alone in remaining), round_.full)
