"""What became of an emulated attempt, from how its ranks ended and what they wrote."""

from __future__ import annotations

from hpc_mp.base.exit_codes import ending
from hpc_mp.launch.backends.watch import Ended, Exit
from hpc_mp.launch.emulator.slurm_env import node_name
from hpc_mp.layout.placement import Placement
from hpc_mp.rundir.failures import RankFailure, coordinates, judged, kind_of_end, read_failures, write_failure
from hpc_mp.rundir.follow import AttemptReader
from hpc_mp.rundir.outcome import STOPPED, Cause, State, cause_of


def judge(ended: Ended, attempt: AttemptReader, placement: Placement) -> tuple[State, Cause | None]:
    """The state of an emulated attempt, and its cause when it failed. Ranks that ended without a word get a record."""
    run = attempt.run
    bad = [end for end in ended.exits if end.code not in (0, STOPPED) and not (end.ours and ended.asked)]
    known = {failure.rank for failure in read_failures(run, attempt.number)}
    for end in bad:
        if end.rank not in known:
            write_failure(run, _silent(end, attempt, placement))
    failure = judged(run, attempt.number, [node_name(node) for node in range(placement.nodes)]) if bad else None
    if failure is not None and not (ended.asked and failure.kind == "peer"):
        return "failed", cause_of(run, failure)
    if ended.broken is not None:
        return "failed", Cause("launcher", ended.broken)
    return ("stopped" if any(end.code for end in ended.exits) else "completed"), None


def _silent(end: Exit, attempt: AttemptReader, placement: Placement) -> RankFailure:
    """The end of a rank that wrote nothing about it."""
    place = placement.ranks[end.rank]
    words = attempt.last_words(end.rank)
    said = "" if end.ours else ending(end.code)
    return RankFailure(end.rank, node_name(place.node), "straggled" if end.ours else kind_of_end(end.code),
                       "; ".join(filter(None, (said, words and f"its last words: {words}"))), end.time, attempt.number,
                       place=coordinates(place))
