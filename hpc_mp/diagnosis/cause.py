"""The failure that explains the others, found in the records that the ranks of an attempt wrote."""

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.files import read_json
from hpc_mp.diagnosis.waits import Awaited, awaited
from hpc_mp.layout.placement import RankPlace, from_dict
from hpc_mp.rundir import RunDirectory, history
from hpc_mp.rundir.failures import ECHO, KINDS, RankFailure, announced, coordinates, precedence, read_failures
from hpc_mp.rundir.outcome import Cause, verdict
from hpc_mp.rundir.standings import Standing, read_standings


def cause(run: RunDirectory, attempt: int | None = None) -> Cause | None:
    """Return the cause of an attempt's failure: from its verdict, else from its records; None without a failure."""
    number = run.attempt() if attempt is None else attempt
    outcome = verdict(run, number)
    if outcome is not None:
        return outcome.cause
    with suppress(OSError, KeyError, TypeError):  # a broken history: the records still exist
        for end in reversed(history.history(run)):
            if end.attempt == number and end.kind in KINDS:
                return Cause(end.kind, end.message, end.rank, end.node, time=end.time)
    failure = judged(run, number)
    return None if failure is None else cause_of(run, failure)


def cause_of(run: RunDirectory, failure: RankFailure) -> Cause:
    """Return a rank's failure as the cause of the run's failure."""
    log, by_node = run.rank_log(failure.rank), run.node_log(failure.node)
    rank = failure.inner if failure.of_node else failure.rank
    return Cause(failure.kind, str(failure), rank, failure.node or None, str(by_node if by_node.exists() else log), failure.time)


def root_cause(failures: Sequence[RankFailure], standings: Iterable[Standing], places: Sequence[RankPlace],
               nodes: Sequence[str]) -> RankFailure | None:
    """Return the failure that explains the others; None without any. ``failures``: failures of ranks whose end is known;
    ``standings``: positions of ranks that were stalled when last seen. ``places``: places of all ranks; ``nodes``: the name of
    every node of the placement."""
    first = min(failures, key=lambda failure: precedence(failure.kind, failure.time), default=None)
    if first is not None and KINDS[first.kind].level < ECHO:
        return first
    stood = {standing.rank: standing for standing in standings}
    stood |= {failure.rank: failure.standing for failure in failures if failure.standing}
    given_up = min((failure.time for failure in failures if failure.kind in ("hang", "lost")), default=math.inf)
    stood = {rank: standing for rank, standing in stood.items() if standing.since < given_up}  # a later mover was waited for
    end = awaited(stood.values(), [place.rank for place in places] or list(stood))
    return first if end is None else _awaited(end, {failure.rank: failure for failure in failures}, stood, places, nodes)


def _awaited(end: Awaited, failures: dict[int, RankFailure], stood: dict[int, Standing], places: Sequence[RankPlace],
             nodes: Sequence[str]) -> RankFailure:
    """Return the failure of the rank that all others waited for, even if it could not write a record."""
    own, standing = failures.get(end.rank), None if end.silent else stood.get(end.rank)
    at = next((place for place in places if place.rank == end.rank), None)
    node = own.node if own else nodes[at.node] if at and at.node < len(nodes) else ""
    others = f"rank{'s' if len(end.by) > 1 else ''} {', '.join(map(str, end.by))} waited for it"
    accusers = [failure for failure in failures.values() if failure.kind == "lost" and node in failure.nodes]
    if own is not None and own.kind not in ("straggled", "peer"):
        kind, text = own.kind, own.message
    elif accusers:
        kind, text = "lost", accusers[0].message
    elif standing is not None:
        kind, text = "hang", str(standing)
    else:
        kind, text = "silent", "it was stopped, is gone, or is stuck in native code"
    moment = own.time if own else max([*(entry.time for entry in stood.values()), *(entry.time for entry in failures.values())])
    position = coordinates(at) if at else own.place if own else ()
    blamed = accusers[0].nodes if accusers and kind == "lost" else own.nodes if own else ()
    return RankFailure(end.rank, node, kind, f"{text}; {others}", moment, place=position, nodes=blamed, standing=standing,
                       traceback=own.traceback if own and kind == own.kind else "")


def judged(run: RunDirectory, attempt: int, nodes: Sequence[str] | None = None) -> RankFailure | None:
    """Return the failure that explains an attempt, from the records of its ranks; None without records. ``nodes``: the name of
    every node of the placement; None: the names that the ranks announced."""
    try:
        places: Sequence[RankPlace] = from_dict(read_json(run.of_attempt(attempt).placement)).ranks
    except (OSError, ValueError, TypeError, AttributeError, HpcMpError):  # the failure records exist anyway
        places = ()
    return root_cause(read_failures(run, attempt), read_standings(run, attempt), places,
                      nodes if nodes is not None else _nodes(run, attempt, places))


def _nodes(run: RunDirectory, attempt: int, places: Sequence[RankPlace]) -> list[str]:
    """Return the names of the nodes, each as announced by its ranks."""
    names_given = {line["rank"]: str(line.get("node", "")) for line in announced(run) if line["attempt"] == attempt}
    names = {place.node: names_given[place.rank] for place in places if names_given.get(place.rank)}
    return [names.get(node, f"node{node}") for node in range(max((place.node for place in places), default=-1) + 1)]
