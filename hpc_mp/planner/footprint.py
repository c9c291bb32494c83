"""Bytes that a rank of the engine holds at the peak of a step, predicted from a layout and the shape of a model. No torch.

A rank holds its state (``planner/memory.py``), and what comes and goes: what the chunks in flight keep (a chunk is a microbatch on
a stage), unsharded parameters, gradients until they are summed, messages, temporaries. The peak is at one of a few moments of a
chunk. ``counted`` is what a dry run counts without dropout and compilation. ``libraries`` adds a CUDA context and NCCL's buffers,
as ``train/dry_run`` does, and for gaps 6 % of what comes and goes: nvidia-smi shows 5 to 9 GB beside sums (arXiv:2211.05100).
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace

from hpc_mp.layout.flat import EMBEDDING, HEAD, TIED, StageSpan, blocks_together, stage_spans
from hpc_mp.layout.layout import Layout
from hpc_mp.layout.models import ModelShape
from hpc_mp.layout.schedule import Action, Residency, residency
from hpc_mp.layout.schedule_of import schedule_of
from hpc_mp.planner.block_memory import SPLIT, PartMemory, Sizes, block_memory, sizes_of
from hpc_mp.planner.memory import BYTES, state_bytes, units_of

CONTEXT, GAPS = 1 << 30, 0.06  # bytes of a CUDA context; share of what comes and goes
BUFFERS = 32 * ((1 << 22) + 120 * 640 * 8 * 8 + 8 * 512 * 8 * 16)  # bytes of a communicator
LOGITS, TILE = 1 << 26, 64  # logits that a loss computes at once, of rows whose number is a multiple of TILE
STEADY = ("1f1b", "interleaved_1f1b", *SPLIT)  # schedules whose first microbatches have the peak
ENDS = (EMBEDDING, HEAD, TIED)
# Places of moments -> actions: the end of a forward, also with gradients of the loss; the backward of the loss, of the last block,
# of others, of the first one in the last backward of a step, and the end of that
PLACES = {"forward": "F", "loss's forward": "F", "loss": "B", "last block": "B", "blocks": "B", "first block": "B", "end": "B"}


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of a rank at its peak. ``working``: temporaries, recomputed blocks and gradients under way. ``host``: of state."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    gathered: int
    working: int
    messages: int
    libraries: int
    host: int

    @property
    def counted(self) -> int:
        return sum(astuple(self)[:-2])

    @property
    def total(self) -> int:
        return self.counted + self.libraries


@dataclass(frozen=True, slots=True)
class Moment:
    """Bytes of a chunk at one of ``PLACES``; the rank's gradients and messages, and other chunks, are not counted."""

    place: str
    activations: float
    gathered: float
    working: float
    logits: float = 0.0


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of a chunk: kept from F to B, from I to W, and of the hidden states that cross to the next stage; and its moments."""

    kept: float
    deferred: float
    message: int
    moments: tuple[Moment, ...]


def footprint(layout: Layout, shape: ModelShape) -> tuple[Footprint, ...]:
    """Return the footprint of every rank of a pipeline, of the tensor rank with most state."""
    states, spans, degrees = state_bytes(layout, shape), stage_spans(layout.layers), layout.degrees
    of_kinds = [block_memory(layout, shape, shape.kinds.index(kind)) for kind in range(1 + max(shape.kinds))]
    blocks, results = [of_kinds[kind] for kind in shape.kinds], []
    few = min(layout.microbatches, 2 * degrees.pipeline) if layout.schedule in STEADY else layout.microbatches
    schedule = schedule_of(replace(layout, microbatches=few))
    (master, number), together = BYTES[layout.precision], blocks_together(layout.recompute) or 1
    for pipeline, actions in enumerate(schedule.ranks):
        units = Counter[str]()  # block, embedding or head -> numbers of it that ranks share out
        for unit in units_of(layout, shape, pipeline, 0).values():
            units[unit.block] += unit.padded * (unit.trained and unit.shards > 1)
        stages = {stage: _stage(layout, shape, spans[stage], blocks, units) for stage in schedule.stages_of(pipeline)}
        peak = [*map(int, max(_rank_moments(layout, stages, actions, units), key=sum))]
        libraries = CONTEXT + BUFFERS * (1 + sum(size > 1 for size in astuple(degrees))) + int(GAPS * sum(peak[:4]))
        state = max((states[pipeline, tensor] for tensor in range(degrees.tensor)), key=lambda state: state.total)
        # the state has the largest units gathered, and one bucket of gradients; moments have their own
        largest = [size for _, size in units.most_common(1 + together)]
        gathered = number * sum(largest) * (layout.zero == 3)
        bucket = master * sum(largest[:1]) * (layout.reduce == "microbatch")
        results.append(Footprint(
            state.parameters - gathered, state.gradients - bucket, state.optimizer, *peak, libraries, state.host))
    return tuple(results)


def _rank_moments(layout: Layout, stages: Mapping[int, StageMemory], actions: Sequence[Action], units: Counter[str],
                  ) -> Iterator[tuple[float, ...]]:
    """Yield bytes at each moment of a rank's chunks: activations, logits, gathered units, temporaries and messages."""
    end, master, others = layout.stages - 1, BYTES[layout.precision][0], _others(actions, stages, layout.offload_horizon)
    first, later = _gradients(layout, units, 0 in stages, end in stages)
    for stage, memory in stages.items():
        for moment in memory.moments:
            kind, numbers = PLACES[moment.place], later[moment.place]
            held = 0.0 if moment.place in ("first block", "end") else others[kind, stage]  # of other chunks
            if kind == "B":  # the first backward has most buckets when its chunk is gone
                numbers = max(numbers, first["blocks"] - memory.kept / master)
            # what is sent is held until its arrival is known, a forward's output until its gradient comes
            sent = (held / (memory.kept or 1) if kind == "F" else 1.0) * (stage < end) + (stage > 0)
            yield (held + moment.activations, moment.logits, moment.gathered, moment.working + numbers * master,
                   sent * memory.message)


def _gradients(layout: Layout, units: Counter[str], first: bool, last: bool) -> tuple[dict[str, float], dict[str, float]]:
    """Return the numbers of gradients and sums under way at each place, in a step's first backward, and later. ``first``,
    ``last``: True if the rank has the first stage, the last one."""
    blocks, ends, shards = [units[name] for name in units if name not in ENDS], sum(units[name] for name in ENDS), layout.shard_degree
    embedding, head, block = units[EMBEDDING] + units[TIED] * first, units[HEAD] + units[TIED] * last, max(blocks, default=0)
    if layout.reduce == "step":  # whole gradients are of the state; only the last backward makes sums, of parts
        rest = (ends + sum(blocks) - block - embedding) / shards
        before = rest - ((blocks_together(layout.recompute) or 1) - 1) * block / shards
        once = dict.fromkeys(PLACES, 0.0) | {"first block": before, "end": rest}
        return once, once
    buckets = min(len(blocks), 3 - (layout.degrees.expert > 1))  # of a block's backward, and of reductions in flight
    if layout.schedule in SPLIT:  # a W has the gradients of all blocks
        buckets = len(blocks) + 2 - last
    early = dict.fromkeys(PLACES, head + buckets * block + 2 * block / shards)
    early |= {"forward": 0.0, "loss's forward": head, "loss": head, "last block": head + block}
    if layout.schedule not in STEADY or layout.microbatches == 1:
        return early, early
    free = embedding + head + buckets * block  # buckets of the step until now, which are used again
    sums = dict.fromkeys(PLACES, embedding + block) | dict.fromkeys(("blocks", "first block", "end"), 2 * block) | {"last block": ends}
    return early, {place: free + part / shards for place, part in sums.items()}


def _others(actions: Sequence[Action], stages: Mapping[int, StageMemory], horizon: int | None) -> dict[tuple[str, int], float]:
    """Return the bytes that other chunks keep at most during forwards, F, and backwards, B, of each stage."""
    plan = Residency() if horizon is None else residency(actions, horizon)
    held, most = 0.0, dict[tuple[str, int], float]()
    for action in (action for action in actions if action.kind in "FBIW"):
        stage, kind = stages[action.stage], action.kind.replace("I", "B")
        held += sum(stages[back].kept for back, _ in plan.returns.get(action, ()))  # chunks that come back from the host
        held -= {"F": 0.0, "B": stage.kept, "W": stage.deferred}[kind]
        most[kind, action.stage] = max(most.get((kind, action.stage), 0.0), held)
        stays = (action.stage, action.microbatch) not in plan.away
        held += {"F": stage.kept * stays, "I": stage.deferred}.get(action.kind, 0.0)
    return most


def _stage(layout: Layout, shape: ModelShape, span: StageSpan, every: Sequence[tuple[PartMemory, PartMemory]],
           units: Counter[str]) -> StageMemory:
    """Return the memory of a stage. ``every``: the blocks of the model, each with its first norm. ``units``: of the rank."""
    together, lengths = blocks_together(layout.recompute), [shape.tokens_of(layer, layout.sequence) for layer in span.layers]
    sizes, norm, blocks = sizes_of(layout, shape, [layout.sequence, *lengths][-1]), every[-1][1], [every[layer][0] for layer in span.layers]
    # the input of a recomputed group is also what its first norm keeps, unless that is another format
    shared = sizes.own * (sizes.number == sizes.wide or norm.kept <= sizes.own)
    groups = blocks if together is None else [
        _recomputed(blocks[begin:begin + together], sizes.own, shared) for begin in range(0, len(blocks), together)]
    kept, deferred = sum(group.kept for group in groups), sum(group.deferred for group in groups)
    if shape.encoder:  # the biases of scores, which layers with as many tokens share
        kept += sum(sizes.number * shape.heads // layout.degrees.tensor * length**2 for length in {*lengths})
    unit = sizes.number * (layout.zero == 3) * max((size for name, size in units.items() if name not in ENDS), default=0)
    moments = [Moment("forward", kept, unit * (together or 1), 4 * sizes.own + layout.sequence_parallel * sizes.all)]
    last = len(groups) - 1
    for place, at in (("last block", last), ("blocks", max(0, last - 2)), ("blocks", 0), ("first block", 0), ("end", 0)) if groups else ():
        behind = sum(group.kept - (layout.schedule in SPLIT) * group.deferred for group in groups[at + 1:])
        working = groups[at].peak - groups[at].kept
        if place == "end":
            working = blocks[0].peak - (blocks[0].kept if together is None else shared)
        moments.append(Moment(place, kept - behind, unit * ((together or 1) + (at > 0)), working))  # the next unit is prefetched
    memory = StageMemory(kept, deferred, sizes.own, moments)
    return _with_loss(layout, shape, sizes, memory, norm, units) if span.last else memory


def _recomputed(blocks: Sequence[PartMemory], entered: int, shared: int) -> PartMemory:
    """Return the bytes of blocks that are recomputed together, and keep their input of ``entered`` bytes, which ..."""
    again = sum(block.kept for block in blocks) - blocks[-1].kept + blocks[-1].peak
    return PartMemory(entered, entered + again - shared, sum(block.deferred for block in blocks))


def _with_loss(layout: Layout, shape: ModelShape, sizes: Sizes, stage: StageMemory, norm: PartMemory, units: Counter[str],
               ) -> StageMemory:
    """Return the memory of a last stage with the model's last norm, head and loss, given that of its blocks."""
    token = shape.hidden * sizes.number
    rows, width = (sizes.own // token, shape.classes) if shape.classes else (
        sizes.tokens, -(-shape.vocabulary // layout.degrees.tensor))
    chunk, row = min(rows, LOGITS // width // TILE * TILE or LOGITS // width), width * sizes.number  # rows; bytes of logits
    last, several, mixed = (rows - 1) % chunk + 1, rows > chunk, sizes.number < sizes.wide
    weight = width * token * mixed  # gradient of the head before it is added
    inputs, slopes = rows * token, last * row  # the head's input, or its gradient; gradients of the last chunk's logits
    copies = 1 + 3 * mixed + (shape.model_type == "gemma2")  # of logits ...
    scores = max(chunk * row * (min(2, rows // chunk) + copies), row*(last * (1 + copies) + chunk * several), (2 * chunk * row + weight) * several)
    gathered = sizes.number * (layout.zero == 3) * (units[HEAD] + units[TIED])
    kept, scattered = stage.kept + norm.kept + inputs, layout.sequence_parallel
    moments = (
        *stage.moments,
        Moment("loss's forward" if several else "forward", kept, gathered, inputs - last * token + scattered * sizes.own, scores),
        Moment("loss", kept, gathered, inputs + max(weight, 2 * inputs * scattered), slopes),
        Moment("loss", stage.kept, gathered, norm.peak))
    return StageMemory(kept + inputs + slopes, stage.deferred + inputs + slopes, stage.message, moments)
