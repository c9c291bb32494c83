"""Bytes of a block for one microbatch on a rank: what it saves for its backward, and the most that its backward has at once.

A block is a sequence of parts: norms, attention, an MLP or experts. What a part saves is what autograd saves in the code of
transformers and in ``train/parallel``; arXiv:2205.05198, section 4.1, counts in the same way. Tensor parallelism cuts attention
and MLP. Between them, sequence parallelism leaves a rank a share of the tokens. Dropout and compilation are not counted.
"""

from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, replace

from hpc_mp.layout.flat import blocks_together
from hpc_mp.layout.layout import Layout
from hpc_mp.layout.models import ModelShape, expert_capacity, expert_slots, family_of
from hpc_mp.layout.models.tensor import heads_of
from hpc_mp.planner.memory import BYTES

QUERIES = 1024  # whose scores ring attention has at once if no fused kernel computes them
SPLIT = ("zero_bubble", "zero_bubble_v")  # schedules that split a backward into I, for inputs, and W, for weights


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a block or of a part of it, for one microbatch."""
    saved: float  # from the forward to the backward
    peak: float  # at most at once in the backward, including what is saved
    deferred: float = 0.0  # from I to W: both factors of the gradients of weights (arXiv:2401.10241)


@dataclass(frozen=True, slots=True)
class Inside:
    """Bytes inside attention or an MLP, between its column-parallel projections and its row-parallel one (arXiv:1909.08053)."""
    saved: float  # from the forward to the backward
    added: float  # at most at once in the backward, beside what is saved
    columns: int  # outputs of the column-parallel projections
    row: int  # input of the row-parallel projection


NORMS = {"t5": "t5", "modernbert": "layer", "gemma2": "wide", "gemma3_text": "wide", "olmo2": "wide"}  # family -> kind of norm
# (Family, True if gated) -> numbers of an MLP for each number of its inner size. A gated MLP saves gate, activated gate, up and
# product, a plain one both sides of its activation. GELU by tanh (NewGELUActivation) saves three more, ReLU its output alone.
GATED, PLAIN, TANH = Inside(4, 2, 2, 1), Inside(2, 1, 1, 1), Inside(5, 2, 1, 1)
MLPS = {("t5", True): Inside(7, 2, 2, 1), ("t5", False): Inside(1, 2, 1, 1), ("gpt2", False): TANH, ("gptj", False): TANH}


@dataclass(frozen=True, slots=True)
class Sizes:
    """A rank's tokens of a microbatch in a layer, and bytes."""
    tokens: int  # of all samples; context ranks share those of each sample
    full: int  # hidden states of all these tokens
    own: int  # hidden states between cut layers; with sequence parallelism, tensor ranks share the tokens
    number: int  # a number in the compute format
    wide: int  # a number in fp32 or fp64, the format of norms, softmax and sums of gradients

    @classmethod
    def of(cls, layout: Layout, shape: ModelShape, length: int) -> "Sizes":
        """Return the sizes in a layer that computes ``length`` tokens of each sample."""
        (wide, number), tokens = BYTES[layout.precision], layout.samples * length // layout.degrees.context
        own_tokens = -(-tokens // layout.degrees.tensor) if layout.sequence_parallel else tokens
        return cls(tokens, tokens * shape.hidden * number, own_tokens * shape.hidden * number, number, wide)


def block_memory(layout: Layout, shape: ModelShape, layer: int) -> tuple[Memory, Memory]:
    """Return the bytes of a block, and of its first norm. In the backward of a part, those before it have what they save."""
    sizes = Sizes.of(layout, shape, shape.tokens_of(layer, layout.sequence))
    weights = {weight.name: weight.shape for weight in family_of(shape).block_weights(shape, layer)}
    norms = [name.removesuffix(".weight") for name, size in weights.items() if len(size) == 1 and name.endswith(".weight")]
    outer = [name for name in norms if not name.endswith(("q_norm", "k_norm"))]  # the others are inside attention
    kind = NORMS.get(shape.model_type, "layer" if any(f"{name}.bias" in weights for name in norms) else "rms")
    norm = _norm(sizes, kind, sizes.own)
    attention = _attention(layout, shape, layer, sizes, weights, kind if len(outer) < len(norms) else None)
    crossed = [norm, _cut_layer(layout, shape, sizes, _flash(layout, shape, sizes))] if 0 < shape.encoder <= layer else []
    numbers = MLPS.get((shape.model_type, shape.gated_mlp), GATED if shape.gated_mlp else PLAIN)
    inner = -(-shape.intermediate // layout.degrees.tensor) * sizes.tokens * sizes.number
    mlp = (_experts(layout, shape, sizes, weights, numbers.saved) if shape.experts_of(layer)
           else _cut_layer(layout, shape, sizes, Inside(*(number * inner for number in astuple(numbers)))))
    before, behind = [norm] * (len(outer) != 1), [norm] * (len(outer) > 3)  # before the MLP; behind attention and MLP
    parts = [norm, _cut_layer(layout, shape, sizes, attention), *behind, *crossed, *before, mlp, *behind]
    saved = peak = 0.0
    for part in parts:
        saved, peak = saved + part.saved, max(peak, saved + part.peak)
    return Memory(saved, peak + sizes.own, sum(part.deferred for part in parts)), norm  # own: the gradient of the output


def _norm(sizes: Sizes, kind: str, size: int) -> Memory:
    """Return the bytes of a norm in transformers' code. ``size``: bytes of its input in the compute format."""
    number, wide = sizes.number, sizes.wide
    saved, peak = {"rms": (wide + number, 6 * wide),  # the input in the wide format, and the normalized input
                   "wide": (2 * wide, 6 * wide),  # an RMS norm with both in the wide format
                   "t5": (wide + number + number * (number < wide), 5 * wide + number),  # an RMS norm that saves its input too
                   "layer": (number, 3 * number)}[kind]  # a fused kernel, which saves its input
    return Memory(size // number * saved, size // number * peak)


def _cut_layer(layout: Layout, shape: ModelShape, sizes: Sizes, inside: Inside) -> Memory:
    """Return the bytes of attention or an MLP with its input. The peak is at one of four moments of its backward."""
    sequence, full, own = layout.sequence_parallel, sizes.full, sizes.own
    copies = 1 + (sequence and layout.samples > 1)  # of what is summed; tokens of several samples are sorted by rank first
    weight = shape.hidden * inside.row // sizes.tokens if sizes.number < sizes.wide else 0  # a gradient, before it is summed
    again = inside.row + full * (1 + sequence * (1 + copies)) + own * (1 + 3 * sequence)  # the end of a recomputed forward
    row = full * sequence + inside.row + weight  # the row-parallel projection: gradients of outputs, gathered, input and weight
    between = inside.added + inside.row * (layout.schedule in SPLIT)  # between the projections; a W needs the last one's input
    # the column-parallel projections, when what is inside is freed: gradients of outputs, weight and input
    column = full * (1 + copies) + 2 * own * sequence + inside.columns + weight
    peak = max(inside.saved + max(between, row, again * (blocks_together(layout.recompute) is not None)), column)
    return Memory(full + inside.saved, full + peak, 2 * full + inside.row + inside.columns)


def _flash(layout: Layout, shape: ModelShape, sizes: Sizes) -> Inside:
    """Return the bytes of attention by a fused kernel, which saves no scores; of the tensor rank with most heads."""
    heads = heads_of(shape.heads, shape.kv_heads, layout.degrees.tensor, 0)
    queries, keys = (sizes.tokens * len(some) * shape.head_dim * sizes.number for some in (heads.query, heads.kv))
    tensors = 2 * (queries + keys)  # queries, keys, values and outputs, or their gradients
    sums = sizes.tokens * len(heads.query) * sizes.wide  # of the exponentials of each query's scores
    return Inside(tensors + sums, tensors, queries + 2 * keys, queries)


def _attention(layout: Layout, shape: ModelShape, layer: int, sizes: Sizes, weights: Iterable[str], norm: str | None) -> Inside:
    """Return the bytes of self-attention. ``norm``: kind of the norms of queries and keys; None: it has none."""
    flash, length, context = _flash(layout, shape, sizes), shape.tokens_of(layer, layout.sequence), layout.degrees.context
    saved, added, queries, keys = flash.saved, flash.added, flash.row, (flash.columns - flash.row) // 2
    number, wide, capped = sizes.number, sizes.wide, shape.model_type == "gemma2"
    rows = queries // (shape.head_dim * number)  # of scores, one for each query of each head
    if context > 1:  # a ring has outputs token by token too; gradients, and keys and values on their way, in the wide format
        saved, added = saved + queries, wide / number * (2 * queries + 6 * keys)
        if capped or (shape.window_of(layer) or length) < length:  # no fused kernel
            added += rows * min(QUERIES, length // context) * (5 * wide + (wide if capped else number))
    elif capped:  # keys and values are copied for each query head; scores, their softmax in both formats
        saved, added = 4 * queries + rows * length * (2 * number + wide), 2 * queries + rows * length * (2 * wide - number)
    elif shape.model_type == "t5":  # scores have a trained bias, for which torch computes plain products in the wide format
        saved, added = queries * (1 + 3 * wide / number) + rows * length * wide, 2 * rows * length * wide
    elif shape.model_type == "stablelm":  # outputs come head by head, and are copied for the row-parallel projection
        saved += queries
    if family_of(shape).rotary and any("qkv" in name.lower() or "query_key_value" in name for name in weights):
        saved += queries + keys  # values are a view of the outputs of one projection for all three
    return replace(flash, saved=saved + (_norm(sizes, norm, queries + keys).saved if norm else 0.0), added=added)


def _experts(layout: Layout, shape: ModelShape, sizes: Sizes, weights: Mapping[str, tuple[int, ...]], mlp: float) -> Memory:
    """Return the bytes of a router and gated experts, with a row for each choice of a token, and of a shared expert."""
    tokens, number, degrees, token = sizes.tokens, sizes.number, layout.degrees, shape.hidden * sizes.number
    capacity = expert_capacity(layout.expert_capacity, tokens * degrees.context, shape)
    slots = expert_slots(capacity, tokens, shape.experts_per_token, shape.experts) if degrees.expert > 1 else None
    choices = tokens * shape.experts_per_token
    rows = slots * shape.experts if slots else min(choices, (capacity or choices) * shape.experts)
    inner = -(-shape.expert_intermediate // degrees.tensor) * number  # and ``token``: bytes of a row
    weight = -(-shape.experts // degrees.expert) * inner * shape.hidden * (number < 8)  # a gradient, before it is summed
    router = tokens * shape.experts * (number + 3 * sizes.wide)  # logits in both formats, softmaxes of router and its loss
    width = sum(size[0] for name, size in weights.items() if "shared" in name and name.endswith("gate_proj.weight"))
    shared = mlp * width // degrees.tensor * tokens * number + sizes.full * ("mlp.shared_expert_gate.weight" in weights)
    saved = sizes.full + shared + router + rows * (token + GATED.saved * inner) + choices * token
    # outputs by the router's weights, and their gradients; Mixtral's weights are in the wide format, and so are both
    weighted = (2 * choices + tokens) * shape.hidden * sizes.wide if shape.model_type == "mixtral" else 2 * choices * token
    column = sizes.full + 2 * (rows * (token + inner) + weight)  # gate and up, when the rest is freed
    return Memory(saved, max(saved + max(weighted, rows * inner + weight), column), saved)
