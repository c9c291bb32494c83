"""The orders of computations, as pure functions of (rank, pipeline ranks P, microbatches M, stages per rank V).

Each returns the F, B, I and W of a rank; ``complete.py`` adds messages and reductions. ``docs/user/schedules.md`` describes what
each is good for.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count

from hpc_mp.layout.schedule.actions import Action, Kind, Schedule


def ordered(name: str, pipeline: int, microbatches: int, stages_per_rank: int) -> Schedule:
    """Return the computations of a schedule by its name. Stage s is on rank s % P. With ``zero_bubble_v`` the stages go down the
    ranks and back up: rank r has r and 2 P − 1 − r."""
    order, ranks = ORDERS[name], range(pipeline)
    placement = (*ranks, *reversed(ranks)) if order is zero_bubble_v else tuple(ranks) * stages_per_rank
    return Schedule(tuple(tuple(order(rank, pipeline, microbatches, stages_per_rank)) for rank in ranks), placement, microbatches)


def gpipe(rank: int, _: int, microbatches: int, __: int) -> list[Action]:
    """Return all forwards, then all backwards, both in microbatch order (Huang et al. 2019, arXiv:1811.06965)."""
    return _each("F", rank, microbatches) + _each("B", rank, microbatches)


def breadth_first(rank: int, pipeline: int, microbatches: int, stages_per_rank: int) -> list[Action]:
    """Return all forwards of a rank's first stage, then of its next stage, and so on; the backwards mirror the forwards.
    Lamy-Poirier 2022, arXiv:2211.05953. Data that is gathered or reduced once per stage crosses the network once per
    direction."""
    turns, all_of_them = range(stages_per_rank), range(microbatches)
    return (_by_stage("F", rank, pipeline, turns, [all_of_them])
            + _by_stage("B", rank, pipeline, turns[::-1], [all_of_them[::-1]]))


def one_f_one_b(rank: int, pipeline: int, microbatches: int, _: int) -> list[Action]:
    """Return Megatron's 1F1B: on rank r min(M, P − r − 1) forwards, then forward and backward in turn."""
    return _alternate(_each("F", rank, microbatches), _each("B", rank, microbatches), warmup=pipeline - rank - 1)


def interleaved_1f1b(rank: int, pipeline: int, microbatches: int, stages_per_rank: int) -> list[Action]:
    """Return 1F1B with V stages per rank, microbatches in rounds of P (Narayanan et al. 2021, arXiv:2104.04473). Rank r does 2 (P
    − r − 1) + (V − 1) P forwards first. M is a multiple of P."""
    rounds = [range(first, first + pipeline) for first in range(0, microbatches, pipeline)]
    turns = range(stages_per_rank)
    return _alternate(_by_stage("F", rank, pipeline, turns, rounds), _by_stage("B", rank, pipeline, turns[::-1], rounds),
                      warmup=2 * (pipeline - rank - 1) + (stages_per_rank - 1) * pipeline)


def zero_bubble(rank: int, pipeline: int, microbatches: int, _: int) -> list[Action]:
    """Return ZB-H1: 1F1B with split backwards; rank r delays every W by r microbatches (Qi et al. 2023, arXiv:2401.10241). The
    later a rank begins, the more of its Ws fill the wait for the last gradients. Each rank holds as much as the first rank in
    1F1B."""
    weights = iter(_each("W", rank, microbatches))
    actions: list[Action] = []
    for action in _alternate(_each("F", rank, microbatches), _each("I", rank, microbatches), warmup=pipeline - rank - 1):
        actions.append(action)
        if action.kind == "I" and action.microbatch >= rank:
            actions.append(next(weights))
    return [*actions, *weights]


def zero_bubble_v(rank: int, pipeline: int, microbatches: int, _: int) -> list[Action]:
    """Return ZB-V: split backwards and two stages per rank, the last beside the first (arXiv:2401.10241, section 6). The loss is
    on rank 0, so that its gradients come back while the ranks still fill. The order is made for at least 2 P − 1 microbatches;
    for fewer, the same order is used without the missing ones."""
    whole = max(microbatches, 2 * pipeline - 1)
    parts: tuple[Kind, ...] = ("F", "I", "W")
    f, i, w = (Action(kind, rank, 0) for kind in parts)  # of the stage on the way down the ranks
    up_f, up_i, up_w = (Action(kind, 2 * pipeline - 1 - rank, 0) for kind in parts)
    ahead, behind = pipeline - rank, rank
    filling = ahead + pipeline - 1  # forwards on the way down before the steady part
    steps = [f] * (2 * ahead - 1) + [up_f, f] * behind + [up_f, up_i, up_w] * ahead
    for turn in range(whole - pipeline):
        steps += [f] * (turn < whole - filling) + [i, w, up_f, up_i, up_w]
    steps += [i, up_i] * behind + [i, w] * ahead + [up_w] * behind + [w] * behind
    numbers = {step: count() for step in steps}
    numbered = (replace(step, microbatch=next(numbers[step])) for step in steps)
    return [action for action in numbered if action.microbatch < microbatches]


ORDERS: dict[str, Callable[[int, int, int, int], list[Action]]] = {
    "gpipe": gpipe,
    "simple": gpipe,
    "1f1b": one_f_one_b,
    "interleaved_1f1b": interleaved_1f1b,
    "breadth_first": breadth_first,
    "zero_bubble": zero_bubble,
    "zero_bubble_v": zero_bubble_v,
}


def _each(kind: Kind, stage: int, microbatches: int) -> list[Action]:
    return [Action(kind, stage, microbatch) for microbatch in range(microbatches)]


def _by_stage(kind: Kind, rank: int, pipeline: int, turns: Sequence[int], rounds: Sequence[Sequence[int]]) -> list[Action]:
    """Return for each round of microbatches the rank's stages in turn, ``rank + turn * pipeline``."""
    return [Action(kind, rank + turn * pipeline, microbatch) for some in rounds for turn in turns for microbatch in some]


def _alternate(forwards: list[Action], backwards: list[Action], warmup: int) -> list[Action]:
    """Return ``warmup`` forwards, then one forward and one backward in turn, then the remaining backwards."""
    steady = [action for pair in zip(forwards[warmup:], backwards, strict=False) for action in pair]
    return [*forwards[:warmup], *steady, *backwards[max(0, len(forwards) - warmup) :]]
