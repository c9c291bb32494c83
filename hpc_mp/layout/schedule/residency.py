"""Residency of activations while a schedule runs: on the device, or away in host memory.

A chunk (stage, microbatch) makes its activations in its F and needs them in its B or I; in between, a rank runs computations of
other chunks. With offload, the activations of a chunk with more than ``horizon`` computations in between are sent to host memory
after the F, and are prefetched when ``horizon`` computations remain before the B or I:

    horizon 1    F0  F1  F2  F3  B0  B1 …     chunk 0 goes after F0 and comes while F3 runs: it is away during F1 and F2
                                              chunk 1 goes after F1 and comes while B0 runs: it is away during F2 and F3
                                              chunk 3, with its B three computations later, is away during B0 and B1

So a chunk is away for the number of computations in between, minus the horizon. Data kept between I and W stays on the device.

The default of ``parallel.offload_horizon`` is one forward and one backward. In the steady state of 1F1B one chunk leaves and one
comes back in that time, which is three forwards long. A Llama block keeps some 34 bytes per token and hidden unit in 16-bit
formats and computes 24 × hidden operations: at hidden 8192 and 400 TFLOP/s, its copy at 25 GB/s takes 2.8 forwards, at 50 GB/s
1.4.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hpc_mp.layout.schedule.actions import COMPUTE, Action

Chunk = tuple[int, int]  # (stage, microbatch): one passage of a microbatch through a stage


@dataclass(frozen=True, slots=True)
class Residency:
    """The activations of a rank that leave the device, and the times of their prefetch. ``away``: the chunks that leave, after
    their F. ``returns``: a computation -> the chunks that are prefetched when it begins."""

    away: frozenset[Chunk] = frozenset()
    returns: Mapping[Action, tuple[Chunk, ...]] = field(default_factory=dict)


def distances(actions: Sequence[Action]) -> dict[Chunk, int]:
    """Return the number of other computations of the rank between the F of each chunk and its B or I."""
    begun: dict[Chunk, int] = {}
    between: dict[Chunk, int] = {}
    for place, action in enumerate(_computations(actions)):
        chunk = action.stage, action.microbatch
        if action.kind == "F":
            begun[chunk] = place
        elif action.kind in ("B", "I"):
            between[chunk] = place - begun[chunk] - 1
    return between


def residency(actions: Sequence[Action], horizon: int) -> Residency:
    """Return the residency for a rank that runs these actions, with or without messages and reductions."""
    computations = _computations(actions)
    away = frozenset(chunk for chunk, between in distances(actions).items() if between > horizon)
    returns: defaultdict[Action, list[Chunk]] = defaultdict(list)
    for place, action in enumerate(computations):
        if action.kind in ("B", "I") and (action.stage, action.microbatch) in away:
            returns[computations[place - horizon]].append((action.stage, action.microbatch))
    return Residency(away, {action: tuple(chunks) for action, chunks in returns.items()})


def peaks(actions: Sequence[Action], plan: Residency) -> tuple[int, int]:
    """Return the largest numbers of chunks with activations on the device, and in host memory, at once."""
    resident, away = set[Chunk](), set[Chunk]()
    most_resident = most_away = 0
    for action in _computations(actions):
        chunk, back = (action.stage, action.microbatch), plan.returns.get(action, ())
        resident.update(back)
        away.difference_update(back)
        leaves = action.kind == "F" and chunk in plan.away
        if action.kind == "F":
            resident.add(chunk)
        if leaves:
            away.add(chunk)
        most_resident, most_away = max(most_resident, len(resident)), max(most_away, len(away))
        if leaves or action.kind in ("B", "W"):
            resident.discard(chunk)
    return most_resident, most_away


def _computations(actions: Sequence[Action]) -> list[Action]:
    return [action for action in actions if action.kind in COMPUTE]
