"""Which node computes slowly, or wrongly. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from statistics import median, quantiles

from hpc_mp.doctor.survey.diagnosis import Diagnosis
from hpc_mp.doctor.survey.evidence import Evidence

SLOW_CPU, SUSPECT_CPU = 0.85, 0.9
"""Of what equal nodes compute in their best window; who is below the second is tested again, below the first may be slow."""
CPU_TRIALS = 8
"""Nobody is called slow before so many trials, nor compared with nodes of fewer: others come and go on the same CPUs."""


def suspected_cpus(seen: Evidence) -> dict[int, float]:
    """Nodes whose best window is below ``SUSPECT_CPU`` of the median of equal nodes' best, and the share."""
    ratios = _ratios(seen, {node: max(rates) for node, rates in _computed(seen).items()})
    return {node: ratio for node, ratio in ratios.items() if ratio < SUSPECT_CPU}


def corrupt(seen: Evidence) -> Iterable[Diagnosis]:
    digests: dict[int, set[str]] = {}
    for trial in seen.trials:
        for node, computed in trial.items():
            digests.setdefault(node, set()).add(computed.digest)
    if not digests:
        return
    right, votes = Counter(digest for own in digests.values() for digest in own).most_common(1)[0]
    for node, own in digests.items():
        if own != {right} and votes > 1:
            yield Diagnosis("node-corrupt", (seen.nodes[node],), True,
                            f"the same computation gave another result than on {votes} nodes")


def slow(seen: Evidence) -> Iterable[Diagnosis]:
    """Slow in the best window, and in most trials slower than others in most of theirs, who were tested in turn with it."""
    suspects, rates = suspected_cpus(seen), _computed(seen)
    tested = {node: own for node, own in rates.items() if len(own) >= CPU_TRIALS}
    for node in sorted(suspects.keys() & tested.keys()):
        model, own = seen.facts[node].model, tested[node]
        like = [rates for other, rates in tested.items() if other not in suspects and seen.facts[other].model == model]
        ratio = max(own) / median(map(max, like)) if like else 1.0
        if ratio < SLOW_CPU and quantiles(own)[2] < median(quantiles(rates)[0] for rates in like):
            share = max(trial[node].share for trial in seen.trials if node in trial)
            words = (f"computes at {ratio:.0%} of its peers' speed, in the best of {len(own)} trials; "
                     f"it got the CPU for {share:.0%} of the time at most")
            yield Diagnosis("node-cpu", (seen.nodes[node],), True, words, ratio)


def _computed(seen: Evidence) -> dict[int, list[float]]:
    """The rates of every node, trial by trial."""
    rates: dict[int, list[float]] = {}
    for trial in seen.trials:
        for node, computed in trial.items():
            rates.setdefault(node, []).append(computed.rate)
    return rates


def _ratios(seen: Evidence, rates: Mapping[int, float]) -> dict[int, float]:
    """Every node's rate to the median of the nodes with the same CPU."""
    equal: dict[str, list[float]] = {}
    for node, rate in rates.items():
        equal.setdefault(seen.facts[node].model, []).append(rate)
    usual = {model: median(found) for model, found in equal.items()}
    return {node: rate / usual[seen.facts[node].model] for node, rate in rates.items()}
