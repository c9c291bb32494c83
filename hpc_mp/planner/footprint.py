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
LOGITS, TILE = 1 << 26, 64  # logits that the loss computes at once, for rows whose number is a multiple of TILE
STEADY = ("1f1b", "interleaved_1f1b", *SPLIT)  # schedules whose first microbatches have the peak
ENDS = (EMBEDDING, HEAD, TIED)
# Places of moments -> actions: the end of a forward, and the same while the loss makes gradients; the backward of the loss, of the
# last block, of others, of the first one if it is the last backward of a step, and the end of that
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
    """Bytes of a chunk at one of ``PLACES``; those of other chunks, of gradients and of messages are added for a rank."""

    place: str
    activations: float
    gathered: float
    working: float
    logits: float = 0.0


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of a chunk: kept from F to B, kept from I to W, and of the hidden states that the next stage gets; its moments."""

    kept: float
    deferred: float
    message: int
    moments: list[Moment]


def footprint(layout: Layout, shape: ModelShape) -> tuple[Footprint, ...]:
    """Return the footprint of every rank of a pipeline, of the tensor rank with most state."""
    states, spans, degrees = state_bytes(layout, shape), stage_spans(layout.layers), layout.degrees
    (master, number), together = BYTES[layout.precision], blocks_together(layout.recompute) or 1
    of_kinds = [block_memory(layout, shape, shape.kinds.index(kind)) for kind in range(1 + max(shape.kinds))]
    blocks, results = [of_kinds[kind] for kind in shape.kinds], []
    few = min(layout.microbatches, 2 * degrees.pipeline) if layout.schedule in STEADY else layout.microbatches
    schedule = schedule_of(replace(layout, microbatches=few))
    for pipeline, actions in enumerate(schedule.ranks):
        units = Counter[str]()  # block, embedding or head -> its numbers, of which each rank keeps a share
        for unit in units_of(layout, shape, pipeline, 0).values():
            units[unit.block] += unit.padded * (unit.trained and unit.shards > 1)
        stages = {stage: _stage(layout, shape, spans[stage], blocks, units) for stage in schedule.stages_of(pipeline)}
        peak = [*map(int, max(_moments(layout, stages, actions, units), key=sum))]
        libraries = CONTEXT + BUFFERS * (1 + sum(size > 1 for size in astuple(degrees))) + int(GAPS * sum(peak[:4]))
        state = max((states[pipeline, tensor] for tensor in range(degrees.tensor)), key=lambda state: state.total)
        largest = [size for _, size in units.most_common(1 + together)]  # the state has them gathered, moments have their own
        parameters = state.parameters - number * (layout.zero == 3) * sum(largest)
        gradients = state.gradients - master * (layout.reduce == "microbatch") * sum(largest[:1])  # the same of a bucket
        results.append(Footprint(parameters, gradients, state.optimizer, *peak, libraries, state.host))
    return tuple(results)


def _moments(layout: Layout, stages: Mapping[int, StageMemory], actions: Sequence[Action],
             units: Counter[str]) -> Iterator[tuple[float, ...]]:
    """Yield the bytes of a rank at every moment: of activations, logits, gathered units, temporaries and messages."""
    end, master, others = layout.stages - 1, BYTES[layout.precision][0], _others(actions, stages, layout.offload_horizon)
    first, later = _gradients(layout, units, 0 in stages, end in stages)
    for stage, chunk in stages.items():
        for moment in chunk.moments:
            kind, numbers = PLACES[moment.place], later[moment.place]
            others_kept = 0.0 if moment.place in ("first block", "end") else others[kind, stage]
            if kind == "B":  # the first backward has most gradients at its end, when the chunk is gone
                numbers = max(numbers, first["blocks"] - chunk.kept / master)
            # a message is held until its arrival is known: that of a forward until its gradient comes
            sent = (others_kept / (chunk.kept or 1) if kind == "F" else 1.0) * (stage < end) + (stage > 0)
            working = moment.working + numbers * master
            yield others_kept + moment.activations, moment.logits, moment.gathered, working, sent * chunk.message


def _gradients(layout: Layout, units: Counter[str], first: bool, last: bool) -> tuple[dict[str, float], dict[str, float]]:
    """Return the numbers of gradients and sums under way at each place, in the first backward of a step, and in later ones.
    ``first``, ``last``: True if the rank has the first stage, the last stage."""
    blocks, ends, shards = [units[name] for name in units if name not in ENDS], sum(map(units.__getitem__, ENDS)), layout.shard_degree
    embedding, head, block = units[EMBEDDING] + units[TIED] * first, units[HEAD] + units[TIED] * last, max(blocks, default=0)
    if layout.reduce == "step":  # the state has whole gradients; sums of parts are made in the last backward
        rest = (ends + sum(blocks) - block - embedding) / shards
        before = rest - ((blocks_together(layout.recompute) or 1) - 1) * block / shards
        once = dict.fromkeys(PLACES, 0.0) | {"first block": before, "end": rest}
        return once, once
    buckets = min(len(blocks), 3 - (layout.degrees.expert > 1))  # a block's gradients, and those that are being reduced
    if layout.schedule in SPLIT:
        buckets = len(blocks) + 2 - last
    early = dict.fromkeys(PLACES, head + buckets * block + 2 * block / shards)
    early |= {"forward": 0.0, "loss's forward": head, "loss": head, "last block": head + block}
    if layout.schedule not in STEADY or layout.microbatches == 1:
        return early, early
    free = embedding + head + buckets * block  # buckets stay until the end of a step
    sums = {"last block": ends, "blocks": 2 * block, "first block": 2 * block, "end": 2 * block}
    return early, {place: free + sums.get(place, embedding + block) / shards for place in PLACES}


def _others(actions: Sequence[Action], stages: Mapping[int, StageMemory], horizon: int | None) -> dict[tuple[str, int], float]:
    """Return the bytes that other chunks keep at most during a forward, F, and a backward, B, of each stage."""
    held, most, plan = 0.0, dict[tuple[str, int], float](), Residency() if horizon is None else residency(actions, horizon)
    for action in (action for action in actions if action.kind in "FBIW"):
        chunk, key = stages[action.stage], (action.kind.replace("I", "B"), action.stage)
        held += sum(stages[stage].kept for stage, _ in plan.returns.get(action, ()))  # which come back to the device
        held -= {"F": 0.0, "W": chunk.deferred}.get(action.kind, chunk.kept)
        most[key] = max(most.get(key, 0.0), held)
        stays = (action.stage, action.microbatch) not in plan.away
        held += {"F": chunk.kept * stays, "I": chunk.deferred}.get(action.kind, 0.0)
    return most


def _stage(layout: Layout, shape: ModelShape, span: StageSpan, every: Sequence[tuple[PartMemory, PartMemory]],
           units: Counter[str]) -> StageMemory:
    """Return the memory of a stage. ``every``: the blocks of the model, each with its first norm. ``units``: of the rank."""
    together, lengths = blocks_together(layout.recompute), [shape.tokens_of(layer, layout.sequence) for layer in span.layers]
    sizes, (_, norm) = sizes_of(layout, shape, [layout.sequence, *lengths][-1]), every[-1]
    groups = blocks = [every[layer][0] for layer in span.layers]
    # the input of recomputed blocks is also what their first norm keeps, if that is in the compute format
    shared = sizes.own * (sizes.number == sizes.wide or norm.kept <= sizes.own)
    if together is not None:
        groups = [_recomputed(blocks[begin:begin + together], sizes.own, shared) for begin in range(0, len(blocks), together)]
    kept, deferred = sum(group.kept for group in groups), sum(group.deferred for group in groups)
    if shape.encoder:  # biases of scores, which an encoder's layers share, and a decoder's
        kept += sum(sizes.number * shape.heads // layout.degrees.tensor * length**2 for length in {*lengths})
    unit = sizes.number * (layout.zero == 3) * max((units[name] for name in units if name not in ENDS), default=0)
    moments = [Moment("forward", kept, unit * (together or 1), 4 * sizes.own + layout.sequence_parallel * sizes.all)]
    last = len(groups) - 1
    places = (("last block", last), ("blocks", max(0, last - 2)), ("blocks", 0), ("first block", 0), ("end", 0))
    for place, at in places if groups else ():
        gone = sum(group.kept - (layout.schedule in SPLIT) * group.deferred for group in groups[at + 1:])
        working = groups[at].peak - groups[at].kept
        if place == "end":  # only the first block of a group
            working = blocks[0].peak - (blocks[0].kept if together is None else shared)
        moments.append(Moment(place, kept - gone, unit * ((together or 1) + (at > 0)), working))  # one is gathered ahead
    chunk = StageMemory(kept, deferred, sizes.own, moments)
    return _with_loss(layout, shape, sizes, chunk, norm, units) if span.last else chunk


def _recomputed(blocks: Sequence[PartMemory], entering: int, shared: int) -> PartMemory:
    """Return the bytes of blocks that are recomputed together from their input, of which their first norm keeps ``shared``."""
    added = sum(block.kept for block in blocks) - shared + blocks[-1].peak - blocks[-1].kept
    return PartMemory(entering, entering + added, sum(block.deferred for block in blocks))


def _with_loss(layout: Layout, shape: ModelShape, sizes: Sizes, stage: StageMemory, norm: PartMemory,
               units: Counter[str]) -> StageMemory:
    """Return the memory of a last stage with the last norm, the head and the loss, given that of its blocks."""
    token, mixed, sequence = shape.hidden * sizes.number, sizes.number < sizes.wide, layout.sequence_parallel
    rows, width = sizes.tokens, -(-shape.vocabulary // layout.degrees.tensor)
    if shape.classes:  # the head is whole on every tensor rank, for its own tokens
        rows, width = sizes.own // token, shape.classes
    row, chunk = width * sizes.number, min(rows, LOGITS // width // TILE * TILE or LOGITS // width)  # bytes, rows at once
    last, several = (rows - 1) % chunk + 1, rows > chunk  # rows of the last chunk
    inputs, slopes, weight = rows * token, last * row, width * token * mixed  # hidden states, gradients of logits and weight
    arrays = 1 + 3 * mixed + (shape.model_type == "gemma2")  # of logits' size: also in fp32, and capped
    logits = max(chunk * row * (min(2, rows // chunk) + arrays), slopes * (1 + arrays) + chunk * row * several,
                 (2 * chunk * row + weight) * several)
    gathered, kept = sizes.number * (layout.zero == 3) * (units[HEAD] + units[TIED]), stage.kept + norm.kept + inputs
    forward = Moment("loss's forward" if several else "forward", kept, gathered, inputs - last * token + sequence * sizes.own, logits)
    loss = Moment("loss", kept, gathered, inputs + max(weight, 2 * inputs * sequence), slopes)
    moments = [*stage.moments, forward, loss, Moment("loss", stage.kept, gathered, norm.peak)]
    return StageMemory(kept + inputs + slopes, stage.deferred + inputs + slopes, stage.message, moments)
