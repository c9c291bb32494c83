"""Faults planted at random places into a lab of shaped links, and the expected diagnosis of each by the survey."""

from __future__ import annotations

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
class Plant:
    """A fault to plant, and the only diagnosis that it must cause: its code and its members."""

    words: str
    fault: AbstractContextManager[None]
    code: str
    members: tuple[str, ...]


def slow_node(lab: Lab, dice: random.Random) -> Plant:
    node, rate = dice.choice(lab.nodes), f"{dice.randint(40, 150)}mbit"
    return Plant(f"{node} at {rate}", faults.slow_node(lab, node, rate, BASE), "node-slow", (node,))


def slow_link(lab: Lab, dice: random.Random) -> Plant:
    a, b = sorted(dice.sample(lab.nodes, 2))
    rate = f"{dice.randint(40, 150)}mbit"
    return Plant(f"{a}–{b} at {rate}", faults.slow_pair(lab, a, b, rate, BASE), "link-slow", (f"{a}–{b}",))


def lossy_node(lab: Lab, dice: random.Random) -> Plant:
    node, percent = dice.choice(lab.nodes), round(dice.uniform(0.5, 4), 1)
    return Plant(f"{node} loses {percent} %", faults.loss(lab, node, percent), "node-loss", (node,))


def cut_link(lab: Lab, dice: random.Random) -> Plant:
    a, b = sorted(dice.sample(lab.nodes, 2))
    return Plant(f"{a}–{b} cut", faults.cut_pair(lab, a, b), "link-cut", (f"{a}–{b}",))


def cut_node(lab: Lab, dice: random.Random) -> Plant:
    node = dice.choice(lab.nodes)
    return Plant(f"{node} cut", faults.cut_node(lab, node), "node-down", (node,))


def throttled_cpu(lab: Lab, dice: random.Random) -> Plant:
    node, share = dice.choice(lab.nodes), round(dice.uniform(0.06, 0.12), 2)  # less than other load leaves to the other nodes
    return Plant(f"{node} gets {share:.0%} of a CPU", faults.throttled(lab, node, share), "node-cpu", (node,))


def wrong_mtu(lab: Lab, dice: random.Random) -> Plant:
    node, mtu = dice.choice(lab.nodes), dice.choice((1280, 1400, 1450, 1492))
    return Plant(f"{node} has MTU {mtu}", faults.small_mtu(lab, node, mtu), "node-mtu", (node,))


def slow_uplink(lab: Lab, dice: random.Random) -> Plant:
    leaf, rate = dice.randint(1, len(lab.leaves)), f"{dice.randint(60, 150)}mbit"
    members = ("s1", "s2") if len(lab.leaves) == 2 else (f"s{leaf}",)
    return Plant(f"s{leaf} at {rate}", faults.slow_uplink(lab, leaf, rate), "uplink-slow", members)


KINDS: dict[str, Callable[[Lab, random.Random], Plant]] = {
    "slow node": slow_node, "slow link": slow_link, "lossy node": lossy_node, "cut link": cut_link, "cut node": cut_node,
    "throttled CPU": throttled_cpu, "wrong MTU": wrong_mtu, "slow uplink": slow_uplink,
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
    plant = KINDS[kind](lab, dice)
    begin = time.monotonic()
    with plant.fault:
        report = surveyed(lab)
    took = time.monotonic() - begin
    said = [(diagnosis.code, diagnosis.members) for diagnosis in report.diagnoses]
    words = "; ".join(f"{found.code} {found.subject}: {found.evidence}" for found in report.diagnoses) or "nothing"
    wrong = None if said == [(plant.code, plant.members)] and report.complete else f"{plant.words}: {words}"
    rounds = report.verdict.rounds if report.verdict else 0
    return f"{kind:14} {took:5.1f} s {rounds:3} rounds  {plant.words:24} {words}", wrong
