"""The course of a survey: what is measured in which order, with a verdict after every step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hpc_mp.doctor.localise import Localisation, localise
from hpc_mp.doctor.survey.compute import WINDOW_S
from hpc_mp.doctor.survey.diagnosis import Diagnosis, diagnose, suspected_cpus, suspected_loss
from hpc_mp.doctor.survey.evidence import Pair, SurveyEvidence
from hpc_mp.doctor.survey.measurements import Measurements

ALL_PAIRS = 16
"""Nodes up to which every pair is probed and measured."""
TURNS = 4
"""Groups that compute one after the other: nodes that share a machine (virtual ones) disturb each other less."""
COMPUTE_S = WINDOW_S
RETESTS = 12  # of one window each, suspects and others in turn: both have the same disturbances
PACED_ROUNDS = 4
PASSES = 2  # a pair loses segments when it does so in several transfers


@dataclass(frozen=True, slots=True)
class SurveyState:
    """Where a survey is: ``step`` in words, and what it says so far. ``verdict``: None before the first round of pairs."""

    step: str
    verdict: Localisation | None
    diagnoses: tuple[Diagnosis, ...]
    complete: bool = False


def survey(tools: Measurements) -> Iterator[SurveyState]:
    """Measure everything; a state after every step, the last one complete."""
    seen, nodes, verdict = tools.evidence, range(len(tools.evidence.nodes)), None

    def now(step: str, complete: bool = False) -> SurveyState:
        return SurveyState(step, verdict, diagnose(seen, verdict), complete)

    before = tools.counters()
    tools.report()
    for turn in range(min(TURNS, len(nodes))):
        tools.compute(nodes[turn::TURNS], COMPUTE_S)
    yield now("computed")
    tools.probe(peers(len(nodes)))
    yield now("probed")
    if len(nodes) > 1:
        for verdict in localise(seen.nodes, tools.bandwidth, seen.leaves or None, tools.rails):
            yield now(f"{verdict.rounds} rounds of pairs measured")
    for _ in range(PASSES):
        for pairs in rounds(suspected_loss(seen), PACED_ROUNDS):
            tools.paced(pairs)
            yield now("lost segments counted")
    for _ in range(RETESTS):
        if suspects := suspected_cpus(seen):
            tools.compute([*suspects], WINDOW_S)
            tools.compute(_others(seen, suspects), WINDOW_S)
            yield now("computed again")
    seen.counters = _since(before, tools.counters())
    yield now("done", complete=True)


def peers(count: int) -> dict[int, list[int]]:
    """Whom every node probes: all others of a few; of many its neighbours and nodes far away."""
    steps = range(1, count) if count <= ALL_PAIRS else (1, 2, count // 3, count // 2)
    return {node: [(node + step) % count for step in steps] for node in range(count)} if count > 1 else {}


def rounds(pairs: Sequence[Pair], most: int) -> list[list[Pair]]:
    """The pairs as rounds of disjoint ones, the first pairs in the first rounds; what does not fit is left out."""
    made: list[list[Pair]] = [[] for _ in range(most)]
    busy: list[set[int]] = [set() for _ in range(most)]
    for pair in pairs:
        for taken, one in zip(busy, made, strict=True):
            if taken.isdisjoint(pair):
                one.append(pair)
                taken.update(pair)
                break
    return [one for one in made if one]


def _others(seen: SurveyEvidence, suspects: Mapping[int, float]) -> list[int]:
    """As many nodes that are not suspected: those that were tested most, so that they are the same ones again and again."""
    trials = Counter(node for trial in seen.trials for node in trial)
    well = [node for node in range(len(seen.nodes)) if node not in suspects]
    return sorted(well, key=lambda node: -trials[node])[: len(suspects)]


def _since(before: Mapping[int, Mapping[str, int]], after: Mapping[int, Mapping[str, int]]) -> dict[int, dict[str, int]]:
    """Counters that have moved, of the nodes that answer still."""
    return {node: {name: value - before.get(node, {}).get(name, value) for name, value in now.items()
                   if value > before.get(node, {}).get(name, value)} for node, now in after.items()}
