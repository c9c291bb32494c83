"""Memory of the ranks: stacked bars of what is known, up to the peak, against the limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpc_mp.placement import Placement
from hpc_mp.report.axes import Scale, Tick, rounds
from hpc_mp.report.facts import Memory, Trace
from hpc_mp.report.words import percent, size

WIDTH, HEIGHT = 1080, 250
LEFT, RIGHT, TOP, BOTTOM = 66, 10, 20, 34
MOST_BARS = 64
WIDEST = 64
LIMIT_WITHIN = 3  # the axis reaches up to the limit unless that is more than so many times the highest peak

PARTS = (("parameters", "parameters"), ("gradients", "gradients"), ("optimizer", "optimizer state"))
REST = ("rest", "the rest up to the peak: activations, buffers, libraries")


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a bar: its CSS class, and top and height in pixels."""

    kind: str
    y: float
    height: float


@dataclass(frozen=True, slots=True)
class Bar:
    """One rank, or the fullest rank of a stage."""

    x: float
    width: float
    label: str
    tip: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Chart:
    """``limit``: its pixel, None where it lies above the axis or is not known; ``note`` says so."""

    bars: tuple[Bar, ...]
    ticks: tuple[Tick, ...]
    limit: float | None
    legend: tuple[tuple[str, str], ...]
    note: str
    per: str


def memory(traces: Mapping[int, Trace], placement: Placement | None) -> Chart | None:
    """One bar per rank, or beyond 64 of them one per stage; None when no rank has said anything."""
    known = {rank: trace.memory for rank, trace in sorted(traces.items()) if trace.memory is not None}
    if not known:
        return None
    labelled, per = _bars(known, placement)
    highest = max(_height(held) for _, _, held in labelled)
    limit = min(held.limit for _, _, held in labelled)
    in_sight = 0 < limit <= LIMIT_WITHIN * highest
    y = Scale(0, 1.06 * max(highest, limit if in_sight else 0, 1), HEIGHT - BOTTOM, TOP)
    pitch = (WIDTH - LEFT - RIGHT) / len(labelled)
    width = min(0.8 * pitch, WIDEST)
    bars = tuple(_bar(label, tip, held, y, LEFT + pitch * (i + 0.5) - width / 2, width)
                 for i, (label, tip, held) in enumerate(labelled))
    used = f"the highest peak is {size(highest)}"
    note = f"{used}, {percent(highest / limit)} of a limit of {size(limit)} per rank" if limit else f"{used}; no limit is known"
    present = {piece.kind for bar in bars for piece in bar.pieces}
    return Chart(bars, _ticks(y), y(limit) if in_sight else None,
                 tuple(entry for entry in (*PARTS, REST) if entry[0] in present),
                 note + ("" if in_sight or not limit else " (above the picture)"), per)


def _bars(known: Mapping[int, Memory], placement: Placement | None) -> tuple[Sequence[tuple[str, str, Memory]], str]:
    """Label, heading of the hover text and bytes of every bar, and what a bar stands for."""
    if len(known) <= MOST_BARS or placement is None:
        return [(str(rank), f"rank {rank}", held) for rank, held in known.items()], "rank"
    stages: dict[int, list[int]] = {}
    for place in placement.ranks:
        if place.rank in known:
            stages.setdefault(place.pp, []).append(place.rank)
    bars = []
    for stage, ranks in sorted(stages.items()):
        fullest = max(ranks, key=lambda rank: known[rank].peak)
        least = min(known[rank].peak for rank in ranks)
        bars.append((f"stage {stage}", f"stage {stage}: rank {fullest}, the fullest of {len(ranks)} (the least: {size(least)})",
                     known[fullest]))
    return bars, "stage (its fullest rank)"


def _parts(held: Memory) -> list[tuple[str, str, int]]:
    """CSS class, name and bytes of every part, from the bottom up."""
    state = [(kind, name, getattr(held, kind)) for kind, name in PARTS]
    return [*state, ("rest", "the rest", max(0, held.peak - sum(part for _, _, part in state)))]


def _height(held: Memory) -> int:
    return sum(part for _, _, part in _parts(held))


def _bar(label: str, heading: str, held: Memory, y: Scale, x: float, width: float) -> Bar:
    pieces, below = [], 0
    for kind, _, part in _parts(held):
        if part:
            pieces.append(Piece(kind, y(below + part), round(y(below) - y(below + part), 1)))
        below += part
    tip = "\n".join([heading, *(f"{name}: {size(part)}" for _, name, part in _parts(held) if part), f"peak: {size(held.peak)}"])
    return Bar(round(x, 1), round(width, 1), label, tip, tuple(pieces))


def _ticks(y: Scale) -> tuple[Tick, ...]:
    """Round numbers of the binary unit that the top of the axis has."""
    unit = 1024 ** ((int(y.high).bit_length() - 1) // 10)
    return tuple(Tick(y(value * unit), size(value * unit)) for value in rounds(0, y.high / unit, 4))
