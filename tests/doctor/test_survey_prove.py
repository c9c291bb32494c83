"""Every kind of fault, planted again and again in random places of a real Slurm; and healthy runs between them."""

import random
import time
from collections.abc import Iterator
from statistics import median

import pytest
from slurm_lab.faults import why_not_throttled
from slurm_lab.lab import Lab, wait_until
from slurm_lab.why_not import why_not
from survey_plants import BASE, KINDS, planted, surveyed

from hpc_mp.doctor.survey.report import findings
from hpc_mp.doctor.survey.run import SurveyState
from hpc_mp.doctor.survey.start import AGENT

pytestmark = [pytest.mark.prove, pytest.mark.timeout(3600), pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]
TIMES = 10
HEALTHY = 20


@pytest.fixture(scope="module")
def four() -> Iterator[Lab]:
    with Lab(4) as lab:
        lab.shape(BASE)
        yield lab


@pytest.mark.parametrize("kind", KINDS)
def test_planted_faults_are_named_with_their_kind(four: Lab, kind: str) -> None:
    """On four hosts, of which two leaves cannot be told apart by a slow uplink: the set of both."""
    if kind == "throttled CPU" and why_not_throttled():
        pytest.skip(str(why_not_throttled()))
    dice, wrong = random.Random(kind), []
    for _ in range(TIMES):
        words, mistake = planted(four, kind, dice)
        print(words, flush=True)
        wrong += [mistake] if mistake else []
        wait_until(lambda: four.run(["sinfo", "-h", "-t", "idle", "-o", "%D"]).stdout.strip() == "4", "all nodes idle", 90)
    assert not wrong


def test_a_slow_node_is_named_where_cables_are_unevenly_fast(four: Lab) -> None:
    """The others have cables that differ by up to twofold: nobody of them gets into the ledger."""
    dice, wrong = random.Random("uneven"), []
    try:
        for _ in range(TIMES):
            rates = {node: dice.randint(150, 300) for node in four.nodes}
            slow = dice.choice(four.nodes)
            rates[slow] = round(min(rates.values()) / dice.uniform(3, 20))
            for node, rate in rates.items():
                four.shape(f"{rate}mbit", [node])
            report = surveyed(four)
            said = [(found.code, found.members, found.certain, found.evidence) for found in report.diagnoses]
            print(rates, said, flush=True)
            if {found.node for found in findings(report)} != {slow} or said[0][:3] != ("node-slow", (slow,), True):
                wrong.append((rates, said))
    finally:
        four.shape(BASE)
    assert not wrong


def test_the_uplink_of_one_of_three_leaves_is_named() -> None:
    dice, wrong = random.Random(3), []
    with Lab(6, leaves=(("n1", "n2"), ("n3", "n4"), ("n5", "n6"))) as lab:
        lab.shape(BASE)
        for _ in range(TIMES):
            words, mistake = planted(lab, "slow uplink", dice)
            print(words, flush=True)
            wrong += [mistake] if mistake else []
    assert not wrong


@pytest.mark.parametrize("fate", ["dies", "hangs"])
def test_a_node_that_is_lost_in_the_middle_is_named(fate: str) -> None:
    """It costs a round or two, and the others are surveyed to the end."""
    with Lab(4) as lab:
        lab.shape(BASE)

        def show(step: str, _: SurveyState | None) -> None:
            if step == "probed":
                lab.kill("n3") if fate == "dies" else lab.at("n3", ["pkill", "-STOP", "-f", AGENT])

        report = surveyed(lab, show)
        print(f"{fate}: {report.seconds:.1f} s, {report.verdict.rounds if report.verdict else 0} rounds")
    assert report.complete and [(found.code, found.members) for found in report.diagnoses] == [("node-down", ("n3",))]


def test_nothing_is_named_where_nothing_is_wrong(four: Lab) -> None:
    wrong, took = [], []
    for _ in range(HEALTHY):
        begin = time.monotonic()
        report = surveyed(four)
        took.append(time.monotonic() - begin)
        wrong += [*report.diagnoses]
    print(f"healthy: {HEALTHY} runs, {min(took):.1f} to {max(took):.1f} s, median {median(took):.1f} s; named: {wrong}")
    assert not wrong
