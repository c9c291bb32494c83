"""Where healthy pairs are unevenly fast: what is slow is named, and nobody else gets into the ledger."""

import random
from itertools import combinations
from math import exp, log

import pytest
from survey_paper import Faults, made

from hpc_mp.doctor.localise import verdict
from hpc_mp.doctor.survey.report import Report, findings


def drawn(seed: int, slow: str | None, least: float = 2.5) -> tuple[Report, str]:
    """The report of a random cluster of 3 to 16 nodes whose healthy pairs differ by up to twofold, and the name of what is slow
    in it. Each healthy pair has a rate of its own, or that of the slower of its nodes.

    Args:
        slow: ``node`` or ``link``: what is slower than the slowest healthy pair, by a factor of ``least`` to a hundred.
    """
    dice = random.Random(f"{slow} {seed}")
    count, spread = dice.randint(3, 16), dice.uniform(1.5, 2.0)
    pairs = [*combinations(range(count), 2)]
    if dice.random() < 0.5:
        rates = {pair: dice.uniform(1 / spread, 1.0) for pair in pairs}
    else:
        own = [dice.uniform(1 / spread, 1.0) for _ in range(count)]
        rates = {pair: min(own[node] for node in pair) for pair in pairs}
    culprit, capped = dice.choice(pairs), dice.random() < 0.5
    bad = {"node": [pair for pair in pairs if culprit[0] in pair], "link": [culprit], None: []}[slow]
    left = min(rates.values()) / exp(dice.uniform(log(least), log(100)))
    rates |= {pair: left if capped else left * rates[pair] for pair in bad}
    leaves = tuple(f"s{2 * node // count}" for node in range(count)) if count > 3 and dice.random() < 0.4 else ()
    report = made(Faults(pair_rate=rates, jitter=dice.uniform(0.8, 0.98)), count, leaves=leaves, seed=seed)
    return report, "–".join(f"n{node}" for node in culprit[: 1 if slow == "node" else 2])


def said(report: Report) -> list[tuple[str, tuple[str, ...], bool]]:
    return [(found.code, found.members, found.certain) for found in report.diagnoses]


def ledger(report: Report) -> set[str]:
    """Nodes that the survey puts into it."""
    return {found.node for found in findings(report)}


COVER, CLUSTERS = 8, 200
"""Clusters of every run of the tests, and of ``make prove``: none of them was looked at while the rules were made."""
PROOF = [pytest.param(range(COVER), id="cover"), pytest.param(range(COVER, CLUSTERS), id="proof", marks=pytest.mark.prove)]


@pytest.mark.parametrize("leaves", [(), ("s1", "s1", "s2", "s2")], ids=["unknown", "known"])
@pytest.mark.parametrize("seed", range(8))
def test_the_cluster_of_the_walk(leaves: tuple[str, ...], seed: int) -> None:
    """Four hosts of one machine: n3's cable carries 0.3 % of the best, the others 32 to 88 %, never twice alike."""
    dice = random.Random(seed)
    rates = {pair: 0.003 if 3 in pair else dice.uniform(0.32, 0.88) for pair in combinations(range(4), 2)}
    report = made(Faults(pair_rate=rates, jitter=0.5), 4, leaves=leaves, seed=seed)
    assert said(report) == [("node-slow", ("n3",), True)] and ledger(report) == {"n3"}
    assert "B/s at most, with anybody; the other pairs have " in report.diagnoses[0].evidence


@pytest.mark.parametrize("seeds", PROOF)
def test_a_slow_node_is_named_and_nobody_else(seeds: range) -> None:
    wrong = {}
    for seed in seeds:
        report, name = drawn(seed, "node")
        if [found for found in said(report) if found[2]] != [("node-slow", (name,), True)] or ledger(report) != {name}:
            wrong[seed] = name, said(report)
    assert not wrong


@pytest.mark.parametrize("seeds", PROOF)
def test_a_slow_link_is_named_and_no_other_node_is_blamed(seeds: range) -> None:
    """A pair alone says less than all of a node: clearly slow is fourfold."""
    missed, wrong = {}, {}
    for seed in seeds:
        report, name = drawn(seed, "link", least=4.0)
        if ("link-slow", (name,), True) not in said(report):
            missed[seed] = name, said(report)
        if not ledger(report) <= {*name.split("–")}:
            wrong[seed] = name, said(report)
    assert not wrong and len(missed) <= len(seeds) // 50, (wrong, missed)


@pytest.mark.parametrize("seeds", PROOF)
def test_nobody_gets_into_the_ledger_where_pairs_differ_by_nature(seeds: range) -> None:
    """A few nodes may be alike, and far from the others, by chance (``uneven.CHANCE``): somebody is named in 2 of 800."""
    reports = {seed: drawn(seed, None)[0] for seed in seeds}
    wrong = {seed: said(report) for seed, report in reports.items() if ledger(report)}
    assert len(wrong) <= len(seeds) // 100, wrong


def test_without_the_spread_the_innocent_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: the suspects of the fit as they are."""
    monkeypatch.setattr(verdict, "weighed", lambda suspects, *_: suspects)
    assert sum(bool(ledger(drawn(seed, None)[0])) for seed in range(COVER)) >= 2
