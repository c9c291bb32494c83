"""The procedure of a search: a first pass over all nodes, then retests until nothing is in doubt."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from random import Random

import numpy as np

from hpc_mp.doctor.localise import rounds
from hpc_mp.doctor.localise.analysis import Known, analyse, silence
from hpc_mp.doctor.localise.fit import RULE, DecisionRule
from hpc_mp.doctor.localise.load import LEARNT
from hpc_mp.doctor.localise.record import ClusterLayout, Localisation, Measure, Round, RoundLog
from hpc_mp.doctor.localise.retest import Retests
from hpc_mp.doctor.localise.verdict import verdict


class Search:
    """The state of a search. ``knowledge`` is replaced after every round."""

    def __init__(self, cluster: ClusterLayout, seed: int, rule: DecisionRule) -> None:
        self.random = Random(seed)
        record = RoundLog(cluster.rails)
        leaves: list[list[int]] = []
        if cluster.leaf is not None:
            everybody = self.random.sample(range(cluster.size), cluster.size)
            leaves = [[node for node in everybody if cluster.leaf[node] == leaf] for leaf in range(len(cluster.leaf_names))]
        self.knowledge = Known(cluster, rule, leaves, record, None, silence(record))

    def first_pass(self) -> Iterator[Round]:
        """Yield the rounds before the retests; each may depend on the results of earlier ones."""
        cluster = self.knowledge.cluster
        if cluster.leaf is not None:
            yield from self._of_active(rounds.known(self.knowledge.leaves, cluster.leaf))
        elif cluster.size <= rounds.ALL_PAIRS:
            yield from self._of_active(rounds.everybody(self.random.sample(range(cluster.size), cluster.size)))
        else:
            learnt = cluster.size <= LEARNT
            for turn in range(rounds.most_rounds(cluster.size)):
                few = turn in (1, 3) if learnt else turn % 2 and (turn == 1 or self.knowledge.state.load.tapered)
                yield self._few(turn) if few else rounds.all_crowded(self.knowledge.crowd(self.random, turn))

    def note(self, round_: Round, measure: Measure) -> None:
        """Measure a round and update ``knowledge``."""
        record, cluster, rule = self.knowledge.record, self.knowledge.cluster, self.knowledge.rule
        record.add(round_, measure(round_.pairs))
        self.knowledge = replace(self.knowledge, analysed=analyse(record, cluster, rule), silence=silence(record))

    def _of_active(self, planned: Iterable[Round]) -> Iterator[Round]:
        return (round_ for plan in planned if (round_ := self.knowledge.only(plan)).pairs)

    def _few(self, turn: int) -> Round:
        """Return a round of few random pairs that do not disturb each other; every node gets a turn."""
        nodes = self.knowledge.active
        room = rounds.light(len(nodes))
        order = Random(len(nodes)).sample(nodes, len(nodes))
        start = turn // 2 * 2 * room % len(order)
        chosen = (order[start:] + order[:start])[: 2 * room]
        return self.knowledge.undisturbed(rounds.matching(chosen, self.random))


def localise(nodes: Sequence[str], measure: Measure, leaves: Mapping[str, str] | None = None, rails: int = 1, seed: int = 0,
             rule: DecisionRule = RULE) -> Iterator[Localisation]:
    """Yield a verdict after every round; the last one is complete.

    Rates are relative to the fastest pairs: two nodes with one rail cannot be slow. The oversubscription of healthy uplinks is
    estimated with three or more leaves; two count as 1:1.

    Args:
        nodes: names of the nodes, two or more.
        measure: function that measures one round of disjoint pairs of indices into ``nodes``.
        leaves: leaf switch of every node; None: unknown.
        rails: number of separately measured NICs of every node.
        seed: seed of the random rounds.
    """
    leaf_names = tuple(sorted({leaves[node] for node in nodes})) if leaves is not None else ()
    number = {name: index for index, name in enumerate(leaf_names)}
    leaf = np.array([number[leaves[node]] for node in nodes]) if leaves is not None else None
    search = Search(ClusterLayout(tuple(nodes), leaf, leaf_names, rails), seed, rule)
    first = 0
    for round_ in search.first_pass():
        search.note(round_, measure)
        first += 1
        yield verdict(search.knowledge, retests=0, complete=False)
    for round_ in Retests(lambda: search.knowledge, search.random):
        search.note(round_, measure)
        yield verdict(search.knowledge, retests=search.knowledge.record.rounds - first, complete=False)
    yield verdict(search.knowledge, retests=search.knowledge.record.rounds - first, complete=True)
