"""Bytes that a rank of the engine holds at the peak of a step, predicted from a layout and the shape of a model. No torch.

A rank has its state (``planner/memory.py``) and what comes and goes: activations, logits, gathered parameters, temporaries,
gradients that are not summed yet, and messages. The peak is the largest of a few moments of each stage's forward and backward.
``counted`` is what a dry run counts without dropout and compilation. ``libraries`` adds a CUDA context, NCCL's buffers as in
``train/dry_run``, and for gaps 6 % of what comes and goes: nvidia-smi shows 5 to 9 GB beside sums (arXiv:2211.05100).
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
STEADY = ("1f1b", "interleaved_1f1b", *SPLIT)  # schedules whose first 2 microbatches for each pipeline rank have the peak
# Place of a moment -> its action: the end of a forward, also with the first gradients of the head; the backward of the loss, of
# the last block, and of others; the backward of the first block, and its end, if no other chunk is left
PLACES = {"forward": "F", "head": "F", "loss": "B", "last block": "B", "blocks": "B", "first block": "B", "end": "B"}
ENDS = (EMBEDDING, HEAD, TIED)
Units = Counter[str]  # a block, or one of ENDS -> its numbers, if ranks share them out


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
    """Bytes at one of ``PLACES``: of a chunk, or of a rank with all its chunks, gradients and messages."""
    place: str
    activations: float
    logits: float
    gathered: float
    working: float
    messages: float = 0.0


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes of a microbatch on a stage: kept from F to B, kept from I to W, and of a message to another stage; and its moments."""
    kept: float
    deferred: float
    message: int
    moments: list[Moment]


def footprint(layout: Layout, shape: ModelShape) -> tuple[Footprint, ...]:
    """Return the footprint of every rank of a pipeline, of the tensor rank with most state."""
    states, spans, results = state_bytes(layout, shape), stage_spans(layout.layers), []
    master, number = BYTES[layout.precision]
    of_kinds = [block_memory(layout, shape, shape.kinds.index(kind)) for kind in range(1 + max(shape.kinds))]
    blocks, (_, norm) = [of_kinds[kind][0] for kind in shape.kinds], of_kinds[shape.kinds[-1]]
    few = 2 * layout.degrees.pipeline if layout.schedule in STEADY else layout.microbatches
    schedule = schedule_of(replace(layout, microbatches=min(few, layout.microbatches)))
    for pipeline, actions in enumerate(schedule.ranks):
        units = Units()
        for unit in units_of(layout, shape, pipeline, 0).values():
            units[unit.block] += unit.padded * (unit.trained and unit.shards > 1)
        chunks = {stage: _chunk(layout, shape, spans[stage], blocks, norm, units) for stage in schedule.stages_of(pipeline)}
        peak = max(_moments(layout, chunks, actions, units), key=lambda moment: sum(astuple(moment)[1:]))
        lines = [*map(int, astuple(peak)[1:])]
        communicators = 1 + sum(size > 1 for size in astuple(layout.degrees))
        libraries = CONTEXT + BUFFERS * communicators + int(GAPS * sum(lines[:4]))
        state = max((states[pipeline, tensor] for tensor in range(layout.degrees.tensor)), key=lambda state: state.total)
        # the state has the largest units gathered, and a bucket for their gradients; moments have them too
        largest = [size for _, size in units.most_common(1 + (blocks_together(layout.recompute) or 1))]
        parameters = state.parameters - number * (layout.zero == 3) * sum(largest)
        gradients = state.gradients - master * (layout.reduce == "microbatch") * sum(largest[:1])
        results.append(Footprint(*[parameters, gradients, state.optimizer, *lines, libraries, state.host]))
    return tuple(results)


def _moments(layout: Layout, chunks: Mapping[int, Chunk], actions: Sequence[Action], units: Units) -> Iterator[Moment]:
    """Yield the moments of a rank with these units, and a chunk of each of its stages."""
    end, master = layout.stages - 1, BYTES[layout.precision][0]
    others, (gradients, first) = _others(actions, chunks, layout.offload_horizon), _gradients(layout, units, 0 in chunks, end in chunks)
    for stage, chunk in chunks.items():
        for moment in chunk.moments:
            kind, place = PLACES[moment.place], moment.place
            held = 0.0 if place in ("first block", "end") else others[kind, stage]
            numbers = max(gradients[place], first - chunk.kept / master if kind == "B" else 0.0)
            # a message is held until its arrival is known: a forward's until its gradient comes
            sent = (held / (chunk.kept or 1) if kind == "F" else 1.0) * (stage < end) + (stage > 0)
            yield replace(moment, activations=held + moment.activations, working=moment.working + numbers * master, messages=sent * chunk.message)


def _gradients(layout: Layout, units: Units, first: bool, last: bool) -> tuple[dict[str, float], float]:
    """Return the numbers of gradients and sums under way at each place, and at the end of a step's first backward, when its chunk is gone."""
    blocks, ends, shards = [units[name] for name in {*units} - {*ENDS}], sum(units[name] for name in ENDS), layout.shard_degree
    block, embedding, head = max(blocks, default=0), units[EMBEDDING] + units[TIED] * first, units[HEAD] + units[TIED] * last
    if layout.reduce == "step":  # the state has all gradients; the last backward makes sums of shares
        rest = (ends + sum(blocks) - block - embedding) / shards
        before = rest - ((blocks_together(layout.recompute) or 1) - 1) * block / shards
        return dict.fromkeys(PLACES, 0.0) | {"first block": before, "end": rest}, 0.0
    # buckets of a block: those of all blocks until a W; or of the backward's block, and of two sums under way
    buckets = len(blocks) + 2 - last if layout.schedule in SPLIT else min(len(blocks), 3 - (layout.degrees.expert > 1))
    most = head + buckets * block + 2 * block / shards
    if layout.schedule in STEADY and layout.microbatches > 1:  # later backwards find the buckets of earlier ones
        sums = dict.fromkeys(("forward", "head", "loss"), embedding + block) | {"last block": ends}
        return {place: embedding + head + buckets * block + sums.get(place, 2 * block) / shards for place in PLACES}, most
    return dict.fromkeys(PLACES, most) | {"forward": 0.0, "head": head, "loss": head, "last block": head + block}, most


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
    shared = sizes.own * (sizes.number == sizes.wide or norm.kept <= sizes.own)  # a block's input, if its first norm keeps it
    if together is not None:  # groups of blocks that keep their input, and are recomputed
        groups = []
        for group in (blocks[begin:begin + together] for begin in range(0, len(blocks), together)):
            again = sum(block.kept for block in group) - shared + group[-1].peak - group[-1].kept
            groups.append(PartMemory(sizes.own, sizes.own + again, sum(block.deferred for block in group)))
    kept, deferred = sum(group.kept for group in groups), sum(group.deferred for group in groups)
    if shape.encoder:  # biases of scores, one for all layers with as many tokens
        kept += sum(sizes.number * shape.heads // layout.degrees.tensor * length**2 for length in {*lengths})
    unit = sizes.number * (layout.zero == 3) * max((units[name] for name in {*units} - {*ENDS}), default=0)
    moments = [Moment("forward", kept, 0.0, unit * (together or 1), 4 * sizes.own + layout.sequence_parallel * sizes.all)]
    places = ("last block", len(groups) - 1), ("blocks", max(0, len(groups) - 3)), ("blocks", 0), ("first block", 0), ("end", 0)
    for place, at in places if groups else ():
        gone = sum(group.kept - split * group.deferred for group in groups[at + 1:])
        working = groups[at].peak - groups[at].kept
        if place == "end":  # of the first block alone
            working = blocks[0].peak - (blocks[0].kept if together is None else shared)
        moments.append(Moment(place, kept - gone, 0.0, unit * ((together or 1) + (at > 0)), working))  # one is gathered ahead
    chunk = Chunk(kept, deferred, sizes.own, moments)
    return _with_loss(layout, shape, sizes, chunk, norm, units) if span.last else chunk


def _with_loss(layout: Layout, shape: ModelShape, sizes: Sizes, chunk: Chunk, norm: PartMemory, units: Units) -> Chunk:
    """Return the bytes of a microbatch on a last stage, given those of its blocks. The loss is computed for some rows at once."""
    token, mixed, sequence = shape.hidden * sizes.number, sizes.number < sizes.wide, layout.sequence_parallel
    rows, width = (sizes.own // token, shape.classes) if shape.classes else (
        sizes.tokens, -(-shape.vocabulary // layout.degrees.tensor))
    row, once = width * sizes.number, min(rows, LOGITS // width // TILE * TILE or LOGITS // width)  # bytes, rows at once
    last, several = (rows - 1) % once + 1, rows > once  # number of the last rows
    inputs, slopes, weight = rows * token, last * row, width * token * mixed  # of the head; gradients of last logits, weight
    arrays = 1 + 3 * mixed + (shape.model_type == "gemma2")  # of logits' size: also in fp32, and capped
    logits = max(once * row * (min(2, rows // once) + arrays), slopes * (1 + arrays) + once * row * several,
                 (2 * once * row + weight) * several)
    gathered, kept = sizes.number * (layout.zero == 3) * (units[HEAD] + units[TIED]), chunk.kept + norm.kept + inputs
    return Chunk(kept + inputs + slopes, chunk.deferred + inputs + slopes, chunk.message, [
        *chunk.moments,
        Moment("head" if several else "forward", kept, logits, gathered, inputs - last * token + sequence * sizes.own),
        Moment("loss", kept, slopes, gathered, inputs + max(weight, 2 * inputs * sequence)),
        Moment("loss", chunk.kept, 0.0, gathered, norm.peak)])
