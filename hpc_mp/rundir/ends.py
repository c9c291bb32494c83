"""The end of a rank that has written nothing about it, in the words of whoever saw it end and of its own log."""

from __future__ import annotations

import signal

from hpc_mp.base.exit_codes import ending
from hpc_mp.rundir.attempt import AttemptReader, last_words
from hpc_mp.rundir.failures import RankFailure, kind_of, kind_of_end
from hpc_mp.rundir.stacks import before_abort
from hpc_mp.rundir.tracebacks import last_error
from hpc_mp.rundir.watchdogs import thrown


def unsaid_end(
    attempt: AttemptReader, rank: int, node: str, code: int, time: float, *, program: bool = False, of_node: bool = False,
    ours: bool = False, at: tuple[tuple[str, int], ...] = (),
) -> RankFailure:
    """Why it ended: a traceback at the end of its log, if there is one, else its last words.

    Args:
        code: as ``subprocess`` gives it: negative for a signal.
        time: unix seconds.
        program: whether it was somebody's program, and not a rank of our own engine.
        of_node: whether it was the one command of a node, which numbers its ranks itself.
        ours: killed by a signal of ours, for it did not end with the others.
        at: its coordinates.
    """
    said = before_abort(attempt.last_lines(rank))
    error = last_error(said) if code > 0 and not ours else None
    if error is not None:
        kind, text, traceback = kind_of(error.text) or "error", error.words if of_node else str(error), error.traceback
    else:
        what = thrown(said) if code == -signal.SIGABRT and program else ""
        words = what or last_words(said)
        kind = "straggled" if ours else kind_of(what) or kind_of_end(code, program)
        text, traceback = "; ".join(filter(None, ("" if ours else ending(code), words and f"its last words: {words}"))), ""
    return RankFailure(rank, node, kind, text, time, attempt.number, place=at, traceback=traceback, of_node=of_node)
