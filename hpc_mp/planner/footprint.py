"""Bytes that a rank of the engine holds at the peak of a step, predicted from a layout and the shape of a model. No torch.

The peak is the largest of a few moments, in a place: 0 a forward's end, 1 the loss, 2 the backward of the last blocks, 3 of
others, 4 of the first ones at the end of a step, 5 behind it. Each has state, what chunks in flight keep, and temporaries.
``counted`` is what a dry run counts without dropout and compilation. ``libraries`` adds a CUDA context and NCCL's buffers, as
``train/dry_run`` does, and 6 % of what comes and goes for gaps: nvidia-smi shows 5 to 9 GB beside sums (arXiv:2211.05100).
"""

from collections import Counter
from dataclasses import astuple, dataclass, replace

from hpc_mp.layout.flat import EMBEDDING, HEAD, TIED, StageSpan, blocks_together, stage_spans
from hpc_mp.layout.layout import Layout
from hpc_mp.layout.models import ModelShape, expert_capacity, expert_slots, family_of
from hpc_mp.layout.models.tensor import heads_of
from hpc_mp.layout.schedule import Action, Residency, residency
from hpc_mp.layout.schedule_of import schedule_of
from hpc_mp.planner.memory import BYTES, state_bytes, units_of

CONTEXT, BUFFERS = 1 << 30, 32 * ((1 << 22) + 120 * 640 * 8 * 8 + 8 * 512 * 8 * 16)  # bytes, BUFFERS for each communicator
GAPS, LOGITS, TILE = 0.06, 1 << 26, 64  # logits of a chunk of the loss, and what the number of its rows is a multiple of
# Numbers for each of a norm: kept, wide and narrow, and most in a backward; for each inner one of an MLP: kept, added, columns.
RMS, LAYER, GATED, PLAIN = (1, 1, 6, 0), (0, 1, 0, 3), (4, 2, 2), (2, 1, 1)
NORMS = {"t5": (1, 2, 5, 1), "modernbert": LAYER, **dict.fromkeys(("gemma2", "gemma3_text", "olmo2"), (2, 0, 6, 0))}
MLPS = {(True, "t5"): (7, 2, 2), (False, "t5"): (1, 2, 1), (False, "gpt2"): (5, 2, 1), (False, "gptj"): (5, 2, 1)}
STEADY = ("1f1b", "interleaved_1f1b", "zero_bubble", "zero_bubble_v")  # whose peaks come early
Part = tuple[float, ...]  # bytes kept for a backward, there at most at once, left to a W; and of a norm: kept, and at most
Moments = list[tuple[str, int, float, float, float, float]]  # F or B, place, activations, logits, gathered units, working


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


def footprint(layout: Layout, shape: ModelShape) -> tuple[Footprint, ...]:
    """Return the footprint of every rank of a pipeline, of the tensor rank with most state."""
    states, spans, (master, c) = state_bytes(layout, shape), stage_spans(layout.layers), BYTES[layout.precision]
    degrees, end, gather, kinds = layout.degrees, layout.stages - 1, c * (layout.zero == 3), shape.kinds
    blocks = [*map([_block(layout, shape, kinds.index(kind)) for kind in range(1 + max(kinds))].__getitem__, kinds)]
    few = min(layout.microbatches, degrees.pipeline * (2 if layout.schedule in STEADY else layout.microbatches))
    schedule, together, results = schedule_of(replace(layout, microbatches=few)), blocks_together(layout.recompute) or 1, []
    for pipeline, actions in enumerate(schedule.ranks):
        own = max((states[pipeline, tensor] for tensor in range(degrees.tensor)), key=lambda state: state.total)
        mine, shared = {stage: spans[stage] for stage in schedule.stages_of(pipeline)}, Counter[str]()
        for unit in units_of(layout, shape, pipeline, 0).values():  # numbers that data ranks share out
            shared[unit.block] += unit.padded * (unit.trained and unit.shards > 1)
        largest, ends = sorted(shared.values(), reverse=True), [shared.pop(name, 0) for name in (EMBEDDING, HEAD, TIED)]
        block, head = max(shared.values(), default=0), ends[1] + ends[2] * (end in mine)
        at_first, later = _gradients(layout, ends, [*shared.values()], 0 in mine, end in mine)
        made = {stage: _stage(layout, shape, span, blocks, block * gather, head * gather) for stage, span in mine.items()}
        peaks, others = [], _others(actions, {stage: chunk for stage, (chunk, _) in made.items()}, layout.offload_horizon)
        for stage, ((kept, message, _), moments) in made.items():
            for kind, place, activations, logits, gathered, working in moments:
                held = others[kind, stage] * (place < 4)
                sent = (held / (kept or 1) if kind == "F" else 1.0) * (stage < end) + (stage > 0)
                sums = max(later[place], at_first[3] - kept / master) if kind == "B" else later[place]
                peaks.append((held + activations, logits, gathered, working + sums * master, sent * message))
        peak = [*map(int, max(peaks, key=sum))]
        libraries = CONTEXT + BUFFERS * (1 + sum(number > 1 for number in astuple(degrees))) + int(GAPS * sum(peak[:4]))
        whole, bucket = gather * sum(largest[:1 + together]), master * sum(largest[:1]) * (layout.reduce == "microbatch")
        results.append(Footprint(own.parameters - whole, own.gradients - bucket, own.optimizer, *peak, libraries, own.host))
    return tuple(results)


def _gradients(layout: Layout, ends: list[int], layers: list[int], first: bool, last: bool) -> tuple[list[float], list[float]]:
    """Return the numbers of gradients and sums under way in each place, during the first backward and during later ones."""
    shards, embedding, head, block = layout.shard_degree, ends[0] + ends[2] * first, ends[1] + ends[2] * last, max([0, *layers])
    if layout.reduce == "step":  # only the last backward has sums
        rest = (sum(ends) + sum(layers) - block - embedding) / shards
        return (once := [0, 0, 0, 0, rest - ((blocks_together(layout.recompute) or 1) - 1) * block / shards, rest]), once
    many = len(layers) + 2 - last if layout.schedule in STEADY[2:] else min(len(layers), 3 - (layout.degrees.expert > 1))
    early = [0, head, head + block, *[head + many * block + 2 * block / shards] * 3]
    late = [embedding + head + many * block + part / shards for part in (*[embedding + block] * 2, sum(ends), *[2 * block] * 3)]
    return early, late if layout.schedule in STEADY and layout.microbatches > 1 else early  # buckets stay until a step's end


def _others(actions: tuple[Action, ...], stages: dict[int, Part], horizon: int | None) -> dict[tuple[str, int], float]:
    """Return what other chunks keep at most during forwards, F, and backwards, B, of a stage."""
    held, most, plan = 0.0, dict[tuple[str, int], float](), Residency() if horizon is None else residency(actions, horizon)
    for action in (action for action in actions if action.kind in "FBIW"):
        (kept, _, left), key = stages[action.stage], (action.kind.replace("I", "B"), action.stage)
        held += sum(stages[stage][0] for stage, _ in plan.returns.get(action, ())) - {"F": 0, "W": left}.get(action.kind, kept)
        most[key] = max(most.get(key, 0.0), held)
        held += {"F": kept * ((action.stage, action.microbatch) not in plan.away), "I": left}.get(action.kind, 0.0)
    return most


def _stage(layout: Layout, shape: ModelShape, span: StageSpan, every: list[Part], unit: int, head: int) -> tuple[Part, Moments]:
    """Return a stage's chunk, with its message in place of ``most``, and its moments. ``unit``, ``head``: gathered bytes."""
    (master, c), sequence, together = BYTES[layout.precision], layout.sequence_parallel, blocks_together(layout.recompute)
    lengths, row, degrees = [shape.tokens_of(layer, layout.sequence) for layer in span.layers], shape.hidden * c, layout.degrees
    tokens, size = layout.samples * [layout.sequence, *lengths][-1] // degrees.context, together or 1
    own, groups, split = -(-tokens // (degrees.tensor if sequence else 1)), list[Part](), layout.schedule in STEADY[2:]
    shared = own * row * (c >= 4 or every[-1][3] <= own * row)  # of a block's input and what its first norm keeps
    for begin in range(0, len(lengths), size):  # of blocks that run together: kept, at most in addition, and left
        parts = [every[layer] for layer in span.layers[begin:begin + size]]
        kept, more, left = sum(part[0] for part in parts), parts[-1][1] - parts[-1][0], sum(part[2] for part in parts)
        groups.append((own * row, kept - shared + more, left) if together else (kept, more, left))
    kept, left = sum(group[0] for group in groups), sum(group[2] for group in groups)
    kept += sum(c * shape.heads // degrees.tensor * length**2 for length in {*lengths} if shape.encoder)  # biases of scores
    final = every[span.layers[0]][1] - (shared if together else every[span.layers[0]][0]) if lengths else 0.0
    moments: Moments = [("F", 0, kept, 0.0, unit * size, (4 * own + sequence * tokens) * row)]
    for place, at in ((2, len(groups) - 1), (3, len(groups) - 3), (3, 0), (4, 0), (5, 0)) if groups else ():
        still = kept - sum(group[0] - split * group[2] for group in groups[max(0, at) + 1:])  # of those before, and for a W
        moments.append(("B", place, still, 0.0, unit * (size + (at > 0)), final if place == 5 else groups[max(0, at)][1]))
    if not span.last:
        return (kept, own * row, left), moments
    rows, width = (own, shape.classes) if shape.classes else (tokens, -(-shape.vocabulary // degrees.tensor))
    part, added = min(rows, LOGITS // width // TILE * TILE or LOGITS // width), shape.hidden * (c < master)  # of a word's row
    last, many, base = (rows - 1) % part + 1, rows > part, kept + every[-1][3] + rows * row
    wide = 1 + 3 * (c < 4) + (shape.model_type == "gemma2")  # logits beside those in the compute format, and capped ones
    scores = c * width * max(part * (min(2, rows // part) + wide), last * (1 + wide) + part * many, (2 * part + added) * many)
    moments += [("F", int(many), base, scores, head, row * (rows - last + own * sequence)),
                ("B", 1, base, last * width * c, head, rows * row + max(c * width * added, 2 * rows * row * sequence)),
                ("B", 1, kept, 0.0, head, every[-1][4])]
    return (base + rows * row + last * width * c, own * row, left + rows * row + last * width * c), moments


def _block(layout: Layout, shape: ModelShape, layer: int) -> Part:
    """Return a block, whose parts run one after another."""
    (master, c), h, degrees, sequence = BYTES[layout.precision], shape.hidden, layout.degrees, layout.sequence_parallel
    length, heads = shape.tokens_of(layer, layout.sequence), heads_of(shape.heads, shape.kv_heads, degrees.tensor, 0)
    tokens, wide, capped = layout.samples * length // degrees.context, max(4, c), shape.model_type == "gemma2"
    family, weights = family_of(shape), {weight.name: weight.shape for weight in family_of(shape).block_weights(shape, layer)}
    scales = [name for name, sizes in weights.items() if len(sizes) == 1 and name.endswith(".weight")]  # of norms
    fused = bool(family.rotary) and any("qkv" in name.lower() or "query_key_value" in name for name in weights)  # v is its view
    inside = sum(name.endswith(("q_norm.weight", "k_norm.weight")) for name in scales)
    norms = NORMS.get(shape.model_type, LAYER if any(f"{name[:-6]}bias" in weights for name in scales) else RMS)
    own, whole = -(-tokens // (degrees.tensor if sequence else 1)) * h * c, tokens * h * c
    normed = 4 * norms[0] + c * norms[1] if c < 4 else c * min(2, norms[0] + norms[1])  # bytes that a norm keeps for a number
    norm = own / c * normed, own / c * (wide * norms[2] + c * norms[3]), 0.0

    def cut(kept: float, most: float, inner: float, columns: float) -> Part:
        """Return a cut layer with its input, given bytes of its last projection's input, and of what the others make."""
        ends, product = 1 + sequence * (layout.samples > 1), h * inner // tokens if c < master else 0
        ran = inner + whole * (1 + sequence * (1 + ends)) + own * (1 + 3 * sequence) if blocks_together(layout.recompute) else 0
        most = max(most + inner * layout.schedule.startswith("zero_bubble"), whole * sequence + inner + product, ran)
        entered = whole * (1 + ends) + 2 * own * sequence + columns + product
        return whole + kept, whole + max(kept + most, entered), 2 * whole + inner + columns

    q, kv = (tokens * len(some) * shape.head_dim * c for some in (heads.query, heads.kv))
    scores, flash = tokens * length * len(heads.query), (2 * (q + kv) + wide * tokens * len(heads.query), 2 * (q + kv))
    cores = {"gemma2": (4 * q + scores * (2 * c + wide), 2 * q + scores * (2 * wide - c)),
             "t5": (q + 3 * q * wide / c + scores * wide, 2 * scores * wide), "stablelm": (flash[0] + q, flash[1])}
    plain = scores // length * min(1024, length // degrees.context) * (capped or (shape.window_of(layer) or length) < length)
    ring = flash[0] + q, wide / c * (2 * q + 6 * kv) + plain * (5 * wide + (wide if capped else c))  # not fused
    kept, most = ring if degrees.context > 1 else cores.get(shape.model_type, flash)
    kept += bool(inside) * (q + kv) / c * normed + fused * (q + kv)
    numbers, more, columns = MLPS.get((shape.gated_mlp, shape.model_type), GATED if shape.gated_mlp else PLAIN)
    inner, behind = -(-shape.intermediate // degrees.tensor) * tokens * c, [norm] * (len(scales) - inside > 3)
    mlp = cut(numbers * inner, more * inner, inner, columns * inner)
    if shape.experts_of(layer):  # with a row for each choice of a token; Mixtral sums rows in the wide format
        cap, chosen = expert_capacity(layout.expert_capacity, tokens * degrees.context, shape), tokens * shape.experts_per_token
        slots = expert_slots(cap, tokens, shape.experts_per_token, shape.experts) if degrees.expert > 1 else None
        rows = slots * shape.experts if slots else min(chosen, (cap or chosen) * shape.experts)
        product = -(-shape.experts // degrees.expert) * (f := -(-shape.expert_intermediate // degrees.tensor) * c) * h * (c < 8)
        summed = (2 * chosen + tokens) * h * wide if shape.model_type == "mixtral" else 2 * chosen * h * c
        shared = sum(sizes[0] for name, sizes in weights.items() if "shared" in name and name.endswith("gate_proj.weight"))
        held = whole * (1 + ("mlp.shared_expert_gate.weight" in weights)) + numbers * shared // degrees.tensor * tokens * c
        held += tokens * shape.experts * (c + 3 * wide) + rows * (h * c + 4 * f) + chosen * h * c
        mlp = held, max(held + max(summed, rows * f + product), whole + 2 * (rows * (h * c + f) + product)), held
    crossed = [norm, cut(*flash, q, q + 2 * kv)] if 0 < shape.encoder <= layer else []
    parts = [norm, cut(kept, most, q, q + 2 * kv), *behind, *crossed, *[norm] * (len(scales) - inside != 1), mlp, *behind]
    most = max(sum(part[0] for part in parts[:place]) + part[1] for place, part in enumerate(parts))
    return sum(part[0] for part in parts), most + own, sum(part[2] for part in parts), *norm[:2]
