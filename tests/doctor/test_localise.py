"""The localiser on simulated clusters: what is bad is named, what is healthy is not, and what cannot be told is said so."""

import json
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from itertools import pairwise
from math import log2

import numpy as np
import pytest
from fabric import Fabric, Fault
from hypothesis import given, settings
from hypothesis import strategies as st
from planted import TAPERS, Case, Outcome, cases, last, plant, score, trial

from hpc_mp.doctor.localise import Localisation, Pair, RailSample, Suspect, localise
from hpc_mp.doctor.localise.fit import RULE


def cluster(*leaves: int, faults: tuple[Fault, ...] = (), **more: object) -> Fabric:
    return Fabric(np.repeat(np.arange(len(leaves)), leaves), max(leaves), faults=faults, **more)  # type: ignore[arg-type]


def test_a_verdict_is_plain_json() -> None:
    for known in (True, False):
        fabric = cluster(4, 4, faults=(Fault("link", (0, 1), 0.4), Fault("node", 2, 0.5), Fault("down", 3, 0.0)))
        assert json.dumps([asdict(suspect) for suspect in last(fabric, known).suspects])


def certain(verdict: Localisation) -> set[tuple[str, tuple[str, ...]]]:
    return {(suspect.kind, suspect.members) for suspect in verdict.suspects if suspect.certain}


# --- what is bad -----------------------------------------------------------------------------------------------------


@settings(max_examples=settings.default.max_examples // 4)
@given(st.sampled_from((16, 64)), st.sampled_from(TAPERS), st.integers(0, 10_000))
def test_known_leaves_every_fault_has_its_name(nodes: int, taper: float, seed: int) -> None:
    outcome = trial(Case(nodes, taper, known=True, seed=seed))
    assert outcome.score.right == outcome.score.named and outcome.score.found == outcome.score.faults, outcome
    assert outcome.first <= outcome.limit


@pytest.mark.parametrize(("taper", "seed"), [(2.0, 1073), (4.0, 1109), (1.0, 1152), (2.0, 1249), (1.0, 2029), (1.0, 2176)])
def test_the_slowest_link_of_a_slow_node_or_uplink_is_no_other_fault(taper: float, seed: int) -> None:
    outcome = trial(Case(16, taper, known=True, seed=seed))
    assert outcome.score.named == outcome.score.right == outcome.score.faults == 1, outcome


@pytest.mark.parametrize(("nodes", "taper"), [
    pytest.param(nodes, taper, marks=pytest.mark.prove if nodes == 256 and taper != 2.0 else ())
    for nodes in (64, 256) for taper in TAPERS])
def test_unknown_leaves(nodes: int, taper: float) -> None:
    outcomes = [trial(Case(nodes, taper, known=False, seed=seed)) for seed in ((21, 22, 23) if nodes == 64 else (1,))]
    assert sum(outcome.score.faults for outcome in outcomes) >= 2
    for outcome in outcomes:
        assert outcome.score.right == outcome.score.named and outcome.score.covered == outcome.score.faults, outcome
        assert outcome.first <= outcome.limit


@pytest.mark.prove
def test_more_nodes_than_leaves_can_be_learnt_of() -> None:
    """A third of the nodes are behind slow, oversubscribed uplinks: they are slow by themselves too, and not bad."""
    outcome = trial(Case(1024, 4.0, known=False, seed=2))
    assert outcome.score.right == outcome.score.named and outcome.score.found == outcome.score.faults == 5, outcome


def test_a_thousand_nodes_with_known_leaves() -> None:
    outcome = trial(Case(1024, 2.0, known=True, seed=1))
    assert outcome.score.right == outcome.score.named == outcome.score.found == outcome.score.faults == 27, outcome


KINDS = {
    "node": (Fault("node", 5, 0.5), ("node", ("n6",))),
    "rail": (Fault("rail", 5, 0.5, 2), ("rail", ("n6 rail 2",))),
    "uplink": (Fault("uplink", 1, 0.5), ("uplink", ("leaf1",))),
    "link": (Fault("link", (2, 9), 0.5), ("link", ("n3–n10",))),
    "down": (Fault("down", 5, 0.0), ("down", ("n6",))),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(kind: str) -> None:
    fault, name = KINDS[kind]
    verdict = last(cluster(4, 4, 4, faults=(fault,), rails=4), known=True)
    assert certain(verdict) == {name}
    [suspect] = verdict.suspects
    assert abs(suspect.factor - fault.factor) < 0.06 and suspect.evidence


def test_faults_of_several_kinds_at_once() -> None:
    faults = (Fault("node", 5, 0.5), Fault("uplink", 1, 0.5), Fault("link", (2, 12), 0.5))
    verdict = last(cluster(5, 5, 5, faults=faults), known=True)
    assert certain(verdict) == {("node", ("n6",)), ("uplink", ("leaf1",)), ("link", ("n3–n13",))}


def test_too_many_faults_in_a_small_leaf_end_in_a_set() -> None:
    """Of its five nodes one is down and one slow: what is left does not load the uplink enough, but no link is blamed for it."""
    for seed in range(4):
        fabric = cluster(5, 5, 5, faults=(Fault("node", 5, 0.5), Fault("uplink", 1, 0.5), Fault("down", 9, 0.0)), seed=seed)
        verdict = last(fabric, known=True, seed=seed)
        assert certain(verdict) - {("uplink", ("leaf1",))} == {("node", ("n6",)), ("down", ("n10",))}, seed
        assert any(suspect.kind == "uplink" and "leaf1" in suspect.members for suspect in verdict.suspects), seed


@settings(max_examples=settings.default.max_examples // 4)
@given(st.integers(4, 16), st.data())
def test_a_slow_link_of_few_nodes_is_neither_of_them(nodes: int, data: st.DataObject) -> None:
    """A mild one may lie within what is natural for a pair: then nothing is certain, and nobody else is blamed either."""
    one, other = sorted(data.draw(st.lists(st.integers(0, nodes - 1), min_size=2, max_size=2, unique=True)))
    left = data.draw(st.floats(0.2, 0.7))
    fabric = cluster(nodes, faults=(Fault("link", (one, other), left),), seed=data.draw(st.integers(0, 99)))
    link = {("link", (f"n{one + 1}–n{other + 1}",))}
    found = certain(last(fabric, known=data.draw(st.booleans())))
    assert found == link if left < 0.55 else found <= link


# --- what is healthy -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("taper", TAPERS)
def test_a_healthy_cluster_raises_no_alarm(taper: float, known: bool) -> None:
    for seed, leaves in enumerate(((4, 4, 4, 4), (8, 8, 7), (16, 16, 16, 16), (12,))):
        assert last(cluster(*leaves, taper=taper, seed=seed, drift=0.02), known, seed).suspects == (), leaves


def test_a_hair_slower_is_healthy() -> None:
    assert last(cluster(8, 8, faults=(Fault("node", 3, 0.97),), seed=4), known=True).suspects == ()


# --- what cannot be told ---------------------------------------------------------------------------------------------


def test_two_nodes_cannot_tell_which() -> None:
    [suspect] = last(cluster(2, faults=(Fault("rail", 1, 0.4, 2),), rails=4), known=False).suspects
    assert suspect.members == ("n1 rail 2", "n2 rail 2") and not suspect.certain and "cannot tell which" in suspect.evidence
    assert last(cluster(2, rails=4), known=False).suspects == ()


# --- rounds ----------------------------------------------------------------------------------------------------------


@settings(max_examples=settings.default.max_examples // 2)
@given(st.integers(2, 70), st.booleans(), st.integers(0, 99))
def test_few_rounds_for_any_number_of_nodes(nodes: int, known: bool, seed: int) -> None:
    fabric = Fabric(np.sort(np.random.default_rng(seed).integers(0, max(1, nodes // 4), nodes)), 8, seed=seed)
    met: set[int] = set()

    def measure(pairs: Sequence[Pair]) -> Sequence[RailSample]:
        met.update(node for pair in pairs for node in pair)
        return fabric.measure(pairs)

    verdicts = [*localise(fabric.names, measure, fabric.leaves if known else None, seed=seed)]
    assert verdicts[-1].rounds - verdicts[-1].retests <= 2 * log2(nodes) + 6
    assert [verdict.complete for verdict in verdicts] == [False] * (len(verdicts) - 1) + [True]
    assert all(after.rounds - before.rounds in (0, 1) for before, after in pairwise(verdicts))
    assert met == {*range(nodes)}


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("leaves", [(4, 4), (16, 16, 16, 16)])
def test_a_node_that_hangs_costs_a_round_of_the_first_pass(leaves: tuple[int, ...], known: bool) -> None:
    fabric = cluster(*leaves, faults=(Fault("down", 3, 0.0),))
    silent = []
    for verdict in localise(fabric.names, fabric.measure, fabric.leaves if known else None):
        if not verdict.complete and not verdict.retests:
            silent.append(fabric.silent_rounds)
    assert silent[-1] == 1, "it was asked again before a retest"
    assert certain(verdict) == {("down", ("n4",))}


def test_there_is_a_verdict_at_any_time() -> None:
    fabric = cluster(8, 8, 8, 8, faults=(Fault("node", 7, 0.4),))
    verdicts = localise(fabric.names, fabric.measure, fabric.leaves)
    seen = [{suspect.members for suspect in verdict.suspects} for verdict in verdicts]
    first = next(number for number, members in enumerate(seen) if ("n8",) in members)
    assert first < len(seen) - 2 and all(("n8",) in members for members in seen[first + 1:])


# --- negative controls -----------------------------------------------------------------------------------------------


def test_without_its_limits_the_fit_is_not_robust() -> None:
    """The same noise, with every slow sample believed: healthy nodes are named."""
    def wrong(rule: object) -> int:
        found = 0
        for seed in range(4):
            fabric = cluster(16, 16, 16, 16, seed=seed, lossy=0.05)
            *_, verdict = localise(fabric.names, fabric.measure, fabric.leaves, seed=seed, rule=rule)  # type: ignore[arg-type]
            found += len(certain(verdict))
        return found

    assert wrong(RULE) == 0 < wrong(replace(RULE, trim=False, least_noise=0.01, convict=4.0))


def test_the_score_tells_good_verdicts_from_bad_ones() -> None:
    fabric = plant(64, 1.0, 8)
    assert (said := score(fabric, (), True)).faults == 2 and (said.found, said.covered) == (0, 0)
    everybody = [Suspect("node", (name,), 0.5, True, "") for name in fabric.names]
    assert (said := score(fabric, everybody, True)).named == 64 and said.right == said.found == 1
    guess = Suspect("uplink", tuple(f"leaf{leaf}" for leaf in range(4)), 0.5, False, "")
    assert (said := score(fabric, [guess], True)).named == said.found == 0 and said.covered == 1


# --- the long proof --------------------------------------------------------------------------------------------------


@pytest.mark.prove
@pytest.mark.timeout(7200)
def test_random_trials(capsys: pytest.CaptureFixture[str]) -> None:
    """With more than 1,500 faults: were one name in a hundred wrong, it would be seen."""
    trials = [*cases()]
    with ProcessPoolExecutor() as pool:
        outcomes = [*pool.map(trial, trials[::-1])]
    named, right, faults, covered = totals(outcomes, "named", "right", "faults", "covered")
    with capsys.disabled():
        print(f"\n{len(outcomes)} trials: {right} of {named} named are bad; {covered} of {faults} bad are named or in a set")
    assert len(outcomes) == len(trials) and faults > 1500 and all(outcome.first <= outcome.limit for outcome in outcomes)
    assert right >= 0.99 * named and covered >= 0.99 * faults
    found, faults = totals([outcome for outcome in outcomes if outcome.case.nodes >= 64], "found", "faults")
    assert found >= 0.95 * faults


def totals(outcomes: list[Outcome], *names: str) -> list[int]:
    return [sum(getattr(outcome.score, name) for outcome in outcomes) for name in names]
