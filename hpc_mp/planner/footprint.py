"""Bytes that a rank of the engine holds at the peak of a step, predicted from a layout and the shape of a model. No torch.

The peak is the largest of a few moments: the end of a forward, its loss, the beginning of a backward, its first blocks, and the
end of the last backward. Each has state, what the chunks in flight keep, and temporaries, all derived from the code of
transformers' modules and of the engine. ``counted`` is what a dry run counts without dropout and compilation, for samples of one
document; benchmarks/footprint_check.py compares both.

``libraries`` is an estimate: a CUDA context and NCCL's buffers, both as in ``train/dry_run``, and gaps between allocations, 6 %
of what comes and goes. nvidia-smi shows 5 to 9 GB beside sums of this kind on A100 with 80 GB (logs of BLOOM, arXiv:2211.05100).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass

from hpc_mp.layout.flat import EMBEDDING, HEAD, TIED, FlatLayout, StageSpan, blocks_together, rank_units, stage_spans
from hpc_mp.layout.layout import Layout
from hpc_mp.layout.models import ModelShape, expert_capacity, expert_slots, family_of
from hpc_mp.layout.models.tensor import heads_of
from hpc_mp.layout.schedule import Action, Residency, residency
from hpc_mp.layout.schedule.actions import COMPUTE
from hpc_mp.layout.schedule_of import schedule_of
from hpc_mp.planner.memory import BYTES, state_bytes

CONTEXT = 1 << 30  # bytes of a CUDA context with kernels and workspaces
BUFFERS = 32 * ((1 << 22) + 120 * 640 * 8 * 8 + 8 * 512 * 8 * 16)  # bytes of a communicator of NCCL, see train/dry_run/host.py
GAPS = 0.06  # of activations and temporaries
LOGITS, TILE = 1 << 26, 64  # logits of a chunk of the loss, and what the number of its rows is a multiple of
# kind -> numbers for each one of a norm: kept in the wide format and in that of computation, and at most in its backward
NORMS = {"rms": (1, 1, 6, 0), "wide rms": (2, 0, 6, 0), "t5": (1, 2, 5, 1), "layer": (0, 1, 0, 3)}
# kind -> numbers for each inner one of an MLP: kept, and what its backward adds at most; and its columns with the same input
MLPS = {"gated": (4, 2, 2), "gated gelu_new": (7, 2, 2), "gelu": (2, 1, 1), "gelu_new": (5, 2, 1), "relu": (1, 2, 1)}
KINDS = {"gemma2": ("wide rms", "gated"), "gemma3_text": ("wide rms", "gated"), "modernbert": ("layer", "gated"),
         "gpt2": ("layer", "gelu_new"), "gptj": ("layer", "gelu_new"), "gpt_neox": ("layer", "gelu"), "bert": ("layer", "gelu"),
         "roberta": ("layer", "gelu"), "t5": ("t5", "relu"), "gated t5": ("t5", "gated gelu_new")}  # models with others than Llama


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of a rank at its peak: state; activations of the chunks in flight; logits of a chunk of the loss; unsharded
    parameters; temporaries, recomputed blocks and gradients under way; messages between stages; libraries. ``host``: of state."""

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
class _Part:
    """Bytes of a part of a model: kept for its backward, there at most while it runs, and left to the W of a split backward."""

    kept: float
    most: float
    waiting: float = 0.0


Moment = tuple[str, int, float, float, float, float]  # F or B, gradients under way, activations, logits, gathered, working


def _norm(layout: Layout, shape: ModelShape, numbers: float) -> _Part:
    c, (wide, narrow, most_wide, most_narrow) = BYTES[layout.precision][1], NORMS[_kinds(shape)[0]]
    kept = 4 * wide + c * narrow if c < 4 else c * min(2, wide + narrow)
    return _Part(numbers * kept, numbers * (max(4, c) * most_wide + c * most_narrow))


def _kinds(shape: ModelShape) -> tuple[str, str]:
    name = "gated t5" if shape.encoder and shape.gated_mlp else shape.model_type
    return KINDS.get(name, ("rms", "gated" if shape.gated_mlp else "gelu"))


def _block(layout: Layout, shape: ModelShape, layer: int) -> _Part:
    """A block, whose parts run one after another."""
    (master, c), h, degrees, sequence = BYTES[layout.precision], shape.hidden, layout.degrees, layout.sequence_parallel
    wide, length, heads = max(4, c), shape.tokens_of(layer, layout.sequence), heads_of(
        shape.heads, shape.kv_heads, degrees.tensor, 0)
    tokens = layout.samples * length // degrees.context
    own, whole = -(-tokens // (degrees.tensor if sequence else 1)) * h * c, tokens * h * c  # bytes of hidden states

    def cut(kept: float, most: float, inner: float, columns: float, width: float) -> _Part:
        """A cut layer with its input, given bytes inside of it, of the last projection's input, and of what the others make."""
        ends, product = 1 + sequence * (layout.samples > 1), h * width * c if c < master else 0
        entered = whole * (2 + ends) + 2 * own * sequence + columns + product
        kept += whole
        return _Part(kept, max(kept + whole * sequence + inner + product, kept + most, entered), 2 * whole + inner + columns)

    q, kv = (tokens * len(numbers) * shape.head_dim * c for numbers in (heads.query, heads.kv))
    scores, sums = layout.samples * len(heads.query) * length**2, wide * tokens * len(heads.query)
    flash = 2 * (q + kv) + sums, 2 * (q + kv)
    cores = {"gemma2": (4 * q + scores * (2 * c + wide), 2 * q + scores * (2 * wide - c)), "gpt_neox": (flash[0] + q + kv, flash[1]),
             "t5": (q + 3 * q * wide / c + scores * wide, 2 * scores * wide)}
    kept, most = cores.get(shape.model_type, flash) if degrees.context == 1 else (flash[0] + q, wide / c * (2 * q + 6 * kv))
    if any(weight.name.endswith("q_norm.weight") for weight in family_of(shape).block_weights(shape, layer)):
        kept += _norm(layout, shape, (q + kv) / c).kept
    norm, several = _norm(layout, shape, own / c), 1 + (_kinds(shape)[0] == "wide rms")
    attention = [norm, cut(kept, most, q, q + 2 * kv, len(heads.query) * shape.head_dim)] + [norm] * (several - 1)
    if shape.encoder and layer >= shape.encoder:
        attention += [norm, cut(*flash, q, q + 2 * kv, len(heads.query) * shape.head_dim)]
    inner_kept, more, columns = MLPS[_kinds(shape)[1]]
    f = -(-shape.intermediate // degrees.tensor)
    mlp = cut(inner_kept * tokens * f * c, more * tokens * f * c, tokens * f * c, columns * tokens * f * c, f)
    if shape.experts_of(layer):
        mlp = _experts(layout, shape, tokens)
    parts = [*attention, norm, mlp, *[norm] * (several - 1)]
    kept = sum(part.kept for part in parts)
    most = max(sum(part.kept for part in parts[:place]) + part.most for place, part in enumerate(parts))
    return _Part(kept, most + own, sum(part.waiting for part in parts))


def _experts(layout: Layout, shape: ModelShape, tokens: int) -> _Part:
    """Gated experts and their router, with a row for each choice of a token. Mixtral sums rows in the wide format."""
    c, h, degree, f = BYTES[layout.precision][1], shape.hidden, layout.degrees.expert, -(
        -shape.expert_intermediate // layout.degrees.tensor)
    capacity, chosen, wide = expert_capacity(layout.expert_capacity, layout.sequence, shape), tokens * shape.experts_per_token, max(
        4, c)
    limit = chosen if capacity is None else capacity * layout.samples
    slots = expert_slots(None if capacity is None else limit, tokens, shape.experts_per_token, shape.experts) if degree > 1 else None
    rows = slots * shape.experts if slots else min(chosen, limit * shape.experts)
    row, inner, choices, whole = rows * h * c, rows * f * c, chosen * h * c, tokens * h * c
    product = -(-shape.experts // degree) * f * h * c * (c < 8)
    kept = whole + tokens * shape.experts * (c + 3 * wide) + row + 4 * inner + choices
    summed = (2 * choices + whole) * wide / c if shape.model_type == "mixtral" else 2 * choices
    return _Part(kept, max(kept + summed, kept + inner + product, whole + 2 * (row + inner + product),
                           kept - choices + 3 * row * (degree > 1)), whole + 2 * row + 4 * inner)


def _stage(layout: Layout, shape: ModelShape, span: StageSpan, block: float, head: float) -> tuple[_Part, list[Moment]]:
    """Return what a chunk of a stage keeps, and its moments. ``block``, ``head``: bytes of their unsharded parameters."""
    master, c = BYTES[layout.precision]
    known: dict[int, _Part] = {}
    blocks = [known.get(kind := shape.kinds[layer]) or known.setdefault(kind, _block(layout, shape, layer)) for layer in span.layers]
    last, ends, together = span.layers[-1:] or range(shape.layers)[-1:], layout.sequence_parallel, blocks_together(layout.recompute)
    whole = layout.samples * shape.tokens_of(last[0], layout.sequence) // layout.degrees.context
    own = -(-whole // layout.degrees.tensor) if ends else whole
    hidden = own * shape.hidden * c
    size = together or 1
    group = blocks[(len(blocks) - 1) // size * size:] if blocks else []
    recomputed = sum(part.kept for part in group) - hidden * (c >= 4 or _kinds(shape)[0] == "layer") if together else 0
    kept = -(-len(blocks) // size) * hidden if together else sum(part.kept for part in blocks)
    if shape.encoder:
        lengths = {shape.tokens_of(layer, layout.sequence) for layer in span.layers}
        kept += sum(c * shape.heads // layout.degrees.tensor * length**2 for length in lengths)
    moments: list[Moment] = []
    for first in (0, 2)[:1 + (len(blocks) > 2)] if blocks else ():
        before = kept - sum((hidden if together else part.kept) for part in blocks[len(blocks) - first:])
        moments.append(("B", 2 + first // 2, before, 0, block * (1 + len(group)), recomputed + group[-1].most - group[-1].kept))
    moments.append(("F", 0, kept, 0, block * len(group), 4 * hidden + ends * whole * shape.hidden * c))
    if not span.last:
        return _Part(kept, 0, sum(part.waiting for part in blocks)), moments
    rows, width = (own, shape.classes) if shape.classes else (whole, -(-shape.vocabulary // layout.degrees.tensor))
    chunk = min(rows, LOGITS // width // TILE * TILE or LOGITS // width)
    norm, number = shape.hidden * c, rows // chunk - 1  # bytes of a row, and chunks before the last whole one
    end, product = _norm(layout, shape, own * shape.hidden), width * norm if c < master else 0
    slopes, base = (rows - (rows - 1) // chunk * chunk) * width * c, kept + end.kept + rows * norm
    scores = chunk * width * (c * (1 + (number > 0)) + max(4, c) * (1 + (c < 4)))
    copies = (1 + (layout.samples > 1)) * ends * rows * norm
    moments += [("F", 0, base, scores, head, number * chunk * norm + hidden * ends), ("B", 1, kept, 0, head, end.most),
                ("B", 1, base, slopes, head, rows * norm + max(product, copies) + 2 * hidden * ends)]
    full = base + rows * norm + slopes
    return _Part(full, 0, sum(part.waiting for part in blocks) + rows * norm + slopes), moments


def _others(actions: Sequence[Action], stages: Mapping[int, _Part], plan: Residency) -> dict[tuple[str, int], float]:
    """Return the most that other chunks keep during forwards and backwards of a stage."""
    held, most = 0.0, dict[tuple[str, int], float]()
    for action in (action for action in actions if action.kind in COMPUTE):
        part, forward = stages[action.stage], action.kind == "F"
        held += sum(stages[stage].kept for stage, _ in plan.returns.get(action, ()))
        held -= {"F": 0.0, "W": part.waiting}.get(action.kind, part.kept)
        if action.kind != "W":
            key = "F" if forward else "B", action.stage
            most[key] = max(most.get(key, 0.0), held)
        held += {"F": part.kept * ((action.stage, action.microbatch) not in plan.away), "I": part.waiting}.get(action.kind, 0.0)
    return most


def footprint(layout: Layout, shape: ModelShape) -> tuple[Footprint, ...]:
    """Return the footprint of every rank of a pipeline, of the tensor rank with most state."""
    states, spans, schedule = state_bytes(layout, shape), stage_spans(layout.layers), schedule_of(layout)
    return tuple(_rank(layout, shape, {stage: spans[stage] for stage in schedule.stages_of(pipeline)}, actions,
                       max((states[pipeline, tensor] for tensor in range(layout.degrees.tensor)), key=lambda state: state.total))
                 for pipeline, actions in enumerate(schedule.ranks))


def _rank(layout, shape, spans, actions, state) -> Footprint:
    (master, c), degrees = BYTES[layout.precision], layout.degrees
    units = [unit for unit in rank_units(layout, shape, [StageSpan(span.layers[-1:], span.first, span.last) for span in spans.values()]
                                         ).values() if unit.trained and unit.shards > 1]
    ends = {unit.block: unit.padded for unit in units if unit.block in (TIED, EMBEDDING, HEAD)}
    names = {unit.block for unit in units} - ends.keys()
    block = max(([unit for unit in units if unit.block == name] for name in names), key=lambda units: sum(
        unit.padded for unit in units), default=[])
    size, layers = sum(unit.padded for unit in block), sum(len(span.layers) for span in spans.values())
    part = sum(unit.part for unit in block)
    head = ends.get(TIED, 0) + ends.get(HEAD, 0)
    largest = sorted([*ends.values(), *[size] * layers])
    together = 1 + (blocks_together(layout.recompute) or 1)
    passing = sum(largest[-together:]) * c if layout.zero == 3 else 0
    parted = layout.reduce == "microbatch" and layout.zero > 1
    copies = min(layers, 3 if len(block) == 1 else 2)
    every = sum(ends.values()) + copies * size
    under_way = (every + part, every, every, every + 2 * part) if layout.microbatches > 1 else (
        0, head, head + size, head + copies * size + 2 * part)
    reduced = 0 if parted else (sum(unit.part for unit in units if unit.block in ends) + part * layers) * master
    gathers = c * (layout.zero == 3)
    made = {stage: _stage(layout, shape, span, size * gathers, head * gathers) for stage, span in spans.items()}
    plan = Residency() if layout.offload_horizon is None else residency(actions, layout.offload_horizon)
    others = _others(actions, {stage: one for stage, (one, _) in made.items()}, plan)
    peaks = [(0.0, 0.0, 0.0, float(reduced), 0.0)]
    shares = degrees.tensor if layout.sequence_parallel else 1
    message = layout.samples * -(-layout.sequence // degrees.context // shares) * shape.hidden * c
    for stage, (one, moments) in made.items():
        onward, back = stage < layout.stages - 1, stage > 0
        for kind, place, activations, logits, gathered, working in moments:
            rest = others[kind, stage]
            sent = (rest / one.kept if kind == "F" else 1.0) * onward + back
            peaks.append((rest + activations, logits, gathered, working + under_way[place] * master * parted,
                          sent * message * (degrees.pipeline > 1)))
    activations, logits, gathered, working, messages = map(int, max(peaks, key=sum))
    sizes = (*astuple(degrees)[:4], degrees.expert, degrees.expert)
    communicators = 1 + sum(size > 1 for size in sizes) + (degrees.pipeline > 1) / 2
    libraries = CONTEXT + int(communicators * BUFFERS + GAPS * (activations + logits + gathered + working))
    return Footprint(state.parameters - int(passing), state.gradients - (largest[-1] * master if parted and largest else 0),
                     state.optimizer, activations, logits, gathered, working, messages, libraries, state.host)
