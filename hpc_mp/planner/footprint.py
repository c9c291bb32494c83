"""Bytes that a rank of the engine holds at the peak of a step, predicted from a layout and the shape of a model. No torch.

The peak is the largest of a few moments: the end of a forward, its loss, the beginning of a backward, its first block, and the
end of the last backward. At each of them a rank holds its state, what the chunks in flight keep, and the temporaries of what
runs. Those of the parts of a block are tables, derived from the modules of transformers and from the engine as PyTorch runs them
without compilation. ``counted`` is what a dry run counts, for jobs without dropout whose samples are one document;
``benchmarks/footprint_check.py`` compares both.

``libraries`` is an estimate of what a dry run does not count: a CUDA context, the buffers of NCCL's communicators (both as in
``train/dry_run``), and gaps between allocations: 6 % of what comes and goes. nvidia-smi shows 5 to 9 GB more than sums of this
kind on an A100 with 80 GB (logs of BLOOM's training, arXiv:2211.05100), with everything that a process has.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

from hpc_mp.layout.flat import FlatLayout, StageSpan, blocks_together, rank_units, stage_spans
from hpc_mp.layout.layout import Layout
from hpc_mp.layout.models import ModelShape, expert_capacity, expert_slots, family_of
from hpc_mp.layout.models.tensor import heads_of
from hpc_mp.layout.schedule import Action, Residency, residency
from hpc_mp.layout.schedule_of import schedule_of
from hpc_mp.planner.memory import BYTES, state_bytes

CONTEXT = 1 << 30  # bytes of a CUDA context with kernels and workspaces
CONNECTION = (1 << 22) + 120 * 640 * 8 * 8 + 8 * 512 * 8 * 16  # bytes of the buffers of a connection of NCCL
COLLECTIVE, CHANNEL = 2 * 16, 4  # connections of a communicator for collectives, and of one between two stages
GAPS = 0.06  # of activations and temporaries
LOGITS, TILE = 1 << 26, 64  # logits of a chunk of the loss, and what its rows are a multiple of
UNDER_WAY = 3  # gradients of blocks that are there at once, if each needs an array of its own


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of a rank at its peak: state that stays; activations of the chunks in flight; logits of a chunk of the loss;
    unsharded parameters; temporaries, recomputed blocks and gradients under way; messages between stages; what libraries take,
    about. ``host``: state in host memory."""

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
        """What a dry run counts."""
        return (self.parameters + self.gradients + self.optimizer + self.activations + self.logits + self.gathered + self.working
                + self.messages)

    @property
    def total(self) -> int:
        return self.counted + self.libraries


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a block, in bytes: kept for its backward, there at most in its forward and in its backward (with what is kept),
    and what a split backward leaves to its weights."""

    kept: float
    forward: float
    backward: float
    waiting: float = 0.0


@dataclass(frozen=True, slots=True)
class _Moment:
    """Bytes beside state and the other chunks. ``chunk``: kind of the action, which says how many of these there are."""

    chunk: str
    activations: float
    working: float
    logits: float = 0.0
    gathered: float = 0.0


# Per token and hidden unit. kind -> kept numbers of the wide format and of the compute format, and those at most in a backward
NORMS = {"rms": (1, 1, 6, 0), "wide rms": (2, 0, 6, 0), "t5": (1, 2, 5, 1), "layer": (0, 1, 0, 3)}
# Per token and inner unit. kind -> kept numbers, those that a backward adds at most, and columns with the same input
MLPS = {"gated": (4, 2, 2), "gated gelu_new": (7, 2, 2), "gelu": (2, 1, 1), "gelu_new": (5, 2, 1), "relu": (1, 2, 1)}
# model_type -> norm and MLP of families that differ from Llama
KINDS = {"gemma2": ("wide rms", "gated"), "gemma3_text": ("wide rms", "gated"), "gpt2": ("layer", "gelu_new"),
         "gptj": ("layer", "gelu_new"), "bert": ("layer", "gelu"), "roberta": ("layer", "gelu"), "gpt_neox": ("layer", "gelu"),
         "modernbert": ("layer", "gated"), "t5": ("t5", "relu")}


class _Sizes:
    """Sizes of a rank: t, a: its tokens between cut layers and inside of them; th, ah: bytes of their hidden states."""

    def __init__(self, layout: Layout, shape: ModelShape) -> None:
        self.layout, self.shape, self.family, self.h = layout, shape, family_of(shape), shape.hidden
        self.m, self.c = BYTES[layout.precision]
        self.w, self.tensor, self.sp = max(4, self.c), layout.degrees.tensor, layout.sequence_parallel
        self.a = layout.samples * layout.sequence // layout.degrees.context
        self.t = -(-self.a // self.tensor) if self.sp else self.a
        heads = heads_of(shape.heads, shape.kv_heads, self.tensor, 0)
        self.heads, self.q, self.kv = len(heads.query), len(heads.query) * shape.head_dim, len(heads.kv) * shape.head_dim
        self.copies = 1 + (layout.samples > 1) if self.sp else 0  # of an input gradient that is scattered
        self.norm_kind, self.mlp_kind = KINDS.get(shape.model_type, ("rms", "gated" if shape.gated_mlp else "gelu"))
        if shape.model_type == "t5" and shape.gated_mlp:
            self.mlp_kind = "gated gelu_new"
        self.keeps_input = self.c == self.w or self.norm_kind == "layer"  # of a norm, in its own format

    def product(self, *sizes: float) -> float:
        """Bytes of a weight gradient before it is added to one of a wider format."""
        return prod(sizes) * (self.c if self.c < self.m else 0)

    def norm(self, width: float) -> _Part:
        """Of so many numbers."""
        wide, computed, wide_back, computed_back = NORMS[self.norm_kind]
        kept = wide * self.w + computed * self.c if self.c < self.w else self.c * min(2, wide + computed)
        return _Part(width * kept, width * (kept + self.w + self.c), width * (wide_back * self.w + computed_back * self.c))

    def cut(self, a: float, kept: float, back: float, inner: float, columns: float, product: float, forward: float = 0.0) -> _Part:
        """A cut layer of so many tokens."""
        io = a * self.h * self.c
        th = self.t * self.h * self.c
        whole, kept = io if self.sp else 0, io + kept
        enter = io * (2 + self.copies + (not self.sp)) + a * columns * self.c + product + 2 * (th if self.sp else 0)
        return _Part(kept, max(kept + (io * (1 + self.copies) + 3 * th if self.sp else 0), kept + forward),
                     max(kept + whole + a * inner * self.c + product, kept + back, enter),
                     io + (inner + columns) * a * self.c + io)

    def attention(self, layer: int, cross: bool = False) -> _Part:
        shape, layout, q, kv, c, w = self.shape, self.layout, self.q, self.kv, self.c, self.w
        length = shape.tokens_of(layer, layout.sequence)
        a = layout.samples * length // layout.degrees.context
        scores = layout.samples * self.heads * length**2
        kept, back, forward = c * a * (2 * q + 2 * kv) + w * a * self.heads, c * a * (2 * q + 2 * kv), 0.0
        if layout.degrees.context > 1:
            kept, back = kept + c * a * q, w * a * (2 * q + 6 * kv)
        elif shape.encoder and not cross:
            kept, back = a * (3 * w + c) * q + scores * w, 2 * scores * w
        elif shape.model_type == "gemma2":
            kept, back, forward = 4 * q * c * a + scores * (2 * c + w), scores * (2 * w - c) + 2 * c * a * q, scores * (w - c + c)
        if shape.model_type == "gpt_neox":
            kept += c * a * (q + kv)
        if any(weight.name.endswith("q_norm.weight") for weight in self.family.block_weights(shape, layer)):
            kept += self.norm(a * (q + kv)).kept
        return self.cut(a, kept, back, q, q + 2 * kv, self.product(self.h, q), forward)

    def mlp(self, layer: int) -> _Part:
        shape, c, h = self.shape, self.c, self.h
        a = self.layout.samples * shape.tokens_of(layer, self.layout.sequence) // self.layout.degrees.context
        if experts := shape.experts_of(layer):
            held, f = -(-experts // self.layout.degrees.expert), -(-shape.expert_intermediate // self.tensor)
            capacity = expert_capacity(self.layout.expert_capacity, self.layout.sequence, shape)
            limit = None if capacity is None else capacity * self.layout.samples
            chosen = a * shape.experts_per_token
            slots = expert_slots(limit, a, shape.experts_per_token, experts) if self.layout.degrees.expert > 1 else None
            rows = slots * experts if slots else chosen if limit is None else min(chosen, limit * experts)
            weights = self.w if shape.model_type == "mixtral" else c
            product = c * held * f * h if c < 8 else 0
            router = a * experts * (c + 3 * self.w)
            kept = a * h * c + router + c * rows * (h + 4 * f) + c * chosen * h
            back = max(kept + chosen * h * ((2 * self.w + c) if weights > c else 2 * c),
                       kept + c * rows * f + product, kept + c * rows * (2 * f - h), a * h * c + c * rows * (2 * h + 2 * f) + 2 * product)
            return _Part(kept, kept + chosen * h * (weights + c), back, a * h * c + c * rows * (2 * h + 4 * f))
        f = -(-shape.intermediate // self.tensor)
        numbers, more, columns = MLPS[self.mlp_kind]
        return self.cut(a, numbers * c * a * f, more * c * a * f, f, columns * f, self.product(h, f))

    def block(self, layer: int) -> _Part:
        """All parts of a block, one after another."""
        t = self.t * self.shape.tokens_of(layer, self.layout.sequence) // self.layout.sequence
        norm, th = self.norm(t * self.h), t * self.h * self.c
        wide = self.norm_kind == "wide rms"
        parts = [norm, self.attention(layer), *[norm] * (1 + wide), self.mlp(layer), *[norm] * wide]
        if self.shape.encoder and layer >= self.shape.encoder:
            parts[2:2] = [norm, self.attention(layer, True)]
        kept = forward = backward = 0.0
        for part in parts:
            forward, backward = max(forward, kept + part.forward), max(backward, kept + part.backward)
            kept += part.kept
        return _Part(kept, max(forward + 3 * th, kept + 4 * th), backward + th, sum(part.waiting for part in parts))


@dataclass(frozen=True, slots=True)
class _Stage:
    """Bytes that a chunk keeps in all, and between the parts of a split backward; those of its output; and its moments."""

    kept: float
    waiting: float
    message: float
    moments: tuple[_Moment, ...]


def _stage(s: _Sizes, span: StageSpan, blocks: Mapping[str, int]) -> _Stage:
    """``blocks``: bytes of unsharded parameters by block."""
    parts = {kind: s.block(layer) for layer, kind in zip(span.layers, (s.shape.kinds[layer] for layer in span.layers))}
    rows = [parts[s.shape.kinds[layer]] for layer in span.layers]
    together = blocks_together(s.layout.recompute)
    th, ah, c, w, h = s.t * s.h * s.c, s.a * s.h * s.c, s.c, s.w, s.h
    group = rows[-(len(rows) % (together or 1) or together or 1):]
    names = [s.family.path(layer) for layer in span.layers]
    ends = [blocks.get(name, 0) for name in reversed(names)]
    gathered = sum(ends[:len(group) + 1])
    inputs = -(-len(rows) // together) * th if together else 0
    base = inputs if together else sum(part.kept for part in rows)
    again = sum(part.kept for part in group) - (th if s.keeps_input else 0) if together and group else 0
    inside = group[-1].kept if group else 0
    biases = 0
    if s.shape.encoder:
        for stack in {layer < s.shape.encoder for layer in span.layers}:
            biases += c * s.heads * s.shape.tokens_of(0 if stack else s.shape.encoder, s.layout.sequence)**2
    base += biases
    moments, kept = [], base
    if span.last:
        width = -(-(s.shape.classes or s.shape.vocabulary) // (1 if s.shape.classes else s.tensor))
        tokens = s.t if s.shape.classes else s.layout.samples * s.shape.tokens_of(s.shape.layers - 1, s.layout.sequence) // s.layout.degrees.context
        most = max(1, LOGITS // width)
        most = most - most % TILE if most > TILE else most
        full, rest = divmod(tokens, most)
        last = rest or most
        norm = s.norm(s.t * h * tokens // s.a)
        head = norm.kept + tokens * h * c
        wide = 2 * w if c < w else w
        n = max(1, full)
        r = min(most, tokens)
        gradients = (n - 1) * r * h * c
        unit = blocks.get("tied", 0) + blocks.get("head", 0)
        whole = th if s.sp else 0
        moments.append(_Moment("F", base + head, gradients + whole, r * width * (wide + c * (1 + (n > 1))), unit))
        kept = base + head + tokens * h * c + last * width * c
        product = s.product(width, h)
        moments.append(_Moment("B", base + head, tokens * h * c + max(product + 2 * whole, ah * s.copies + 2 * whole), last * width * c, unit))
        moments.append(_Moment("B", base, norm.backward, 0, unit))
    if rows:
        forward = rows[-1].forward
        if not together:
            moments.append(_Moment("F", base, forward - inside, 0, gathered))
        moments.append(_Moment("B", base, again + max(part.backward for part in group[-1:]) - inside + (0 if span.last else th), 0, gathered))
    waiting = sum(part.waiting for part in rows) + (kept - base if span.last else 0)
    return _Stage(kept, waiting, 0 if span.last else th, tuple(moments))


def _held(actions: Iterable[Action], stages: Mapping[int, _Stage], plan: Residency) -> dict[tuple[str, int], tuple[float, int]]:
    """Return for forwards and backwards of each stage what other chunks keep at most, and the number of those that have sent."""
    held, most = 0.0, {}
    sent = 0
    for action in actions:
        if action.kind not in ("F", "B", "I", "W"):
            continue
        stage, kind = stages[action.stage], "F" if action.kind == "F" else "B"
        for chunk in plan.returns.get(action, ()):
            held += stages[chunk[0]].kept
        leaves = kind == "F" and (action.stage, action.microbatch) in plan.away
        if kind == "B" and action.kind != "W":
            held -= stage.kept
            sent -= stage.message > 0
        key = kind, action.stage
        if action.kind != "W" and held >= most.get(key, (-1, 0))[0]:
            most[key] = held, sent
        if action.kind == "F":
            sent += stage.message > 0
        if action.kind == "F" and not leaves:
            held += stage.kept
        elif action.kind == "I":
            held += stage.waiting
        elif action.kind == "W":
            held -= stage.waiting
    return most


def footprint(layout: Layout, shape: ModelShape) -> tuple[Footprint, ...]:
    """Return the footprint of every rank of a pipeline, of the tensor rank with most state."""
    s, states, spans = _Sizes(layout, shape), state_bytes(layout, shape), stage_spans(layout.layers)
    few = {"gpipe", "simple", "breadth_first"}
    schedule = schedule_of(layout)
    results = []
    for pipeline, actions in enumerate(schedule.ranks):
        state = max((states[pipeline, tensor] for tensor in range(layout.degrees.tensor)), key=lambda state: state.total)
        held = [stage for stage, holder in enumerate(schedule.placement) if holder == pipeline]
        units = _units(layout, shape, [spans[stage] for stage in held])
        parts, blocks = Counter(), Counter()
        together = 1 + (blocks_together(layout.recompute) or 1)
        for unit, count in units.items():
            pass
        gathers = layout.zero == 3
        for block, several in units.items():
            for unit in several:
                if gathers and unit.shards > 1:
                    blocks[block] += unit.padded * s.c
                if layout.zero >= 2 and layout.reduce == "microbatch" and unit.shards > 1:
                    parts[block] += unit.padded * s.m
        gathered = sum(size for _, size in blocks.most_common(together))
        under_way = 0
        lengths: dict[int, int] = {}
        if parts:
            for several in units.values():
                for unit in several:
                    if unit.shards > 1:
                        lengths[unit.padded] = min(lengths.get(unit.padded, 0) + 1, UNDER_WAY if len(several) == 1 else 2)
            under_way = sum(length * count for length, count in lengths.items()) * s.m
        gradients = state.gradients - max(parts.values(), default=0)
        reduced = 0 if parts else sum(unit.part * s.m for several in units.values() for unit in several if unit.shards > 1)
        plan = Residency() if layout.offload_horizon is None else residency(actions, layout.offload_horizon)
        stages = {stage: _stage(s, spans[stage], blocks) for stage in held}
        others = _held(actions, stages, plan)
        best = None
        for stage, made in stages.items():
            for moment in made.moments:
                rest, sent = others[moment.chunk, stage]
                messages = made.message + (sent * made.message if moment.chunk == "F" else made.message)
                one = (rest + moment.activations, moment.logits, moment.gathered, moment.working + under_way, messages)
                if best is None or sum(one) > sum(best):
                    best = one
        last = (0, 0, 0, reduced, 0)
        best = max(best, last, key=sum)
        activations, logits, whole, working, messages = map(int, best)
        libraries = CONTEXT + _buffers(layout, schedule.placement, pipeline, shape) + int(GAPS * (activations + logits + working + whole))
        results.append(Footprint(state.parameters - gathered, gradients, state.optimizer, activations, logits, whole, working,
                                 messages, libraries, state.host))
    return tuple(results)


def _units(layout, shape, spans):
    """One FlatLayout list by block name; layers of a kind have the same."""
    family, result, known = family_of(shape), {}, {}
    for span in spans:
        for layer in span.layers:
            kind = shape.kinds[layer]
            if kind not in known:
                known[kind] = [unit for unit in rank_units(layout, shape, [StageSpan(range(layer, layer + 1), False, False)]).values()]
            result[family.path(layer)] = known[kind]
        for unit in rank_units(layout, shape, [StageSpan(range(0), span.first, span.last)]).values():
            result[unit.block] = [*(other for other in result.get(unit.block, []) if other.unit != unit.unit), unit]
    return result


def _buffers(layout, placement, pipeline, shape) -> int:
    d = layout.degrees
    same = layout.state_degree // d.expert
    shards = layout.expert_cut().shards
    sizes = (d.tensor, d.context, layout.shard_degree, layout.state_degree // layout.shard_degree, d.expert,
             shards if d.expert > 1 else 1, same // shards if d.expert > 1 else 1,
             d.pipeline if pipeline in (placement[0], placement[-1]) and placement[0] != placement[-1] else 1,
             d.tensor if shape.kv_heads < d.tensor else 1)
    pairs = {(a, b) for a, b in zip(placement, placement[1:]) if a != b and pipeline in (a, b)}
    return ((1 + sum(size > 1 for size in sizes)) * COLLECTIVE + 2 * len(pairs) * CHANNEL) * CONNECTION
