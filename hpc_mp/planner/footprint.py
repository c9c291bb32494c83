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

CONTEXT = 1 << 30  # bytes of a CUDA context with kernels and workspaces
BUFFERS = 32 * ((1 << 22) + 120 * 640 * 8 * 8 + 8 * 512 * 8 * 16)  # bytes of a communicator of NCCL
GAPS = 0.06  # of activations and temporaries
LOGITS, TILE = 1 << 26, 64  # logits of a chunk of the loss, and what the number of its rows is a multiple of
RMS, LAYER = (1, 1, 6, 0), (0, 1, 0, 3)  # numbers for each of a norm: kept, wide and narrow, and at most in its backward
NORMS = {**dict.fromkeys(("gemma2", "gemma3_text"), (2, 0, 6, 0)), "t5": (1, 2, 5, 1),
         **dict.fromkeys(("bert", "gpt2", "gptj", "gpt_neox", "modernbert", "roberta"), LAYER)}
# (gated, model_type) -> numbers for each inner one of an MLP: kept, added at most in its backward, and columns of its input
GATED, PLAIN = (4, 2, 2), (2, 1, 1)
MLPS = {(True, "t5"): (7, 2, 2), (False, "t5"): (1, 2, 1), **dict.fromkeys(((False, "gpt2"), (False, "gptj")), (5, 2, 1))}
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
    states, spans, schedule, (master, c) = state_bytes(layout, shape), stage_spans(layout.layers), schedule_of(layout), BYTES[
        layout.precision]
    degrees, blocks, several = layout.degrees, _blocks(layout, shape), layout.microbatches > 1
    shares, parted, gathers = degrees.tensor if layout.sequence_parallel else 1, layout.reduce == "microbatch", layout.zero == 3
    message = layout.samples * -(-layout.sequence // degrees.context // shares) * shape.hidden * c * (degrees.pipeline > 1)
    results = []
    for pipeline, actions in enumerate(schedule.ranks):
        state = max((states[pipeline, tensor] for tensor in range(degrees.tensor)), key=lambda state: state.total)
        mine = {stage: spans[stage] for stage in schedule.stages_of(pipeline)}
        layers = sum(len(span.layers) for span in mine.values())
        few = [StageSpan(span.layers[-1:], span.first, span.last) for span in mine.values()]
        cut = [unit for unit in rank_units(layout, shape, few).values() if unit.trained and unit.shards > 1]
        ends = {unit.block: unit for unit in cut if unit.block in (EMBEDDING, HEAD, TIED)}
        inner = [unit for unit in cut if cut and unit.block == [*{unit.block: 0 for unit in cut if unit.block not in ends}][-1]] if (
            len(cut) > len(ends)) else []
        block, part = sum(unit.padded for unit in inner), sum(unit.part for unit in inner)
        head = sum(unit.padded for name, unit in ends.items() if name != EMBEDDING)
        whole = sorted([*(unit.padded for unit in ends.values()), *[block] * layers])
        arrays = sum(unit.padded for unit in ends.values()) + block * (most := min(layers, 4 - len(inner)))
        under_way = ((0, head, head + block, head + most * block + 2 * part), (arrays + part, arrays, arrays, arrays + 2 * part))
        made = {stage: _stage(layout, shape, span, blocks, block * c * gathers, head * c * gathers) for stage, span in mine.items()}
        others = _others(actions, {stage: one for stage, (one, _) in made.items()}, layout.offload_horizon)
        kept = sum(unit.part for unit in ends.values()) + part * layers
        peaks = [(0.0, 0.0, 0.0, float(kept * master * (not parted)), 0.0)]
        for stage, (one, moments) in made.items():
            for kind, place, activations, logits, gathered, working in moments:
                rest = others[kind, stage]
                sent = (rest / one[0] if kind == "F" else 1.0) * (stage < layout.stages - 1) + (stage > 0)
                working += under_way[several][place] * master * parted
                peaks.append((rest + activations, logits, gathered, working, sent * message))
        activations, logits, gathered, working, messages = map(int, max(peaks, key=sum))
        number = 1 + sum(size > 1 for size in astuple(degrees)) + (degrees.expert > 1) + (degrees.pipeline > 1) / 2
        results.append(Footprint(
            state.parameters - gathers * c * sum(whole[-1 - (blocks_together(layout.recompute) or 1):]),
            state.gradients - parted * master * max(whole, default=0), state.optimizer, activations, logits, gathered, working, messages,
            int(CONTEXT + number * BUFFERS + GAPS * (activations + logits + gathered + working)), state.host))
    return tuple(results)


def _others(actions: Sequence[Action], stages: dict[int, Part], horizon: int | None) -> dict[tuple[str, int], float]:
    """Return what other chunks keep at most during forwards, F, and backwards, B, of a stage."""
    held, most, plan = 0.0, dict[tuple[str, int], float](), Residency() if horizon is None else residency(actions, horizon)
    for action in (action for action in actions if action.kind in COMPUTE):
        kept, _, waiting = stages[action.stage]
        held += sum(stages[stage][0] for stage, _ in plan.returns.get(action, ()))
        held -= {"F": 0.0, "W": waiting}.get(action.kind, kept)
        if action.kind != "W":
            key = action.kind.replace("I", "B"), action.stage
            most[key] = max(most.get(key, 0.0), held)
        held += {"F": kept * ((action.stage, action.microbatch) not in plan.away), "I": waiting}.get(action.kind, 0.0)
    return most


def _stage(layout: Layout, shape: ModelShape, span: StageSpan, kinds: Sequence[Part], block: float, head: float,
           ) -> tuple[Part, list[Moment]]:
    """Return a stage's chunk, and its moments. ``block``, ``head``: bytes of the parameters that are gathered for them."""
    (master, c), sequence, together = BYTES[layout.precision], layout.sequence_parallel, blocks_together(layout.recompute)
    blocks, size = [kinds[shape.kinds[layer]] for layer in span.layers], together or 1
    whole = layout.samples * shape.tokens_of(shape.layers - 1 if span.last else span.layers[-1], layout.sequence) // layout.degrees.context
    own = -(-whole // (layout.degrees.tensor if sequence else 1))
    hidden, group = own * shape.hidden * c, blocks[(len(blocks) - 1) // size * size:]
    kept = -(-len(blocks) // size) * hidden if together else sum(part[0] for part in blocks)
    kept += sum(c * shape.heads // layout.degrees.tensor * length**2 for length in {
        shape.tokens_of(layer, layout.sequence) for layer in span.layers} if shape.encoder)
    input_kept = c >= 4 or NORMS.get(shape.model_type) == LAYER
    again = sum(part[0] for part in group) - hidden * input_kept if together else 0.0
    moments: list[Moment] = [("F", 0, kept, 0.0, block * len(group), 4 * hidden + sequence * whole * shape.hidden * c)]
    for later in (0, 2)[:len(blocks)]:
        before = kept - sum(hidden if together else part[0] for part in blocks[max(0, len(blocks) - later):])
        moments.append(("B", 2 + later // 2, before, 0.0, block * (1 + len(group)), again + group[-1][1] - group[-1][0]))
    waiting = sum(part[2] for part in blocks)
    if not span.last:
        return (kept, 0.0, waiting), moments
    rows, width = (own, shape.classes) if shape.classes else (whole, -(-shape.vocabulary // layout.degrees.tensor))
    chunk = min(rows, LOGITS // width // TILE * TILE or LOGITS // width)
    row, before = shape.hidden * c, rows // chunk - 1  # bytes of a row, and number of whole chunks before the last one
    norm, most = _norm(layout, shape, own * shape.hidden)
    slopes, base = (rows - (rows - 1) // chunk * chunk) * width * c, kept + norm + rows * row
    scores = chunk * width * (c * (1 + (before > 0)) + max(4, c) * (1 + (c < 4)))
    copies = max(row * width * (c < master), (1 + (layout.samples > 1)) * sequence * rows * row) + 2 * hidden * sequence
    return (base + rows * row + slopes, 0.0, waiting + rows * row + slopes), [
        *moments, ("F", 0, base, scores, head, before * chunk * row + hidden * sequence), ("B", 1, kept, 0.0, head, most),
        ("B", 1, base, slopes, head, rows * row + copies)]


def _norm(layout: Layout, shape: ModelShape, numbers: float) -> tuple[float, float]:
    c, (wide, narrow, most_wide, most_narrow) = BYTES[layout.precision][1], NORMS.get(shape.model_type, RMS)
    kept = 4 * wide + c * narrow if c < 4 else c * min(2, wide + narrow)
    return numbers * kept, numbers * (max(4, c) * most_wide + c * most_narrow)


def _blocks(layout: Layout, shape: ModelShape) -> list[Part]:
    """Return a block of each of the model's kinds."""
    first = {kind: layer for layer, kind in reversed([*enumerate(shape.kinds)])}
    return [_block(layout, shape, first[kind]) for kind in sorted(first)]


def _block(layout: Layout, shape: ModelShape, layer: int) -> Part:
    """Return a block, whose parts run one after another."""
    (master, c), h, degrees, sequence = BYTES[layout.precision], shape.hidden, layout.degrees, layout.sequence_parallel
    wide, length, heads = max(4, c), shape.tokens_of(layer, layout.sequence), heads_of(
        shape.heads, shape.kv_heads, degrees.tensor, 0)
    tokens, recomputes = layout.samples * length // degrees.context, blocks_together(layout.recompute) is not None
    own, whole = -(-tokens // (degrees.tensor if sequence else 1)) * h * c, tokens * h * c  # bytes of hidden states

    def cut(kept: float, most: float, inner: float, columns: float) -> Part:
        """A cut layer and its input. ``inner``: bytes of its last projection's input, ``columns``: of what the others make."""
        ends, product = 1 + sequence * (layout.samples > 1), h * inner // tokens if c < master else 0
        ran = inner + whole * (1 + sequence * (1 + ends)) + own * (1 + 3 * sequence) if recomputes else 0
        most = max(most + inner * layout.schedule.startswith("zero_bubble"), whole * sequence + inner + product, ran)
        return whole + kept, max(whole + kept + most, whole * (2 + ends) + 2 * own * sequence + columns + product), 2 * whole + inner + columns

    q, kv = (tokens * len(numbers) * shape.head_dim * c for numbers in (heads.query, heads.kv))
    scores, sums = layout.samples * len(heads.query) * length**2, wide * tokens * len(heads.query)
    cores = {"gemma2": (4 * q + scores * (2 * c + wide), 2 * q + scores * (2 * wide - c)), "gpt_neox": (3 * (q + kv), 2 * (q + kv)),
             "t5": (q + 3 * q * wide / c + scores * wide, 2 * scores * wide)}
    flash = 2 * (q + kv) + sums, 2 * (q + kv)
    kept, most = (flash[0] + q, wide / c * (2 * q + 6 * kv)) if degrees.context > 1 else cores.get(shape.model_type, flash)
    normed = any(weight.name.endswith("q_norm.weight") for weight in family_of(shape).block_weights(shape, layer))
    kept += _norm(layout, shape, (q + kv) / c * normed)[0]
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
    c, h, degree, chosen = BYTES[layout.precision][1], shape.hidden, layout.degrees.expert, tokens * shape.experts_per_token
    capacity, f = expert_capacity(layout.expert_capacity, layout.sequence, shape), -(-shape.expert_intermediate // layout.degrees.tensor)
    limit = None if capacity is None else capacity * layout.samples
    slots = expert_slots(limit, tokens, shape.experts_per_token, shape.experts) if degree > 1 else None
    rows = slots * shape.experts if slots else min(chosen, (limit or chosen) * shape.experts)
    row, inner, choices, whole, wide = rows * h * c, rows * f * c, chosen * h * c, tokens * h * c, max(4, c)
    product = -(-shape.experts // degree) * f * h * c * (c < 8)
    kept = whole + tokens * shape.experts * (c + 3 * wide) + row + 4 * inner + choices
    summed = (2 * choices + whole) * wide / c if shape.model_type == "mixtral" else 2 * choices
    most = max(kept + summed, kept + inner + product, whole + 2 * (row + inner + product), kept - choices + 3 * row * (degree > 1))
    return kept, most, whole + 2 * row + 4 * inner
