"""A whole survey: start the agents, run the procedure, report; after an interrupt a partial report."""

import os
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from hpc_mp.base.errors import HpcMpError, RunFailed
from hpc_mp.cluster.slurm.nodelist import expand
from hpc_mp.cluster.slurm.steps import is_queue_notice
from hpc_mp.cluster.topology import SwitchTree, from_addresses, load_topology
from hpc_mp.doctor.survey.agents import AgentPool, read
from hpc_mp.doctor.survey.evidence import Absence, SurveyEvidence
from hpc_mp.doctor.survey.facts import NodeFacts
from hpc_mp.doctor.survey.measurements import GpuMeasurements, Gpus, Measurements
from hpc_mp.doctor.survey.procedure import SurveyState, survey
from hpc_mp.doctor.survey.report import Report
from hpc_mp.doctor.survey.start import AgentStart, SurveyRequest, out_of_service, plan, without

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
