"""Where healthy pairs are unevenly fast: what is slow is named, and nobody else gets into the ledger."""

from __future__ import annotations

import random
from itertools import combinations

import pytest
from uneven import UnevenCluster, drawn, ledger, said

from hpc_mp.doctor.localise import verdict

COVER, CLUSTERS = 8, 200
"""Clusters of every run of the tests, and of ``make prove``: none of them was looked at while the rules were made."""
PROOF = [pytest.param(range(COVER), id="cover"), pytest.param(range(COVER, CLUSTERS), id="proof", marks=pytest.mark.prove)]


def of_the_walk(leaves: tuple[str, ...], seed: int) -> UnevenCluster:
    """Four hosts of one machine: n4's cable carries 12 MB/s, the others gigabytes, 32 to 88 % of the best, never twice alike."""
    dice = random.Random(seed)
    rates = {pair: 0.003 if 3 in pair else dice.uniform(0.32, 0.88) for pair in combinations(range(4), 2)}
    return UnevenCluster(rates, leaves, jitter=0.5, seed=seed)


@pytest.mark.parametrize("leaves", [(), ("s1", "s1", "s2", "s2")], ids=["unknown", "known"])
@pytest.mark.parametrize("seed", range(8))
def test_the_cluster_of_the_walk(leaves: tuple[str, ...], seed: int) -> None:
    report = of_the_walk(leaves, seed).surveyed()
    assert said(report) == [("node-slow", ("n4",), True)] and ledger(report) == {"n4"}
    assert " MB/s at most, with anybody; the other pairs have " in report.diagnoses[0].evidence


@pytest.mark.parametrize("seeds", PROOF)
def test_a_slow_node_is_named_and_nobody_else(seeds: range) -> None:
    wrong = {}
    for seed in seeds:
        each = drawn(seed, "node")
        report = each.cluster.surveyed()
        sure = [found for found in said(report) if found[2]]
        if sure != [("node-slow", (each.name,), True)] or ledger(report) != {each.name}:
            wrong[seed] = each.name, said(report)
    assert not wrong


@pytest.mark.parametrize("seeds", PROOF)
def test_a_slow_link_is_named_and_no_other_node_is_blamed(seeds: range) -> None:
    """A pair alone says less than all of a node: clearly slow is fourfold."""
    missed, wrong = {}, {}
    for seed in seeds:
        each = drawn(seed, "link", least=4.0)
        assert each.name is not None
        report = each.cluster.surveyed()
        if ("link-slow", (each.name,), True) not in said(report):
            missed[seed] = each.name, said(report)
        if not ledger(report) <= {*each.name.split("–")}:
            wrong[seed] = each.name, said(report)
    assert not wrong and len(missed) <= len(seeds) // 50, (wrong, missed)


@pytest.mark.parametrize("seeds", PROOF)
def test_nobody_gets_into_the_ledger_where_pairs_differ_by_nature(seeds: range) -> None:
    """A few nodes may be alike, and far from the others, by chance (``uneven.CHANCE``): somebody is named in 2 of 800."""
    reports = {seed: drawn(seed, None).cluster.surveyed() for seed in seeds}
    wrong = {seed: said(report) for seed, report in reports.items() if ledger(report)}
    assert len(wrong) <= len(seeds) // 100, wrong


def test_without_the_spread_the_innocent_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: the suspects of the fit as they are."""
    monkeypatch.setattr(verdict, "weighed", lambda suspects, *_: suspects)
    assert sum(bool(ledger(drawn(seed, None).cluster.surveyed())) for seed in range(COVER)) >= 2
