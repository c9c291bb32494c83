"""Why a start of a run died: all findings, of which the one that explains the others is named.

When one rank dies, the others lose their peer, wait for it in vain, and are ended by srun: most of what is written then is
an echo. ``RULES`` holds the kinds of death, those that bring others about before those that are brought about.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from hpc_mp.base.exit_codes import ending
from hpc_mp.base.text import memory_size
from hpc_mp.rundir.outcome import STOPPED, Kind
from hpc_mp.supervisor.evidence import Evidence, Failure, gather
from hpc_mp.supervisor.log_patterns import (
    CANCELLED,
    CANNOT_START,
    JOB_CANCELLED,
    KILLED_PID,
    NODE_FAILURE,
    NOT_INSTALLED,
    PYTHON_ERROR,
    TaskEnd,
    all_ends,
    sign,
    task_ends,
    xid,
)

__all__ = ["RULES", "Death", "Rule", "classify", "gather"]


@dataclass(frozen=True, slots=True)
class Rule:
    """What follows from a kind of death.

    Attributes:
        says: what a rank, task, node or job of which it is found has done; empty where the evidence says it itself.
        retry: whether another start may go well: a fault of the machine, or one that nobody can tell from it.
        blames: whether the node of which it is found should be left out then.
        cause: the word for it in ``outcome.json``.
    """

    says: str
    retry: bool
    blames: bool
    cause: Kind


RULES: dict[str, Rule] = {
    "memory": Rule("ran out of memory", retry=False, blames=False, cause="error"),
    "hardware": Rule("has a hardware fault", retry=True, blames=True, cause="error"),
    "node": Rule("failed, says Slurm", retry=True, blames=True, cause="peer"),
    "unfit": Rule("is not fit for this run", retry=True, blames=True, cause="launcher"),
    "user": Rule("", retry=False, blames=False, cause="user"),
    "error": Rule("failed", retry=False, blames=False, cause="error"),
    "space": Rule("found no space", retry=False, blames=False, cause="error"),
    "signal": Rule("", retry=True, blames=False, cause="signal"),
    "ended": Rule("", retry=False, blames=False, cause="signal"),
    "exit": Rule("", retry=False, blames=False, cause="exit"),
    "cancelled": Rule("was ended by Slurm", retry=False, blames=False, cause="exit"),
    "lost": Rule("lost contact", retry=True, blames=True, cause="peer"),
    "hang": Rule("made no progress", retry=True, blames=False, cause="hang"),
    "network": Rule("had a network error", retry=True, blames=False, cause="peer"),
    "timeout": Rule("lost another rank", retry=True, blames=False, cause="peer"),
    "unknown": Rule("", retry=False, blames=False, cause="exit"),
}
ORDER = {kind: place for place, kind in enumerate(RULES)}

# Kinds of the ranks' own records. What an exception is about may say more: lack of memory, a broken GPU.
RECORDED = {"user": "user", "error": "error", "peer": "timeout", "lost": "lost", "hang": "hang", "memory": "memory"}
TOLD = frozenset({"memory", "hardware", "space", "network"})
BY_SOMEBODY = frozenset({-1, -2, -10, -12, -15, -24, -25})  # HUP, INT, USR1, USR2, TERM, and limits on CPU time and file size
KILLED = "SIGKILL"  # what the kernel sends where memory ends
REFUSED = re.compile(r"^(?:\d+: )?hpc-mp: (\S+): (?!warning: )(.+)$")  # of slurm/node-start.sh
REMEDY = "Name a Python that all nodes see, with hpc-mp in it, in slurm.python, slurm.venv or slurm.conda"
LABEL = re.compile(r"^\s*(\d+): (.*)$")


@dataclass(frozen=True, slots=True)
class Death:
    """Attributes:
    kind: a key of ``RULES``.
    message: one sentence with rank, host, coordinates and the evidence.
    nodes_to_blame: hosts that the next start should not get.
    retry: whether there should be a next start at all.
    cause, rank, node, log: for ``outcome.json``; None when it was no rank, or no node.
    """

    kind: str
    message: str
    nodes_to_blame: tuple[str, ...]
    retry: bool
    cause: Kind
    rank: int | None = None
    node: str | None = None
    log: Path | None = None


@dataclass(frozen=True, slots=True)
class Clue:
    """One finding. ``text`` is its evidence; ``lost``: hosts that did not answer; ``time``: unix seconds, where known."""

    kind: str
    text: str
    host: str | None = None
    rank: int | None = None
    task: int | None = None
    time: float = math.inf
    lost: tuple[str, ...] = ()


def classify(evidence: Evidence) -> Death:
    """The death that explains all that was found."""
    found = chain(_records(evidence), _srun(evidence), _nodes(evidence), _said(evidence), _unfit(evidence), _missing(evidence))
    clues = list(found) or [_last_error(evidence) or Clue("unknown", f"{ending(evidence.code)}, and {_srun_error(evidence)}")]
    if all(clue.kind == "timeout" for clue in clues):
        clues += _vanished(evidence)
    return _death(_located(min(clues, key=_precedence), clues, evidence), clues, evidence)


def _precedence(clue: Clue) -> tuple[int, bool, bool, float]:
    """Of clues to the same kind of death, one that names a rank tells more than one that names a host; then the earliest."""
    return ORDER[clue.kind], clue.rank is None, clue.host is None, clue.time


def _located(clue: Clue, clues: Sequence[Clue], evidence: Evidence) -> Clue:
    """Lack of memory is often told of a node or a job only: then it was the task that the kernel killed, if one was, else the
    largest there."""
    if clue.kind != "memory" or clue.rank is not None:
        return clue
    killed = next((other for other in clues if other.kind == "signal" and KILLED in other.text
                   and clue.host in (None, other.host)), None)
    if killed is not None and clue.task is None:
        return replace(clue, host=killed.host, rank=killed.rank, task=killed.task)
    ranks = evidence.ranks_on(clue.host)
    if len(ranks) == 1:
        return replace(clue, rank=ranks[0])
    held = {rank: evidence.resident[rank] for rank in ranks if rank in evidence.resident}
    if not held:
        return clue
    most = max(held, key=held.__getitem__)
    return replace(clue, rank=most, text=f"{clue.text}; of the {len(ranks)} ranks there it held most, {memory_size(held[most])}")


def _death(clue: Clue, clues: Sequence[Clue], evidence: Evidence) -> Death:
    rule = RULES[clue.kind]
    same = [other for other in clues if other.kind == clue.kind]
    blamed = (_lost(same, evidence.here) if clue.kind == "lost"
              else tuple(dict.fromkeys(other.host for other in same if other.host)) if rule.blames else ())
    message = " ".join(filter(None, (_who(clue, evidence), rule.says and f"{rule.says}:", clue.text)))
    if clue.kind == "user":
        message = clue.text
    elif clue.kind == "lost" and blamed:
        message = f"{'node' if len(blamed) == 1 else 'nodes'} {', '.join(blamed)} lost: {message}"
    log = evidence.run.node_log(clue.host) if evidence.run and clue.host else None
    return Death(clue.kind, message, blamed, rule.retry, rule.cause, clue.rank, clue.host, log)


def _lost(clues: Sequence[Clue], here: str | None) -> tuple[str, ...]:
    """Hosts that most hosts did not hear from. Both sides of a cut say so of each other: the side of ``here`` is right, for
    Slurm and this program are on it."""
    said = {(clue.host, host) for clue in clues for host in clue.lost}
    doubted = {host for by, host in said if by == here}
    votes = Counter(host for by, host in said if by not in doubted and host != here)
    return tuple(sorted(host for host, count in votes.items() if count == max(votes.values())))


def _who(clue: Clue, evidence: Evidence) -> str:
    place = evidence.places.get(clue.rank) if clue.rank is not None else None
    at = f" (dp {place.dp}, pp {place.pp}, tp {place.tp})" if place else ""
    on = f" on {clue.host}" if clue.host else ""
    if clue.rank is not None:
        return f"rank {clue.rank}{at}{on}"
    if clue.task is not None:
        return f"task {clue.task}{on}"
    if clue.host is None:
        return "the job"
    ranks = ", ".join(map(str, evidence.ranks_on(clue.host)))
    return f"node {clue.host}" + (f" (ranks {ranks})" if ranks else "")


def _records(evidence: Evidence) -> Iterator[Clue]:
    """What ranks wrote about their own end."""
    for failure in evidence.failures:
        kind = RECORDED.get(failure.kind, "error")
        told = sign(failure.message) if kind == "error" else None
        yield Clue(told if told in TOLD else kind, failure.message, failure.node, failure.rank, None, failure.time, failure.nodes)


def _srun(evidence: Evidence) -> Iterator[Clue]:
    """What srun says about the ends of tasks, and slurmstepd about the job's."""
    for end in task_ends(evidence.srun):
        yield from _end(end, evidence)
    for line in evidence.srun:
        if failed := NODE_FAILURE.search(line):
            yield Clue("node", line.strip(), failed[1] or failed[2])
        elif (cancelled := CANCELLED.search(line)) is not None:
            yield Clue("node" if cancelled[2].startswith("NODE FAILURE") else "cancelled", line.strip())
        elif JOB_CANCELLED.search(line):
            yield Clue("cancelled", line.strip())


def _end(end: TaskEnd, evidence: Evidence) -> Iterator[Clue]:
    for task in end.tasks:
        rank = evidence.rank_of(end.host, task)
        if end.code is None:
            yield Clue("memory", end.line.strip(), end.host, rank, task)
        elif end.code < 0:
            kind = "ended" if end.code in BY_SOMEBODY else "signal"
            yield Clue(kind, _with_last_words(ending(end.code), end.host, task, evidence), end.host, rank, task)
        elif _is_silent(end, rank, evidence):
            yield Clue("exit", _with_last_words(ending(end.code), end.host, task, evidence), end.host, rank, task)


def _is_silent(end: TaskEnd, rank: int | None, evidence: Evidence) -> bool:
    """Whether a task gave up without a record of why."""
    return end.code is not None and end.code > 0 and end.code != STOPPED and not any(
        _is_of(failure, end.host, rank) for failure in evidence.failures)


def _is_of(failure: Failure, host: str, rank: int | None) -> bool:
    return failure.node == host if rank is None else failure.rank == rank


def _with_last_words(text: str, host: str, task: int, evidence: Evidence) -> str:
    words = _last_words(host, task, evidence)
    return f"{text}; its last words: {words}" if words else text


def _last_words(host: str, task: int, evidence: Evidence) -> str:
    own = (found[2].strip() for line in reversed(evidence.logs.get(host, ()))
           if (found := LABEL.match(line)) and int(found[1]) == task and not found[2].startswith("slurmstepd"))
    return next(filter(None, own), "")


def _nodes(evidence: Evidence) -> Iterator[Clue]:
    """What Slurm thinks of the nodes."""
    for host, state in evidence.states.items():
        if state.startswith("down") or state.endswith("*"):  # the star: it does not answer
            yield Clue("node", f"its state is {state}", host)


def _srun_error(evidence: Evidence) -> str:
    """What srun itself complains of last."""
    said = (line for line in reversed(evidence.srun) if line.startswith(("srun: error:", "srun: fatal:")))
    return next((f"all that is known is {line!r}" for line in said), "nothing says why")


def _vanished(evidence: Evidence) -> Iterator[Clue]:
    """Hosts that neither a rank nor srun has a word of, when all others complain of lost peers: a node that went and came
    back at once, of which Slurm knows nothing."""
    if not evidence.failures or any(failure.kind != "peer" for failure in evidence.failures):
        return
    heard = {failure.node for failure in evidence.failures} | {end.host for end in all_ends(evidence.srun)}
    silent = tuple(host for host in evidence.hosts if host not in heard)
    if silent and 2 * len(silent) < len(evidence.hosts):
        yield Clue("lost", f"nothing was heard of {', '.join(silent)} when all others lost a peer", lost=silent)


def _said(evidence: Evidence) -> Iterator[Clue]:
    """What lines of logs speak of."""
    for line in evidence.srun:
        if (kind := sign(line)) is not None:
            yield _line(kind, line, None, evidence)
    for host, lines in chain(evidence.logs.items(), evidence.kernel.items()):
        for line in lines:
            if (kind := sign(line)) is not None:
                yield _line(kind, line, host, evidence)


def _line(kind: str, line: str, host: str | None, evidence: Evidence) -> Clue:
    label = LABEL.match(line)
    text = label[2] if label else line.strip()
    known = xid(text)
    task = int(label[1]) if label and "slurmstepd" not in text else None  # slurmstepd's lines carry a node's first task
    if "being killed" in text:
        task = evidence.largest
    rank = evidence.rank_of(host, task)
    if (pid := KILLED_PID.search(text)) and host is not None:
        rank = evidence.pids.get((host, int(pid[1])))
    return Clue(kind, known or text, host, rank, task)


def _missing(evidence: Evidence) -> Iterator[Clue]:
    """Nodes without the ranks' Python, or without a package; when all are, it is not the nodes.

    Ends that srun had asked for count too: it stops at the first, and whoever has no Python ends so all the same.
    """
    found: dict[str, str] = {}
    for end in all_ends(evidence.srun):
        for task in end.tasks:
            rank = evidence.rank_of(end.host, task)
            lacks = end.code in CANNOT_START or NOT_INSTALLED.match(_last_words(end.host, task, evidence))
            if end.code is not None and lacks and _is_silent(end, rank, evidence):
                text = _with_last_words(ending(end.code), end.host, task, evidence)
                found.setdefault(end.host, f"{f'task {task}' if rank is None else f'rank {rank}'} {text}")
    everywhere = set(found) == set(evidence.hosts)
    for host, text in found.items():
        yield Clue("user", f"{host}, like all nodes, lacks what ranks need: {text}. {REMEDY}", host) if everywhere else Clue(
            "unfit", text, host)


def _last_error(evidence: Evidence) -> Clue | None:
    """The last line that looks like a Python error: of ranks, else of srun."""
    for host, lines in chain(evidence.logs.items(), ((None, evidence.srun),)):
        for line in reversed(lines):
            label = LABEL.match(line)
            if PYTHON_ERROR.match(label[2] if label else line):
                return _line("error", line, host, evidence)
    return None


def _unfit(evidence: Evidence) -> Iterator[Clue]:
    """Nodes that ``node-start.sh`` refused; when all are, it is not the nodes."""
    found = [(match[1], match[2]) for line in evidence.srun if (match := REFUSED.match(line)) and match[1] in evidence.hosts]
    everywhere = {host for host, _ in found} == set(evidence.hosts)
    for host, text in found:
        yield Clue("user" if everywhere else "unfit", f"{host}: {text}" if everywhere else text, host)
