"""The whole course on clusters on paper: every kind of fault is named, with its kind, and nothing else is."""

from dataclasses import replace

import pytest
from survey_paper import Faults, Paper

from hpc_mp.doctor.localise import Localisation, Suspect
from hpc_mp.doctor.survey.diagnosis import diagnose
from hpc_mp.doctor.survey.report import drain_commands, to_avoid
from hpc_mp.doctor.survey.run import SurveyState, peers, rounds, survey

TWO = ("s1", "s1", "s2", "s2")
THREE = ("s1", "s1", "s2", "s2", "s3", "s3")

NAMED: dict[str, tuple[Faults, str, tuple[str, ...], tuple[str, ...]]] = {
    "slow node": (Faults(node_rate={2: 0.5}), "node-slow", ("n2",), TWO),
    "slow link": (Faults(pair_rate={(0, 2): 0.4}), "link-slow", ("n0–n2",), TWO),
    "lossy node": (Faults(node_loss={1: 0.01}), "node-loss", ("n1",), TWO),
    "lossy link": (Faults(pair_loss={(1, 2): 0.02}), "link-loss", ("n1–n2",), TWO),
    "cut link": (Faults(cut=frozenset({(0, 3)})), "link-cut", ("n0–n3",), TWO),
    "hung node": (Faults(hung=frozenset({3})), "node-down", ("n3",), TWO),
    "throttled CPU": (Faults(cpu={1: 0.2}), "node-cpu", ("n1",), TWO),
    "throttled CPU that slows its transfers": (Faults(cpu={1: 0.2}, cpu_slows_network=True), "node-cpu", ("n1",), TWO),
    "throttled CPU among busy ones": (Faults(cpu={1: 0.1}, busy=0.25), "node-cpu", ("n1",), TWO),
    "slow CPU": (Faults(slow_cpu={1: 0.6}), "node-cpu", ("n1",), TWO),
    "corrupt CPU": (Faults(corrupt=frozenset({0})), "node-corrupt", ("n0",), TWO),
    "wrong MTU": (Faults(mtu={2: 1400}), "node-mtu", ("n2",), TWO),
    "small MTU at a node's switch port": (Faults(hole=frozenset({(0, 1), (1, 2), (1, 3)})), "node-mtu", ("n1",), TWO),
    "small MTU between two": (Faults(hole=frozenset({(0, 3)})), "link-mtu", ("n0–n3",), TWO),
    "uplink of two leaves": (Faults(leaf_rate={"s1": 0.5}), "uplink-slow", ("s1", "s2"), TWO),
    "uplink of three leaves": (Faults(leaf_rate={"s2": 0.5}), "uplink-slow", ("s2",), THREE),
    "MTU of two nodes": (Faults(mtu={1: 1400}), "node-mtu", ("n0", "n1"), ("s1", "s1")),
}


def last(paper: Paper) -> SurveyState:
    return [*survey(paper)][-1]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", NAMED)
def test_one_fault_is_named_with_its_kind(name: str, seed: int) -> None:
    faults, code, members, leaves = NAMED[name]
    state = last(Paper(len(leaves), faults, leaves, seed))
    assert state.complete
    assert [(found.code, found.members) for found in state.diagnoses] == [(code, members)]
    assert state.diagnoses[0].certain == (len(members) == 1) and state.diagnoses[0].remedy


@pytest.mark.parametrize("faults", [Faults(), Faults(congestion=0.002), Faults(busy=0.3)], ids=["quiet", "congested", "busy"])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 6, 7])
def test_a_healthy_cluster_has_no_fault(count: int, faults: Faults) -> None:
    for seed in range(10):
        assert last(Paper(count, faults, (*THREE, "s3")[:count], seed)).diagnoses == ()


@pytest.mark.parametrize("share", [0.1, 0.5, 0.7])
def test_a_cpu_that_others_use_is_no_evidence_against_its_node(share: float) -> None:
    (found,) = last(Paper(4, Faults(others={1: share}), TWO)).diagnoses
    assert (found.code, found.members, found.certain) == ("node-busy", ("n1",), False) and "drain" not in found.remedy
    assert to_avoid([found]) == {} and drain_commands([found]) == []


def test_what_queues_drop_at_full_speed_is_tested_again_at_a_low_rate() -> None:
    congested, lossless = Paper(4, Faults(congestion=0.002), TWO), Paper(4, Faults(), TWO)
    assert last(congested).diagnoses == () and "paced" in congested.asked
    assert last(lossless).diagnoses == () and "paced" not in lossless.asked


def test_several_faults_at_once() -> None:
    state = last(Paper(6, Faults(cpu={0: 0.1}, node_loss={2: 0.02}, mtu={4: 1280}), THREE))
    assert {(found.code, found.members) for found in state.diagnoses} == {
        ("node-cpu", ("n0",)), ("node-loss", ("n2",)), ("node-mtu", ("n4",))}


def test_a_verdict_exists_after_every_step() -> None:
    states = [*survey(Paper(4, Faults(mtu={2: 1400}, node_rate={1: 0.3}), TWO))]
    assert [state.complete for state in states] == [False] * (len(states) - 1) + [True]
    assert [found.code for found in states[1].diagnoses] == ["node-mtu"]
    assert any({"node-mtu", "node-slow"} <= {found.code for found in state.diagnoses} for state in states[:-1])


def test_whom_a_node_probes() -> None:
    assert peers(1) == {}
    assert peers(3) == {0: [1, 2], 1: [2, 0], 2: [0, 1]}
    many = peers(100)
    assert all(len({*others} - {node}) == 4 for node, others in many.items())


def test_rounds_hold_each_node_once() -> None:
    assert rounds([(0, 1), (0, 2), (2, 3), (0, 3), (1, 2)], 2) == [[(0, 1), (2, 3)], [(0, 2)]]


def test_what_leads_through_a_slow_uplink_is_no_link_of_its_own() -> None:
    """Transfers that share an uplink get unequal parts of it, and each gets all of it when it is alone."""
    evidence = Paper(4, Faults(), TWO).evidence
    uplink = Suspect("uplink", ("s1", "s2"), 0.25, False, "25%")
    across, inside = (Suspect("link", (link,), 0.5, True, "50%") for link in ("n0–n3", "n2–n3"))
    verdict = Localisation((uplink, across, inside), 0.025, 9, 0, True)
    assert [found.subject for found in diagnose(evidence, verdict)] == ["s1 or s2", "n2–n3"]
    assert [found.subject for found in diagnose(evidence, replace(verdict, suspects=(across,)))] == ["n0–n3"]
