"""Before the ranks start: a new attempt, the order of the hosts, and where the ranks meet."""

from __future__ import annotations

import os
import socket
import time
import zlib
from pathlib import Path

from hpc_mp.base.command import Runner, ask
from hpc_mp.base.errors import HpcMpError
from hpc_mp.cluster.bandwidth import read_measured
from hpc_mp.cluster.slurm.nodes import address_of, unresponsive_nodes
from hpc_mp.planner.hosts import choose_host_order
from hpc_mp.rundir import AttemptRecord, RunDirectory, prepare_resume, read_attempt, write_attempt
from hpc_mp.rundir.history import AttemptEnd, history, record, saved_step
from hpc_mp.rundir.plan import read_plan
from hpc_mp.supervisor.context import AttemptContext, SupervisedRun
from hpc_mp.supervisor.switches import TopologySources, switches

FIRST_PORT, PORTS = 10000, 20000  # below Linux' ephemeral ports, 32768 and up


def begin(waiting: SupervisedRun, ask: Runner = ask) -> AttemptContext:
    """Make a new attempt the run's current one, and write down what its ranks need.

    Raises:
        HpcMpError: the allocation has too few hosts, or the run directory cannot be written.
        OSError: the run directory cannot be written.
    """
    run, spec, placement, given = waiting.run, waiting.spec, waiting.placement, waiting.allocation
    hosts, why = _hosts(waiting, ask)
    earlier = _earlier(run)
    if earlier is not None and earlier.attempt == run.attempt():  # nobody has put it away: Slurm started this script again
        _close(run, earlier, ask)
        prepare_resume(run)
    number = run.attempt()
    token = f"{given.job_id}.{given.restart}.{number}" if given else f"{socket.gethostname()}.{os.getpid()}.{number}"
    attempt = AttemptRecord(
        token, number, hosts, address_of(hosts[placement.ranks[0].node], ask) if hosts else "", port(run.path, token),
        given.end if given else None, spec.grace)
    write_attempt(run.attempt_record, attempt)
    return AttemptContext(run, spec, placement, given, waiting.command, record=attempt, host_order=why)


def port(run: Path, token: str) -> int:
    """A port of this start alone: another run on the same host, or a lost rank of an earlier start, has another."""
    return FIRST_PORT + zlib.crc32(f"{run} {token}".encode()) % PORTS


def _earlier(run: RunDirectory) -> AttemptRecord | None:
    try:
        return read_attempt(run.attempt_record)
    except (OSError, ValueError):
        return None


def _close(run: RunDirectory, earlier: AttemptRecord, ask: Runner) -> None:
    """A start without an end was ended by Slurm or by the death of its first node: say so, and name nodes that are down."""
    if any(end.token == earlier.token for end in history(run)):
        return
    down = unresponsive_nodes(earlier.hosts, ask)
    said = f"nodes down now: {', '.join(down)}" if down else "all its nodes answer now"
    record(run, AttemptEnd(earlier.token, earlier.attempt, saved_step(run), "vanished",
                    f"attempt {earlier.attempt} ended without a word; {said}", down, "requeue", time.time()))


def _hosts(waiting: SupervisedRun, ask: Runner) -> tuple[tuple[str, ...], str]:
    """A host for every node of the placement, and why; with ``rank_map = "auto"`` by measured rates and by switches."""
    run, given, placement = waiting.run, waiting.allocation, waiting.placement
    if given is None:
        return (), "rank map: as the launcher has it"
    if len(given.hosts) < placement.nodes:
        raise HpcMpError(f"{len(given.hosts)} hosts in the allocation ({', '.join(given.hosts)})",
                         f"are fewer than job.nodes = {placement.nodes}", "ask for more nodes, or lower job.nodes")
    hosts = given.hosts[:placement.nodes]  # srun starts its steps on the first ones: --relative=0
    plan, rank_map = read_plan(run), waiting.spec.parallel.rank_map
    if rank_map != "auto":
        return hosts, f"parallel.rank_map = {rank_map}"
    if plan is None:
        return hosts, f"rank map: in Slurm's order of hosts, for {run.plan.name} cannot be read"
    tree, witness = switches(hosts, waiting.command, TopologySources(ask))
    measured = read_measured(run.measured)
    here = measured if measured is not None and measured.cluster == given.cluster else None  # names of nodes repeat elsewhere
    ordered, why = choose_host_order(placement, plan.traffic, hosts, tree, here)
    return ordered, f"{why}; switches according to {witness}" if tree.above else why
