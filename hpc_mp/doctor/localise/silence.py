"""Who does not answer."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from hpc_mp.doctor.localise.record import Record
from hpc_mp.doctor.localise.sample import Pair


@dataclass(frozen=True, slots=True)
class Silence:
    """Attributes:
        down: answered nobody since they were first silent, and were so with two others, one of whom answered somebody.
        aside: silent, and not yet known whether it was they; they stay out of the rounds until a retest.
        cut: pairs that were silent twice though both ends answer others.
        doubtful: pairs that were silent once and never talked, though both ends answer others.
    """

    down: frozenset[int]
    aside: frozenset[int]
    cut: frozenset[Pair]
    doubtful: frozenset[Pair]


def silence(record: Record) -> Silence:
    left = list(record.silent)
    down: set[int] = set()
    while True:
        partners: defaultdict[int, set[int]] = defaultdict(set)
        first: dict[int, int] = {}
        for turn, (one, other) in left:
            for node, partner in ((one, other), (other, one)):
                if record.answered.get(node, -1) < turn:
                    partners[node].add(partner)
                    first.setdefault(node, turn)
        proven = [node for node, met in partners.items()
                  if len(met) > 1 and record.answered.get(node, -1) < first[node] and met & record.answered.keys()]
        if not proven:
            break
        worst = max(proven, key=lambda node: (len(partners[node]), -node))
        down.add(worst)
        left = [(turn, pair) for turn, pair in left if worst not in pair]
    times: defaultdict[Pair, list[int]] = defaultdict(list)
    for turn, pair in left:
        times[pair].append(turn)
    excused = {pair: turns for pair, turns in times.items()
               if all(record.answered.get(node, -1) > turns[0] for node in pair)}
    aside = {node for turn, pair in left if pair not in excused for node in pair if record.answered.get(node, -1) < turn}
    return Silence(frozenset(down), frozenset(aside),
                   frozenset(pair for pair, turns in excused.items() if len(turns) > 1),
                   frozenset(pair for pair, turns in excused.items() if len(turns) == 1 and pair not in record.talked))
