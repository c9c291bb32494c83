"""Classification of a failed attempt: all symptoms are collected, and the symptom that explains the others is named.

If one rank dies, the others lose their peer, wait for it in vain, and are ended by srun. Most of the messages are then echoes.
The kinds of failure, their order and their wording are in ``hpc_mp.rundir.failures``. If all symptoms are echoes, the wait
chains of the ranks show the cause.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from hpc_mp.base.exit_codes import ending
from hpc_mp.base.text import memory_size
from hpc_mp.diagnosis import symptoms as reading
from hpc_mp.diagnosis.cause import root_cause
from hpc_mp.diagnosis.ends import Symptom
from hpc_mp.diagnosis.evidence import Evidence
from hpc_mp.diagnosis.lines import NO_DEVICE, NO_USE, OTHERS_ENDED
from hpc_mp.rundir.failures import KINDS, coordinates, one_line, precedence, sentence, who
from hpc_mp.rundir.outcome import Cause

# Messages of torch about a file that was not written whole. Where another rank met a full file system, that is why.
CUT_SHORT = re.compile(r"unexpected pos|PytorchStreamWriter|iostream error")
KILLED = "SIGKILL"  # sent by the kernel if memory is exhausted


def classify(evidence: Evidence) -> Cause:
    """Return the failure that explains all evidence."""
    symptoms = reading.found_in(evidence) or reading.ended_by_mpi(evidence) or [
        reading.step_cancelled(evidence) or reading.last_error_line(evidence)
        or Symptom("unknown", f"{ending(evidence.code)}, and {reading.srun_complaint(evidence)}")]
    if all(symptom.kind == "peer" for symptom in symptoms):
        symptoms += reading.vanished(evidence)
    if evidence.program and all(KINDS[symptom.kind].level >= KINDS["early"].level for symptom in symptoms):
        symptoms += [*reading.given_up_inside(evidence), *reading.awaited_in_vain_by_all(evidence, symptoms)]
    first = min(symptoms, key=_precedence)
    # PMIx may have killed the others of srun's ranks before srun reports the first end: the supervisor has none to end then.
    unreported = bool(evidence.srun) and not any(line.startswith(OTHERS_ENDED) for line in evidence.srun)
    if first.own and first.kind == "signal" and KILLED in first.text and unreported:
        first = next((symptom for symptom in symptoms if symptom.own and symptom.kind == "crash"), first)
    if first.kind == "storage" and CUT_SHORT.search(first.text):
        first = next((symptom for symptom in symptoms if symptom.kind == "space"), first)
    if KINDS[first.kind].echo:
        first = _awaited(evidence, first)
    if first.own and (NO_DEVICE if len(evidence.hosts) == 1 else NO_USE).search(first.text) and _everywhere(NO_USE, evidence):
        first = replace(first, kind="error")  # of the job's GPUs, which no machine provides
    return _root_cause(_located(first, symptoms, evidence), symptoms, evidence)


def _precedence(symptom: Symptom) -> tuple[int, float, int, bool, bool]:
    """Return the sort key: the level, then the time. Without a time, a rank's symptom is more specific than a host's."""
    kind = "error" if symptom.own and symptom.kind == "memory" else symptom.kind  # a program may report it later
    level, time = precedence(kind, symptom.time)
    order = "error" if symptom.own and level == KINDS["error"].level else kind  # srun names a program's first end first
    return level, time, tuple(KINDS).index(order), symptom.rank is None, symptom.host is None


def _awaited(evidence: Evidence, first: Symptom) -> Symptom:
    """Return the symptom of the rank that all others waited for, else the ``first``. A lost node remains the cause, together with
    its rank that was waited for."""
    places = sorted(evidence.places.values(), key=lambda place: place.rank)
    failure = root_cause(evidence.failures, evidence.standings, places, evidence.hosts)
    if failure is None or failure in evidence.failures:
        return first
    if first.kind == "lost":
        return replace(first, host=failure.node, rank=failure.rank) if failure.node in first.lost else first
    return Symptom(failure.kind, failure.message, failure.node or None, failure.rank, None, failure.time, failure.nodes)


def _located(symptom: Symptom, symptoms: Sequence[Symptom], evidence: Evidence) -> Symptom:
    """Return the symptom with its rank. Lack of memory is often reported only for a node or a job: the rank is then the task that
    the kernel killed, or else the largest one there."""
    if symptom.kind != "memory" or symptom.rank is not None:
        return symptom
    killed = next((other for other in symptoms if other.kind == "signal" and KILLED in other.text
                   and symptom.host in (None, other.host)), None)
    if killed is not None and symptom.task is None:
        return replace(symptom, host=killed.host, rank=killed.rank, task=killed.task)
    ranks = evidence.ranks_on(symptom.host)
    if len(ranks) == 1:
        return replace(symptom, rank=ranks[0])
    memory = {rank: evidence.resident[rank] for rank in ranks if rank in evidence.resident}
    if not memory:
        return symptom
    largest = max(memory, key=memory.__getitem__)
    text = f"{symptom.text}; it held the most memory of the {len(ranks)} ranks there, {memory_size(memory[largest])}"
    return replace(symptom, rank=largest, text=text)


def _root_cause(symptom: Symptom, symptoms: Sequence[Symptom], evidence: Evidence) -> Cause:
    consequence = KINDS[symptom.kind]
    same = [other for other in symptoms if other.kind == symptom.kind]
    blamed = (_lost(same, evidence.supervisor_host) if symptom.kind == "lost"
              else tuple(dict.fromkeys(other.host for other in same if other.host)) if consequence.blame_node else ())
    message = one_line(symptom.text) if symptom.kind == "user" else sentence(_who(symptom, evidence), symptom.kind, symptom.text)
    if symptom.kind == "lost" and blamed:
        message = f"{'node' if len(blamed) == 1 else 'nodes'} {', '.join(blamed)} lost: {message}"
    log = _log(evidence, symptom)
    time = symptom.time if math.isfinite(symptom.time) else 0.0
    rank = symptom.inner if evidence.of_node else symptom.rank
    return Cause(symptom.kind, message, rank, symptom.host, log, time, blamed, consequence.retry)


def _log(evidence: Evidence, symptom: Symptom) -> str | None:
    """Return the log of the node, which srun writes, else that of the rank."""
    run = evidence.run
    if run is None or symptom.host is None:
        return None
    of_node = run.node_log(symptom.host)
    by_node = symptom.rank is None or (of_node.exists() and not evidence.by_mpirun)
    return str(of_node if by_node or symptom.rank is None else run.rank_log(symptom.rank))


def _lost(symptoms: Sequence[Symptom], supervisor_host: str | None) -> tuple[str, ...]:
    """Return the hosts that most hosts lost. Both sides of a network cut report each other: the supervisor's side is right,
    because Slurm and this program are on it."""
    reports = {(symptom.host, host) for symptom in symptoms for host in symptom.lost}
    doubted = {host for by, host in reports if by == supervisor_host}
    votes = Counter(host for by, host in reports if by not in doubted and host != supervisor_host)
    return tuple(sorted(host for host, count in votes.items() if count == max(votes.values())))


def _who(symptom: Symptom, evidence: Evidence) -> str:
    if evidence.of_node and symptom.host is not None:
        return f"node {symptom.host}"
    if symptom.rank is not None:
        place = evidence.places.get(symptom.rank)
        shown = coordinates(place) if place and (evidence.axes or not evidence.program) else ()
        return who(symptom.rank, shown, symptom.host)
    if symptom.task is not None:
        return f"task {symptom.task}" + (f" on {symptom.host}" if symptom.host else "")
    if symptom.host is None:
        return "the job"
    ranks = ", ".join(map(str, evidence.ranks_on(symptom.host)))
    return f"node {symptom.host}" + (f" (ranks {ranks})" if ranks else "")


def _everywhere(pattern: re.Pattern[str], evidence: Evidence) -> bool:
    """Return True if the last lines of a rank on every host match."""
    return all(any(pattern.search(line) for task in range(len(evidence.places))
                   for line in evidence.lines_of_task(host, task)[-reading.LAST_LINES:]) for host in evidence.hosts)
