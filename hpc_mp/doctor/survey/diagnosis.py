"""Classification of the fault of each suspect, from the evidence and the localiser's verdict. Pure.

A slow transfer is a symptom of many faults. It is not diagnosed as a slow network if CPU, loss or MTU explain it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median, quantiles

from hpc_mp.base.assets import asset_table
from hpc_mp.base.grouping import grouped
from hpc_mp.base.text import several
from hpc_mp.doctor.localise import Localisation, Suspect, nodes_of, of_pairs
from hpc_mp.doctor.survey.evidence import Computed, Leg, Pair, SurveyEvidence, by_pair


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A fault."""

    code: str  # stable kind of fault, a key of ``REMEDIES``
    members: tuple[str, ...]  # nodes, leaf switches, "n3 rail 1", or links "n1–n3". Several mean that one of them is faulty
    certain: bool  # True if the evidence suffices for the single member; else it is a suspicion
    evidence: str  # measured values and the values that they are compared with
    factor: float | None = None

    @property
    def remedy(self) -> str:
        return REMEDIES[self.code]

    @property
    def subject(self) -> str:
        """The members as text: ``n3``, ``n2 or n3``."""
        return " or ".join(self.members)


REMEDIES: dict[str, str] = asset_table("env/cluster-faults.toml")["remedies"]


SUSPECT_LOSS = 5e-4
"""Of the segments of a full-speed transfer: only what exceeds it is looked at again at a low rate. Congestion loses some too."""
LEAST_LOST, LOSS = 3, 5e-4
"""Segments that both directions of a paced transfer must have lost together, and their share, to be called loss."""


def diagnose(evidence: SurveyEvidence, verdict: Localisation | None) -> tuple[Diagnosis, ...]:
    """Return all faults, those that explain others first. ``verdict``: None before the first round has ended."""
    faults = (*_absent(evidence), *_corrupt(evidence), *_slow(evidence), *_mtu(evidence), *_loss(evidence))
    return faults if verdict is None else tuple(_network(evidence, verdict, faults))


def suspected_loss(evidence: SurveyEvidence) -> list[Pair]:
    """Return pairs to test at a low rate, the most urgent first.

    Pairs that already lost segments at a low rate are tested once more. Then follow pairs that lost segments at full speed, the
    worst first, and other pairs of the lossy nodes, to tell a fault of the node from one of the link.
    """
    pairs = by_pair(evidence.legs)
    tested = {pair for pair, legs in pairs.items() if any(leg.paced for leg in legs)}
    confirmed = [pair for pair in tested if lossy(pairs[pair])]
    share = {pair: _share([leg for leg in legs if not leg.paced]) for pair, legs in pairs.items()}
    fresh = [pair for pair in share if pair not in tested and share[pair] > SUSPECT_LOSS]
    lossy_ends = {node for pair in confirmed for node in pair}
    near = [pair for pair in share if pair not in tested and share[pair] <= SUSPECT_LOSS and not lossy_ends.isdisjoint(pair)]
    return [*sorted(confirmed), *sorted(fresh, key=lambda pair: -share[pair]), *sorted(near)]


def lossy(legs: Iterable[Leg]) -> bool:
    """Return True if a pair's paced transfers lost segments, which no full queue can have dropped."""
    paced = [leg for leg in legs if leg.paced]
    return sum(leg.lost for leg in paced) >= LEAST_LOST and _share(paced) > LOSS


def _absent(evidence: SurveyEvidence) -> Iterable[Diagnosis]:
    for node, absence in evidence.absent.items():
        yield Diagnosis(absence.code, (node,), True, absence.why)


def _mtu(evidence: SurveyEvidence) -> Iterable[Diagnosis]:
    for rail in range(evidence.rails):
        mtus = [facts.interfaces[rail].mtu for facts in evidence.facts]
        usual, count = Counter(mtus).most_common(1)[0]
        odd = [node for node, mtu in enumerate(mtus) if mtu != usual]
        if 2 * count == len(mtus):  # two nodes: either may be the wrong one
            yield Diagnosis("node-mtu", evidence.nodes, False,
                            "; ".join(_mtu_words(evidence, node, rail) for node in range(len(mtus))))
            continue
        for node in odd:
            message = f"{_mtu_words(evidence, node, rail)}, {count} of {len(mtus)} nodes have {usual}"
            yield Diagnosis("node-mtu", (evidence.nodes[node],), True, message + _unreached(evidence, node, rail))
        judged = [echo for echo in evidence.echoes
                  if echo.rail == rail and echo.counts.small and not {echo.sender, echo.receiver} & {*odd}]
        bad = {(echo.sender, echo.receiver) for echo in judged if not echo.counts.full}
        yield from _blamed(evidence, "mtu", bad, {(echo.sender, echo.receiver) for echo in judged} - bad,
                           f"packets of {usual} bytes are lost, small ones are not, and every interface has MTU {usual}")


def _mtu_words(evidence: SurveyEvidence, node: int, rail: int) -> str:
    interface = evidence.facts[node].interfaces[rail]
    return f"{interface.name} of {evidence.nodes[node]} has MTU {interface.mtu}"


def _unreached(evidence: SurveyEvidence, node: int, rail: int) -> str:
    lost = [evidence.nodes[echo.sender] for echo in evidence.echoes
            if (echo.receiver, echo.rail) == (node, rail) and echo.counts.small and not echo.counts.full]
    return f"; full-size packets from {several(lost)} do not reach it" if lost else ""


def _loss(evidence: SurveyEvidence) -> Iterable[Diagnosis]:
    pairs = by_pair(evidence.legs)
    bad = {pair for pair, legs in pairs.items() if lossy(legs)}
    good = {pair for pair, legs in pairs.items() if pair not in bad and any(leg.segments for leg in legs)
            and (any(leg.paced for leg in legs) or _share(legs) <= SUSPECT_LOSS)}
    paced = [leg for pair in bad for leg in pairs[pair] if leg.paced]
    clean = [leg for pair in good for leg in pairs[pair]]
    message = (f"{_share(paced):.1%} of the segments of unhurried transfers were lost and sent again "
               f"({sum(leg.lost for leg in paced)} of {sum(leg.segments for leg in paced)}), {_share(clean):.2%} elsewhere")
    yield from _blamed(evidence, "loss", bad, good, message)


def _blamed(evidence: SurveyEvidence, kind: str, bad: Iterable[Pair], good: Iterable[Pair], message: str) -> Iterable[Diagnosis]:
    """Yield diagnoses for bad pairs; ``message``: the evidence."""
    for suspect in of_pairs(_named(evidence, bad), _named(evidence, good), evidence.leaves):
        yield Diagnosis(f"{suspect.kind}-{kind}", suspect.members, suspect.certain, f"{message}; {suspect.evidence}")


def _named(evidence: SurveyEvidence, pairs: Iterable[Pair]) -> set[tuple[str, str]]:
    return {(evidence.nodes[min(pair)], evidence.nodes[max(pair)]) for pair in pairs}


def _network(evidence: SurveyEvidence, verdict: Localisation, faults: Sequence[Diagnosis]) -> Iterable[Diagnosis]:
    """Yield network faults for suspects that no earlier finding explains, then the findings with the evidence they explain."""
    explained: dict[Diagnosis, str] = {}
    uplinks = {member for suspect in verdict.suspects if suspect.kind == "uplink" for member in suspect.members}
    for suspect in verdict.suspects:
        sick = [diagnosis for diagnosis in faults if _explains(diagnosis, suspect)]
        if not sick and not (suspect.kind == "link" and _leads_through(evidence, suspect, uplinks)):
            yield Diagnosis(_code(evidence, suspect), suspect.members, suspect.certain, suspect.evidence, suspect.factor)
        explained |= dict.fromkeys(sick, f"; this explains: {suspect.evidence}")
    for diagnosis in faults:
        yield replace(diagnosis, evidence=diagnosis.evidence + explained.get(diagnosis, ""))


def _code(evidence: SurveyEvidence, suspect: Suspect) -> str:
    nodes = {evidence.nodes.index(name) for name in nodes_of(suspect.members) if name in evidence.nodes}
    if suspect.kind == "down":
        return "node-cut" if nodes and nodes <= evidence.counters.keys() else "node-down"
    between = [leg for leg in evidence.legs if {*leg.pair} == nodes]
    cut = suspect.kind == "link" and between and all(leg.rate is None for leg in between)
    return "link-cut" if cut else f"{suspect.kind}-slow"


def _explains(diagnosis: Diagnosis, suspect: Suspect) -> bool:
    """Return True if the diagnosis explains the suspect. A faulty node explains itself and its links, a link or uplink only
    itself.
    """
    touched, sick = {*nodes_of(suspect.members)}, {*nodes_of(diagnosis.members)}
    if diagnosis.code.startswith("node"):
        return suspect.kind != "uplink" and not touched.isdisjoint(sick)
    return touched == sick


def _leads_through(evidence: SurveyEvidence, suspect: Suspect, uplinks: set[str]) -> bool:
    """Return True if all traffic of a suspected link crosses one of the uplinks."""
    leaves = {evidence.leaves.get(node, "") for node in nodes_of(suspect.members)}
    return len(leaves) > 1 and not leaves.isdisjoint(uplinks)


def _share(legs: Iterable[Leg]) -> float:
    transfers = [*legs]
    return sum(leg.lost for leg in transfers) / max(1, sum(leg.segments for leg in transfers))


SLOW_CPU, SUSPECT_CPU = 0.85, 0.9
"""Of what equal nodes compute in their best window; who is below the second is tested again, below the first may be slow."""
STARVED = 0.9  # of the time: a trial that got the CPU for less tells what else runs there, unless CPUs stood idle meanwhile
CPU_TRIALS = 8
"""Nobody is called slow before so many trials, nor compared with nodes of fewer: others come and go on the same CPUs."""


def suspected_cpus(evidence: SurveyEvidence) -> dict[int, float]:
    """Return nodes whose best window is below ``SUSPECT_CPU`` of the median of equal nodes' best windows, with that ratio."""
    ratios = _ratios(evidence, {node: max(rates) for node, rates in _rates(evidence).items()})
    return {node: ratio for node, ratio in ratios.items() if ratio < SUSPECT_CPU}


def _corrupt(evidence: SurveyEvidence) -> Iterable[Diagnosis]:
    digests = {node: {result.digest for result in results} for node, results in _computed(evidence).items()}
    if not digests:
        return
    right, votes = Counter(digest for results in digests.values() for digest in results).most_common(1)[0]
    for node, results in digests.items():
        if results != {right} and votes > 1:
            yield Diagnosis("node-corrupt", (evidence.nodes[node],), True,
                            f"the same computation gave another result than on {votes} nodes")


def _slow(evidence: SurveyEvidence) -> Iterable[Diagnosis]:
    """Yield nodes that are slow in their best window and also in most trials, compared with nodes tested alternately."""
    suspects, results = suspected_cpus(evidence), _computed(evidence)
    tested = {node: node_rates for node, node_rates in _rates(evidence).items() if len(node_rates) >= CPU_TRIALS}
    for node in sorted(suspects.keys() & tested.keys()):
        model, node_rates = evidence.facts[node].model, tested[node]
        like = [rates for other, rates in tested.items() if other not in suspects and evidence.facts[other].model == model]
        ratio = max(node_rates) / median(map(max, like)) if like else 1.0
        if ratio < SLOW_CPU and quantiles(node_rates)[2] < median(quantiles(rates)[0] for rates in like):
            best = max(results[node], key=lambda result: result.share)
            starved = best.share < STARVED and best.idle < (1 - best.share) / 2
            message = (f"computes at {ratio:.0%} of its peers' speed, in the best of {len(node_rates)} trials; "
                       f"it got the CPU for {best.share:.0%} of the time at most" + (", and none was idle" if starved else ""))
            yield Diagnosis("node-busy" if starved else "node-cpu", (evidence.nodes[node],), not starved, message, ratio)


def _computed(evidence: SurveyEvidence) -> dict[int, list[Computed]]:
    nodes = dict.fromkeys(node for trial in evidence.trials for node in trial)
    return {node: [trial[node] for trial in evidence.trials if node in trial] for node in nodes}


def _rates(evidence: SurveyEvidence) -> dict[int, list[float]]:
    return {node: [result.rate for result in results] for node, results in _computed(evidence).items()}


def _ratios(evidence: SurveyEvidence, rates: Mapping[int, float]) -> dict[int, float]:
    """Return the ratio of every node's rate to the median of the nodes with the same CPU."""
    equal = grouped((evidence.facts[node].model, rate) for node, rate in rates.items())
    usual = {model: median(values) for model, values in equal.items()}
    return {node: rate / usual[evidence.facts[node].model] for node, rate in rates.items()}
