"""Bytes that a rank of the engine holds at the peak of a step, predicted from a layout and the shape of a model. No torch.

A rank holds its state (``planner/memory.py``), and what comes and goes: activations of the chunks in flight (a chunk is a microbatch
on a stage), gathered parameters, gradients on their way to sums, messages, and temporaries. The peak is at one of a few moments of
a chunk. ``counted`` is what a dry run counts without dropout and compilation. ``libraries`` adds a CUDA context and NCCL's buffers,
as in ``train/dry_run``, and gaps, 6 % of what comes and goes: nvidia-smi shows 5 to 9 GB beside sums (arXiv:2211.05100).
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace

from hpc_mp.layout.flat import EMBEDDING, HEAD, TIED, StageSpan, blocks_together, stage_spans
from hpc_mp.layout.layout import Layout
from hpc_mp.layout.models import ModelShape
from hpc_mp.layout.schedule import Action, Residency, residency
from hpc_mp.layout.schedule_of import schedule_of
from hpc_mp.planner.block_memory import SPLIT, PartMemory, Sizes, block_memory
from hpc_mp.planner.memory import BYTES, state_bytes, units_of

CONTEXT, GAPS = 1 << 30, 0.06  # bytes of a CUDA context; share of what comes and goes
BUFFERS = 32 * ((1 << 22) + 120 * 640 * 8 * 8 + 8 * 512 * 8 * 16)  # bytes of a communicator
LOGITS, TILE = 1 << 26, 64  # logits that the loss computes at once, and what the number of their rows is a multiple of
STEADY = ("1f1b", "interleaved_1f1b", *SPLIT)  # schedules whose first microbatches have the peak
# Place of a moment -> action. "head": a forward's end, if it makes gradients of the head. "end": that of a step's last backward
PLACES = {"forward": "F", "head": "F", "loss": "B", "last block": "B", "blocks": "B", "first block": "B", "end": "B"}
ENDS = (EMBEDDING, HEAD, TIED)
Units = Counter[str]  # a block, or one of ENDS -> numbers of it that a rank gathers, and of whose gradients it keeps a share


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
    """Bytes of a chunk at one of ``PLACES``, without gradients and messages."""

    place: str
    activations: float
    gathered: float
    working: float
    logits: float = 0.0


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes of a microbatch on a stage: kept from F to B, from I to W, and those that cross to the next stage; and its moments."""

    kept: float
    deferred: float
    message: int
    moments: list[Moment]


def footprint(layout: Layout, shape: ModelShape) -> tuple[Footprint, ...]:
    """Return the footprint of every rank of a pipeline, of the tensor rank with most state."""
    states, spans, degrees = state_bytes(layout, shape), stage_spans(layout.layers), layout.degrees
    (master, number), together = BYTES[layout.precision], blocks_together(layout.recompute) or 1
    of_kinds = [block_memory(layout, shape, shape.kinds.index(kind)) for kind in range(1 + max(shape.kinds))]
    blocks, norm, results = [of_kinds[kind][0] for kind in shape.kinds], of_kinds[shape.kinds[-1]][1], []
    few = 2 * degrees.pipeline if layout.schedule in STEADY else layout.microbatches
    schedule = schedule_of(replace(layout, microbatches=min(few, layout.microbatches)))
    for pipeline, actions in enumerate(schedule.ranks):
        units = Units()
        for unit in units_of(layout, shape, pipeline, 0).values():
            units[unit.block] += unit.padded * (unit.trained and unit.shards > 1)
        chunks = {stage: _chunk(layout, shape, spans[stage], blocks, norm, units) for stage in schedule.stages_of(pipeline)}
        peak = [*map(int, max(_moments(layout, chunks, actions, units), key=sum))]
        libraries = CONTEXT + BUFFERS * (1 + sum(size > 1 for size in astuple(degrees))) + int(GAPS * sum(peak[:4]))
        state = max((states[pipeline, tensor] for tensor in range(degrees.tensor)), key=lambda state: state.total)
        largest = [size for _, size in units.most_common(1 + together)]  # in the state they are gathered, as in moments
        parameters = state.parameters - number * (layout.zero == 3) * sum(largest)
        gradients = state.gradients - master * (layout.reduce == "microbatch") * sum(largest[:1])
        results.append(Footprint(*[parameters, gradients, state.optimizer, *peak, libraries, state.host]))
    return tuple(results)


def _moments(layout: Layout, chunks: Mapping[int, Chunk], actions: Sequence[Action], units: Units) -> Iterator[tuple[float, ...]]:
    """Yield a rank's bytes at each moment: of activations, logits, gathered units, temporaries with gradients, and messages."""
    end, master, others = layout.stages - 1, BYTES[layout.precision][0], _others(actions, chunks, layout.offload_horizon)
    gradients, first = _gradients(layout, units, 0 in chunks, end in chunks)
    for stage, chunk in chunks.items():
        for moment in chunk.moments:
            kind, numbers = PLACES[moment.place], gradients[moment.place]
            if kind == "B":
                numbers = max(numbers, first - chunk.kept / master)
            held = 0.0 if moment.place in ("first block", "end") else others[kind, stage]
            # a message is held until its arrival is known: that of a forward until its gradient comes
            sent = (held / (chunk.kept or 1) if kind == "F" else 1.0) * (stage < end) + (stage > 0)
            working = moment.working + numbers * master
            yield held + moment.activations, moment.logits, moment.gathered, working, sent * chunk.message


def _gradients(layout: Layout, units: Units, has_first: bool, has_last: bool) -> tuple[dict[str, float], float]:
    """Return the numbers of gradients and sums under way at each place, and at the end of a step's first backward, when its chunk
    is gone. ``has_first``, ``has_last``: True if the rank has the first stage, the last one."""
    blocks, ends, shards = [units[name] for name in {*units} - {*ENDS}], sum(units[name] for name in ENDS), layout.shard_degree
    block, embedding = max(blocks, default=0), units[EMBEDDING] + units[TIED] * has_first
    head = units[HEAD] + units[TIED] * has_last
    if layout.reduce == "step":  # the state has all gradients; the last backward makes sums of shares
        rest = (ends + sum(blocks) - block - embedding) / shards
        before = rest - ((blocks_together(layout.recompute) or 1) - 1) * block / shards
        return dict.fromkeys(PLACES, 0.0) | {"first block": before, "end": rest}, 0.0
    buckets = min(len(blocks), 3 - (layout.degrees.expert > 1))  # of a block's backward, and of two sums under way
    if layout.schedule in SPLIT:  # a W has those of all blocks
        buckets = len(blocks) + 2 - has_last
    first = head + buckets * block + 2 * block / shards
    if layout.schedule in STEADY and layout.microbatches > 1:  # later backwards, which find the buckets of earlier ones
        sums = dict.fromkeys(("forward", "head", "loss"), embedding + block) | {"last block": ends}
        return {place: embedding + head + buckets * block + sums.get(place, 2 * block) / shards for place in PLACES}, first
    return dict.fromkeys(PLACES, first) | {"forward": 0.0, "head": head, "loss": head, "last block": head + block}, first


def _others(actions: Sequence[Action], chunks: Mapping[int, Chunk], horizon: int | None) -> dict[tuple[str, int], float]:
    """Return the bytes that other chunks keep at most during a forward, F, and a backward, B, of each stage."""
    held, most, plan = 0.0, dict[tuple[str, int], float](), Residency() if horizon is None else residency(actions, horizon)
    for action in (action for action in actions if action.kind in "FBIW"):
        chunk, key = chunks[action.stage], (action.kind.replace("I", "B"), action.stage)
        held += sum(chunks[stage].kept for stage, _ in plan.returns.get(action, ()))  # come back from the host
        held -= {"F": 0.0, "W": chunk.deferred}.get(action.kind, chunk.kept)
        most[key] = max(most.get(key, 0.0), held)
        stays = (action.stage, action.microbatch) not in plan.away
        held += {"F": chunk.kept * stays, "I": chunk.deferred}.get(action.kind, 0.0)
    return most


def _chunk(layout: Layout, shape: ModelShape, span: StageSpan, every: list[PartMemory], norm: PartMemory, units: Units) -> Chunk:
    """Return the bytes of a microbatch on a stage. ``every``: the blocks of the model. ``norm``: its last norm."""
    lengths, together = [shape.tokens_of(layer, layout.sequence) for layer in span.layers], blocks_together(layout.recompute)
    sizes, split = Sizes.of(layout, shape, [layout.sequence, *lengths][-1]), layout.schedule in SPLIT
    groups = blocks = [every[layer] for layer in span.layers]
    shared = sizes.own * (sizes.number == sizes.wide or norm.kept <= sizes.own)  # the input of blocks, if their first norm keeps it
    if together is not None:  # groups that are recomputed from their input
        groups = []
        for group in (blocks[begin:begin + together] for begin in range(0, len(blocks), together)):
            again = sum(block.kept for block in group) - shared + group[-1].peak - group[-1].kept
            groups.append(PartMemory(sizes.own, sizes.own + again, sum(block.deferred for block in group)))
    kept, deferred = sum(group.kept for group in groups), sum(group.deferred for group in groups)
    if shape.encoder:  # biases of scores, one for all layers with as many tokens
        kept += sum(sizes.number * shape.heads // layout.degrees.tensor * length**2 for length in {*lengths})
    unit = sizes.number * (layout.zero == 3) * max((units[name] for name in {*units} - {*ENDS}), default=0)
    moments = [Moment("forward", kept, unit * (together or 1), 4 * sizes.own + layout.sequence_parallel * sizes.all)]
    last = len(groups) - 1
    places = ("last block", last), ("blocks", max(0, last - 2)), ("blocks", 0), ("first block", 0), ("end", 0)
    for place, at in places if groups else ():
        gone = sum(group.kept - split * group.deferred for group in groups[at + 1:])
        working = groups[at].peak - groups[at].kept
        if place == "end":  # of the first block alone
            working = blocks[0].peak - (blocks[0].kept if together is None else shared)
        moments.append(Moment(place, kept - gone, unit * ((together or 1) + (at > 0)), working))  # another is gathered ahead
    chunk = Chunk(kept, deferred, sizes.own, moments)
    return _with_loss(layout, shape, sizes, chunk, norm, units) if span.last else chunk


def _with_loss(layout: Layout, shape: ModelShape, sizes: Sizes, chunk: Chunk, norm: PartMemory, units: Units) -> Chunk:
    """Return the bytes of a microbatch on a last stage, given those of its blocks. The loss is computed for some rows at once."""
    token, mixed, sequence = shape.hidden * sizes.number, sizes.number < sizes.wide, layout.sequence_parallel
    rows, width = sizes.tokens, -(-shape.vocabulary // layout.degrees.tensor)
    if shape.classes:  # every tensor rank has the whole head
        rows, width = sizes.own // token, shape.classes
    row, once = width * sizes.number, min(rows, LOGITS // width // TILE * TILE or LOGITS // width)  # bytes, rows at once
    last, several = (rows - 1) % once + 1, rows > once  # number of the last rows
    inputs, slopes, weight = rows * token, last * row, width * token * mixed  # of the head; gradients of last logits, weight
    arrays = 1 + 3 * mixed + (shape.model_type == "gemma2")  # of logits' size: also in fp32, and capped
    logits = max(once * row * (min(2, rows // once) + arrays), slopes * (1 + arrays) + once * row * several,
                 (2 * once * row + weight) * several)
    gathered, kept = sizes.number * (layout.zero == 3) * (units[HEAD] + units[TIED]), chunk.kept + norm.kept + inputs
    return Chunk(kept + inputs + slopes, chunk.deferred + inputs + slopes, chunk.message, [
        *chunk.moments,
        Moment("head" if several else "forward", kept, gathered, inputs - last * token + sequence * sizes.own, logits),
        Moment("loss", kept, gathered, inputs + max(weight, 2 * inputs * sequence), slopes),
        Moment("loss", chunk.kept, gathered, norm.peak)])
