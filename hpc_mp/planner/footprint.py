"""Bytes that a rank of the engine holds at the peak of a step, predicted from a layout and the shape of a model. No torch.

A rank has its state (``planner/memory.py``), and what comes and goes: activations, logits, gathered parameters, temporaries,
gradients that are not summed yet, messages. The peak is the largest of a few moments of a chunk, a microbatch on a stage.
``counted`` is what a dry run counts without dropout and compilation. ``libraries`` adds a CUDA context, NCCL's buffers as in
``train/dry_run``, and for gaps between allocations 6 % of all but messages: nvidia-smi shows 5 to 9 GB more (arXiv:2211.05100).
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace

from hpc_mp.layout.flat import EMBEDDING, HEAD, TIED, StageSpan, blocks_together, stage_spans
from hpc_mp.layout.layout import Layout
from hpc_mp.layout.models import ModelShape
from hpc_mp.layout.schedule import Action, Residency, residency
from hpc_mp.layout.schedule_of import schedule_of
from hpc_mp.planner.block_memory import SPLIT, Memory, Sizes, block_memory
from hpc_mp.planner.memory import BYTES, state_bytes, units_of

CONTEXT, GAPS = 1 << 30, 0.06  # bytes of a CUDA context; share of gaps
BUFFERS = 32 * ((1 << 22) + 120 * 640 * 8 * 8 + 8 * 512 * 8 * 16)  # bytes of a communicator
LOGITS, TILE = 1 << 26, 64  # logits that the loss has at once, in a multiple of TILE rows
STEADY = ("1f1b", "interleaved_1f1b", *SPLIT)  # schedules whose peak is that of their first 2 microbatches for each rank
# Moment -> action: the end of a forward, or of one that has begun the head's gradient; the backward of the loss, of a stage's
# last block, and of its other blocks; in the last backward of a step that of the first block, and the end
MOMENTS = {"forward": "F", "head": "F", "loss": "B", "last block": "B", "blocks": "B", "first block": "B", "end": "B"}
ENDS = (EMBEDDING, HEAD, TIED)
Units = Counter[str]  # block, or one of ENDS -> numbers in its units that ZeRO shards


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
class InUse:
    """Bytes in use at one of ``MOMENTS``: by a chunk; or by its rank, with other chunks, gradients and messages."""
    name: str
    activations: float
    logits: float
    gathered: float
    working: float
    messages: float = 0.0


@dataclass(frozen=True, slots=True)
class InFlight:
    """Bytes of a chunk: saved from F to B, deferred from I to W, and of the hidden states that it sends; and its moments."""
    saved: float
    deferred: float
    message: int
    moments: list[InUse]


def footprint(layout: Layout, shape: ModelShape) -> tuple[Footprint, ...]:
    """Return the footprint of every rank of a pipeline, of the tensor rank with most state."""
    states, spans, (master, number) = state_bytes(layout, shape), stage_spans(layout.layers), BYTES[layout.precision]
    by_kind = [block_memory(layout, shape, shape.kinds.index(kind)) for kind in range(1 + max(shape.kinds))]
    blocks, (_, norm), results = [by_kind[kind][0] for kind in shape.kinds], by_kind[shape.kinds[-1]], []
    enough = 2 * layout.degrees.pipeline if layout.schedule in STEADY else layout.microbatches
    schedule = schedule_of(replace(layout, microbatches=min(enough, layout.microbatches)))
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
        parameters = state.parameters - number * (layout.zero == 3) * sum(largest)  # gathered ones are in ``lines``,
        gradients = state.gradients - master * (layout.reduce == "microbatch") * sum(largest[:1])  # and so is a bucket
        results.append(Footprint(*[parameters, gradients, state.optimizer, *lines, libraries, state.host]))
    return tuple(results)


def _moments(layout: Layout, chunks: dict[int, InFlight], actions: Sequence[Action], units: Units) -> Iterator[InUse]:
    """Yield the bytes in use at the moments of a rank with these units, and with chunks of these stages."""
    end, others = layout.stages - 1, _others(actions, chunks, layout.offload_horizon)
    (gradients, after_first), master = _gradients(layout, units, 0 in chunks, end in chunks), BYTES[layout.precision][0]
    for stage, chunk in chunks.items():
        for moment in chunk.moments:
            kind = MOMENTS[moment.name]
            held = 0.0 if moment.name in ("first block", "end") else others[kind, stage]
            # the first backward of a step has most gradients at its end, when its chunk is gone
            numbers = max(gradients[moment.name], after_first - chunk.saved / master if kind == "B" else 0.0)
            # a message is held until its arrival is known: that of a forward until its gradient arrives
            sent = (held / (chunk.saved or 1) if kind == "F" else 1.0) * (stage < end) + (stage > 0)
            yield replace(moment, activations=held + moment.activations, working=moment.working + numbers * master,
                          messages=sent * chunk.message)


def _gradients(layout: Layout, units: Units, begins: bool, ends: bool) -> tuple[dict[str, float], float]:
    """Return the numbers of gradients and of sums under way at each moment, and at the end of a step's first backward."""
    blocks, rest, shards = [units[name] for name in {*units} - {*ENDS}], sum(units[name] for name in ENDS), layout.shard_degree
    block, embedding, head = max(blocks, default=0), units[EMBEDDING] + units[TIED] * begins, units[HEAD] + units[TIED] * ends
    if layout.reduce == "step":  # the state has all gradients; the last backward sums them into shares
        sums = (rest + sum(blocks) - block - embedding) / shards
        before = sums - ((blocks_together(layout.recompute) or 1) - 1) * block / shards
        return dict.fromkeys(MOMENTS, 0.0) | {"first block": before, "end": sums}, 0.0
    # blocks with a bucket: that of the backward and two whose sums are under way; all of them if gradients wait for a W
    buckets = len(blocks) + 2 - ends if layout.schedule in SPLIT else min(len(blocks), 3 - (layout.degrees.expert > 1))
    peak = head + buckets * block + 2 * block / shards
    if layout.schedule in STEADY and layout.microbatches > 1:  # buckets are freed at the end of a step
        summed = dict.fromkeys(("forward", "head", "loss"), embedding + block) | {"last block": rest}
        return {name: embedding + head + buckets * block + summed.get(name, 2 * block) / shards for name in MOMENTS}, peak
    return dict.fromkeys(MOMENTS, peak) | {"forward": 0.0, "head": head, "loss": head, "last block": head + block}, peak


def _others(actions: Sequence[Action], chunks: dict[int, InFlight], horizon: int | None) -> dict[tuple[str, int], float]:
    """Return the bytes that other chunks keep at most during a forward, F, and a backward, B, of each stage."""
    held, highest, plan = 0.0, dict[tuple[str, int], float](), Residency() if horizon is None else residency(actions, horizon)
    for action in (action for action in actions if action.kind in "FBIW"):
        chunk, key = chunks[action.stage], (action.kind.replace("I", "B"), action.stage)
        held += sum(chunks[stage].saved for stage, _ in plan.returns.get(action, ()))  # back from the host
        held -= {"F": 0.0, "W": chunk.deferred}.get(action.kind, chunk.saved)
        highest[key] = max(highest.get(key, 0.0), held)
        stays = (action.stage, action.microbatch) not in plan.away
        held += {"F": chunk.saved * stays, "I": chunk.deferred}.get(action.kind, 0.0)
    return highest


def _chunk(layout: Layout, shape: ModelShape, span: StageSpan, layers: list[Memory], norm: Memory, units: Units) -> InFlight:
    """Return the bytes of a chunk of a stage. ``layers``: the blocks of the model. ``norm``: its last norm."""
    together, lengths = blocks_together(layout.recompute), [shape.tokens_of(layer, layout.sequence) for layer in span.layers]
    sizes, blocks = Sizes.of(layout, shape, [layout.sequence, *lengths][-1]), [layers[layer] for layer in span.layers]
    shared = sizes.own * (sizes.number == sizes.wide or norm.saved <= sizes.own)  # a block's input, if a norm saves it
    groups = blocks
    if together is not None:  # groups save their input; the backward of one first recomputes what its blocks save
        parts = [blocks[begin:begin + together] for begin in range(0, len(blocks), together)]
        groups = [Memory(sizes.own, sizes.own - shared + sum(block.saved for block in part[:-1]) + part[-1].peak,
                             sum(block.deferred for block in part)) for part in parts]
    saved, deferred = sum(group.saved for group in groups), sum(group.deferred for group in groups)
    if shape.encoder:  # biases of scores, which all layers of an encoder share, and all of a decoder
        saved += sum(sizes.number * shape.heads // layout.degrees.tensor * length**2 for length in {*lengths})
    unit = sizes.number * (layout.zero == 3) * max((units[name] for name in {*units} - {*ENDS}), default=0)
    moments = [InUse("forward", saved, 0.0, unit * (together or 1), 4 * sizes.own + layout.sequence_parallel * sizes.full)]
    left = blocks[0].peak - (blocks[0].saved if together is None else shared) if blocks else 0.0  # for the stage's first block
    places = ("last block", len(groups) - 1), ("blocks", max(0, len(groups) - 3)), ("blocks", 0), ("first block", 0), ("end", 0)
    for name, at in places if groups else ():
        freed = sum(group.saved - (layout.schedule in SPLIT) * group.deferred for group in groups[at + 1:])
        working = left if name == "end" else groups[at].peak - groups[at].saved
        moments.append(InUse(name, saved - freed, 0.0, unit * ((together or 1) + (at > 0)), working))  # and the next one
    chunk = InFlight(saved, deferred, sizes.own, moments)
    return _with_loss(layout, shape, sizes, chunk, norm, units) if span.last else chunk


def _with_loss(layout: Layout, shape: ModelShape, sizes: Sizes, chunk: InFlight, norm: Memory, units: Units) -> InFlight:
    """Return the bytes of a chunk of the last stage, given those of its blocks. The loss has a part of the logits at once."""
    token, mixed, sequence = shape.hidden * sizes.number, sizes.number < sizes.wide, layout.sequence_parallel
    words = -(-shape.vocabulary // layout.degrees.tensor)
    rows, width = (sizes.own // token, shape.classes) if shape.classes else (sizes.tokens, words)  # classes are not cut
    row, at_once = width * sizes.number, min(rows, LOGITS // width // TILE * TILE or LOGITS // width)  # bytes of a row; rows
    last, several = (rows - 1) % at_once + 1, rows > at_once  # rows that are computed last
    inputs, slopes, weight = rows * token, last * row, width * token * mixed  # of the head; gradients of logits, of its weight
    arrays = 1 + 3 * mixed + (shape.model_type == "gemma2")  # beside logits: softmax, in fp32 with a copy; capped logits
    logits = max(at_once * row * (min(2, rows // at_once) + arrays),  # and gradients of the rows before
                 slopes * (1 + arrays) + at_once * row * several,  # the same for the last rows
                 (2 * at_once * row + weight) * several)  # when the gradient of the weight is summed
    gathered, saved = sizes.number * (layout.zero == 3) * (units[HEAD] + units[TIED]), chunk.saved + norm.saved + inputs
    return InFlight(saved + inputs + slopes, chunk.deferred + inputs + slopes, chunk.message, [
        *chunk.moments,
        InUse("head" if several else "forward", saved, logits, gathered, inputs - last * token + sequence * sizes.own),
        InUse("loss", saved, slopes, gathered, inputs + max(weight, 2 * inputs * sequence)),
        InUse("loss", chunk.saved, 0.0, gathered, norm.peak)])
