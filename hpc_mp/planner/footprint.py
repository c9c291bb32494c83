"""Bytes that a rank of the engine holds at the peak of a step, predicted from a layout and the shape of a model. No torch.

A rank has its state (``planner/memory.py``) and what comes and goes: activations, logits, gathered parameters, temporaries,
gradients that are not summed yet, messages. The peak is the largest of a few moments of a chunk, a microbatch on a stage.
``counted`` is what a dry run counts without dropout and compilation. ``libraries`` adds a CUDA context, NCCL's buffers as in
``train/dry_run``, and gaps of 6 % of what comes and goes: nvidia-smi shows 5 to 9 GB more than sums of this kind (arXiv:2211.05100).
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

CONTEXT, GAPS = 1 << 30, 0.06  # bytes of a CUDA context; gaps as a share of what comes and goes
BUFFERS = 32 * ((1 << 22) + 120 * 640 * 8 * 8 + 8 * 512 * 8 * 16)  # bytes of a communicator
LOGITS, TILE = 1 << 26, 64  # logits that the loss computes at once, and what the number of their rows is a multiple of
STEADY = ("1f1b", "interleaved_1f1b", *SPLIT)  # schedules whose peak is that of their first 2 microbatches for each rank
# Moment -> action. "forward" and "head" are its end, "head" if the head has gradients already; the others are backwards: of the
# loss, of a stage's last block, of its others, and in a step's last backward of its first block, and the end
MOMENTS = {"forward": "F", "head": "F", "loss": "B", "last block": "B", "blocks": "B", "first block": "B", "end": "B"}
ENDS = (EMBEDDING, HEAD, TIED)
Units = Counter[str]  # a block, or one of ENDS -> its numbers in units that ZeRO shards


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
    """Bytes at one of ``MOMENTS``: of a chunk, or of its rank, with other chunks, gradients and messages."""
    name: str
    activations: float
    logits: float
    gathered: float
    working: float
    messages: float = 0.0


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes of a microbatch on a stage: kept from F to B, and from I to W; of a message to another stage; at its moments."""
    kept: float
    deferred: float
    message: int
    moments: list[Moment]


def footprint(layout: Layout, shape: ModelShape) -> tuple[Footprint, ...]:
    """Return the footprint of every rank of a pipeline, of the tensor rank with most state."""
    states, spans, results = state_bytes(layout, shape), stage_spans(layout.layers), []
    by_kind = [block_memory(layout, shape, shape.kinds.index(kind)) for kind in range(1 + max(shape.kinds))]
    blocks, (_, norm) = [by_kind[kind][0] for kind in shape.kinds], by_kind[shape.kinds[-1]]
    few = 2 * layout.degrees.pipeline if layout.schedule in STEADY else layout.microbatches
    schedule = schedule_of(replace(layout, microbatches=min(few, layout.microbatches)))
    for pipeline, actions in enumerate(schedule.ranks):
        units = Units()
        for unit in units_of(layout, shape, pipeline, 0).values():
            units[unit.block] += unit.padded * (unit.trained and unit.shards > 1)
        chunks = {stage: _chunk(layout, shape, spans[stage], blocks, norm, units) for stage in schedule.stages_of(pipeline)}
        peak = max(_moments(layout, chunks, actions, units), key=lambda moment: sum(astuple(moment)[1:]))
        lines = [*map(int, astuple(peak)[1:])]
        libraries = CONTEXT + BUFFERS * (1 + sum(size > 1 for size in astuple(layout.degrees))) + int(GAPS * sum(lines[:4]))
        state = max((states[pipeline, tensor] for tensor in range(layout.degrees.tensor)), key=lambda state: state.total)
        largest = [size for _, size in units.most_common(1 + (blocks_together(layout.recompute) or 1))]
        parameters = state.parameters - BYTES[layout.precision][1] * (layout.zero == 3) * sum(largest)  # gathered ones are in ``lines``,
        gradients = state.gradients - BYTES[layout.precision][0] * (layout.reduce == "microbatch") * sum(largest[:1])  # and so is a bucket
        results.append(Footprint(*[parameters, gradients, state.optimizer, *lines, libraries, state.host]))
    return tuple(results)


def _moments(layout: Layout, chunks: Mapping[int, Chunk], actions: Sequence[Action], units: Units) -> Iterator[Moment]:
    """Yield the moments of a rank with these units, and with a chunk of each of its stages."""
    end, others = layout.stages - 1, _others(actions, chunks, layout.offload_horizon)
    (gradients, most), master = _gradients(layout, units, 0 in chunks, end in chunks), BYTES[layout.precision][0]
    for stage, chunk in chunks.items():
        for moment in chunk.moments:
            kind = MOMENTS[moment.name]
            held = 0.0 if moment.name in ("first block", "end") else others[kind, stage]
            # a step's first backward has most gradients at its end, when its chunk is gone
            numbers = max(gradients[moment.name], most - chunk.kept / master if kind == "B" else 0.0)
            # a message is held until its arrival is known, that of a forward until its gradient comes
            sent = (held / (chunk.kept or 1) if kind == "F" else 1.0) * (stage < end) + (stage > 0)
            yield replace(moment, activations=held + moment.activations, working=moment.working + numbers * master,
                          messages=sent * chunk.message)


def _gradients(layout: Layout, units: Units, first: bool, last: bool) -> tuple[dict[str, float], float]:
    """Return the numbers of gradients and their sums under way at each moment, and at the end of a step's first backward."""
    blocks, ends, shards = [units[name] for name in {*units} - {*ENDS}], sum(units[name] for name in ENDS), layout.shard_degree
    block, embedding, head = max(blocks, default=0), units[EMBEDDING] + units[TIED] * first, units[HEAD] + units[TIED] * last
    if layout.reduce == "step":  # the state has all gradients; the last backward begins sums of shares
        rest = (ends + sum(blocks) - block - embedding) / shards
        before = rest - ((blocks_together(layout.recompute) or 1) - 1) * block / shards
        return dict.fromkeys(MOMENTS, 0.0) | {"first block": before, "end": rest}, 0.0
    # buckets of the block whose backward runs and of two whose sums are under way; if gradients wait for a W, of all blocks
    buckets = len(blocks) + 2 - last if layout.schedule in SPLIT else min(len(blocks), 3 - (layout.degrees.expert > 1))
    most = head + buckets * block + 2 * block / shards
    if layout.schedule in STEADY and layout.microbatches > 1:  # buckets are used again, and freed at a step's end
        sums = dict.fromkeys(("forward", "head", "loss"), embedding + block) | {"last block": ends}
        return {name: embedding + head + buckets * block + sums.get(name, 2 * block) / shards for name in MOMENTS}, most
    return dict.fromkeys(MOMENTS, most) | {"forward": 0.0, "head": head, "loss": head, "last block": head + block}, most


def _others(actions: Sequence[Action], chunks: Mapping[int, Chunk], horizon: int | None) -> dict[tuple[str, int], float]:
    """Return the bytes that other chunks keep at most during a forward, F, and a backward, B, of each stage."""
    held, most, plan = 0.0, dict[tuple[str, int], float](), Residency() if horizon is None else residency(actions, horizon)
    for action in (action for action in actions if action.kind in "FBIW"):
        chunk, key = chunks[action.stage], (action.kind.replace("I", "B"), action.stage)
        held += sum(chunks[stage].kept for stage, _ in plan.returns.get(action, ()))  # from the host
        held -= {"F": 0.0, "W": chunk.deferred}.get(action.kind, chunk.kept)
        most[key] = max(most.get(key, 0.0), held)
        stays = (action.stage, action.microbatch) not in plan.away
        held += {"F": chunk.kept * stays, "I": chunk.deferred}.get(action.kind, 0.0)
    return most


def _chunk(layout: Layout, shape: ModelShape, span: StageSpan, every: list[PartMemory], norm: PartMemory, units: Units) -> Chunk:
    """Return the bytes of a microbatch on a stage. ``every``: all blocks of the model. ``norm``: its last norm."""
    together, lengths = blocks_together(layout.recompute), [shape.tokens_of(layer, layout.sequence) for layer in span.layers]
    sizes, blocks = Sizes.of(layout, shape, [layout.sequence, *lengths][-1]), [every[layer] for layer in span.layers]
    shared = sizes.own * (sizes.number == sizes.wide or norm.kept <= sizes.own)  # a block's input, if its first norm keeps it
    groups = blocks
    if together is not None:  # a group keeps its input; the backward of its last block has what its recomputed blocks keep
        parts = [blocks[begin:begin + together] for begin in range(0, len(blocks), together)]
        groups = [PartMemory(sizes.own, sizes.own + sum(block.kept for block in part) - shared + part[-1].peak - part[-1].kept,
                             sum(block.deferred for block in part)) for part in parts]
    kept, deferred = sum(group.kept for group in groups), sum(group.deferred for group in groups)
    if shape.encoder:  # biases of scores, one for all layers with as many tokens
        kept += sum(sizes.number * shape.heads // layout.degrees.tensor * length**2 for length in {*lengths})
    unit = sizes.number * (layout.zero == 3) * max((units[name] for name in {*units} - {*ENDS}), default=0)
    moments = [Moment("forward", kept, 0.0, unit * (together or 1), 4 * sizes.own + layout.sequence_parallel * sizes.full)]
    first = blocks[0].peak - (blocks[0].kept if together is None else shared) if blocks else 0.0
    places = ("last block", len(groups) - 1), ("blocks", max(0, len(groups) - 3)), ("blocks", 0), ("first block", 0), ("end", 0)
    for name, at in places if groups else ():
        gone = sum(group.kept - (layout.schedule in SPLIT) * group.deferred for group in groups[at + 1:])
        working = first if name == "end" else groups[at].peak - groups[at].kept
        moments.append(Moment(name, kept - gone, 0.0, unit * ((together or 1) + (at > 0)), working))  # one is gathered ahead
    chunk = Chunk(kept, deferred, sizes.own, moments)
    return _with_loss(layout, shape, sizes, chunk, norm, units) if span.last else chunk


def _with_loss(layout: Layout, shape: ModelShape, sizes: Sizes, chunk: Chunk, norm: PartMemory, units: Units) -> Chunk:
    """Return the bytes of a microbatch on the last stage, given those of its blocks. The loss computes some rows at once."""
    token, mixed, sequence = shape.hidden * sizes.number, sizes.number < sizes.wide, layout.sequence_parallel
    rows, width = (sizes.own // token, shape.classes) if shape.classes else (
        sizes.tokens, -(-shape.vocabulary // layout.degrees.tensor))
    once, row = min(rows, LOGITS // width // TILE * TILE or LOGITS // width), width * sizes.number  # rows at once; bytes of one
    last, several = (rows - 1) % once + 1, rows > once  # rows that are the last
    inputs, slopes, weight = rows * token, last * row, width * token * mixed  # the head's input; gradients of logits, weight
    arrays = 1 + 3 * mixed + (shape.model_type == "gemma2")  # beside logits: softmax, in fp32 with a copy; capped logits
    logits = max(once * row * (min(2, rows // once) + arrays),  # with gradients of the logits of the rows before
                 slopes * (1 + arrays) + once * row * several,  # the same at the last rows
                 (2 * once * row + weight) * several)  # when the head's gradient is summed
    gathered, kept = sizes.number * (layout.zero == 3) * (units[HEAD] + units[TIED]), chunk.kept + norm.kept + inputs
    return Chunk(kept + inputs + slopes, chunk.deferred + inputs + slopes, chunk.message, [
        *chunk.moments,
        Moment("head" if several else "forward", kept, logits, gathered, inputs - last * token + sequence * sizes.own),
        Moment("loss", kept, slopes, gathered, inputs + max(weight, 2 * inputs * sequence)),
        Moment("loss", chunk.kept, 0.0, gathered, norm.peak)])
