"""Why an attempt of a run failed: all symptoms, of which the one that explains the others is named.

When one rank dies, the others lose their peer, wait for it in vain, and are ended by srun: most of what is written then is
an echo. Kinds of failure, their order and their wording are those of ``hpc_mp.rundir.failures``, and so is the way to the cause
where there are echoes alone: who waits for whom.
"""

from __future__ import annotations

import math
import re
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from hpc_mp.base.exit_codes import ending
from hpc_mp.base.text import memory_size
from hpc_mp.rundir.attempt import last_words
from hpc_mp.rundir.ends import awaited_in_vain, given_up, words_of_end
from hpc_mp.rundir.failures import (
    BY_SOMEBODY,
    KINDS,
    RankFailure,
    coordinates,
    kind_of_end,
    one_line,
    precedence,
    root_cause,
    sentence,
    who,
)
from hpc_mp.rundir.outcome import STOPPED, Cause
from hpc_mp.rundir.tracebacks import last_error
from hpc_mp.rundir.watchdogs import collective_timeout
from hpc_mp.supervisor.evidence import LABEL, Evidence
from hpc_mp.supervisor.log_patterns import (
    CANCELLED,
    CANNOT_START,
    IMPROPER,
    JOB_CANCELLED,
    KILLED_PID,
    MPI_PLUGIN,
    NO_DEVICE,
    NODE_FAILURE,
    NOT_INSTALLED,
    PYTHON_ERROR,
    STEP_CANCELLED,
    TaskEnd,
    TasksRefused,
    all_ends,
    completed_first,
    not_started,
    sign,
    task_ends,
    xid,
)

__all__ = ["FAILURE_CLASSES", "FailureClass", "RootCause", "classify"]


@dataclass(frozen=True, slots=True)
class FailureClass:
    """What follows from a kind of failure.

    Attributes:
        retry: whether another attempt may go well: a fault of the machine, or one that nobody can tell from it.
        blame_node: whether the node of which it is found should be left out then.
    """

    retry: bool
    blame_node: bool = False


FAILURE_CLASSES: dict[str, FailureClass] = {
    "memory": FailureClass(retry=False),
    "removed": FailureClass(retry=False),
    "hardware": FailureClass(retry=True, blame_node=True),
    "node": FailureClass(retry=True, blame_node=True),
    "unfit": FailureClass(retry=True, blame_node=True),
    "user": FailureClass(retry=False),
    "error": FailureClass(retry=False),
    "space": FailureClass(retry=False),
    "storage": FailureClass(retry=True),
    "crash": FailureClass(retry=False),
    "signal": FailureClass(retry=True),
    "exit": FailureClass(retry=False),
    "ended": FailureClass(retry=False),
    "launcher": FailureClass(retry=False),
    "cancelled": FailureClass(retry=False),
    "early": FailureClass(retry=False),
    "lost": FailureClass(retry=True, blame_node=True),
    "hang": FailureClass(retry=True),
    "silent": FailureClass(retry=True),
    "straggled": FailureClass(retry=True),
    "network": FailureClass(retry=True),
    "peer": FailureClass(retry=True),
    "vanished": FailureClass(retry=True),
    "unknown": FailureClass(retry=False),
}

# What an exception is about may say more than its kind: lack of memory, a broken GPU.
MORE_EXACT = frozenset({"memory", "hardware", "space", "storage", "network"})
KILLED = "SIGKILL"  # what the kernel sends where memory ends
REFUSED = re.compile(r"^(?:\d+: )?hpc-mp: (\S+): (?!warning: )(.+)$")  # of slurm/node-start.sh
REMEDY = "Name a Python that all nodes see, with hpc-mp in it, in slurm.python, slurm.venv or slurm.conda"
CONTAINERS_REMEDY = "Load the module that brings it (slurm.modules), or leave slurm.container out"
IMAGE_REMEDY = ("Name an image that all nodes can read or fetch in slurm.container, and directories that all nodes have in "
                "slurm.container_mounts")
LACKING_REMEDY = "Take an image that has it (slurm.container)"
NO_LIBRARY = ("srun lists it, and this Slurm cannot load it. Name another that `srun --mpi=list` shows, or ask your "
              "administrators for its library")
SLURMS = re.compile(r"srun: |slurmstepd: |hpc-mp: |\d+: hpc-mp: ")  # lines of srun's log that mpirun has not written
LAST_LINES = 100  # of a node's log in which a program's words are about its end
OF_A_GPU = re.compile(r"CUDA|CUBLAS|CUDNN|NCCL", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class RootCause:
    """Attributes:
    cause: for ``outcome.json``: one sentence with rank, host, coordinates and the evidence.
    nodes_to_blame: hosts that the next attempt should not get.
    retry: whether there should be a next attempt at all.
    """

    cause: Cause
    nodes_to_blame: tuple[str, ...]
    retry: bool


@dataclass(frozen=True, slots=True)
class Symptom:
    """One finding.

    Attributes:
        text: its evidence.
        lost: hosts that did not answer.
        time: unix seconds, where known.
        own: in the words of a program, which may speak of anything.
        inner: the rank that the command of a node says has failed.
    """

    kind: str
    text: str
    host: str | None = None
    rank: int | None = None
    task: int | None = None
    time: float = math.inf
    lost: tuple[str, ...] = ()
    own: bool = False
    inner: int | None = None


def classify(evidence: Evidence) -> RootCause:
    """The failure that explains all that was found."""
    sources = (_records, _hang, _unended, _watchdogs, _early, _srun, _nodes, _said, _unfit, _not_started, _missing)
    found = chain.from_iterable(source(evidence) for source in sources)
    symptoms = list(found) or [_step_cancelled(evidence) or _last_error(evidence) or Symptom(
        "unknown", f"{ending(evidence.code)}, and {_srun_error(evidence)}")]
    if all(symptom.kind == "peer" for symptom in symptoms):
        symptoms += _vanished(evidence)
    if evidence.program and all(KINDS[symptom.kind].level >= KINDS["early"].level for symptom in symptoms):
        symptoms += [*_given_up_inside(evidence), *_awaited_in_vain(evidence, symptoms)]
    first = min(symptoms, key=_precedence)
    if first.own and first.kind == "signal" and KILLED in first.text:  # PMIx ends the others before srun tells of the first
        first = next((symptom for symptom in symptoms if symptom.own and symptom.kind == "crash"), first)
    if KINDS[first.kind].echo:
        first = _awaited(evidence, first)
    if first.own and NO_DEVICE.search(first.text) and _everywhere(NO_DEVICE, evidence):
        first = replace(first, kind="error")  # of the job's GPUs, of which no machine gives it any
    return _root_cause(_located(first, symptoms, evidence), symptoms, evidence)


def _precedence(symptom: Symptom) -> tuple[int, float, int, bool, bool]:
    """Of one level the earliest; of those without a time one that names a rank tells more than one that names a host."""
    kind = "error" if symptom.own and symptom.kind == "memory" else symptom.kind  # of its own memory a program may say it later
    level, time = precedence(kind, symptom.time)
    order = "error" if symptom.own and level == KINDS["error"].level else kind  # of a program's ends srun names the first first
    return level, time, tuple(KINDS).index(order), symptom.rank is None, symptom.host is None


def _awaited(evidence: Evidence, first: Symptom) -> Symptom:
    """Of the rank for which all others waited; the ``first`` when nobody has said for whom. A lost node stays one: of its ranks
    it is then the one that was waited for."""
    places = sorted(evidence.places.values(), key=lambda place: place.rank)
    found = root_cause(evidence.failures, evidence.standings, places, evidence.hosts)
    if found is None or found in evidence.failures:
        return first
    if first.kind == "lost":
        return replace(first, host=found.node, rank=found.rank) if found.node in first.lost else first
    return Symptom(found.kind, found.message, found.node or None, found.rank, None, found.time, found.nodes)


def _located(symptom: Symptom, symptoms: Sequence[Symptom], evidence: Evidence) -> Symptom:
    """Lack of memory is often reported for a node or a job only: then it was the task that the kernel killed, if one was, else
    the largest there."""
    if symptom.kind != "memory" or symptom.rank is not None:
        return symptom
    killed = next((other for other in symptoms if other.kind == "signal" and KILLED in other.text
                   and symptom.host in (None, other.host)), None)
    if killed is not None and symptom.task is None:
        return replace(symptom, host=killed.host, rank=killed.rank, task=killed.task)
    ranks = evidence.ranks_on(symptom.host)
    if len(ranks) == 1:
        return replace(symptom, rank=ranks[0])
    held = {rank: evidence.resident[rank] for rank in ranks if rank in evidence.resident}
    if not held:
        return symptom
    most = max(held, key=held.__getitem__)
    text = f"{symptom.text}; of the {len(ranks)} ranks there it held most, {memory_size(held[most])}"
    return replace(symptom, rank=most, text=text)


def _root_cause(symptom: Symptom, symptoms: Sequence[Symptom], evidence: Evidence) -> RootCause:
    consequence = FAILURE_CLASSES[symptom.kind]
    same = [other for other in symptoms if other.kind == symptom.kind]
    blamed = (_lost(same, evidence.here) if symptom.kind == "lost"
              else tuple(dict.fromkeys(other.host for other in same if other.host)) if consequence.blame_node else ())
    message = one_line(symptom.text) if symptom.kind == "user" else sentence(_who(symptom, evidence), symptom.kind, symptom.text)
    if symptom.kind == "lost" and blamed:
        message = f"{'node' if len(blamed) == 1 else 'nodes'} {', '.join(blamed)} lost: {message}"
    log = _log(evidence, symptom)
    time = symptom.time if math.isfinite(symptom.time) else 0.0
    rank = symptom.inner if evidence.of_node else symptom.rank
    return RootCause(Cause(symptom.kind, message, rank, symptom.host, log, time), blamed, consequence.retry)


def _log(evidence: Evidence, symptom: Symptom) -> str | None:
    """Of its node, which srun writes; else its own."""
    run = evidence.run
    if run is None or symptom.host is None:
        return None
    of_node = run.node_log(symptom.host)
    by_node = symptom.rank is None or (of_node.exists() and not evidence.by_mpirun)
    return str(of_node if by_node or symptom.rank is None else run.rank_log(symptom.rank))


def _lost(symptoms: Sequence[Symptom], here: str | None) -> tuple[str, ...]:
    """Hosts that most hosts did not hear from. Both sides of a cut say so of each other: the side of ``here`` is right, for
    Slurm and this program are on it."""
    said = {(symptom.host, host) for symptom in symptoms for host in symptom.lost}
    doubted = {host for by, host in said if by == here}
    votes = Counter(host for by, host in said if by not in doubted and host != here)
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


def _records(evidence: Evidence) -> Iterator[Symptom]:
    """What ranks wrote about their own end."""
    for failure in evidence.failures:
        found = sign(failure.message) if failure.kind == "error" else None
        kind = found if found in MORE_EXACT else failure.kind
        yield Symptom(kind, failure.message, failure.node, failure.rank, None, failure.time, failure.nodes)


def _hang(evidence: Evidence) -> Iterator[Symptom]:
    """Ranks that were ended for their silence."""
    if evidence.hang is not None:
        place = evidence.places.get(evidence.hang.rank) if evidence.hang.rank is not None else None
        yield Symptom("hang", str(evidence.hang), evidence.hosts[place.node] if place else None, evidence.hang.rank)


def _unended(evidence: Evidence) -> Iterator[Symptom]:
    """Nodes that answer srun no more, or know nothing of the step: they died, and some were started anew."""
    if evidence.unended:
        yield Symptom("lost", "srun was told of no end of its tasks there when it ended all others", lost=evidence.unended)


def _given_up_inside(evidence: Evidence) -> Iterator[Symptom]:
    """Ranks whose last words are a traceback though they have not ended: MPI and NCCL may wait for the others as Python exits."""
    for place in evidence.places.values():
        host = evidence.hosts[place.node]
        found = given_up(evidence.said_by(host, evidence.task_of(place.rank)), evidence.of_node)
        if found is not None:
            yield Symptom(found.kind, found.text, host, place.rank, own=True, inner=found.inner)


def _awaited_in_vain(evidence: Evidence, symptoms: Sequence[Symptom]) -> Iterator[Symptom]:
    """The rank that all others have given up waiting for, those among them that were ended before they could end of it."""
    if evidence.of_node:
        return
    complaints = {symptom.rank: symptom.text for symptom in symptoms if symptom.rank is not None and symptom.kind == "peer"}
    if not complaints:
        return
    for place in evidence.places.values():
        lines = evidence.said_by(evidence.hosts[place.node], evidence.task_of(place.rank))
        error = last_error(lines, code=0)
        if place.rank not in complaints and error is not None and error.kind == "peer":
            complaints[place.rank] = str(error)
    found = awaited_in_vain(complaints, evidence.places)
    if found is not None:
        rank, text = found
        yield Symptom("hang", text, evidence.hosts[evidence.places[rank].node], rank)


def _everywhere(pattern: re.Pattern[str], evidence: Evidence) -> bool:
    """Whether a rank of every host has said it last."""
    return all(any(pattern.search(line) for task in range(len(evidence.places))
                   for line in evidence.said_by(host, task)[-LAST_LINES:]) for host in evidence.hosts)


def _watchdogs(evidence: Evidence) -> Iterator[Symptom]:
    """A collective of a program that did not end, in the words of NCCL."""
    if not evidence.program or evidence.of_node:  # of a node's ranks nobody knows whose words are whose
        return
    lines = {place.rank: evidence.said_by(evidence.hosts[place.node], evidence.task_of(place.rank))[-LAST_LINES:]
             for place in evidence.places.values()}
    found = collective_timeout(lines, len(evidence.places))
    if found is not None:
        place = evidence.places.get(found.apart) if found.apart is not None else None
        yield Symptom("hang", str(found), evidence.hosts[place.node] if place else None, found.apart)


def _early(evidence: Evidence) -> Iterator[Symptom]:
    """A task that had ended well by itself when the others failed or hung."""
    improper = next((found for line in evidence.srun if (found := IMPROPER.search(line))), None)
    if improper is not None and (place := evidence.places.get(int(improper[1]))) is not None:
        yield Symptom("early", "without a word to MPI (MPI_Finalize)", evidence.hosts[place.node], place.rank)
    end = completed_first(evidence.srun)
    if end is not None and not evidence.by_mpirun:  # a task of a node ends well as soon as mpirun's daemon does
        yield Symptom("early", "with exit code 0, while others went on", end.host, evidence.rank_of(end.host, end.tasks[0]),
                      end.tasks[0])


def _srun(evidence: Evidence) -> Iterator[Symptom]:
    """What srun says about the ends of tasks, and slurmstepd about the job's."""
    for end in task_ends(evidence.srun):
        yield from _end(end, evidence) if not evidence.by_mpirun else _end_of_node(end, evidence)
    for line in evidence.srun:
        if failed := NODE_FAILURE.search(line):
            yield Symptom("node", line.strip(), failed[1] or failed[2])
        elif (cancelled := CANCELLED.search(line)) is not None:
            yield Symptom("node" if cancelled[2].startswith("NODE FAILURE") else "cancelled", line.strip())
        elif JOB_CANCELLED.search(line):
            yield Symptom("cancelled", line.strip())
        elif (plugin := MPI_PLUGIN.search(line)) is not None:
            yield Symptom("user", f"slurm.mpi = {plugin[1]!r}: {NO_LIBRARY}")


def _end_of_node(end: TaskEnd, evidence: Evidence) -> Iterator[Symptom]:
    """Of the task in which mpirun or its daemon ran: it tells of what no rank has written itself."""
    if end.code is None:
        yield Symptom("memory", end.line.strip(), end.host)
    elif end.code < 0:
        yield Symptom(kind_of_end(end.code, evidence.program), ending(end.code), end.host)
    elif end.code > 0 and end.code != STOPPED and not evidence.failures:
        said = last_words([line for line in evidence.srun if not SLURMS.match(line)])
        words = f"; its last words: {said}" if said else ""
        yield Symptom("launcher", f"{ending(end.code)}, which is mpirun's{words}", end.host)


def _end(end: TaskEnd, evidence: Evidence) -> Iterator[Symptom]:
    if not_started(evidence.logs.get(end.host, ())) is not None:  # then the code is slurmstepd's
        return
    for task in end.tasks:
        rank = evidence.rank_of(end.host, task)
        if end.code is None:
            yield Symptom("memory", end.line.strip(), end.host, rank, task)
        elif end.code < 0 or _is_silent(end, rank, evidence):
            lines = evidence.said_by(end.host, task)
            found = words_of_end(lines, end.code, program=evidence.program, of_node=evidence.of_node)
            broken = next(filter(None, map(xid, lines[-LAST_LINES:])), None) if OF_A_GPU.search(found.text) else None
            kind, text = ("hardware", f"{broken}; {found.text}") if evidence.program and broken else (found.kind, found.text)
            yield Symptom(kind, text, end.host, rank, task, own=evidence.program, inner=found.inner)


def _is_silent(end: TaskEnd, rank: int | None, evidence: Evidence) -> bool:
    """Whether a task gave up without a record of why."""
    return end.code is not None and end.code > 0 and end.code != STOPPED and not any(
        _is_of(failure, end.host, rank) for failure in evidence.failures)


def _is_of(failure: RankFailure, host: str, rank: int | None) -> bool:
    return failure.node == host if rank is None else failure.rank == rank


def _with_last_words(text: str, host: str, task: int, evidence: Evidence) -> str:
    words = last_words(evidence.said_by(host, task))
    return f"{text}; its last words: {words}" if words else text


def _nodes(evidence: Evidence) -> Iterator[Symptom]:
    """What Slurm thinks of the nodes."""
    for host, state in evidence.states.items():
        if state.startswith("down") or state.endswith("*"):  # the star: it does not answer
            yield Symptom("node", f"its state is {state}", host)


def _srun_error(evidence: Evidence) -> str:
    """What srun itself complains of last."""
    said = (line for line in reversed(evidence.srun) if line.startswith(("srun: error:", "srun: fatal:")))
    return next((f"all that is known is {line!r}" for line in said), "nothing says why")


def _vanished(evidence: Evidence) -> Iterator[Symptom]:
    """Hosts that neither a rank nor srun has a word of, when all others complain of lost peers: a node that went and came
    back at once, of which Slurm knows nothing."""
    if not evidence.failures or any(failure.kind != "peer" for failure in evidence.failures):
        return
    seen = {failure.node for failure in evidence.failures} | {end.host for end in all_ends(evidence.srun)}
    silent = tuple(host for host in evidence.hosts if host not in seen)
    if silent and 2 * len(silent) < len(evidence.hosts):
        yield Symptom("lost", f"nothing was heard of {', '.join(silent)} when all others lost a peer", lost=silent)


def _said(evidence: Evidence) -> Iterator[Symptom]:
    """What lines of logs speak of."""
    for line in evidence.srun:
        if (kind := sign(line)) is not None:
            yield _line(kind, line, None, evidence)
    for host, lines in chain(evidence.logs.items(), evidence.kernel.items()):
        theirs = evidence.program and lines is evidence.logs.get(host)  # a program says what it likes; how it ended, _end knows
        for line in lines:
            if not (theirs and "slurmstepd" not in line) and (kind := sign(line)) is not None:
                yield _line(kind, line, host, evidence)


def _line(kind: str, line: str, host: str | None, evidence: Evidence) -> Symptom:
    label = LABEL.match(line)
    text = label[2] if label else line.strip()
    known = xid(text)
    task = int(label[1]) if label and "slurmstepd" not in text else None  # slurmstepd's lines carry a node's first task
    if "being killed" in text:
        task = evidence.largest
    rank = evidence.rank_of(host, task)
    if (pid := KILLED_PID.search(text)) and host is not None:
        rank = evidence.pids.get((host, int(pid[1])))
    return Symptom(kind, known or text, host, rank, task)


def _not_started(evidence: Evidence) -> Iterator[Symptom]:
    """Nodes whose tasks slurmstepd could not start; when it could on none, it is not the nodes."""
    found = {host: why for host in evidence.hosts if (why := not_started(evidence.logs.get(host, ()))) is not None}
    everywhere = len(found) == len(set(evidence.hosts))
    for host, why in found.items():
        if why.signal is not None and -why.signal in BY_SOMEBODY:
            yield Symptom("cancelled", f"{signal.Signals(why.signal).name} came while the container was made: {why.words}", host)
        elif everywhere:
            yield Symptom("user", f"{host}, like all nodes, could not start the ranks: {why.words}. {_mend(why)}", host)
        else:
            yield Symptom("unfit", f"slurmstepd could not start the ranks: {why.words}", host)


def _mend(why: TasksRefused) -> str:
    return IMAGE_REMEDY if why.lacks is None else LACKING_REMEDY


def _missing(evidence: Evidence) -> Iterator[Symptom]:
    """Nodes without the ranks' Python, or without a package; when all are, it is not the nodes.

    Ends that srun had asked for count too: it stops at the first, and whoever has no Python ends so all the same. What another
    program lacks it may lack on one rank alone, on all nodes, and its own rank has said whether it could be started.
    """
    if evidence.program:
        return
    found: dict[str, str] = {}
    for end in all_ends(evidence.srun):
        for task in end.tasks:
            rank = evidence.rank_of(end.host, task)
            lacks = end.code in CANNOT_START or NOT_INSTALLED.match(last_words(evidence.said_by(end.host, task)))
            if end.code is not None and lacks and _is_silent(end, rank, evidence):
                text = _with_last_words(ending(end.code), end.host, task, evidence)
                found.setdefault(end.host, f"{f'task {task}' if rank is None else f'rank {rank}'} {text}")
    everywhere = set(found) == set(evidence.hosts)
    for host, text in found.items():
        lacking = f"{host}, like all nodes, lacks what ranks need: {text}. {_bring(text)}"
        yield Symptom("user", lacking, host) if everywhere else Symptom("unfit", text, host)


def _bring(text: str) -> str:
    """What brings a thing that all nodes lack."""
    return CONTAINERS_REMEDY if re.search(r"(apptainer|singularity): (command )?not found", text) else REMEDY


def _step_cancelled(evidence: Evidence) -> Symptom | None:
    """That the step was ended, of a program of which nothing has failed: slurmstepd says it of all steps that srun ends, too."""
    lines = chain(evidence.srun, *evidence.logs.values()) if evidence.program else ()
    line = next((found[0] for found in map(STEP_CANCELLED.search, lines) if found), None)
    return None if line is None else Symptom("cancelled", f"{line}: somebody has ended its step (scancel)")


def _last_error(evidence: Evidence) -> Symptom | None:
    """The last line that looks like a Python error: of ranks, else of srun."""
    for host, lines in chain(evidence.logs.items(), ((None, evidence.srun),)):
        for line in reversed(lines):
            label = LABEL.match(line)
            if PYTHON_ERROR.match(label[2] if label else line):
                return _line("error", line, host, evidence)
    return None


def _unfit(evidence: Evidence) -> Iterator[Symptom]:
    """Nodes that ``node-start.sh`` refused; when all are, it is not the nodes."""
    found = [(match[1], match[2]) for line in evidence.srun if (match := REFUSED.match(line)) and match[1] in evidence.hosts]
    everywhere = {host for host, _ in found} == set(evidence.hosts)
    for host, text in found:
        yield Symptom("user" if everywhere else "unfit", f"{host}: {text}" if everywhere else text, host)
