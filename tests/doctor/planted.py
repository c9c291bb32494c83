"""Random faults in simulated clusters, and how well a verdict names them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import log2

import numpy as np
from fabric import Fabric, Fault

from hpc_mp.cluster.slurm.nodelist import expand
from hpc_mp.doctor.localise import Localisation, Suspect, localise

LEAF = {16: (4,), 64: (8, 16), 256: (16, 32), 1024: (32,), 4096: (32, 64)}  # nodes of a leaf, by nodes


def plant(nodes: int, taper: float, seed: int) -> Fabric:
    """A cluster with shuffled nodes, equal or unequal leaves, one to eight rails, and up to nodes/32 faults of any kind,
    uplinks of at most a third of the leaves among them (of more, the healthy ones would be the exception)."""
    random = np.random.default_rng(seed)
    ports = int(random.choice(LEAF[nodes]))
    sizes = np.full(nodes // ports, ports)
    if random.random() < 0.5:  # some leaves have up to a sixteenth more nodes, others so many fewer
        moved = random.integers(0, ports // 16 + 1, len(sizes) // 2)
        sizes[: len(moved)] += moved
        sizes[-len(moved):] -= moved
    leaf = random.permutation(np.repeat(np.arange(len(sizes)), sizes))
    rails = int(random.choice([1, 2, 4, 8] if nodes < 4096 else [1, 2, 4]))
    planes = bool(rails > 1 and random.random() < 0.5)
    places: dict[tuple[str, object, int | None], Fault] = {}
    for _ in range(int(random.integers(0, max(1, nodes // 32) + 1))):
        fault = _fault(random, nodes, len(sizes), rails)
        if fault.kind != "uplink" or sum(kind == "uplink" for kind, _, _ in places) < max(1, len(sizes) // 3):
            places[fault.kind, fault.where, fault.rail] = fault
    return Fabric(leaf, int(sizes.max()), taper, rails, planes, tuple(places.values()), seed=seed)


def _fault(random: np.random.Generator, nodes: int, leaves: int, rails: int) -> Fault:
    factor = float(random.uniform(0.2, 0.8))
    match random.choice(["node", "rail", "uplink"]):
        case "uplink":
            return Fault("uplink", int(random.integers(leaves)), factor)
        case "rail":
            return Fault("rail", int(random.integers(nodes)), factor, int(random.integers(rails)))
    return Fault("node", int(random.integers(nodes)), factor)


TAPERS = (1.0, 2.0, 4.0)
TRIALS = {16: 300, 64: 300, 256: 120, 1024: 24, 4096: 6}  # by nodes: of the large ones, each of which has many faults, few


@dataclass(frozen=True, slots=True)
class Case:
    """One trial: so many nodes, that oversubscription, leaves told or not, and what ``plant`` makes of the seed."""

    nodes: int
    taper: float
    known: bool
    seed: int


def cases() -> Iterator[Case]:
    """Trials of all sizes, each with every oversubscription, leaves known and unknown in turn."""
    ways = [(taper, known) for taper in TAPERS for known in (True, False)]
    for nodes, trials in TRIALS.items():
        for number in range(trials):
            yield Case(nodes, *ways[number % len(ways)], seed=number)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of a trial. ``first``: rounds of the first pass; ``limit``: how many there may be."""

    case: Case
    score: "Score"
    first: int
    retests: int

    @property
    def limit(self) -> float:
        return 2 * log2(self.case.nodes) + 6


def trial(case: Case) -> Outcome:
    fabric = plant(case.nodes, case.taper, case.seed)
    verdict = last(fabric, known=case.known, seed=case.seed)
    return Outcome(case, score(fabric, verdict.suspects, case.known), verdict.rounds - verdict.retests, verdict.retests)


def last(fabric: Fabric, known: bool, seed: int = 0) -> Localisation:
    """The complete verdict."""
    return [*localise(fabric.names, fabric.measure, fabric.leaves if known else None, rails=fabric.rails, seed=seed)][-1]


@dataclass(frozen=True, slots=True)
class Score:
    """Counts. ``named``: certain suspects; ``right``: of these, truly bad; ``faults``: planted; ``found``: of these, named for
    certain; ``covered``: named, or member of a stated suspicion."""

    named: int
    right: int
    faults: int
    found: int
    covered: int


def score(fabric: Fabric, suspects: Sequence[Suspect], known: bool) -> Score:
    bad = [(fault, _labels(fabric, fault)) for fault in fabric.faults]
    uplinks = [fault.where for fault in fabric.faults if fault.kind == "uplink"]
    behind = {int(node) for where in uplinks for node in np.flatnonzero(fabric.leaf == where)}
    index = {name: number for number, name in enumerate(fabric.names)}
    named = [suspect for suspect in suspects if suspect.certain]
    groups = [] if known else [({index[name] for name in expand(member.split(" ")[0])}, suspect)
                               for suspect in suspects if suspect.kind == "uplink" for member in suspect.members]
    right = 0
    for suspect in named:
        if suspect.kind == "uplink" and not known:
            nodes = next(group for group, other in groups if other is suspect)
            right += len(nodes & behind) >= 0.9 * len(nodes)
        else:
            right += any((suspect.kind, suspect.members[0]) in labels for _, labels in bad)
    found = covered = 0
    for fault, labels in bad:
        if fault.kind == "uplink" and not known:
            nodes = set(np.flatnonzero(fabric.leaf == fault.where).tolist())
            sure = sum(len(group & nodes) for group, suspect in groups if suspect.certain)
            any_ = sum(len(group & nodes) for group, suspect in groups)
            found += sure >= 0.75 * len(nodes)
            covered += any_ >= 0.75 * len(nodes)
        else:
            found += any((suspect.kind, suspect.members[0]) in labels for suspect in named)
            covered += any((suspect.kind, member) in labels for suspect in suspects for member in suspect.members)
    return Score(len(named), right, len(bad), found, covered)


def _labels(fabric: Fabric, fault: Fault) -> set[tuple[str, str]]:
    """How a fault may be named. A rail that is the only one, or that is bad beside all others, is the node."""
    if fault.kind == "uplink":
        return {("uplink", f"leaf{fault.where}")}
    name = fabric.names[int(fault.where)]  # type: ignore[arg-type]
    if fault.kind == "node":
        return {("node", name)}
    rails = {other.rail for other in fabric.faults if other.kind == "rail" and other.where == fault.where}
    return {("rail", f"{name} rail {fault.rail}")} | ({("node", name)} if len(rails) == fabric.rails else set())
