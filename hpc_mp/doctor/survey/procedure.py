"""The procedure of a survey: the order of its measurements, with a verdict after every step."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hpc_mp.doctor.localise import Localisation, localise
from hpc_mp.doctor.localise.rounds import disjoint
from hpc_mp.doctor.survey.compute import WINDOW_S
from hpc_mp.doctor.survey.diagnosis import Diagnosis, diagnose, suspected_cpus, suspected_loss
from hpc_mp.doctor.survey.evidence import Pair, SurveyEvidence
from hpc_mp.doctor.survey.measurements import Measurements

ALL_PAIRS = 16  # nodes up to which every pair is probed and measured
TURNS = 4  # groups that compute one after the other: nodes that share a machine (virtual ones) disturb each other less
COMPUTE_S = WINDOW_S
RETESTS = 12  # of one window each, suspects and others alternately, so that both have the same disturbances
PACED_ROUNDS = 4
PASSES = 2  # loss must show in several transfers


@dataclass(frozen=True, slots=True)
class SurveyState:
    """The progress of a survey: ``step`` as text, and the results so far. ``verdict``: None before the first round of pairs."""

    step: str
    verdict: Localisation | None
    diagnoses: tuple[Diagnosis, ...]
    complete: bool = False


def survey(tools: Measurements) -> Iterator[SurveyState]:
    """Measure everything and yield a state after every step, the last one complete."""
    evidence, nodes, verdict = tools.evidence, range(len(tools.evidence.nodes)), None

    def state(step: str, complete: bool = False) -> SurveyState:
        return SurveyState(step, verdict, diagnose(evidence, verdict), complete)

    before = tools.counters()
    tools.report()
    for turn in range(min(TURNS, len(nodes))):
        tools.compute(nodes[turn::TURNS], COMPUTE_S)
    yield state("computed")
    tools.probe(peers(len(nodes)))
    yield state("probed")
    if len(nodes) > 1:
        for verdict in localise(evidence.nodes, tools.bandwidth, evidence.leaves or None, tools.rails):
            yield state(f"{verdict.rounds} rounds of pairs measured")
    for _ in range(PASSES):
        for pairs in rounds(suspected_loss(evidence), PACED_ROUNDS):
            tools.paced(pairs)
            yield state("lost segments counted")
    for _ in range(RETESTS):
        if suspects := suspected_cpus(evidence):
            tools.compute([*suspects], WINDOW_S)
            tools.compute(_others(evidence, suspects), WINDOW_S)
            yield state("computed again")
    evidence.counters = _since(before, tools.counters())
    yield state("done", complete=True)


def peers(count: int) -> dict[int, list[int]]:
    """Return the nodes that every node probes: all others if there are few, else its neighbours and distant nodes."""
    steps = range(1, count) if count <= ALL_PAIRS else (1, 2, count // 3, count // 2)
    return {node: [(node + step) % count for step in steps] for node in range(count)} if count > 1 else {}


def rounds(pairs: Sequence[Pair], limit: int) -> list[list[Pair]]:
    """Distribute pairs over rounds of disjoint pairs, the first pairs in the first rounds. Pairs that do not fit are dropped."""
    plan: list[list[Pair]] = []
    while (remaining := [pair for pair in pairs if not any(pair in round_ for round_ in plan)]) and len(plan) < limit:
        plan.append(disjoint(remaining))
    return plan


def _others(evidence: SurveyEvidence, suspects: Mapping[int, float]) -> list[int]:
    """Return as many unsuspected nodes as there are suspects: the most tested, so that every round has the same nodes."""
    trials = Counter(node for trial in evidence.trials for node in trial)
    well = [node for node in range(len(evidence.nodes)) if node not in suspects]
    return sorted(well, key=lambda node: -trials[node])[: len(suspects)]


def _since(before: Mapping[int, Mapping[str, int]], after: Mapping[int, Mapping[str, int]]) -> dict[int, dict[str, int]]:
    """Return the increments of counters that grew, for the nodes that still answer."""
    return {node: {name: value - before.get(node, {}).get(name, value) for name, value in counters.items()
                   if value > before.get(node, {}).get(name, value)} for node, counters in after.items()}
