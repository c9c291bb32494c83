"""A whole survey: start the agents, measure in a fixed order, with a verdict after every step, and report; after an interrupt a
partial report."""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from hpc_mp.base.errors import HpcMpError, RunFailed
from hpc_mp.cluster.slurm.nodelist import expand
from hpc_mp.cluster.slurm.steps import is_queue_notice
from hpc_mp.cluster.topology import SwitchTree, from_addresses, load_topology
from hpc_mp.doctor.localise import Localisation, localise
from hpc_mp.doctor.localise.rounds import disjoint
from hpc_mp.doctor.survey.agents import AgentPool, read
from hpc_mp.doctor.survey.diagnosis import Diagnosis, diagnose, suspected_cpus, suspected_loss
from hpc_mp.doctor.survey.evidence import WINDOW_S, Absence, NodeFacts, Pair, SurveyEvidence
from hpc_mp.doctor.survey.measurements import GpuMeasurements, Gpus, Measurements
from hpc_mp.doctor.survey.report import Report
from hpc_mp.doctor.survey.start import AgentStart, SurveyRequest, out_of_service, plan, without

ALL_PAIRS = 16  # nodes up to which every pair is probed and measured
TURNS = 4  # groups that compute one after the other: nodes that share a machine (virtual ones) disturb each other less
COMPUTE_S = WINDOW_S
RETESTS = 12  # of one window each, suspects and others alternately, so that both have the same disturbances
PACED_ROUNDS = 4
PASSES = 2  # loss must show in several transfers


@dataclass(frozen=True, slots=True)
class SurveyState:
    """The progress of a survey: ``step`` as text, and the results so far. ``verdict``: None before the first round of pairs."""

    step: str
    verdict: Localisation | None
    diagnoses: tuple[Diagnosis, ...]
    complete: bool = False


def survey(tools: Measurements) -> Iterator[SurveyState]:
    """Measure everything and yield a state after every step, the last one complete."""
    evidence, nodes, verdict = tools.evidence, range(len(tools.evidence.nodes)), None

    def state(step: str, complete: bool = False) -> SurveyState:
        return SurveyState(step, verdict, diagnose(evidence, verdict), complete)

    before = tools.counters()
    tools.report()
    for turn in range(min(TURNS, len(nodes))):
        tools.compute(nodes[turn::TURNS], COMPUTE_S)
    yield state("computed")
    tools.probe(peers(len(nodes)))
    yield state("probed")
    if len(nodes) > 1:
        for verdict in localise(evidence.nodes, tools.bandwidth, evidence.leaves or None, tools.rails):
            yield state(f"{verdict.rounds} rounds of pairs measured")
    for _ in range(PASSES):
        for pairs in rounds(suspected_loss(evidence), PACED_ROUNDS):
            tools.paced(pairs)
            yield state("lost segments counted")
    for _ in range(RETESTS):
        if suspects := suspected_cpus(evidence):
            tools.compute([*suspects], WINDOW_S)
            tools.compute(_others(evidence, suspects), WINDOW_S)
            yield state("computed again")
    evidence.counters = _since(before, tools.counters())
    yield state("done", complete=True)


def peers(count: int) -> dict[int, list[int]]:
    """Return the nodes that every node probes: all others if there are few, else its neighbours and distant nodes."""
    steps = range(1, count) if count <= ALL_PAIRS else (1, 2, count // 3, count // 2)
    return {node: [(node + step) % count for step in steps] for node in range(count)} if count > 1 else {}


def rounds(pairs: Sequence[Pair], limit: int) -> list[list[Pair]]:
    """Distribute pairs over rounds of disjoint pairs, the first pairs in the first rounds. Pairs that do not fit are dropped."""
    plan: list[list[Pair]] = []
    while (remaining := [pair for pair in pairs if not any(pair in round_ for round_ in plan)]) and len(plan) < limit:
        plan.append(disjoint(remaining))
    return plan


def _others(evidence: SurveyEvidence, suspects: Mapping[int, float]) -> list[int]:
    """Return as many unsuspected nodes as there are suspects: the most tested, so that every round has the same nodes."""
    trials = Counter(node for trial in evidence.trials for node in trial)
    well = [node for node in range(len(evidence.nodes)) if node not in suspects]
    return sorted(well, key=lambda node: -trials[node])[: len(suspects)]


def _since(before: Mapping[int, Mapping[str, int]], after: Mapping[int, Mapping[str, int]]) -> dict[int, dict[str, int]]:
    """Return the increments of counters that grew, for the nodes that still answer."""
    return {node: {name: value - before.get(node, {}).get(name, value) for name, value in counters.items()
                   if value > before.get(node, {}).get(name, value)} for node, counters in after.items()}


ASK_S = 30.0  # between two queries to Slurm while the job is queued
START_S = 60.0  # for the other agents after the first: Python from a slow file system
ATTEMPTS = 3  # srun ends if a node is unreachable or drops its connection; it is started again without that node

Show = Callable[[str, SurveyState | None], None]  # called with what is being done, in words, and what is known by then


def run(request: SurveyRequest, show: Show, environ: Mapping[str, str] = os.environ) -> Report:
    """Survey the nodes. After an interrupt (Ctrl-C) the report is a partial one. Raises HpcMpError for no Slurm, no nodes, or no
    node with the interface; RunFailed if no agent could be started."""
    start: AgentStart | None = plan(request, environ)
    messages: list[str] = []
    for _ in range(ATTEMPTS):
        if start is None or start.count < 1:
            break
        with AgentPool([start()]) as crew:
            report, nodes = _with(crew, start, show)
        messages, fewer = crew.words, without(start, crew.words, nodes)
        lost = report is not None and report.complete and not crew.alive  # srun gave up midway and ended all agents
        if report is not None and not (lost and fewer):
            return report
        start = fewer
    absent = [f"{node}: {why}" for node, why in start.absent.items()] if start is not None else []
    raise RunFailed("\n".join(["no agent could be started on the nodes", *(absent or messages[-5:])]))


def _with(crew: AgentPool, start: AgentStart, show: Show) -> tuple[Report | None, tuple[str, ...]]:
    """Return the report, None if srun could start no agent, and the nodes of the step in srun's order."""
    moment, begin = time.time(), time.monotonic()

    @lru_cache(maxsize=1)
    def missing(_period: int) -> str:
        return out_of_service(start.request)

    def waiting(message: str) -> None:
        """Show srun's last line; while the job is queued, also the nodes out of service, queried once per period."""
        down = missing(int(time.monotonic() / ASK_S)) if is_queue_notice(message) else ""
        show(f"{message}: {down}" if down else message if is_queue_notice(message) else "starting agents", None)

    hellos = crew.assemble(lambda hello: len(expand(hello["slurm"]["nodelist"])), START_S, waiting)
    if not crew.alive:
        return None, ()
    tools, cluster = _instruments(crew, hellos, start)
    state = SurveyState("", None, ())
    try:
        for state in survey(tools):
            show(state.step, state)
    except KeyboardInterrupt:
        show("interrupted", state)
    report = Report(cluster, moment, time.monotonic() - begin, tools.evidence, state.verdict, state.diagnoses, state.complete)
    return report, expand(next(iter(hellos.values()))["slurm"]["nodelist"])


def _instruments(crew: AgentPool, hellos: Mapping[int, Mapping[str, Any]], start: AgentStart) -> tuple[Measurements, str | None]:
    """Return the measurements and the cluster's name. Raises HpcMpError if no agent has an interface to measure."""
    facts = {rank: read(NodeFacts, hello["facts"]) for rank, hello in sorted(hellos.items()) if "facts" in hello}
    lame = {hello["node"]: Absence("node-cut", hello["error"]) for hello in hellos.values() if "error" in hello}
    if not facts:
        node, absence = next(iter(lame.items()))
        raise HpcMpError(f"node {node}", absence.why, "name one that all nodes have, with --interface")
    slurm = next(iter(hellos.values()))["slurm"]
    present = {entry.node for entry in facts.values()}
    silent = [node for node in expand(slurm["nodelist"]) if node not in present and node not in lame]
    absent = {node: Absence("node-down", why) for node, why in start.absent.items()}
    absent |= dict.fromkeys(silent, Absence("node-down", f"its agent has said nothing within {START_S:.0f} s"))
    tree = load_topology(start.request.topology) if start.request.topology else _tree(hellos)
    leaves = {node: leaf for node in present if (leaf := tree.leaf(node)) is not None}
    if len(leaves) < len(present):  # useless: the switches between the other nodes are unknown
        leaves = {}
    evidence = SurveyEvidence(tuple(entry.node for entry in facts.values()), tuple(facts.values()), absent | lame, leaves)
    gpus, seconds = start.request.gpus, start.request.load_seconds
    tools = (GpuMeasurements(crew, list(facts), evidence, Gpus(gpus), seconds) if gpus
             else Measurements(crew, list(facts), evidence, seconds))
    return tools, slurm["cluster"]


def _tree(hellos: Mapping[int, Mapping[str, Any]]) -> SwitchTree:
    """Return the switches as reported by every node's slurmd; none if Slurm has no topology."""
    addresses = [hello["slurm"]["address"] for hello in hellos.values()]
    return from_addresses((address, pattern) for address, pattern in addresses if "." in pattern)
