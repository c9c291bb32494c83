"""Preparation of the ranks' start: a new attempt, the order of the hosts, the rendezvous address, and the environment profile."""

import math
import os
import secrets
import shutil
import socket
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hpc_mp.base.command import CommandFailed, Runner, ask
from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.files import write_text
from hpc_mp.base.programs import PYTHON
from hpc_mp.base.text import counted
from hpc_mp.cluster.bad_nodes import AVOIDED_S, BadNode, ledger
from hpc_mp.cluster.bad_nodes import record as remember
from hpc_mp.cluster.bandwidth import read_measured
from hpc_mp.cluster.node.source import NodeSource
from hpc_mp.cluster.slurm.nodes import address_of, daemon_start, unresponsive_nodes
from hpc_mp.diagnosis.lines import NODE_FAILURE
from hpc_mp.environment.job import of_interpreter, profile_job
from hpc_mp.environment.versions import Installed, distribution
from hpc_mp.job import AnySpec, ProgramSpec
from hpc_mp.planner.hosts import choose_host_order, kept_order_words
from hpc_mp.rundir import AttemptRecord, RunDirectory, prepare_resume, read_attempt, write_attempt
from hpc_mp.rundir.attempt import tail
from hpc_mp.rundir.failures import read_failures, sentence
from hpc_mp.rundir.history import AttemptEnd, furthest_step, history, record, returned
from hpc_mp.rundir.plan import read_plan
from hpc_mp.supervisor.context import AttemptContext, SupervisedRun
from hpc_mp.supervisor.gather import ScriptLog, before
from hpc_mp.supervisor.restart_policy import departure, since_begin
from hpc_mp.supervisor.switches import switches

FIRST_PORT, PORTS = 10000, 20000  # below Linux' ephemeral ports, 32768 and up


def begin(waiting: SupervisedRun, ask: Runner = ask, script: ScriptLog | None = None) -> AttemptContext:
    """Make a new attempt the run's current one, and write the files that its ranks need. ``script``: the log of the job's script.
    Raises HpcMpError if the allocation has too few hosts, and HpcMpError or OSError if the run directory cannot be written."""
    run, spec, placement, job = waiting.run, waiting.spec, waiting.placement, waiting.allocation
    hosts, why = _hosts(waiting, ask)
    earlier: AttemptRecord | None = None
    with suppress(OSError, ValueError):
        earlier = read_attempt(run.attempt_record)
    if earlier is not None and earlier.attempt == run.attempt():  # its files were not archived: Slurm started this script again
        _close(waiting, earlier, ask, script)
        prepare_resume(run)
    number = run.attempt()
    token = f"{job.job_id}.{job.restart}.{number}" if job else f"{socket.gethostname()}.{os.getpid()}.{number}"
    attempt = AttemptRecord(
        token, number, hosts, address_of(hosts[placement.ranks[0].node], ask) if hosts else "", port(run.path, token),
        secrets.token_hex(16),
        job.end if job else None, spec.grace, time.time(),
        tuple(address_of(host, ask) for host in hosts) if isinstance(spec, ProgramSpec) and spec.by_mpirun else ())
    write_attempt(run.attempt_record, attempt)
    return AttemptContext(run, spec, placement, job, waiting.command, record=attempt, host_order=why)


def port(run: Path, token: str) -> int:
    """Return a port for this attempt: another run on the same host, or a lost rank of an earlier attempt, has a different one."""
    return FIRST_PORT + zlib.crc32(f"{run} {token}".encode()) % PORTS


def _close(waiting: SupervisedRun, earlier: AttemptRecord, ask: Runner, script: ScriptLog | None) -> None:
    """Record the end of an attempt that Slurm or the death of its first node ended without a record. Record dead nodes too."""
    run = waiting.run
    ends = history(run)
    if any(end.token == earlier.token for end in ends):
        return
    down: tuple[str, ...] = ()
    condition = "the state of its nodes is unknown"
    with suppress(CommandFailed):
        down = unresponsive_nodes(earlier.hosts, ask) if earlier.hosts else ()
        condition = f"down now: {', '.join(down)}" if down else "all its nodes answer now"
    failures = read_failures(run, earlier.attempt)
    noted_before = f"; earlier failure: {failures[0]}" if failures else ""
    script_lines = since_begin(before(script), earlier)
    lost = {match[1] or match[2]: line for line in (*tail(run.srun_log), *script_lines) if (match := NODE_FAILURE.search(line))}
    departed = (departure({}, 0, script_lines) or "") if not lost else ""
    node = next(iter(lost), None)
    if departed:
        kind, message = "stopped", f"stopped: {departed}, which ended its ranks and its supervisor{noted_before}"
    elif lost:
        down = tuple(dict.fromkeys((*lost, *down)))
        kind, message = "node", f"{sentence(f'node {down[0]}', 'node', lost[down[0]])}; {condition}"
    else:
        node = next(iter(earlier.hosts), None)
        first, how = f"its first node, {node}," if node else "its first node", "as if {} had died"
        if node is not None and not down and (daemon_start(node, ask) or math.inf) < earlier.time:
            node, how = None, "although {} had not died: Slurm kills a job whose start its restarted controller does not know"
        kind, message = "vanished", f"it ended without a record, {how.format(first)}; {condition}{noted_before}"
    record(run, AttemptEnd(earlier.token, earlier.attempt, furthest_step(run, waiting.spec), kind, message, down, "requeue",
                           last_sign(run, earlier), node=node, returned=() if departed else returned(ends, earlier.hosts),
                           departed=departed))
    waiting.say(f"attempt {earlier.attempt}: {message}")
    if waiting.allocation is not None and down:
        now = time.time()
        with suppress(OSError):  # a full disk must not keep a job from running
            remember(ledger(waiting.allocation.cluster), [
                BadNode(node, "node", f"down after {run.path} ended there without a record", str(run.path), now, now + AVOIDED_S,
                        "likely") for node in down])


def last_sign(run: RunDirectory, earlier: AttemptRecord) -> float:
    """Return unix seconds of the last write of an attempt without a recorded end: a step, or output of a rank."""
    files = [run.metrics, run.status, run.attempt_record, *run.log.glob("*.log")]
    times = [path.stat().st_mtime for path in files if path.exists()]
    return max(earlier.time, min(time.time(), max(times, default=earlier.time)))


def _hosts(waiting: SupervisedRun, ask: Runner) -> tuple[tuple[str, ...], str]:
    """Return a host for every node of the placement, and the reason; with ``rank_map = "auto"`` by rates and switches."""
    run, allocation, placement = waiting.run, waiting.allocation, waiting.placement
    if allocation is None:
        return (), "rank map: the launcher's"
    if len(allocation.hosts) < placement.nodes:
        raise HpcMpError(f"{counted(len(allocation.hosts), 'host')} in the allocation ({', '.join(allocation.hosts)})",
                         f"are fewer than job.nodes = {placement.nodes}", "request more nodes, or lower job.nodes")
    hosts = allocation.hosts[:placement.nodes]  # srun starts its steps on the first hosts: --relative=0
    measured = read_measured(run.measured)
    rates = measured if measured is not None and measured.cluster == allocation.cluster else None  # node names repeat elsewhere
    if isinstance(waiting.spec, ProgramSpec):
        return hosts, kept_order_words(hosts, rates)
    plan, rank_map = read_plan(run), waiting.spec.parallel.rank_map
    if rank_map != "auto":
        return hosts, f"parallel.rank_map = {rank_map}"
    if plan is None:
        return hosts, f"rank map: in Slurm's order of hosts, because {run.plan.name} cannot be read"
    tree, witness = switches(hosts, waiting.command, ask)
    ordered, why = choose_host_order(placement, plan.traffic, hosts, tree, rates)
    return ordered, f"{why}; switches according to {witness}" if tree.above else why


PYXIS_NAMES = "--container-env="  # srun's option; without it the image's values win


def apply_profile(run: RunDirectory, spec: AnySpec, command: Sequence[str], environ: Mapping[str, str],
                  source: NodeSource | None = None) -> tuple[list[str], dict[str, str], str | None]:
    """Return the ranks' command and environment, and a sentence for the main log; both unchanged for a job without a profile.
    ``command``: srun and the command that it starts; pyxis gets the names in it. ``environ``: the job script's environment:
    values of a module, ``slurm.setup`` or ``environment.set`` in it override the profile. Raises HpcMpError if the profile does
    not exist."""
    if spec.environment.profile is None:
        return list(command), dict(environ), None
    container = spec.slurm.container is not None
    job = profile_job(spec.environment.profile, source or NodeSource(), environ, spec.environment.set, container=container,
                      installed=_rank_packages(spec, command, environ))
    host = environ.get("SLURMD_NODENAME") or os.uname().nodename
    scope = "outside of the container, whose libraries and files are not visible" if container else "for all nodes of the job"
    head = f"profile {job.profile.name} ({job.profile.title}), applied on {host}, {scope}"
    with suppress(OSError):  # an unwritable log must not keep a job from running
        write_text(run.profile_log, "".join(f"{line}\n" for line in (head, *job.lines())))
    extended = [f"{word},{','.join(job.exported)}" if word.startswith(PYXIS_NAMES) and job.exported else word for word in command]
    return extended, job.environ, f"{job.summary()}, by the facts of {host}; reasons: {run.profile_log.relative_to(run.path)}"


def _rank_packages(spec: AnySpec, command: Sequence[str], environ: Mapping[str, str]) -> Installed:
    """Return the ranks' packages: those of the interpreter that runs ``-m hpc_mp`` in their command, or a program's own."""
    if isinstance(spec, ProgramSpec):
        if spec.slurm.container is not None:
            return lambda name: None
        name = spec.program.command[0] if PYTHON.fullmatch(os.path.basename(spec.program.command[0])) else "python"
        return of_interpreter(shutil.which(name, path=environ.get("PATH")) or name)
    at = [number for number, word in enumerate(command) if word == "hpc_mp" and command[number - 1] == "-m"]
    python = command[at[-1] - 3] if at and at[-1] >= 3 else sys.executable
    same = python == sys.executable or not Path(python).is_file()  # a staged Python that does not exist yet is a copy
    return distribution if same else of_interpreter(python)
