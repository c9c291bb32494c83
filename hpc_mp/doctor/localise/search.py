"""The state of a search: what is known after its last round, and the rounds of its first pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from random import Random

from hpc_mp.doctor.localise import rounds
from hpc_mp.doctor.localise.analysis import analyse
from hpc_mp.doctor.localise.fit import DecisionRule
from hpc_mp.doctor.localise.groups import LEARNT
from hpc_mp.doctor.localise.known import Known
from hpc_mp.doctor.localise.links import silence
from hpc_mp.doctor.localise.record import ClusterLayout, Measure, Round, RoundLog


class Search:
    """``known`` is replaced after every round."""

    def __init__(self, cluster: ClusterLayout, seed: int, rule: DecisionRule) -> None:
        self.random = Random(seed)
        record = RoundLog(cluster.rails)
        leaves: list[list[int]] = []
        if cluster.leaf is not None:
            everybody = self.random.sample(range(cluster.size), cluster.size)
            leaves = [[node for node in everybody if cluster.leaf[node] == leaf] for leaf in range(len(cluster.leaf_names))]
        self.known = Known(cluster, rule, leaves, record, None, silence(record))

    def first_pass(self) -> Iterator[Round]:
        """The rounds before the retests; each may depend on what those before it have shown."""
        cluster = self.known.cluster
        if cluster.leaf is not None:
            yield from self._of_active(rounds.known(self.known.leaves, cluster.leaf))
        elif cluster.size <= rounds.ALL_PAIRS:
            yield from self._of_active(rounds.everybody(self.random.sample(range(cluster.size), cluster.size)))
        else:
            learnt = cluster.size <= LEARNT
            for turn in range(rounds.most_rounds(cluster.size)):
                few = turn in (1, 3) if learnt else turn % 2 and (turn == 1 or self.known.state.load.tapered)
                yield self._few(turn) if few else rounds.all_crowded(self.known.crowd(self.random, turn))

    def note(self, round_: Round, measure: Measure) -> None:
        """Have a round measured, and draw the conclusions."""
        record, cluster, rule = self.known.record, self.known.cluster, self.known.rule
        record.add(round_, measure(round_.pairs))
        self.known = replace(self.known, analysed=analyse(record, cluster, rule), silence=silence(record))

    def _of_active(self, planned: Iterable[Round]) -> Iterator[Round]:
        return (round_ for each in planned if (round_ := self.known.only(each)).pairs)

    def _few(self, turn: int) -> Round:
        """So few random pairs that they do not disturb each other; everybody gets a turn."""
        nodes = self.known.active
        room = rounds.light(len(nodes))
        order = Random(len(nodes)).sample(nodes, len(nodes))
        start = turn // 2 * 2 * room % len(order)
        chosen = (order[start:] + order[:start])[: 2 * room]
        return self.known.undisturbed(rounds.matching(chosen, self.random))
