"""Faults planted at random places into a lab of shaped links, and the expected diagnosis of each by the survey."""

import os
import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from slurm_lab import faults
from slurm_lab.lab import Lab

from hpc_mp.doctor.survey.report import Report
from hpc_mp.doctor.survey.run import Show, run
from hpc_mp.doctor.survey.start import SurveyRequest

BASE = "200mbit"


@dataclass(frozen=True)
class Kind:
    """A kind of fault, and the code of the only diagnosis that it must cause.

    Attributes:
        where: what is hit: a "node", a "link" between two, or the "uplink" of a leaf.
        fault: plants it: of the lab, the places and the size.
        words: say what was planted, of the size.
        size: draws the size.
    """

    where: str
    fault: Callable[..., AbstractContextManager[None]]
    code: str
    words: str
    size: Callable[[random.Random], object] = lambda dice: None


def rate(least: int) -> Callable[[random.Random], str]:
    return lambda dice: f"{dice.randint(least, 150)}mbit"


PLACES: dict[str, Callable[[Lab, random.Random], list[str]]] = {
    "node": lambda lab, dice: [dice.choice(lab.nodes)],
    "link": lambda lab, dice: sorted(dice.sample(lab.nodes, 2)),
    "uplink": lambda lab, dice: [f"s{dice.randint(1, len(lab.leaves))}"],
}
KINDS = {
    "slow node": Kind("node", lambda *drawn: faults.slow_node(*drawn, BASE), "node-slow", "at {}", rate(40)),
    "slow link": Kind("link", lambda *drawn: faults.slow_pair(*drawn, BASE), "link-slow", "at {}", rate(40)),
    "lossy node": Kind("node", faults.loss, "node-loss", "loses {} %", lambda dice: round(dice.uniform(0.5, 4), 1)),
    "cut link": Kind("link", lambda lab, a, b, _: faults.cut_pair(lab, a, b), "link-cut", "cut"),
    "cut node": Kind("node", lambda lab, node, _: faults.cut_node(lab, node), "node-down", "cut"),
    "throttled CPU": Kind("node", faults.throttled, "node-cpu", "gets {:.0%} of a CPU",
                          lambda dice: round(dice.uniform(0.06, 0.12), 2)),  # less than other load leaves to the other nodes
    "wrong MTU": Kind("node", faults.small_mtu, "node-mtu", "has MTU {}", lambda dice: dice.choice((1280, 1400, 1450, 1492))),
    "slow uplink": Kind("uplink", lambda lab, leaf, rate: faults.slow_uplink(lab, int(leaf[1:]), rate), "uplink-slow", "at {}",
                        rate(60)),
}


def surveyed(lab: Lab, show: Show = lambda _step, _state: None) -> Report:
    """Survey all nodes of the lab from this machine."""
    os.environ["SLURM_CONF"] = lab.environ["SLURM_CONF"]
    try:
        return run(SurveyRequest(nodelist=lab.nodes), show)
    finally:
        del os.environ["SLURM_CONF"]


def planted(lab: Lab, kind: str, dice: random.Random) -> tuple[str, str | None]:
    """Plant, survey, mend. Return words for a table, and the error of the diagnosis (None if correct)."""
    plant = KINDS[kind]
    places, size = PLACES[plant.where](lab, dice), plant.size(dice)
    subject = "–".join(places)
    members = ("s1", "s2") if plant.where == "uplink" and len(lab.leaves) == 2 else (subject,)
    begin = time.monotonic()
    with plant.fault(lab, *places, size):
        report = surveyed(lab)
    took = time.monotonic() - begin
    said = [(diagnosis.code, diagnosis.members) for diagnosis in report.diagnoses]
    words = "; ".join(f"{found.code} {found.subject}: {found.evidence}" for found in report.diagnoses) or "nothing"
    what = f"{subject} {plant.words.format(size)}"
    wrong = None if said == [(plant.code, members)] and report.complete else f"{what}: {words}"
    rounds = report.verdict.rounds if report.verdict else 0
    return f"{kind:14} {took:5.1f} s {rounds:3} rounds  {what:24} {words}", wrong
