"""Start of an agent on every node with srun: as a step of the current allocation, or as a separate small job."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpc_mp.base.command import CommandFailed, Runner, ask
from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.text import counted
from hpc_mp.cluster.slurm.allocation import job_environment, step_environment, why_outside
from hpc_mp.cluster.slurm.nodelist import compress, expand
from hpc_mp.cluster.slurm.nodes import NodeState, node_states
from hpc_mp.cluster.slurm.query import why_silent
from hpc_mp.cluster.slurm.records import find_record
from hpc_mp.cluster.slurm.steps import failed_nodes, srun

AGENT = "hpc_mp.doctor.survey.agent"
MINUTES = 20  # time limit of a separate job, which ends as soon as the survey does


@dataclass(frozen=True, slots=True)
class SurveyRequest:
    """The request of a survey: its nodes and options."""

    nodes: int | None = None  # number of nodes; None = those of ``nodelist``, else all of the current allocation
    nodelist: tuple[str, ...] = ()
    partition: str | None = None
    interfaces: tuple[str, ...] = ()  # network interfaces to measure, one per rail; empty = the interface of a node's name
    topology: Path | None = None  # a topology file, if Slurm does not know the switches
    gpus: int = 0  # GPUs per node between which NCCL is measured; 0 = TCP between the interfaces
    load_seconds: float = 0.0  # duration of each kind of work of the nodes' devices under load; 0 = no load
    options: tuple[str, ...] = ()  # more options for srun: an account, a reservation


@dataclass(frozen=True, slots=True)
class AgentStart:
    """A plan to start agents; calling it starts srun."""

    request: SurveyRequest
    inside: bool  # True to start a step of the allocation in ``environ``
    environ: Mapping[str, str]
    absent: Mapping[str, str]  # requested nodes that are unavailable, with the reason

    @property
    def available(self) -> list[str]:
        """The available nodes of the list."""
        return [node for node in self.request.nodelist if node not in self.absent]

    @property
    def count(self) -> int:
        return len(self.available) if self.request.nodelist else self.request.nodes or 0

    @property
    def command(self) -> list[str]:
        request = self.request
        options = ["--ntasks-per-node=1", "--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--mpi=none", "--cpu-bind=none",
                   "--export=ALL", *request.options]
        if self.inside:
            options += ["--overlap"]
        else:
            options += ["--exclusive", f"--time={MINUTES}", "--job-name=hpc-mp-doctor"]
            options += [f"--partition={request.partition}"] if request.partition else []
        options += [f"--gpus-per-node={request.gpus}"] if request.gpus else []
        options += [f"--nodes={self.count}", f"--ntasks={self.count}"]
        if request.nodelist:
            options += [f"--nodelist={compress(self.available)}"]
        elif self.absent:
            options += [f"--exclude={compress(self.absent)}"]
        return srun(options, [sys.executable, "-m", AGENT, *request.interfaces])

    def __call__(self) -> subprocess.Popen[str]:
        """Start srun in a separate session, so that only this process gets an interrupt from the terminal."""
        pipe = subprocess.PIPE
        return subprocess.Popen(self.command, env=self.environ, stdin=pipe, stdout=pipe, stderr=pipe, text=True, errors="replace",
                                start_new_session=True)


def plan(request: SurveyRequest, environ: Mapping[str, str] = os.environ, ask: Runner = ask) -> AgentStart:
    """Plan the start of the agents. Raises HpcMpError if there is no Slurm, no nodes are given, or there are not that many."""
    silence = why_silent(ask)
    if silence is not None:
        raise HpcMpError("doctor", f"cannot survey nodes without Slurm: {silence}", "run it where Slurm's commands work")
    inside = why_outside(environ, ask) is None
    if not (request.nodelist or request.nodes or inside):
        raise HpcMpError("doctor", "is not told which nodes to survey",
                         "give --nodes or --nodelist, or run it inside an allocation")
    if inside and not request.nodelist:
        allocated = expand(environ["SLURM_JOB_NODELIST"])
        if (request.nodes or 0) > len(allocated):
            raise HpcMpError(f"doctor --nodes {request.nodes}", f"the allocation has {counted(len(allocated), 'node')}",
                             "ask for fewer, or survey from outside the allocation")
        nodes = allocated[: request.nodes]
        request = replace(request, nodes=None, nodelist=nodes)
    _check_number(request, inside, ask)
    if not inside:
        _check_names(request, ask)
    environment = step_environment(environ) if inside else job_environment(environ)
    return AgentStart(request, inside, environment, _not_ready(request.nodelist, ask))


def _check_number(request: SurveyRequest, inside: bool, ask: Runner) -> None:
    """Refuse a number of nodes that contradicts the list or exceeds the cluster: Slurm would queue such a job forever."""
    if request.nodes and request.nodelist and request.nodes != len(request.nodelist):
        raise HpcMpError(f"doctor --nodes {request.nodes}", f"--nodelist names {counted(len(request.nodelist), 'node')}",
                         "give one of the two")
    if inside or request.nodelist or not request.nodes:
        return
    total = len(_states((), request.partition, ask) or ())
    if total and request.nodes > total:
        scope = f"partition {request.partition}" if request.partition else "this cluster"
        raise HpcMpError(f"doctor --nodes {request.nodes}", f"{scope} has {counted(total, 'node')}",
                         f"ask for {total} at most; `sinfo -N` lists them")


def _check_names(request: SurveyRequest, ask: Runner) -> None:
    """Refuse nodes and a partition that do not exist: Slurm would refuse the step without stating the wrong name."""
    if request.partition and _states((), request.partition, ask) == {}:
        raise HpcMpError(f"doctor --partition {request.partition}", "is no partition with nodes that you may use",
                         "`sinfo -s` lists them")
    states = _states(request.nodelist, None, ask) if request.nodelist else None
    if states is not None and (strangers := [node for node in request.nodelist
                                             if node not in states and not find_record("node", node, ask)]):
        what = "are no nodes" if strangers[1:] else "is no node"
        raise HpcMpError(f"doctor --nodelist {compress(strangers)}", f"{what} of this cluster", "`sinfo -N` lists them")


def without(start: AgentStart, messages: Sequence[str], nodes: Sequence[str] = ()) -> AgentStart | None:
    """Return the plan without the nodes that srun reports as unreachable or lost; None if it names none. srun reports a lost node
    by its number in ``nodes``, the nodes of the step in srun's order."""
    failed = failed_nodes(messages, nodes)
    if not failed:
        return None
    fewer = replace(start.request, nodes=start.request.nodes - len(failed) if start.request.nodes else None)
    return AgentStart(fewer, start.inside, start.environ, {**start.absent, **failed})


def out_of_service(request: SurveyRequest, ask: Runner = ask) -> str:
    """Return why a survey is queued: the eligible nodes that are out of service; empty if there are none."""
    states = _states(request.nodelist, request.partition, ask) or {}
    return ", ".join(f"{node} is {_words(record)}" for node, record in states.items() if not record.in_service)


def _not_ready(nodes: tuple[str, ...], ask: Runner) -> dict[str, str]:
    """Return the nodes that a job would have to wait for, with their state; none if Slurm does not answer."""
    states = (_states(nodes, None, ask) if nodes else None) or {}
    return {node: f"Slurm calls it {_words(record)}" for node, record in states.items() if node in nodes and not record.ready}


def _states(nodes: Sequence[str], partition: str | None, ask: Runner) -> dict[str, NodeState] | None:
    """Return the states of nodes as ``node_states`` does; None if Slurm does not answer."""
    try:
        return node_states(nodes, partition, ask)
    except CommandFailed:
        return None


def _words(record: NodeState) -> str:
    return f"{record.state} ({record.reason})" if record.reason else record.state
