"""Bytes of a block for one microbatch on a rank: what it keeps for its backward, and the most that its backward has at once.

A block is a sequence of parts: norms, attention, an MLP or experts. A part keeps what autograd saves in the code of transformers
and in ``train/parallel``; arXiv:2205.05198, section 4.1, counts in the same way. Tensor parallelism cuts attention and MLP.
Between them, sequence parallelism leaves a rank a share of the tokens. Dropout and compilation are not counted.
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
class PartMemory:
    """Bytes of a part of a block, for one microbatch."""

    kept: float  # from the forward to the backward
    peak: float  # at most at once in the backward, including what is kept
    deferred: float = 0.0  # from I to W: both factors of the gradients of weights (arXiv:2401.10241)


@dataclass(frozen=True, slots=True)
class Inside:
    """Bytes inside attention or an MLP, between the first projections, whose columns are cut, and the last, whose rows are."""

    kept: float  # from the forward to the backward
    added: float  # at most at once in the backward, beside what is kept
    columns: int  # outputs of the first projections
    row: int  # input of the last projection


NORMS = {"t5": "t5", "modernbert": "layer", "gemma2": "fp32", "gemma3_text": "fp32", "olmo2": "fp32"}  # kinds, by family
# Numbers for each inner number of an MLP, by family and whether it is gated. A gated MLP keeps gate, activated gate, other half and
# product, a plain one both sides of its activation; GELU by tanh in Python (NewGELUActivation) three more, ReLU its output alone.
GATED, PLAIN, PLAIN_TANH = Inside(4, 2, 2, 1), Inside(2, 1, 1, 1), Inside(5, 2, 1, 1)
MLPS = {("t5", True): Inside(7, 2, 2, 1), ("t5", False): Inside(1, 2, 1, 1), ("gpt2", False): PLAIN_TANH,
        ("gptj", False): PLAIN_TANH}


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a rank computes for one microbatch: its number of tokens, and bytes."""

    tokens: int  # of all samples; context ranks share those of each sample
    all: int  # hidden states of all these tokens
    own: int  # hidden states between cut layers; with sequence parallelism, tensor ranks share the tokens
    number: int  # a number in the compute format
    wide: int  # a number in fp32 or fp64: the format of norms, softmax and sums of gradients


def sizes_of(layout: Layout, shape: ModelShape, length: int) -> Sizes:
    """Return the sizes of layers that compute ``length`` tokens of a sample."""
    (wide, number), tokens = BYTES[layout.precision], layout.samples * length // layout.degrees.context
    own_tokens = -(-tokens // layout.degrees.tensor) if layout.sequence_parallel else tokens
    return Sizes(tokens, tokens * shape.hidden * number, own_tokens * shape.hidden * number, number, wide)


def block_memory(layout: Layout, shape: ModelShape, layer: int) -> tuple[PartMemory, PartMemory]:
    """Return the bytes of a block, and of its first norm. The backward of a part finds what the parts before it keep."""
    sizes = sizes_of(layout, shape, shape.tokens_of(layer, layout.sequence))
    weights = {weight.name: weight.shape for weight in family_of(shape).block_weights(shape, layer)}
    norms = [name.removesuffix(".weight") for name, size in weights.items() if len(size) == 1 and name.endswith(".weight")]
    around = sum(not name.endswith(("q_norm", "k_norm")) for name in norms)  # attention and MLP; the others are in attention
    kind = NORMS.get(shape.model_type, "layer" if any(f"{name}.bias" in weights for name in norms) else "rms")
    norm, attention = _norm(sizes, kind, sizes.own), _attention(layout, shape, layer, sizes, weights)
    if len(norms) > around:
        heads = _norm(sizes, kind, (attention.columns + attention.row) // 2)  # of queries and keys
        attention = replace(attention, kept=attention.kept + heads.kept)
    if shape.experts_of(layer):
        mlp = _experts(layout, shape, sizes, weights)
    else:
        inner = -(-shape.intermediate // layout.degrees.tensor) * sizes.tokens * sizes.number
        mlp = _cut_layer(layout, shape, sizes, Inside(*(numbers * inner for numbers in astuple(_mlp_numbers(shape)))))
    parts = [norm, _cut_layer(layout, shape, sizes, attention)]
    parts += [norm] * (around > 3)  # behind attention, and behind the MLP
    if 0 < shape.encoder <= layer:  # attention to what the encoder returns
        parts += [norm, _cut_layer(layout, shape, sizes, _flash_attention(layout, shape, sizes))]
    parts += [*[norm] * (around != 1), mlp, *[norm] * (around > 3)]  # 1: GPT-J's attention and MLP have the same input
    kept = peak = 0.0
    for part in parts:
        kept, peak = kept + part.kept, max(peak, kept + part.peak)
    return PartMemory(kept, peak + sizes.own, sum(part.deferred for part in parts)), norm  # own: the gradient of the output


def _norm(sizes: Sizes, kind: str, size: int) -> PartMemory:
    """Return the bytes of a norm in transformers' code. ``size``: bytes of its input in the compute format."""
    number, wide = sizes.number, sizes.wide
    kept, peak = {  # bytes for each number
        "rms": (wide + number, 6 * wide),  # the input in the wide format, and the normalized input
        "fp32": (2 * wide, 6 * wide),  # both wide, because the product with the weight is
        "t5": (wide + 2 * number, 5 * wide + number),  # the input in both formats
        "layer": (number, 3 * number)}[kind]  # a kernel, which keeps its input
    kept = min(kept, 2 * number) if number == wide else kept  # the input in both formats is one tensor
    return PartMemory(size // number * kept, size // number * peak)


def _cut_layer(layout: Layout, shape: ModelShape, sizes: Sizes, inside: Inside) -> PartMemory:
    """Return the bytes of attention or an MLP with its input. The peak is the largest of four moments of its backward."""
    sequence, copies = layout.sequence_parallel, 1 + (layout.sequence_parallel and layout.samples > 1)
    weight = shape.hidden * inside.row // sizes.tokens if sizes.number < sizes.wide else 0  # its gradient before it is added
    # the end of the forward, if it is recomputed: outputs, which sequence parallelism sorts by ranks and scatters
    again = inside.row + sizes.all * (1 + sequence * (1 + copies)) + sizes.own * (1 + 3 * sequence)
    # last projection: gradients of its output, which sequence parallelism gathers, and of its input
    last = sizes.all * sequence + inside.row + weight
    # between the projections; a W needs the input of the last one
    between = inside.added + inside.row * (layout.schedule in SPLIT)
    # first projections, when all else is freed: gradients of their outputs and of their input, of which sequence parallelism has
    # copies, as above, and others the gradient of another projection
    first = sizes.all * (1 + copies) + 2 * sizes.own * sequence + inside.columns + weight
    recomputed = blocks_together(layout.recompute) is not None
    peak = max(inside.kept + max(between, last, again * recomputed), first)
    return PartMemory(sizes.all + inside.kept, sizes.all + peak, 2 * sizes.all + inside.row + inside.columns)


def _flash_attention(layout: Layout, shape: ModelShape, sizes: Sizes) -> Inside:
    """Return the bytes of attention by a fused kernel, which has no scores; of the first tensor rank, which has most heads."""
    heads = heads_of(shape.heads, shape.kv_heads, layout.degrees.tensor, 0)
    queries, keys = (sizes.tokens * len(some) * shape.head_dim * sizes.number for some in (heads.query, heads.kv))
    sums = sizes.tokens * len(heads.query) * sizes.wide  # of the exponentials of each query's scores
    tensors = 2 * (queries + keys)  # queries, keys, values and outputs, or their gradients
    return Inside(tensors + sums, tensors, queries + 2 * keys, queries)


def _attention(layout: Layout, shape: ModelShape, layer: int, sizes: Sizes, weights: Iterable[str]) -> Inside:
    """Return the bytes of self-attention, without norms of queries and keys. ``weights``: names of the block's weights."""
    flash, length, capped = _flash_attention(layout, shape, sizes), shape.tokens_of(layer, layout.sequence), shape.model_type == "gemma2"
    kept, added, queries, keys = flash.kept, flash.added, flash.row, (flash.columns - flash.row) // 2
    number, wide, rows = sizes.number, sizes.wide, queries // (shape.head_dim * sizes.number)  # rows of scores
    if layout.degrees.context > 1:  # also outputs token by token; gradients, and keys and values that travel, in the wide format
        kept, added = kept + queries, wide / number * (2 * queries + 6 * keys)
        if capped or (shape.window_of(layer) or length) < length:  # no fused kernel
            block = rows * min(QUERIES, length // layout.degrees.context)
            added += block * (5 * wide + (wide if capped else number))
    elif capped:  # plain products: keys and values of each query head, scores, their softmax in both formats
        scores = rows * length
        kept, added = 4 * queries + scores * (2 * number + wide), 2 * queries + scores * (2 * wide - number)
    elif shape.model_type == "t5":  # scores have a trained bias, for which torch computes plain products in fp32
        kept, added = queries * (1 + 3 * wide / number) + rows * length * wide, 2 * rows * length * wide
    elif shape.model_type == "stablelm":  # the kernel's outputs are sorted by heads, and copied for the last projection
        kept += queries
    if family_of(shape).rotary and any("qkv" in name.lower() or "query_key_value" in name for name in weights):
        kept += queries + keys  # values are a view of the product that queries and keys were taken from
    return replace(flash, kept=kept, added=added)


def _experts(layout: Layout, shape: ModelShape, sizes: Sizes, weights: Mapping[str, tuple[int, ...]]) -> PartMemory:
    """Return the bytes of a router and its gated experts, with a row for each choice of a token, and of an MLP beside them."""
    degrees, number, hidden = layout.degrees, sizes.number, shape.hidden * sizes.number
    choices, samples = sizes.tokens * shape.experts_per_token, sizes.tokens * degrees.context
    capacity = expert_capacity(layout.expert_capacity, samples, shape)
    slots = expert_slots(capacity, sizes.tokens, shape.experts_per_token, shape.experts) if degrees.expert > 1 else None
    rows = slots * shape.experts if slots else min(choices, (capacity or choices) * shape.experts)
    inner = -(-shape.expert_intermediate // degrees.tensor) * number
    weight = -(-shape.experts // degrees.expert) * inner * shape.hidden * (number < 8)  # gradient by a grouped product
    router = sizes.tokens * shape.experts * (number + 3 * sizes.wide)  # logits in both formats; softmax, once more for a loss
    gated = sizes.all * ("mlp.shared_expert_gate.weight" in weights)
    width = sum(size[0] for name, size in weights.items() if "shared" in name and name.endswith("gate_proj.weight"))
    shared = _mlp_numbers(shape).kept * width // degrees.tensor * sizes.tokens * number
    kept = sizes.all + gated + shared + router + rows * (hidden + 4 * inner) + choices * hidden
    # weighted outputs and their gradients; Mixtral's weights are wide, and so are its sums
    outputs = 2 * choices * hidden
    if shape.model_type == "mixtral":
        outputs = (2 * choices + sizes.tokens) * shape.hidden * sizes.wide
    first = sizes.all + 2 * (rows * (hidden + inner) + weight)
    return PartMemory(kept, max(kept + max(outputs, rows * inner + weight), first), kept)


def _mlp_numbers(shape: ModelShape) -> Inside:
    """Return the numbers of a model's MLPs for each inner number."""
    return MLPS.get((shape.model_type, shape.gated_mlp), GATED if shape.gated_mlp else PLAIN)
