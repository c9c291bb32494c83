"""What became of an emulated attempt, from how its ranks ended and what they wrote."""

from __future__ import annotations

from hpc_mp.base.exit_codes import ending
from hpc_mp.launch.backends.watch import Ended
from hpc_mp.launch.emulator.emulator import Exit
from hpc_mp.launch.emulator.slurm_env import node_name
from hpc_mp.layout.placement import Placement
from hpc_mp.rundir.follow import AttemptReader
from hpc_mp.rundir.outcome import STOPPED, Cause, Kind, State, first, reported


def judge(ended: Ended, attempt: AttemptReader, placement: Placement) -> tuple[State, Cause | None]:
    """The state of an emulated attempt, and its first cause when it failed."""
    words = attempt.failures()
    causes = [
        reported(words[end.rank], attempt) if end.rank in words else _silent(end, attempt, placement)
        for end in ended.exits if end.code not in (0, STOPPED) and not (end.ours and ended.asked)
    ]
    if ended.broken is not None:
        causes.append(Cause("launcher", ended.broken))
    cause = first(causes)
    if cause is not None and not (ended.asked and cause.kind == "peer"):
        return "failed", cause
    return ("stopped" if any(end.code for end in ended.exits) else "completed"), None


def _silent(end: Exit, attempt: AttemptReader, placement: Placement) -> Cause:
    """The end of a rank that wrote nothing about it."""
    node = node_name(placement.ranks[end.rank].node)
    kind: Kind = "hang" if end.ours else "signal" if end.code < 0 else "exit"
    words = attempt.last_words(end.rank)
    message = (f"rank {end.rank} on {node} {'did not end with the others' if end.ours else ending(end.code)}"
               + (f"; its last words: {words}" if words else ""))
    return Cause(kind, message, end.rank, node, str(attempt.run.rank_log(end.rank)), end.time)
