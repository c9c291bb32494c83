"""Memory of the ranks: stacked bars of the known parts, up to the peak, against the limit."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

from hpc_mp.base.text import BINARY, counted, memory_size, percent
from hpc_mp.job import JobSpec
from hpc_mp.layout.placement import Placement
from hpc_mp.report.axes import Scale, Tick, rounds
from hpc_mp.rundir.plan import ChunkCounts
from hpc_mp.rundir.records import RankMemory, RankTrace

WIDTH, HEIGHT = 1080, 240
LEFT, RIGHT, TOP, BOTTOM = 66, 10, 14, 24
MOST_BARS = 64
MOST_LABELS = 33
WIDEST = 64
LIMIT_WITHIN = 3  # the axis includes the limit unless it exceeds this multiple of the highest peak

STATE = (("parameters", "parameters"), ("gradients", "gradients"), ("optimizer", "optimizer state"))
KNOWN = (*STATE, ("activations", "activations kept for backwards"))
NAMES = dict(KNOWN) | {"rest": "the rest"}
REST = ("rest", "the rest up to the peak: working memory, buffers, libraries")


@dataclass(frozen=True, slots=True)
class _Held:
    """The content of a bar: the label beneath it, the first line of its hover text, and the bytes."""

    label: str
    heading: str
    memory: RankMemory

    @property
    def state(self) -> int:
        return sum(getattr(self.memory, kind) for kind, _ in STATE)

    @property
    def parts(self) -> list[tuple[str, int]]:
        """CSS class and bytes of each part, from the bottom up, without empty ones."""
        parts = [(kind, getattr(self.memory, kind)) for kind, _ in KNOWN]
        rest = self.memory.peak - sum(part for _, part in parts)
        return [(kind, part) for kind, part in (*parts, ("rest", rest)) if part > 0]


def memory(traces: Mapping[int, RankTrace], placement: Placement | None, spec: JobSpec | None = None,
           chunks: Sequence[ChunkCounts] = ()) -> SimpleNamespace | None:
    """Return the figure with one bar per rank, or one per stage beyond 64 ranks; None if no rank has reported its memory. ``per``
    is the unit of a bar, ``limit`` its pixel, None if it is above the axis or unknown. ``chunks``: chunk counts of every pipeline
    rank, from its schedule."""
    memories = {rank: trace.memory for rank, trace in sorted(traces.items()) if trace.memory is not None}
    if not memories:
        return None
    if len(memories) <= MOST_BARS or placement is None:
        per, held = "rank", [_Held(str(rank), f"rank {rank}", memory) for rank, memory in memories.items()]
    else:
        per, held = "stage (its fullest rank)", _by_stage(memories, placement)
    highest = max(max(bar.memory.peak, bar.state) for bar in held)
    limit = min(bar.memory.limit for bar in held)
    in_sight = 0 < limit <= LIMIT_WITHIN * highest
    y = Scale(0, 1.06 * max(highest, limit if in_sight else 0, 1), HEIGHT - BOTTOM, TOP)
    of_limit = f"{percent(highest / limit)} of the limit of {memory_size(limit)} per rank" if limit else "limit unknown"
    state = f"model state takes at most {memory_size(max(bar.state for bar in held))} of it"
    for where, elsewhere in (("in the host's memory", [bar.memory.host for bar in held]),
                             ("on a disk", [bar.memory.disk for bar in held])):
        state += f", and {memory_size(max(elsewhere))} more is {where}" if any(elsewhere) else ""
    present = {kind for bar in held for kind, _ in bar.parts}
    return SimpleNamespace(
        step=max(trace.step for trace in traces.values()),
        per=per,
        bars=_bars(held, y),
        ticks=_ticks(y),
        limit=y(limit) if in_sight else None,
        legend=tuple(entry for entry in (*KNOWN, REST) if entry[0] in present),
        words=f"the highest peak is {memory_size(highest)}, {of_limit}, {state}{_activations(spec, chunks)}",
    )


def _activations(spec: JobSpec | None, chunks: Sequence[ChunkCounts]) -> str:
    if spec is None or not chunks:
        return ""
    held, on_device, on_host = (max(getattr(counts, what) for counts in chunks) for what in ("held", "here", "away"))
    text = (f"; recompute is {spec.parallel.recompute}, and a rank has at most {counted(held, 'microbatch', 'microbatches')} "
            "between forward and backward")
    if spec.offload_horizon is None:
        return text
    return (f"{text}: at most {on_device} with activations on the device and {on_host} on the host (offload with a horizon of "
            f"{spec.offload_horizon})")


def _by_stage(memories: Mapping[int, RankMemory], placement: Placement) -> list[_Held]:
    stages: dict[int, list[int]] = {}
    for place in placement.ranks:
        if place.rank in memories:
            stages.setdefault(place.pp, []).append(place.rank)

    def held(stage: int, ranks: list[int]) -> _Held:
        by_peak = sorted(ranks, key=lambda rank: memories[rank].peak)
        heading = (f"stage {stage}: rank {by_peak[-1]}, the highest peak of {len(ranks)}\n"
                   f"the lowest: rank {by_peak[0]}, peak {memory_size(memories[by_peak[0]].peak)}")
        return _Held(f"stage {stage}", heading, memories[by_peak[-1]])

    return [held(stage, ranks) for stage, ranks in sorted(stages.items())]


def _bars(all_held: Sequence[_Held], y: Scale) -> tuple[SimpleNamespace, ...]:
    """Return the bars in pixels; the class of each piece is the kind of memory."""
    pitch = (WIDTH - LEFT - RIGHT) / len(all_held)
    width = min(0.8 * pitch, WIDEST)
    every = 1 + len(all_held) // MOST_LABELS

    def bar(i: int, held: _Held) -> SimpleNamespace:
        x = LEFT + pitch * (i + 0.5) - width / 2
        pieces, below = [], 0
        for kind, part in held.parts:
            pieces.append(SimpleNamespace(kind=kind, y=y(below + part), height=round(y(below) - y(below + part), 1)))
            below += part
        parts = [f"{NAMES[kind]}: {memory_size(part)}" for kind, part in held.parts]
        away = [f"activations on the host: {memory_size(held.memory.away)}"] if held.memory.away else []
        tip = "\n".join([held.heading, f"peak: {memory_size(held.memory.peak)}", *parts, *away])
        label = "" if i % every else held.label
        return SimpleNamespace(x=round(x, 1), width=round(width, 1), label=label, tip=tip, pieces=pieces)

    return tuple(bar(i, held) for i, held in enumerate(all_held))


def _ticks(y: Scale) -> tuple[Tick, ...]:
    """Return round numbers in the binary unit of the axis's upper end."""
    power = min((int(y.high).bit_length() - 1) // 10, len(BINARY) - 1)
    unit, name = 1024**power, BINARY[power]
    return tuple(Tick(y(value * unit), f"{value:g} {name}") for value in rounds(0, y.high / unit, 5))
