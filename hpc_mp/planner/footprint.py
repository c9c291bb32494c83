"""Bytes that a rank of the engine holds at the peak of a step, predicted from a layout and the shape of a model. No torch.

The peak is the largest of a few moments: the end of a forward, its loss, the beginning of a backward, its first blocks, and the
end of the last backward. Each has state, what the chunks in flight keep, and temporaries, derived from the code of transformers'
modules and of the engine. ``counted`` is what a dry run counts without dropout and compilation, for samples of one document;
benchmarks/footprint_check.py compares both. ``libraries`` is an estimate: a CUDA context and NCCL's buffers, as in
``train/dry_run``, and 6 % of what comes and goes for gaps between allocations. nvidia-smi shows 5 to 9 GB beside sums of this
kind on A100 with 80 GB (logs of BLOOM's training, arXiv:2211.05100).
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from hpc_mp.layout.flat import EMBEDDING, HEAD, TIED, StageSpan, blocks_together, rank_units, stage_spans
from hpc_mp.layout.layout import Layout
from hpc_mp.layout.models import ModelShape, expert_capacity, expert_slots, family_of
from hpc_mp.layout.models.tensor import heads_of
from hpc_mp.layout.schedule import Action, Residency, residency
from hpc_mp.layout.schedule.actions import COMPUTE
from hpc_mp.layout.schedule_of import schedule_of
from hpc_mp.planner.memory import BYTES, state_bytes

CONTEXT, GAPS = 1 << 30, 0.06  # bytes of a CUDA context with kernels and workspaces, and share of activations and temporaries
BUFFERS = 32 * ((1 << 22) + 120 * 640 * 8 * 8 + 8 * 512 * 8 * 16)  # bytes of a communicator of NCCL
LOGITS, TILE = 1 << 26, 64  # logits of a chunk of the loss, and what the number of its rows is a multiple of
RMS, LAYER = (1, 1, 6, 0), (0, 1, 0, 3)  # numbers for each of a norm: kept, wide and narrow, and at most in its backward
NORMS = {"t5": (1, 2, 5, 1), **dict.fromkeys(("gemma2", "gemma3_text"), (2, 0, 6, 0)),
         **dict.fromkeys(("bert", "gpt2", "gptj", "gpt_neox", "modernbert", "roberta"), LAYER)}
GATED, PLAIN = (4, 2, 2), (2, 1, 1)  # numbers for each inner one of an MLP: kept, more in its backward, columns of its input
MLPS = {(True, "t5"): (7, 2, 2), (False, "t5"): (1, 2, 1), (False, "gpt2"): (5, 2, 1), (False, "gptj"): (5, 2, 1)}
Part = tuple[float, float, float]  # bytes kept for a backward, there at most at once, and left to the W of a split backward
Moment = tuple[str, int, float, float, float, float]  # F or B, gradients under way, activations, logits, gathered, working


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


def footprint(layout: Layout, shape: ModelShape) -> tuple[Footprint, ...]:
    """Return the footprint of every rank of a pipeline, of the tensor rank with most state."""
    states, schedule, (master, c), spans = (state_bytes(layout, shape), schedule_of(layout), BYTES[layout.precision],
                                            stage_spans(layout.layers))
    blocks = [_block(layout, shape, shape.kinds.index(kind)) for kind in sorted({*shape.kinds})]
    degrees, end, gathers = layout.degrees, layout.stages - 1, c * (layout.zero == 3)
    parted = master * (layout.reduce == "microbatch")  # bytes of numbers of which ranks keep a part of the sum
    shares = degrees.tensor if layout.sequence_parallel else 1
    message = layout.samples * -(-layout.sequence // degrees.context // shares) * shape.hidden * c * (degrees.pipeline > 1)
    results = []
    for pipeline, actions in enumerate(schedule.ranks):
        state = max((states[pipeline, tensor] for tensor in range(degrees.tensor)), key=lambda state: state.total)
        mine = {stage: spans[stage] for stage in schedule.stages_of(pipeline)}
        layers = [layer for span in mine.values() for layer in span.layers]
        few = StageSpan(range(layers[-1], layers[-1] + 1) if layers else range(0), 0 in mine, end in mine)
        cut = [unit for unit in rank_units(layout, shape, [few]).values() if unit.trained and unit.shards > 1]
        ends = {unit.block: unit.padded for unit in cut if unit.block in (EMBEDDING, HEAD, TIED)}
        inner = [unit for unit in cut if unit.block not in ends]
        block, part, head = sum(unit.padded for unit in inner), sum(unit.part for unit in inner), sum(ends.values()) - ends.get(
            EMBEDDING, 0)
        whole, most = sorted([*ends.values(), *[block] * len(layers)]), min(len(layers), 4 - len(inner))
        arrays = sum(ends.values()) + most * block + ends.get(TIED, 0)  # numbers of gradients that are there at once
        first, last = (ends.get(EMBEDDING, ends.get(TIED, 0)) / layout.shard_degree, head / layout.shard_degree)
        under_way = ((arrays + part + first, arrays + part + first, arrays + first + last, arrays + 2 * part)
                     if layout.microbatches > 1 else
                     (0, head, head + block, head + most * block + 2 * part))
        made = {stage: _stage(layout, shape, span, blocks, block * gathers, head * gathers) for stage, span in mine.items()}
        others = _others(actions, {stage: chunk for stage, (chunk, _) in made.items()}, layout.offload_horizon)
        peaks = [(0.0, 0.0, 0.0, sum(whole) / max(1, layout.shard_degree) * (master - parted), 0.0)]
        for stage, (chunk, moments) in made.items():
            for kind, place, activations, logits, gathered, working in moments:
                sent = (others[kind, stage] / chunk[0] if kind == "F" else 1.0) * (stage < end) + (stage > 0)
                peaks.append((others[kind, stage] + activations, logits, gathered, working + under_way[place] * parted,
                              sent * message))
        activations, logits, gathered, working, messages = map(int, max(peaks, key=sum))
        groups = 1 + sum(size > 1 for size in astuple(degrees)) + (degrees.expert > 1) + (degrees.pipeline > 1) / 2
        libraries = int(CONTEXT + groups * BUFFERS + GAPS * (activations + logits + gathered + working))
        results.append(Footprint(
            state.parameters - gathers * sum(whole[-1 - (blocks_together(layout.recompute) or 1):]),
            state.gradients - parted * max(whole, default=0), state.optimizer, activations, logits, gathered, working, messages,
            libraries, state.host))
    return tuple(results)


def _others(actions: Sequence[Action], stages: dict[int, Part], horizon: int | None) -> dict[tuple[str, int], float]:
    """Return what other chunks keep at most during forwards, F, and backwards, B, of a stage."""
    held, most, plan = 0.0, dict[tuple[str, int], float](), Residency() if horizon is None else residency(actions, horizon)
    for action in (action for action in actions if action.kind in COMPUTE):
        kept, _, waiting = stages[action.stage]
        held += sum(stages[stage][0] for stage, _ in plan.returns.get(action, ())) - {"F": 0.0, "W": waiting}.get(action.kind, kept)
        key = action.kind.replace("I", "B"), action.stage
        most[key] = max(most.get(key, 0.0), held)
        held += {"F": kept * ((action.stage, action.microbatch) not in plan.away), "I": waiting}.get(action.kind, 0.0)
    return most


def _stage(layout: Layout, shape: ModelShape, span: StageSpan, kinds: Sequence[Part], block: float, head: float,
           ) -> tuple[Part, list[Moment]]:
    """Return a stage's chunk, and its moments. ``block``, ``head``: bytes of the parameters that are gathered for them."""
    (master, c), sequence, together = BYTES[layout.precision], layout.sequence_parallel, blocks_together(layout.recompute)
    blocks, degrees = [kinds[shape.kinds[layer]] for layer in span.layers], layout.degrees
    lengths = [shape.tokens_of(layer, layout.sequence) for layer in span.layers] or [layout.sequence]
    whole = layout.samples * lengths[-1] // degrees.context
    own = -(-whole // (degrees.tensor if sequence else 1))
    hidden, group = own * shape.hidden * c, blocks[(len(blocks) - 1) // (together or 1) * (together or 1):]
    again = sum(part[0] for part in group) - hidden * (c >= 4 or NORMS.get(shape.model_type) == LAYER) if together else 0.0
    inputs = [hidden / (together or 1) if together else part[0] for part in blocks]  # what a chunk keeps of each block
    biases = sum(c * shape.heads // degrees.tensor * length**2 for length in {*lengths}) if shape.encoder else 0
    kept, waiting = sum(inputs) + biases, sum(part[2] for part in blocks)
    moments: list[Moment] = [("F", 0, kept, 0.0, block * len(group), 4 * hidden + sequence * whole * shape.hidden * c)]
    moments += [("B", 2 + later // 2, kept - sum(inputs[len(blocks) - later:]), 0.0, block * (1 + len(group)),
                 again + group[-1][1] - group[-1][0]) for later in (0, 2) if later < len(blocks)]
    if not span.last:
        return (kept, 0.0, waiting), moments
    rows, width = (own, shape.classes) if shape.classes else (whole, -(-shape.vocabulary // degrees.tensor))
    chunk, row = min(rows, LOGITS // width // TILE * TILE or LOGITS // width), shape.hidden * c
    (norm, most), many, product = _norm(layout, shape, own * shape.hidden), rows > chunk, row * width * (c < master)
    slopes, base = (rows - (rows - 1) // chunk * chunk) * width * c, kept + norm + rows * row
    scores = chunk * width * c * (1 + many) + max(chunk * width * max(4, c) * (1 + (c < 4)), product * many)
    sums = max(product, (1 + (layout.samples > 1)) * sequence * rows * row) + 2 * hidden * sequence
    return (base + rows * row + slopes, 0.0, waiting + rows * row + slopes), [
        *moments, ("F", int(many), base, scores, head, hidden * sequence + row * (rows // chunk * chunk - chunk if many else 2 * rows * (c >= 4))), ("B", 1, kept, 0.0, head, most),
        ("B", 1, base, slopes, head, rows * row + sums)]


def _norm(layout: Layout, shape: ModelShape, numbers: float) -> tuple[float, float]:
    c, (wide, narrow, most_wide, most_narrow) = BYTES[layout.precision][1], NORMS.get(shape.model_type, RMS)
    kept = 4 * wide + c * narrow if c < 4 else c * min(2, wide + narrow)
    return numbers * kept, numbers * (max(4, c) * most_wide + c * most_narrow)


def _block(layout: Layout, shape: ModelShape, layer: int) -> Part:
    """Return a block, whose parts run one after another."""
    (master, c), degrees, sequence = BYTES[layout.precision], layout.degrees, layout.sequence_parallel
    wide, length, recomputes = max(4, c), shape.tokens_of(layer, layout.sequence), blocks_together(layout.recompute) is not None
    heads, tokens = heads_of(shape.heads, shape.kv_heads, degrees.tensor, 0), layout.samples * length // degrees.context
    own, whole = -(-tokens // (degrees.tensor if sequence else 1)) * shape.hidden * c, tokens * shape.hidden * c

    def cut(kept: float, most: float, inner: float, columns: float) -> Part:
        """Return a cut layer with its input, given bytes of its last projection's input, and of what the others make."""
        ends, product = 1 + sequence * (layout.samples > 1), shape.hidden * inner // tokens if c < master else 0
        ran = inner + whole * (1 + sequence * (1 + ends)) + own * (1 + 3 * sequence) if recomputes else 0
        most = max(most + inner * layout.schedule.startswith("zero_bubble"), whole * sequence + inner + product, ran)
        entered = whole * (1 + ends) + 2 * own * sequence + columns + product
        return whole + kept, whole + max(kept + most, entered), 2 * whole + inner + columns

    q, kv = (tokens * len(numbers) * shape.head_dim * c for numbers in (heads.query, heads.kv))
    scores, sums = layout.samples * len(heads.query) * length**2, wide * tokens * len(heads.query)
    flash = 2 * (q + kv) + sums, 2 * (q + kv)
    cores = {"gemma2": (4 * q + scores * (2 * c + wide), 2 * q + scores * (2 * wide - c)), "gpt_neox": (3 * (q + kv), 2 * (q + kv)),
             "t5": (q + 3 * q * wide / c + scores * wide, 2 * scores * wide)}
    kept, most = (flash[0] + q, wide / c * (2 * q + 6 * kv)) if degrees.context > 1 else cores.get(shape.model_type, flash)
    if any(weight.name.endswith("q_norm.weight") for weight in family_of(shape).block_weights(shape, layer)):
        kept += _norm(layout, shape, (q + kv) / c)[0]
    norm = *_norm(layout, shape, own / c), 0.0
    behind = [norm] * shape.model_type.startswith("gemma")
    crossed = [norm, cut(*flash, q, q + 2 * kv)] if shape.encoder and layer >= shape.encoder else []
    numbers, more, columns = MLPS.get((shape.gated_mlp, shape.model_type), GATED if shape.gated_mlp else PLAIN)
    inner = -(-shape.intermediate // degrees.tensor) * tokens * c
    mlp = _experts(layout, shape, tokens) if shape.experts_of(layer) else cut(numbers * inner, more * inner, inner, columns * inner)
    parts = [norm, cut(kept, most, q, q + 2 * kv), *behind, *crossed, norm, mlp, *behind]
    most = max(sum(part[0] for part in parts[:place]) + part[1] for place, part in enumerate(parts))
    return sum(part[0] for part in parts), most + own, sum(part[2] for part in parts)


def _experts(layout: Layout, shape: ModelShape, tokens: int) -> Part:
    """Return gated experts and their router, with a row for each choice of a token. Mixtral sums rows in the wide format."""
    c, h, degrees, chosen = BYTES[layout.precision][1], shape.hidden, layout.degrees, tokens * shape.experts_per_token
    capacity = expert_capacity(layout.expert_capacity, layout.sequence, shape)
    limit, f, wide = capacity and capacity * layout.samples, -(-shape.expert_intermediate // degrees.tensor), max(4, c)
    slots = expert_slots(limit, tokens, shape.experts_per_token, shape.experts) if degrees.expert > 1 else None
    rows = slots * shape.experts if slots else min(chosen, (limit or chosen) * shape.experts)
    row, inner, choices, whole = rows * h * c, rows * f * c, chosen * h * c, tokens * h * c
    product = -(-shape.experts // degrees.expert) * f * h * c * (c < 8)
    kept = whole + tokens * shape.experts * (c + 3 * wide) + row + 4 * inner + choices
    summed = (2 * choices + whole) * wide / c if shape.model_type == "mixtral" else 2 * choices
    most = max(kept + summed, kept + inner + product, whole + 2 * (row + inner + product), kept - choices + 3 * row * (
        degrees.expert > 1))
    return kept, most, whole + 2 * row + 4 * inner
