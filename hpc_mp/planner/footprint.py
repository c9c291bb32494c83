"""Bytes that a rank of the engine holds at the peak of a step, predicted from a layout and the shape of a model. No torch.

The peak is the largest of a few moments: a forward's end, its loss, a backward's beginning, its first blocks and its last one.
Each has state, what the chunks in flight keep, and temporaries, derived from the code of transformers' modules and the engine.
``counted`` is what a dry run counts without dropout and compilation. ``libraries`` adds a CUDA context and NCCL's buffers, as
``train/dry_run`` does, and 6 % of what comes and goes for gaps: nvidia-smi shows 5 to 9 GB beside such sums (arXiv:2211.05100).
"""

from dataclasses import astuple, dataclass, replace

from hpc_mp.layout.flat import EMBEDDING, HEAD, TIED, StageSpan, blocks_together, rank_units, stage_spans
from hpc_mp.layout.layout import Layout
from hpc_mp.layout.models import ModelShape, expert_capacity, expert_slots, family_of
from hpc_mp.layout.models.tensor import heads_of
from hpc_mp.layout.schedule import Action, Residency, residency
from hpc_mp.layout.schedule_of import schedule_of
from hpc_mp.planner.memory import BYTES, state_bytes

CONTEXT, BUFFERS = 1 << 30, 32 * ((1 << 22) + 120 * 640 * 8 * 8 + 8 * 512 * 8 * 16)  # bytes, BUFFERS for each communicator
GAPS, LOGITS, TILE = 0.06, 1 << 26, 64  # logits of a chunk of the loss, and what the number of its rows is a multiple of
# Numbers for each of a norm: kept, wide and narrow, and most in a backward; for each inner one of an MLP: kept, added, columns.
RMS, LAYER, GATED, PLAIN = (1, 1, 6, 0), (0, 1, 0, 3), (4, 2, 2), (2, 1, 1)
NORMS = {"t5": (1, 2, 5, 1), "modernbert": LAYER, **dict.fromkeys(("gemma2", "gemma3_text", "olmo2"), (2, 0, 6, 0))}
MLPS = {(True, "t5"): (7, 2, 2), (False, "t5"): (1, 2, 1), (False, "gpt2"): (5, 2, 1), (False, "gptj"): (5, 2, 1)}
STEADY = ("1f1b", "interleaved_1f1b", "zero_bubble", "zero_bubble_v")  # whose peaks come early
Part = tuple[float, ...]  # bytes kept for a backward, there at most at once, left to a W; and of a norm: kept, and at most
# F or B; place: 0 a forward, 1 the loss, 2 the last blocks, 3 others, 4 and 5 the first ones and the end of a step's last backward;
Moments = list[tuple[str, int, float, float, float, float]]  # and bytes of activations, logits, gathered units, and what else works


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
    states, spans, (master, c), degrees = state_bytes(layout, shape), stage_spans(layout.layers), BYTES[layout.precision], layout.degrees
    end, gather, parts, kinds = layout.stages - 1, c * (layout.zero == 3), layout.reduce == "microbatch", shape.kinds
    of_kinds = [_block(layout, shape, kinds.index(kind)) for kind in range(1 + max(kinds))]
    few = min(layout.microbatches, 2 * degrees.pipeline) if layout.schedule in STEADY else layout.microbatches
    schedule, units, results = schedule_of(replace(layout, microbatches=few)), dict.fromkeys(("", EMBEDDING, HEAD, TIED), 0), []
    for unit in rank_units(layout, shape, [StageSpan(range(shape.layers)[-1:], True, True)]).values():
        units[unit.block if unit.block in units else ""] += unit.padded * (unit.trained and unit.shards > 1)
    for pipeline, actions in enumerate(schedule.ranks):
        state = max((states[pipeline, tensor] for tensor in range(degrees.tensor)), key=lambda state: state.total)
        mine = {stage: spans[stage] for stage in schedule.stages_of(pipeline)}
        first, last, layers = 0 in mine, end in mine, sum(len(span.layers) for span in mine.values())
        ends, block = (units[EMBEDDING] * first, units[HEAD] * last, units[TIED] * (first or last)), units[""]
        at_first, later = _gradients(layout, ends, block, layers, (first, last))
        head, largest = ends[1] + ends[2] * last, sorted([*ends, *[block] * layers], reverse=True)
        made = {stage: _stage(layout, shape, span, [of_kinds[kind] for kind in kinds], block * gather, head * gather)
                for stage, span in mine.items()}
        peaks, others = [], _others(actions, {stage: chunk for stage, (chunk, _) in made.items()}, layout.offload_horizon)
        for stage, ((kept, message, _), moments) in made.items():
            for kind, place, activations, logits, gathered, working in moments:
                held = others[kind, stage] * (place < 4)
                sent = (held / (kept or 1) if kind == "F" else 1.0) * (stage < end) + (stage > 0)
                sums = max(later[place], at_first[3] - kept / master) if kind == "B" else later[place]
                peaks.append((held + activations, logits, gathered, working + sums * master, sent * message))
        peak = [*map(int, max(peaks, key=sum))]
        libraries = CONTEXT + BUFFERS * (1 + sum(number > 1 for number in astuple(degrees))) + int(GAPS * sum(peak[:4]))
        together = 1 + (blocks_together(layout.recompute) or 1)  # units that are gathered at once: moments have them
        parameters, gradients = gather * sum(largest[:together]), parts * master * largest[0]
        results.append(Footprint(state.parameters - parameters, state.gradients - gradients, state.optimizer, *peak, libraries, state.host))
    return tuple(results)


def _gradients(layout: Layout, ends: tuple[int, int, int], block: int, layers: int, has: tuple[bool, bool]) -> tuple[list[float], ...]:
    """Return the numbers of gradients and sums under way at every place, of the first backward and of later ones. ``ends``: numbers
    of the units of embedding, head and both; ``block``: of each of the layers; ``has``: whether a rank has the first and last stage."""
    first, last = has
    embedding, head, part = (ends[0] + ends[2] * first) / layout.shard_degree, ends[1] + ends[2] * last, block / layout.shard_degree
    if layout.reduce == "step":  # the last backward sums whole gradients as they come
        rest = (sum(ends) + block * layers) / layout.shard_degree - part - embedding
        once = [0, 0, 0, 0, rest - ((blocks_together(layout.recompute) or 1) - 1) * part, rest]
        return once, once
    at_once = layers + 2 - last if layout.schedule in STEADY[2:] else min(layers, 3 - (layout.degrees.expert > 1))  # blocks' buckets
    full = head + at_once * block + 2 * part
    at_first = [0, head, head + block, full, full, full]
    if layout.microbatches == 1 or layout.schedule not in STEADY:
        return at_first, at_first
    buckets = sum(ends) + ends[2] * (first and last) + at_once * block  # all stay for later backwards
    blocks = buckets + 2 * part
    return at_first, [buckets + part + embedding, buckets + part + embedding, buckets + sum(ends) / layout.shard_degree, blocks, blocks, blocks]


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
    c, sequence, together = BYTES[layout.precision][1], layout.sequence_parallel, blocks_together(layout.recompute)
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
    moments: Moments = [("F", 0, kept, 0.0, unit * size, (4 * own + sequence * tokens) * row)]
    for place, at in ((2, len(groups) - 1), (3, len(groups) - 3), (3, 0), (4, 0), (5, 0)):  # backwards of groups
        if 0 <= at < len(groups):
            gone = sum(group[0] - split * group[2] for group in groups[at + 1:])
            entered = every[span.layers[0]][1] - (shared if together else every[span.layers[0]][0])
            moments.append(("B", place, kept - gone, 0.0, unit * (size + (at > 0)), entered if place == 5 else groups[at][1]))
    if not span.last:
        return (kept, own * row, left), moments
    passed, ending = _head(layout, shape, (kept, every[-1][3], every[-1][4]), tokens, own, head)
    return (kept + passed + every[-1][3], own * row, left + passed), moments + ending


def _head(layout: Layout, shape: ModelShape, below: Part, tokens: int, own: int, head: int) -> tuple[float, Moments]:
    """Return what the head keeps beside its norm, and its moments. ``below``: bytes that layers keep; that their last norm keeps, and
    needs at most. ``own``: tokens of a rank between cut layers."""
    (master, c), (kept, normed, norm), sequence = BYTES[layout.precision], below, layout.sequence_parallel
    row = shape.hidden * c
    rows, width = (own, shape.classes) if shape.classes else (tokens, -(-shape.vocabulary // layout.degrees.tensor))
    part, added = min(rows, LOGITS // width // TILE * TILE or LOGITS // width), shape.hidden * (c < master)  # of a word's row
    last, many, base = (rows - 1) % part + 1, rows > part, kept + normed + rows * row
    wide = 1 + 3 * (c < 4) + (shape.model_type == "gemma2")  # logits beside those in the compute format, and capped ones
    scores = c * width * max(part * (min(2, rows // part) + wide), last * (1 + wide) + part * many, (2 * part + added) * many)
    back = rows * row + max(c * width * added, 2 * rows * row * sequence)
    return rows * row + last * width * c, [
        ("F", int(many), base, scores, head, row * (rows - last + own * sequence)),
        ("B", 1, base, last * width * c, head, back), ("B", 1, kept, 0.0, head, norm)]


def _block(layout: Layout, shape: ModelShape, layer: int) -> Part:
    """Return a block, whose parts run one after another."""
    (master, c), h, degrees, sequence = BYTES[layout.precision], shape.hidden, layout.degrees, layout.sequence_parallel
    length, heads = shape.tokens_of(layer, layout.sequence), heads_of(shape.heads, shape.kv_heads, degrees.tensor, 0)
    tokens, wide, window = layout.samples * length // degrees.context, max(4, c), shape.window_of(layer) or length
    weights = {weight.name: len(weight.shape) for weight in family_of(shape).block_weights(shape, layer)}
    scales = [name for name, number in weights.items() if number == 1 and name.endswith(".weight")]  # of norms
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
             "t5": (q + 3 * q * wide / c + scores * wide, 2 * scores * wide), "gpt_neox": (3 * (q + kv), flash[1]), "stablelm": (flash[0] + q, flash[1])}
    capped = shape.model_type == "gemma2"
    plain = scores // length * min(1024, length // degrees.context) * (capped or window < length)
    ring = flash[0] + q, wide / c * (2 * q + 6 * kv) + plain * (5 * wide + (wide if capped else c))  # not fused
    kept, most = ring if degrees.context > 1 else cores.get(shape.model_type, flash)
    kept += bool(inside) * (q + kv) / c * normed
    numbers, more, columns = MLPS.get((shape.gated_mlp, shape.model_type), GATED if shape.gated_mlp else PLAIN)
    inner, behind = -(-shape.intermediate // degrees.tensor) * tokens * c, [norm] * (len(scales) - inside > 3)
    mlp = cut(numbers * inner, more * inner, inner, columns * inner)
    if shape.experts_of(layer):  # with a row for each choice of a token; Mixtral sums rows in the wide format
        cap, chosen = expert_capacity(layout.expert_capacity, tokens * degrees.context, shape), tokens * shape.experts_per_token
        slots = expert_slots(cap, tokens, shape.experts_per_token, shape.experts) if degrees.expert > 1 else None
        rows = slots * shape.experts if slots else min(chosen, (cap or chosen) * shape.experts)
        product = -(-shape.experts // degrees.expert) * (f := -(-shape.expert_intermediate // degrees.tensor) * c) * h * (c < 8)
        summed = (2 * chosen + tokens) * h * wide if shape.model_type == "mixtral" else 2 * chosen * h * c
        held = whole + tokens * shape.experts * (c + 3 * wide) + rows * (h * c + 4 * f) + chosen * h * c
        mlp = held, max(held + max(summed, rows * f + product), whole + 2 * (rows * (h * c + f) + product)), held
    crossed = [norm, cut(*flash, q, q + 2 * kv)] if 0 < shape.encoder <= layer else []
    parts = [norm, cut(kept, most, q, q + 2 * kv), *behind, *crossed, *[norm] * (len(scales) - inside != 1), mlp, *behind]
    most = max(sum(part[0] for part in parts[:place]) + part[1] for place, part in enumerate(parts))
    return sum(part[0] for part in parts), most + own, sum(part[2] for part in parts), *norm[:2]
