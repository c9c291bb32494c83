"""Maintenance of our node exclusions while a job waits and has no process, by a tiny job, the watch.

Slurm keeps a job off excluded nodes forever. If the job's first node dies, or another one while the job is queued, no process
of ours notices that too few other nodes are left: only Slurm itself runs. So a job with exclusions gets a second job, of one
task and one second, which lifts the exclusions if the first job would not start otherwise (``cluster.exclusions``):

- while the job waits, on one of the excluded nodes. It starts when an excluded node is up and free: lifting the exclusion
  helps only then. It never delays the job, which cannot have that node. It is repeated every ``AGAIN_S``.
- while the job runs, on one of the job's own nodes except the first. It can start when the job has left them.

``watch.id`` names the valid watch: a replaced watch does nothing. It runs ``python -m hpc_mp.supervisor.exclusions RUN``.
"""

import os
import shlex
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from hpc_mp.base.command import CommandFailed, Runner
from hpc_mp.base.errors import RunFailed
from hpc_mp.base.files import write_text
from hpc_mp.cluster.bad_nodes import BadNode, Keeping, read_exclusions, write_exclusions
from hpc_mp.cluster.slurm import jobs as queue
from hpc_mp.cluster.slurm.jobs import SlurmJob
from hpc_mp.cluster.slurm.nodelist import compress
from hpc_mp.cluster.slurm.nodes import node_states
from hpc_mp.cluster.slurm.requeue import exclude, held_back, start_soon
from hpc_mp.cluster.slurm.submit import sbatch, withdraw
from hpc_mp.job import AnySpec, load_resolved
from hpc_mp.rundir import RunDirectory
from hpc_mp.rundir.runs import successors

AGAIN_S = 25  # seconds between two checks while the job waits
SETTLES_S = 15  # seconds in which Slurm cleans up after an ended start, and reports how long it holds the job back
RUNNING_S = 600  # seconds between two checks beside a running job of one node, which cannot report its own death
UNSAID = ("", "None")  # reasons of a waiting job that the scheduler has not considered yet
SCRIPT = """#!/bin/bash
# A short job that hpc-mp queues next to a job with excluded nodes: it lifts exclusions if too few other nodes are left.
exec {python} -P -m hpc_mp.supervisor.exclusions {run}
"""


def reconsider(run: RunDirectory, job_id: str, blamed: Sequence[BadNode] = (), spare: int = 0) -> Keeping:
    """Decide again which of our exclusions hold for a pending job, update Slurm, and record them.

    Args:
        blamed: nodes to exclude now, in addition to earlier ones.
        spare: number of nodes beyond its need that must be left to the job.

    Raises:
        CommandFailed: Slurm refuses or does not answer.
        OSError: the run directory cannot be written.
    """
    before = read_exclusions(run.excluded)
    ours = {finding.node: finding for finding in (*before, *blamed)}
    recorded = {finding.node for finding in before}
    if not ours:
        return Keeping((), ())
    write_exclusions(run.excluded, tuple(ours.values()))  # first, because the rest of Slurm's list is the user's
    keeping = exclude(job_id, tuple(ours.values()), recorded, load_resolved(run.job).job.nodes + spare)
    write_exclusions(run.excluded, keeping.excluded)
    return keeping


def leave_out(run: RunDirectory, spec: AnySpec, job_id: str, blamed: Sequence[BadNode]) -> tuple[Keeping, str | None]:
    """Exclude the nodes to blame from a requeued job, and queue a watch. Return also the reason if no watch could be queued.
    Without a watch the job keeps a spare node, and starts even if one more node is lost. Raises CommandFailed or OSError as
    ``reconsider`` does."""
    nodes = {finding.node for finding in (*read_exclusions(run.excluded), *blamed)}
    refused = watch_waiting(run, spec, nodes)
    keeping = reconsider(run, job_id, blamed, spare=int(refused is not None))
    if not keeping.excluded:
        end_watch(run)
    return keeping, refused


def watch_waiting(run: RunDirectory, spec: AnySpec, nodes: Collection[str]) -> str | None:
    """Queue a watch for one of the excluded ``nodes``, soon. Return the reason if it could not be queued."""
    return _replace(run, spec, nodes, [f"--begin=now+{AGAIN_S}"])


def watch_running(run: RunDirectory, spec: AnySpec, hosts: Sequence[str]) -> str | None:
    """Queue a watch for one of the job's ``hosts``, to run after the job has left them. Return the reason if it could not be
    queued. Does nothing for a job without exclusions."""
    ours = read_exclusions(run.excluded)
    if not ours or not run.job_id.exists():  # a step of the user's session is not started again
        end_watch(run)
        return None
    if len(hosts) > 1:
        return _replace(run, spec, hosts[1:], ["--exclusive"])
    return _replace(run, spec, [finding.node for finding in ours], [f"--begin=now+{RUNNING_S}"])


def end_watch(run: RunDirectory) -> None:
    """Withdraw the watch, if one exists."""
    with suppress(OSError):
        withdraw([run.watch_id.read_text(encoding="utf-8").strip()])
        run.watch_id.unlink(missing_ok=True)


def poll(run: RunDirectory, watch_job: str, ask: Runner = queue.patient) -> str:
    """Update the exclusions of the run's job if it waits, and queue the next watch while exclusions remain. The watch calls it as
    the job ``watch_job``. Return a sentence about it. Raises CommandFailed or OSError as ``reconsider`` does."""
    if not run.watch_id.exists() or run.watch_id.read_text(encoding="utf-8").strip() != watch_job:
        return "another watch has taken over, or none is needed"
    first = run.job_id.read_text(encoding="utf-8").strip()
    ids = [first, *successors(run, first)]
    states = queue.job_states(ids, ask)
    job = next((states[job_id] for job_id in ids if not states[job_id].ended), None)
    if job is None or not read_exclusions(run.excluded):
        run.watch_id.unlink(missing_ok=True)
        return "the job has ended, or nothing is excluded"
    taken = reconsider(run, job.id).taken_back if job.waits else ()
    hastened = job.waits and _hastened(job, ask)
    remaining = read_exclusions(run.excluded)
    if remaining:
        _queue(run, load_resolved(run.job), [finding.node for finding in remaining], [f"--begin=now+{AGAIN_S}"])
    else:
        run.watch_id.unlink(missing_ok=True)
    back = ", ".join(finding.node for finding in taken)
    done = [*([f"{back} no longer excluded"] if back else []), *(["Slurm's hold cut short"] if hastened else [])]
    return f"job {job.id} is {job.state}: {', '.join(done) or 'nothing to do'}"


def _hastened(job: SlurmJob, ask: Runner) -> bool:
    """Return True once Slurm no longer holds back the waiting job. Slurm reports the hold only after it has cleaned up the
    ended start. This call waits for it, since the next watch may not start before an excluded node is back."""
    deadline = time.monotonic() + SETTLES_S
    while not held_back(job.id):
        job = queue.job_states([job.id], ask)[job.id]
        if not job.waits or job.reason not in UNSAID or time.monotonic() > deadline:
            return False
        time.sleep(1.0)
    start_soon(job.id)
    return True


def _replace(run: RunDirectory, spec: AnySpec, places: Collection[str], options: Sequence[str]) -> str | None:
    earlier = run.watch_id.read_text(encoding="utf-8").strip() if run.watch_id.exists() else ""
    refused = _queue(run, spec, places, options)
    withdraw([earlier] if earlier else [])
    return refused


def _queue(run: RunDirectory, spec: AnySpec, places: Collection[str], options: Sequence[str]) -> str | None:
    """Submit a watch for one of the ``places``. Return the reason if that failed."""
    slurm, log = spec.slurm, str(run.watch_log).replace("%", "%%")
    site = {"partition": slurm.partition, "account": slurm.account, "qos": slurm.qos, "reservation": slurm.reservation}
    try:
        others = [node for node in node_states() if node not in places]
        write_text(run.watch_script, SCRIPT.format(python=shlex.quote(sys.executable), run=shlex.quote(str(run.path))))
        submission = sbatch(run.watch_script, [
            f"--job-name={spec.job.name}-watch", "--nodes=1", "--ntasks=1", "--mem=200", "--time=5", "--no-requeue",
            *(f"--{name}={value}" for name, value in site.items() if value is not None),
            *([f"--exclude={compress(others)}"] if others else []), *options,
            f"--output={log}", "--open-mode=append"])
        write_text(run.watch_id, f"{submission.job_id}\n")
    except (CommandFailed, RunFailed, OSError) as refused:
        return " ".join(str(refused).split())
    return None


def main(run: str) -> int:
    """Run the watch and return the exit code: 1 if Slurm or the file system refused."""
    try:
        message, code = poll(RunDirectory(Path(run)), os.environ["SLURM_JOB_ID"]), 0
    except (CommandFailed, OSError) as error:
        message, code = str(error), 1
    print(f"{datetime.now():%H:%M:%S} {message}", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
