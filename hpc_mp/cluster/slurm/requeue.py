"""Have Slurm queue this very job again, without the nodes that failed.

Called by the job's script on its first node while the job still runs, under an ignored SIGTERM: Slurm sends that as soon
as the job is requeued.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from hpc_mp.base.command import CommandFailed, Runner
from hpc_mp.cluster.bad_nodes import BadNode
from hpc_mp.cluster.exclusions import Keeping, choose
from hpc_mp.cluster.slurm import jobs as queue
from hpc_mp.cluster.slurm.nodelist import compress, expand
from hpc_mp.cluster.slurm.nodes import NodeState, node_states, unresponsive_nodes
from hpc_mp.cluster.slurm.records import Words, find_settings, show_records

UNREACHABLE = ("did not answer", "Unable to contact", "Connection refused", "timed out", "Communication connection failure")
PATIENCE_S = 300.0  # for a controller that is being restarted: the run hangs on its answer
STUCK = ("ReqNodeNotAvail", "BadConstraints", "PartitionConfig", "NodeNotAvail")  # idle nodes would not do either
SETTLING_S = 15.0  # in which a job that has just been requeued takes a list of excluded nodes
CLEARED_S = 10  # in which the nodes of a job that ends are mostly cleared
SLURMD_TIMEOUT_S, NOTICED_S = 300.0, 30.0  # Slurm's default, and what it takes to act upon it
POLL_S = 2.0  # between two polls of what Slurm has noticed
HELD_S = 125.0  # how long Slurm holds a job back that was queued again, by default, and a little


def persistent(argv: Sequence[str], ask: Runner = queue.patient, sleep: Callable[[float], None] = time.sleep) -> str:
    """Ask for as long as Slurm cannot be reached. Raises CommandFailed when it says no, or after ``PATIENCE_S``."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return ask(argv)
        except CommandFailed as error:
            if not any(sign in str(error) for sign in UNREACHABLE) or time.monotonic() > deadline:
                raise
        sleep(5.0)


def queued_again(job_id: str, restart: int, script: Path, ask: Runner = persistent) -> bool:
    """Whether the job has been queued again since it was started for the ``restart``-th time: Slurm does so after a node
    failure. A job with another script is somebody's session, of which we are a step."""
    job = known_job(job_id, ask)
    return int(job.get("Restarts") or 0) > restart and is_own(job, job_id, script)


def notice_s(ask: Runner = persistent) -> float:
    """Seconds in which Slurm notices that a node is dead, and acts upon it."""
    said = re.match(r"\d+", find_settings(ask).get("SlurmdTimeout", ""))
    return (int(said[0]) if said else SLURMD_TIMEOUT_S) + NOTICED_S


def await_notice(job_id: str, restart: int, script: Path, dead: Collection[str], seconds: float, wanted: Callable[[], bool],
                 ask: Runner = persistent, sleep: Callable[[float], None] = time.sleep) -> bool:
    """Wait until Slurm has noticed that nodes of the job are dead, upon which it queues the job again by itself, or until they
    answer again; whether one of the two has come.

    A job that is queued again before is being cleared from a node that never answers; where that node is then set down, Slurm
    22.05 leaves the record of the job in a state that no node can satisfy (BadConstraints), and neither a release nor an update
    mends it. Slurm notices after its ``SlurmdTimeout``, 300 s unless the site says otherwise.

    Args:
        dead: nodes that a step could not be started on.
        seconds: that it may take.
        wanted: whether the job is to go on at all.
    """
    deadline = time.monotonic() + seconds
    missed: set[str] = set()
    while time.monotonic() < deadline and wanted():
        if queued_again(job_id, restart, script, ask):
            return True
        try:
            silent = unresponsive_nodes(dead, ask)
        except CommandFailed:
            silent = tuple(missed)
        if missed and not silent:
            return True
        missed.update(silent)
        sleep(POLL_S)
    return False


def requeue(job_id: str, restart: int, script: Path, ask: Runner = persistent, expired: bool = False) -> str | None:
    """Queue the job again; None when that was done, else why it was not.

    Args:
        restart: how often it was queued again before.
        script: the run's own; of an array's elements the first one's is all their script. A step inside somebody's session
            must not have that session started again.
        expired: whether Slurm ends it for its time limit: it takes a job back that it is ending, and of other ends that is the
            decision of whoever ended it.
    """
    try:
        job = job_record(job_id, ask)
        state = job.get("JobState") or "unknown"
        if state != "RUNNING" and not (expired and state in ("COMPLETING", "TIMEOUT")):
            return f"the job is {state}: Slurm or its user ended it"
        if not is_own(job, job_id, script):
            return "this allocation is not the job's own"
        ask(("scontrol", "requeue", job_id))
    except CommandFailed as error:
        return None if queued_again(job_id, restart, script, ask) else str(error)  # an answer that was lost
    return None


def exclude(
    job_id: str, ours: Sequence[BadNode], recorded: Collection[str], needed: int, ask: Runner = persistent,
) -> Keeping:
    """Keep a job that pends from these nodes, and from those its user excludes.

    The job is never held for that: a requeued job does not start at once, and while it pends its list of excluded nodes
    can be changed. Should that fail, the job runs where Slurm puts it, which is better than a job that is held for ever.
    While the old start is being ended Slurm may refuse: it is asked again for some seconds. A name that it does not know any more
    would make it refuse the whole list, ours or the user's: a node that was renamed is left off.

    Args:
        ours: what we have against nodes, of earlier starts too.
        recorded: nodes that we had excluded before: others in Slurm's list are the user's.
        needed: how many nodes must be left, see ``exclusions.choose``.

    Raises:
        CommandFailed: Slurm refuses, or does not answer.
    """
    deadline = time.monotonic() + SETTLING_S
    while True:
        try:
            job = job_record(job_id, ask)
            listed = expand(job.get("ExcNodeList", ""))
            states = node_states(partition=job.get("Partition"), ask=ask)
            users = _known([node for node in listed if node not in recorded], states, ask)
            keeping = choose(ours, users, states, needed, job.get("Reason", "").startswith(STUCK))
            wanted = tuple(dict.fromkeys((*users, *keeping.nodes)))
            if set(wanted) != set(listed):
                ask(("scontrol", "update", f"JobId={job_id}", f"ExcNodeList={compress(wanted)}"))
            return keeping
        except CommandFailed:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.2)


def job_record(job_id: str, ask: Runner) -> Words:
    """What Slurm keeps of a job. Raises CommandFailed."""
    return next(iter(show_records("job", job_id, ask)), {})


def known_job(job_id: str, ask: Runner = persistent) -> Words:
    """Return what Slurm keeps of a job; nothing if it does not tell."""
    try:
        return job_record(job_id, ask)
    except CommandFailed:
        return {}


def start_soon(job_id: str, ask: Runner = persistent) -> None:
    """Have a job that was queued again start in ``CLEARED_S`` seconds, not when Slurm's hold ends.

    Slurm gives such a job a begin time when its nodes are cleared: now and as long as a credential lives, two minutes by default,
    for a node to have forgotten the old one. One that lies in the future already it leaves alone (``batch_requeue_fini`` in
    slurmctld's job_mgr.c), and a node takes a newer credential before the old one expires (``slurm_cred_handle_reissue``).

    Raises:
        CommandFailed: Slurm refuses, or does not answer.
    """
    ask(("scontrol", "update", f"JobId={job_id}", f"StartTime=now+{CLEARED_S}"))


def held_back(job_id: str, ask: Runner = persistent) -> bool:
    """Whether a job waits for nothing but Slurm's hold after it was queued again, not for a day that its user has set.

    Raises:
        CommandFailed: Slurm does not answer.
    """
    job = job_record(job_id, ask)
    if job.get("Reason") != "BeginTime" or not int(job.get("Restarts") or 0):
        return False
    queued, begin = (datetime.fromisoformat(job[field]) for field in ("SubmitTime", "EligibleTime"))
    return (begin - queued).total_seconds() <= HELD_S


def _known(nodes: Sequence[str], states: Mapping[str, NodeState], ask: Runner) -> list[str]:
    """Those that Slurm has: in the job's partition, whose ``states`` are at hand, or in others."""
    elsewhere = [node for node in nodes if node not in states]
    others = node_states(elsewhere, ask=ask) if elsewhere else {}
    return [node for node in nodes if node in states or node in others]


def is_own(job: Words, job_id: str, script: Path) -> bool:
    """Whether the job's script is this one; for an element of an array (``7_2``) that of a run beside it."""
    if not job.get("Command"):
        return False
    command, own = Path(job["Command"]).resolve(), script.resolve()
    return command == own or ("_" in job_id and command.name == own.name and command.parent.parent == own.parent.parent)
