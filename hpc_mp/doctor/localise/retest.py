"""Choice of pairs to measure again: suspects with healthy nodes."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from random import Random

import numpy as np

from hpc_mp.base.grouping import grouped
from hpc_mp.doctor.localise import rounds
from hpc_mp.doctor.localise.analysis import Known, behind, together
from hpc_mp.doctor.localise.fit import NEAR, Health
from hpc_mp.doctor.localise.load import Load
from hpc_mp.doctor.localise.record import Floats, Ints, Pair, Round

CONFIRMED = 2  # retests that a conviction needs
PASSES = 3
MOST = {"silent": 6, "missing": 12, "among": 12, "against": 48, "load": 12, "links": 12}  # rounds of each kind, at most
LEANS = 0.02
"""Mean log rate under load below which a node is tested with a load aimed at it: a mild fault that shows at times only."""
CONTROLS = 8  # healthy pairs that are measured beside the suspects: what is common to them is the round's


class Retests:
    """The rounds after the first pass. Tests are counted, so that passes do not repeat each other."""

    def __init__(self, latest: Callable[[], Known], random: Random) -> None:
        """Store the source of knowledge: ``latest`` returns the state after the last round."""
        self.latest, self.random = latest, random
        self.spent: Counter[str] = Counter()
        self.tested: Counter[tuple[str, int]] = Counter()

    def __iter__(self) -> Iterator[Round]:
        cluster = self.latest().cluster
        small = cluster.size <= rounds.ALL_PAIRS
        yield from self._some("silent", self._silent)
        if small:
            yield from self._some("missing", self._missing)
        for _ in range(PASSES):
            before = self.latest().record.rounds
            if cluster.leaf is None:
                yield from self._some("among", self._among_suspects)
            yield from self._some("against", self._against_good)
            yield from self._some("load", self._crowd if cluster.leaf is None else self._uplinks)
            if small:
                yield from self._some("links", self._links)
            yield from self._some("silent", self._silent)
            if self.latest().record.rounds == before:
                break

    def _some(self, kind: str, step: Callable[[Known, int], Round | None]) -> Iterator[Round]:
        while self.spent[kind] < MOST[kind] and (round_ := step(self.latest(), self.spent[kind])) is not None and round_.pairs:
            self.spent[kind] += 1
            yield round_

    def _silent(self, knowledge: Known, _: int) -> Round | None:
        """Pair each silent node with one that answers others; once no node is silent, retest the silent pairs."""
        silence = knowledge.silence
        good = [node for node in knowledge.active if node in knowledge.record.answered]
        pairs = rounds.couples_of(sorted(silence.aside), good, self.random)
        return knowledge.undisturbed(pairs or rounds.disjoint(sorted(silence.doubtful)))

    def _missing(self, knowledge: Known, _: int) -> Round:
        return knowledge.crowded(rounds.disjoint([pair for pair in combinations(knowledge.active, 2)
                                                  if pair not in knowledge.record.talked]))

    def _among_suspects(self, knowledge: Known, turn: int) -> Round | None:
        """Pair suspects with each other or with healthy nodes behind a slow uplink: a node that is fast here is not bad."""
        health, load, active = knowledge.state.node, knowledge.state.load, knowledge.active
        suspicious = (np.minimum(health.evidence, load.health.evidence) < 0) | (not load.tapered)
        suspects = [node for node in active if (health.open[node] & suspicious[node]).any()]
        slow = sorted({int(load.group[node]) for node in active if load.group[node] >= 0 and load.health.bad[node].any()})
        if slow and turn % 2:
            pairs = []
            for shift, group in enumerate(slow):
                members = [node for node in active if load.group[node] == group and health.healthy[node].all()]
                pairs += rounds.couples_of(suspects[(shift + turn // 2) % len(slow)::len(slow)], members, self.random)
        else:
            factor = np.nan_to_num(load.health.factor, nan=1.0)
            pairs = rounds.neighbours(sorted(suspects, key=lambda node: float(np.median(factor[node]))), turn)
        return Round(tuple(pairs), (False,) * len(pairs))

    def _against_good(self, knowledge: Known, _: int) -> Round | None:
        """Pair each suspected node with a healthy one of the same leaf, or a few at a time across leaves."""
        health = knowledge.state.node
        targets = [node for node in knowledge.active if self._unsure("node", health, node)]
        targets.sort(key=lambda node: self.tested["node", node])
        leaf, load = knowledge.state.load.group, knowledge.state.load.health
        good = [node for node in knowledge.active if health.healthy[node].all()]
        pairs, lonely, free = _near(targets, self.random.sample(good, len(good)), leaf)
        if knowledge.cluster.leaf is None:
            room = rounds.light(len(knowledge.active))
            # Two nodes that share a slow uplink would be slow together in every round, so each round takes different nodes.
            chosen = [node for node in lonely if self.tested["node", node] < CONFIRMED or self.random.random() < 0.5]
            chosen = self._apart(knowledge, chosen or lonely[:1])
            partners = _spread([node for node in free if load.healthy[node].all()], leaf)
            pairs += rounds.couples_of(chosen[:max(1, room - room // 4)], partners, self.random)
        else:
            pairs += _across(lonely, free, leaf)
        if not pairs:
            return None
        self._count("node", {*targets} & {node for pair in pairs for node in pair})
        used = {node for pair in pairs for node in pair}
        unused = [node for node in free if node not in used]
        if knowledge.cluster.leaf is None:
            controls = rounds.matching([node for node in unused if load.healthy[node].all()], self.random)[:room // 4]
        else:
            controls = _near(unused[::2], unused[1::2], leaf)[0]
        return knowledge.undisturbed(pairs + controls[:CONTROLS])

    def _apart(self, knowledge: Known, nodes: Sequence[int]) -> list[int]:
        """Drop nodes that would share a slow uplink with too many others."""
        shared = behind(knowledge.state.load, knowledge.rule)
        chosen = [node for node in nodes if shared[node]][: together(int(shared.sum()))]
        return chosen + [node for node in nodes if not shared[node]]

    def _uplinks(self, knowledge: Known, turn: int) -> Round | None:
        """Pair each suspected leaf with a healthy one, with all nodes of both."""
        health = knowledge.state.load.health
        suspects = [leaf for leaf in range(len(knowledge.leaves)) if self._unsure("leaf", health, leaf)]
        suspects.sort(key=lambda leaf: self.tested["leaf", leaf])
        good = [leaf for leaf in range(len(knowledge.leaves)) if health.healthy[leaf].all()]
        couples = rounds.couples_of(suspects, good, self.random)
        if not couples:
            return None
        self._count("leaf", {leaf for couple in couples for leaf in couple})
        return knowledge.only(rounds.across(knowledge.leaves, knowledge.state.load.group, couples, turn))

    def _crowd(self, knowledge: Known, _: int) -> Round | None:
        """Return a round of all nodes. If crowds are fast, suspects are paired only with others, to load their uplinks most."""
        load = knowledge.state.load
        health = knowledge.state.node
        can = [node for node in knowledge.active if health.healthy[node].any()]
        lean = _lean(load)
        suspects = {node for node in can if lean[node] < -LEANS or self._unsure("load", load.health, node)}
        suspects = {*sorted(suspects, key=lambda node: float(lean[node]))[: len(can) // 2]}
        if not any(self._unsure("load", load.health, node) or self.tested["load", node] < CONFIRMED for node in suspects):
            return None
        self._count("load", suspects)
        if load.tapered:
            return rounds.all_crowded(knowledge.crowd(self.random))
        good = [node for node in can if node not in suspects and health.healthy[node].all()]
        pairs = rounds.couples_of(self.random.sample(sorted(suspects), len(suspects)), good, self.random)
        used = {node for pair in pairs for node in pair}
        pairs += rounds.matching([node for node in knowledge.active if node not in used], self.random)
        return rounds.all_crowded(pairs, sorted(used & suspects))

    def _links(self, knowledge: Known, _: int) -> Round | None:
        """Return a round of pairs that are slow although both ends are healthy."""
        limit = rounds.light(knowledge.cluster.size) if knowledge.state.load.tapered else knowledge.cluster.size
        pairs = rounds.disjoint(knowledge.links.open)[:limit]
        return Round(tuple(pairs), (True,) * len(pairs))

    def _unsure(self, kind: str, health: Health, end: int) -> bool:
        """Return True if the end is not cleared, and not yet clearly convicted on all slow rails with two retests."""
        slow = ~health.healthy[end]
        return bool((slow & ~health.settled[end]).any() or (slow.any() and self.tested[kind, end] < CONFIRMED))

    def _count(self, kind: str, ends: set[int]) -> None:
        self.tested.update((kind, end) for end in ends)


def _near(targets: Sequence[int], good: Sequence[int], leaf: Ints) -> tuple[list[Pair], list[int], list[int]]:
    """Pair targets with good nodes of their own leaf (−1: none). Return the pairs and the remaining targets and good nodes."""
    free = grouped((int(leaf[node]), node) for node in good)
    pairs, lonely = [], []
    for node in targets:
        if leaf[node] >= 0 and free.get(int(leaf[node])):
            pairs.append(rounds.ordered(node, free[int(leaf[node])].pop()))
        else:
            lonely.append(node)
    return pairs, lonely, [node for nodes in free.values() for node in nodes]


def _spread(nodes: Sequence[int], group: Ints) -> list[int]:
    """Return one node per group, so that partners do not crowd an uplink, and all nodes without a group."""
    by_group: dict[int, int] = {}
    for node in nodes:
        by_group.setdefault(int(group[node]) if group[node] >= 0 else -1 - node, node)
    return list(by_group.values())


def _across(lonely: Sequence[int], free: Sequence[int], leaf: Ints) -> list[Pair]:
    """Pair nodes with nodes of other leaves. The pairs per leaf are limited, so that they do not crowd its uplink."""
    room = Counter({index: max(1, int(count) // 8) for index, count in enumerate(np.bincount(leaf))})
    available, pairs = list(free), []
    for node in lonely:
        home = int(leaf[node])
        partner = next((candidate for candidate in available if leaf[candidate] != home and room[int(leaf[candidate])] > 0), None)
        if partner is not None and room[home] > 0:
            available.remove(partner)
            room.subtract([home, int(leaf[partner])])
            pairs.append(rounds.ordered(node, partner))
    return pairs


def _lean(load: Load) -> Floats:
    """Return the mean log rate of every node under full load that its partners do not explain, with samples clipped."""
    value = np.clip(load.health.residual, -3 * NEAR, NEAR).mean(axis=1)
    nodes = len(load.health.open)
    ends = np.concatenate([load.table.one, load.table.other])
    partners = np.concatenate([load.table.other, load.table.one])
    count = np.maximum(np.bincount(ends, minlength=nodes), 1)
    lean = np.zeros(nodes)
    for _ in range(20):
        excess = np.bincount(ends, np.concatenate([value, value]) - lean[partners], minlength=nodes) / count
        lean = (lean + np.minimum(excess, 0)) / 2
    return lean
