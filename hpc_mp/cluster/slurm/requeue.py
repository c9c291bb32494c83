"""Requeueing of this job by Slurm, without the nodes that failed; and the single mail from Slurm, sent by the job that ends a
run."""

import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from hpc_mp.base.command import CommandFailed, Runner
from hpc_mp.cluster.bad_nodes import BadNode, Keeping, choose
from hpc_mp.cluster.slurm import jobs as queue
from hpc_mp.cluster.slurm.nodelist import compress, expand
from hpc_mp.cluster.slurm.nodes import NodeState, node_states, unresponsive_nodes
from hpc_mp.cluster.slurm.records import Words, find_record, find_settings, show_records

UNREACHABLE = ("did not answer", "Unable to contact", "Connection refused", "timed out", "Communication connection failure")
PATIENCE_S = 300.0  # for a controller that is being restarted: the run depends on its answer
STUCK = ("ReqNodeNotAvail", "BadConstraints", "PartitionConfig", "NodeNotAvail")  # reasons that more idle nodes would not resolve
SETTLING_S = 15.0  # period in which a job that was just requeued accepts a list of excluded nodes
CLEARED_S = 10  # period in which the nodes of an ending job are mostly cleared
SLURMD_TIMEOUT_S, NOTICED_S = 300.0, 30.0  # Slurm's default, and the time it takes to act upon it
POLL_S = 2.0  # between two polls of Slurm's view of the nodes
HELD_S = 125.0  # Slurm's default hold of a requeued job, with a margin


def persistent(argv: Sequence[str], ask: Runner = queue.patient, sleep: Callable[[float], None] = time.sleep) -> str:
    """Repeat a query while Slurm cannot be reached. Raises CommandFailed if Slurm refuses, or after ``PATIENCE_S``."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return ask(argv)
        except CommandFailed as error:
            if not any(sign in str(error) for sign in UNREACHABLE) or time.monotonic() > deadline:
                raise
        sleep(5.0)


def queued_again(job_id: str, restart: int, script: Path, ask: Runner = persistent) -> bool:
    """Return True if the job was requeued since its ``restart``-th start, as Slurm does after a node failure. A job with
    another script is another session of the user, of which we are a step."""
    job = known_job(job_id, ask)
    return int(job.get("Restarts") or 0) > restart and is_own(job, job_id, script)


def notice_s(ask: Runner = persistent) -> float:
    """Return the seconds in which Slurm notices that a node is dead, and acts upon it."""
    match = re.match(r"\d+", find_settings(ask).get("SlurmdTimeout", ""))
    return (int(match[0]) if match else SLURMD_TIMEOUT_S) + NOTICED_S


def await_notice(job_id: str, restart: int, script: Path, dead: Collection[str], seconds: float,
                 should_continue: Callable[[], bool], ask: Runner = persistent,
                 sleep: Callable[[float], None] = time.sleep) -> bool:
    """Wait until Slurm notices that nodes of the job are dead and requeues the job, or until the nodes answer again.

    Return True if one of the two has happened. A job that is requeued earlier is still being cleared from a node that never
    answers. If that node is then set down, Slurm 22.05 leaves the job's record in a state that no node can satisfy
    (BadConstraints), and neither a release nor an update repairs it. Slurm notices after its ``SlurmdTimeout``, 300 s by default.

    Args:
        dead: nodes that a step could not be started on.
        seconds: time limit.
        should_continue: returns True while the job should continue.
    """
    deadline = time.monotonic() + seconds
    missed: set[str] = set()
    while time.monotonic() < deadline and should_continue():
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
    """Requeue the job. Return None on success, else the reason of the failure.

    Args:
        restart: number of earlier requeues.
        script: the run's own script; the first element's script is the script of all elements of an array. A step inside another
            session must not requeue that session.
        expired: True if Slurm ends the job for its time limit: then it may be requeued while it is being ended. After any other
            end, that is the decision of the user or administrator who ended it.
    """
    try:
        job = job_record(job_id, ask)
        state = job.get("JobState") or "unknown"
        if state != "RUNNING" and not (expired and state in ("COMPLETING", "TIMEOUT")):
            return f"the job is {state}: Slurm or its user ended it"
        if not is_own(job, job_id, script):
            return "this allocation does not belong to the job"
        ask(("scontrol", "requeue", job_id))
    except CommandFailed as error:
        return None if queued_again(job_id, restart, script, ask) else str(error)  # the answer was lost
    return None


def exclude(job_id: str, ours: Sequence[BadNode], recorded: Collection[str], needed: int, ask: Runner = persistent) -> Keeping:
    """Keep a pending job off these nodes, and off those that its user excludes.

    The job is never held for that: a requeued job does not start at once, and its list of excluded nodes can be changed while it
    pends. If the change fails, the job runs where Slurm puts it, which is better than a job held forever. While the old start is
    being ended Slurm may refuse, so the request is repeated for some seconds. An unknown node name would make Slurm refuse the
    whole list, ours or the user's: a node that was renamed is left out. Raises CommandFailed if Slurm refuses, or does not
    answer.

    Args:
        ours: our findings against nodes, including those of earlier starts.
        recorded: nodes that we had excluded before; others in Slurm's list are the user's.
        needed: number of nodes that must remain, see ``bad_nodes.choose``.
    """
    deadline = time.monotonic() + SETTLING_S
    while True:
        try:
            job = job_record(job_id, ask)
            listed = expand(job.get("ExcNodeList", ""))
            states = node_states(partition=job.get("Partition"), ask=ask)
            users = _existing([node for node in listed if node not in recorded], states, ask)
            keeping = choose(ours, users, states, needed, job.get("Reason", "").startswith(STUCK))
            excluded = tuple(dict.fromkeys((*users, *keeping.nodes)))
            if set(excluded) != set(listed):
                ask(("scontrol", "update", f"JobId={job_id}", f"ExcNodeList={compress(excluded)}"))
            return keeping
        except CommandFailed:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.2)


def job_record(job_id: str, ask: Runner) -> Words:
    """Return Slurm's record of a job. Raises CommandFailed."""
    return next(iter(show_records("job", job_id, ask)), {})


def known_job(job_id: str, ask: Runner = persistent) -> Words:
    """Return Slurm's record of a job; empty if Slurm does not report it."""
    return find_record("job", job_id, ask)


def start_soon(job_id: str, ask: Runner = persistent) -> None:
    """Let a requeued job start in ``CLEARED_S`` seconds, not when Slurm's hold ends.

    When its nodes are cleared, Slurm gives such a job a begin time: now plus the lifetime of a credential, two minutes by
    default, for a node to have forgotten the old one. Slurm keeps a begin time that is already in the future
    (``batch_requeue_fini`` in slurmctld's job_mgr.c), and a node accepts a newer credential before the old one expires
    (``slurm_cred_handle_reissue``). Raises CommandFailed if Slurm refuses, or does not answer.
    """
    ask(("scontrol", "update", f"JobId={job_id}", f"StartTime=now+{CLEARED_S}"))


def held_back(job_id: str, ask: Runner = persistent) -> bool:
    """Return True if a job waits only for Slurm's hold after a requeue, not for a begin time set by its user. Raises
    CommandFailed if Slurm does not answer."""
    job = job_record(job_id, ask)
    if job.get("Reason") != "BeginTime" or not int(job.get("Restarts") or 0):
        return False
    queued, begin = (datetime.fromisoformat(job[field]) for field in ("SubmitTime", "EligibleTime"))
    return (begin - queued).total_seconds() <= HELD_S


def _existing(nodes: Sequence[str], states: Mapping[str, NodeState], ask: Runner) -> list[str]:
    """Return the nodes that Slurm has: in the job's partition, whose ``states`` are given, or in others."""
    elsewhere = [node for node in nodes if node not in states]
    others = node_states(elsewhere, ask=ask) if elsewhere else {}
    return [node for node in nodes if node in states or node in others]


def is_own(job: Words, job_id: str, script: Path) -> bool:
    """Return True if the job's script is this one; for an element of an array (``7_2``) also that of a run beside it."""
    if not job.get("Command"):
        return False
    command, resolved = Path(job["Command"]).resolve(), script.resolve()
    return command == resolved or (
        "_" in job_id and command.name == resolved.name and command.parent.parent == resolved.parent.parent)


def mail_at_end(job_id: str, script: Path, user: str, ask: Runner = persistent) -> str | None:
    """Request a mail to ``user`` at the end of this job. Return None on success, else the reason of the failure. ``script``: the
    run's own script; a step inside another session of the user is not a job of the run.

    ``--mail-type=END,FAIL`` of a job script would send a mail for each job of a chain, and a FAIL mail for a node failure after
    which Slurm requeues the job. So jobs request no mail. The job that reaches the run's verdict requests one while it still
    runs, which ``scontrol update`` permits its owner; Slurm sends it when the job's script has ended. Its subject has the state
    and the exit code of the job: 0 if the run is complete.
    """
    kinds = "END,FAIL,ARRAY_TASKS" if "_" in job_id else "END,FAIL"
    try:
        if not is_own(job_record(job_id, ask), job_id, script):
            return "this allocation does not belong to the job"
        ask(("scontrol", "update", f"JobId={job_id}", f"MailUser={user}", f"MailType={kinds}"))
    except CommandFailed as error:
        return str(error)
    return None
