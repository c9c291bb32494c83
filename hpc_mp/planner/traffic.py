"""Bytes that the ranks of a job send each other in an optimizer step, by axis, as the engine sends them.

With m microbatches, T and C the tensor and context degrees, A the bytes of one activation (microbatch × sequence / C × hidden), K
those of the keys and values of a rank's tokens and heads, Q those of its queries, D the ranks of data × context, s the shard
degree and R = D / s, a rank sends:

======== ============================ ==========================================================================================
axis     to                           bytes per step
======== ============================ ==========================================================================================
tp       its neighbour in a ring      2 (T−1)/T × m × (4 per layer, 1 for the embedding, 1 for the head) × A, and 3 numbers per
                                      token for the loss: all-reduces forward and backward, or, with sequence parallelism,
                                      an all-gather and a reduce-scatter instead of each; 2 more per recomputed layer
                                      (recompute full or every-N); and gradients, see below
cp       its neighbour in a ring      m × layers × (2 (C−1) × K forward and backward, C × K of gradients in at least fp32),
                                      (C−1) × K more for a recomputed layer
cp_pairs each other rank of its       m × layers × 4 (Q + K) / C, with ulysses instead: tokens for heads and back, forward and
         context group                backward; 2 (Q + K) / C more if recomputed. K counts a head once for each rank that
                                      gets it; where heads are cut unevenly, this is the mean of the first rank
pp       the next and previous stage  m × A each, for every stage of the rank; A/T with sequence parallelism; and the tables
                                      and the norm that layers behind a boundary need of an encoder and a decoder
dp       its neighbour in the ring of without shards 2 (D−1)/D × the rank's gradients; with them (s−1) × its part of its units ×
         its shard group              (all-gathers in the compute format + reduce-scatters in the master format)
replicas its neighbour in the ring of 2 (R−1)/R × its part of the gradients, in the master format
         ranks with the same part
ep       each other rank of its       m × (4 per layer, 2 more if recomputed) × K A / E for K experts of each token, 4 bytes
         expert group                 for each of the receiver's experts. An expectation: routers decide. With a capacity, an
                                      expert gets no more than that of each sample; where
                                      rows are filled up to it, exactly that
expert_  as dp and replicas, among    the same for the units of experts
dp, …    the ranks with the same ones
tied     the other end of a pipeline  its part of the embedding's gradient, if the head is a copy of it
======== ============================ ==========================================================================================

All-gathers and reduce-scatters per step: ZeRO-0 and 1 have one of each, ZeRO-2 one and m, ZeRO-3 2 m and m. The embedding's
parameters are gathered m times, because its backward does not need them. With ``parallel.reduce`` "step" there is one
reduce-scatter. Under bf16 the master format is fp32, so ZeRO-1 moves 2 + 4 bytes per parameter and ZeRO-0, which all-reduces, 8.
Parts are those of ``layout/flat.py``, including padding. Tensor ranks sum the gradients of key-value heads that they share, and
with sequence parallelism those of all weights that they hold whole, as often as the data axis does. Modules that are not cut send
nothing, except attention with sequence parallelism, whose tokens are gathered. If experts have a capacity, context ranks, and
with sequence parallelism tensor ranks with whole experts, all-reduce 4 bytes for each choice of a microbatch's tokens in each
layer, once more if it is recomputed. Weights beside adapters are not reduced, and gathered by ZeRO-3 alone; what lies before the
first adapter gets no gradient, so that tensor ranks send less than stated there. tests/planner/test_traffic.py counts the same
bytes in running ranks.
"""

from dataclasses import replace

from hpc_mp.base.text import data_size, memory_size
from hpc_mp.job.resolution import ResolvedKey
from hpc_mp.layout.flat import EMBEDDING, TIED, FlatLayout, StageSpan, blocks_together, stage_spans
from hpc_mp.layout.layout import Layout, Reduce
from hpc_mp.layout.models import Family, ModelShape, expert_capacity, expert_slots, family_of
from hpc_mp.layout.models.tensor import heads_of
from hpc_mp.layout.schedule_of import schedule_of
from hpc_mp.planner.memory import BYTES, state_bytes, units_of
from hpc_mp.rundir.plan import Traffic

AXES = ("tp", "cp", "cp_pairs", "pp", "ep", "dp", "replicas", "expert_dp", "expert_replicas", "tied")
COUNT = 4  # bytes of the number of rows for an expert
CHOICE = 4  # bytes of a token's choice of an expert
LOSS_NUMBERS = 3  # per token and microbatch: the greatest logit, the sum of exponentials, the label's logit


def traffic_of(layout: Layout, shape: ModelShape) -> Traffic:
    """Return for every axis the traffic of the pipeline place that sends most."""
    places = [rank_traffic(layout, shape, place) for place in range(layout.degrees.pipeline)]
    return Traffic(**{axis: max(getattr(place, axis) for place in places) for axis in AXES}, shards=places[0].shards,
                   expert_shards=places[0].expert_shards)


def reduce_choice(layout: Layout, shape: ModelShape, requested: str) -> ResolvedKey[str]:
    """Return when gradients are summed, and the cost of each alternative; no reason if ranks keep whole gradients anyway.
    ``requested``: "auto", or what the job states."""
    m, key, chosen = layout.microbatches, "parallel.reduce", layout.reduce
    if layout.zero < 2 or layout.shard_degree == 1 or (m == 1 and requested == "auto"):
        return ResolvedKey(key, chosen)
    if m == 1:
        return ResolvedKey(key, chosen, "summed once: a step has one microbatch")
    when: dict[Reduce, str] = {"microbatch": f"after each of {m} microbatches", "step": "once per step"}
    costs = {}
    for way in when:
        candidate = replace(layout, reduce=way)
        held = max(state.total for state in state_bytes(candidate, shape).values())
        sent = traffic_of(candidate, shape).data
        costs[way] = f"{data_size(sent)} per step over the data axis and holds {memory_size(held)}"
    other, = when.keys() - {chosen}
    source = f"the default of ZeRO-{layout.zero}" if requested == "auto" else "as requested"
    return ResolvedKey(key, chosen, f"summed {when[chosen]}, {source}: a rank sends {costs[chosen]} of state; "
                                    f"{when[other]} it sends {costs[other]}")


def rank_traffic(layout: Layout, shape: ModelShape, pipeline: int) -> Traffic:
    """Return the bytes that the first rank at a place of the pipeline sends along each axis."""
    degrees, m = layout.degrees, layout.microbatches
    master, computed = BYTES[layout.precision]
    spans, placement = stage_spans(layout.layers), schedule_of(layout).placement
    held = [stage for stage, holder in enumerate(placement) if holder == pipeline]
    first, last = 0 in held, len(spans) - 1 in held
    tokens = layout.sequence // degrees.context
    shares = degrees.tensor if layout.sequence_parallel else 1  # of a rank's tokens, between cut layers
    activation = layout.samples * -(-tokens // shares) * shape.hidden * computed
    units = units_of(layout, shape, pipeline, 0)
    tensor = _tensor_axis(layout, shape, [spans[stage] for stage in held], shares * activation)
    crossing = [activation + computed * _numbers_beside(layout, shape, span.layers.start) for span in spans]
    onward = sum(crossing[stage + 1] for stage in held if stage + 1 < len(spans) and placement[stage + 1] != pipeline)
    back = sum(crossing[stage] for stage in held if stage > 0 and placement[stage - 1] != pipeline)
    copied = TIED in units and not (first and last)
    same, expert = layout.state_degree // degrees.expert, layout.expert_cut()
    rank_spans, family = [spans[stage] for stage in held], family_of(shape)
    dp, replicas = _data_axis(layout, family, _kind(units, False), layout.state_degree, layout.shard_degree, first, last)
    expert_dp, expert_replicas = _data_axis(layout, family, _kind(units, True), same, expert.shards, False, False)
    cp, cp_pairs = _context_axis(layout, shape, rank_spans)
    choices_tp, choices_cp = _choices(layout, shape, rank_spans)
    return Traffic(
        tp=tensor + _shared_gradients(layout, units) + choices_tp, cp=cp + choices_cp, cp_pairs=cp_pairs,
        pp=float(m * max(onward, back)), ep=_expert_axis(layout, shape, rank_spans), dp=dp, replicas=replicas,
        expert_dp=expert_dp, expert_replicas=expert_replicas,
        tied=float(units[TIED].part * master) if copied and units[TIED].trained else 0.0,
        shards=_of_all(layout.shard_degree, layout.state_degree), expert_shards=_of_all(expert.shards, same))


def _numbers_beside(layout: Layout, shape: ModelShape, begin: int) -> int:
    """Return the numbers that cross beside hidden states to a stage that begins with this layer, see ``families/t5.py``."""
    heads = len(heads_of(shape.heads, shape.heads, layout.degrees.tensor, 0).query)
    needed = tuple(name for name, end in (("encoder.", shape.encoder), ("decoder.", shape.layers)) if begin < end)
    weights = family_of(shape).embedding_weights(shape) if shape.encoder else ()
    return sum(weight.shape[0] * (heads if weight.cut else 1) for weight in weights if weight.name.startswith(needed))


def _tensor_axis(layout: Layout, shape: ModelShape, spans: list[StageSpan], activation: int) -> float:
    """Return a tensor rank's bytes for these stages' activations, their gradients and the loss. ``activation``: bytes of one."""
    family, cut = family_of(shape), layout.tensor_cut()
    ends, heads = 0.0, 0  # of cut layers: each has an all-reduce, or an all-gather and a reduce-scatter
    again = 0.0
    for span in spans:
        for place, layer in enumerate(span.layers):
            path = family.path(layer)
            entered = sum(cut.cuts(family.module_of(shape, f"{path}.{inner}.weight"))
                          or (layout.sequence_parallel and inner == family.attention) for inner in family.entered(shape, layer))
            left = sum(weight.row and cut.cuts(family.module_of(shape, f"{path}.{weight.name}"))
                       for weight in family.projections(shape, layer).values())
            mixed = shape.experts_of(layer) > 0 and cut.cuts(family.module_of(shape, f"{path}.{family.experts}.weight"))
            left += mixed
            share = shape.tokens_of(layer, layout.sequence) / layout.sequence  # of what an activation has
            ends += share * (entered + left)
            if (together := blocks_together(layout.recompute)) is not None:  # the forward's half of everything
                ends_group = (place + 1) % together == 0 or place + 1 == len(span.layers)
                left -= mixed and ends_group  # a sum that no later computation needs is not recomputed
                again += (entered + left) / 2 if layout.sequence_parallel else share * left
        ends += span.first and cut.cuts(family.embedding)
        heads += span.last and cut.cuts(family.head_module(shape))
    loss = LOSS_NUMBERS * layout.samples * layout.sequence // layout.degrees.context * max(
        4, BYTES[layout.precision][1])
    return _ring_all_reduce(cut.size) * layout.microbatches * ((ends + again + heads) * activation + heads * loss)


def _shared_gradients(layout: Layout, units: dict[str, FlatLayout]) -> float:
    """Return the bytes that a tensor rank sends to sum gradients of which several ranks hold shares: those of shared key-value
    heads, and with sequence parallelism of all whole weights, whenever the data axis sums."""
    slots = [(layout.microbatches if layout.reduce == "microbatch" and unit.shards > 1 else 1, slot)
             for unit in units.values() if unit.trained for slot in unit.slots if slot.shares]
    return BYTES[layout.precision][0] * sum(times * _ring_all_reduce(slot.copies) * slot.size for times, slot in slots)


def _kind(units: dict[str, FlatLayout], of_experts: bool) -> dict[str, FlatLayout]:
    return {name: unit for name, unit in units.items() if unit.of_experts == of_experts}


def _of_all(shards: int, ranks: int) -> int | None:
    """Return the number of ranks in a ring of shards; None: all of them, or no shards."""
    return shards if 1 < shards < ranks else None


def _expert_axis(layout: Layout, shape: ModelShape, spans: list[StageSpan]) -> float:
    """Return the bytes that a rank sends each other rank of its expert group, if routers choose all experts alike."""
    degrees = layout.degrees
    if degrees.expert == 1:
        return 0.0
    again = blocks_together(layout.recompute) is not None
    capacity = expert_capacity(layout.expert_capacity, layout.sequence, shape)
    sent = 0.0
    for layer in (layer for span in spans for layer in span.layers if shape.experts_of(layer)):
        shares = degrees.context * _sharing_tensor_ranks(layout, shape, layer)
        tokens = layout.samples * -(-layout.sequence // shares)
        limit = None if capacity is None else capacity * layout.samples
        rows, counts = float(tokens * shape.experts_per_token), shape.experts
        if slots := expert_slots(limit, tokens, shape.experts_per_token, shape.experts):
            rows, counts = float(slots * shape.experts), 0
        elif limit is not None:
            rows = min(rows, limit * shape.experts / shares)
        sent += (4 + 2 * again) * rows * shape.hidden * BYTES[layout.precision][1] + (1 + again) * COUNT * counts
    return layout.microbatches * sent / degrees.expert


def _choices(layout: Layout, shape: ModelShape, spans: list[StageSpan]) -> tuple[float, float]:
    """Return the bytes that a rank sends along the tensor and the context axis to enforce the experts' capacity."""
    if layout.expert_capacity is None:
        return 0.0, 0.0
    layers = [layer for span in spans for layer in span.layers if shape.experts_of(layer)]
    passes = 1 if blocks_together(layout.recompute) is None else 2
    choices = layout.microbatches * layout.samples * layout.sequence * shape.experts_per_token
    tensor = sum(_ring_all_reduce(_sharing_tensor_ranks(layout, shape, layer)) for layer in layers)
    return passes * choices * CHOICE * tensor, passes * choices * CHOICE * len(layers) * _ring_all_reduce(layout.degrees.context)


def _sharing_tensor_ranks(layout: Layout, shape: ModelShape, layer: int) -> int:
    """Return the number of tensor ranks that share the tokens of samples at a layer's experts."""
    family = family_of(shape)
    whole = not layout.tensor_cut().cuts(family.module_of(shape, f"{family.path(layer)}.{family.experts}.weight"))
    return layout.degrees.tensor if layout.sequence_parallel and whole else 1


def _data_axis(layout: Layout, family: Family, units: dict[str, FlatLayout], ranks: int, shards: int, first: bool,
               last: bool) -> tuple[float, float]:
    """Return the bytes of ``dp`` and of ``replicas`` for a rank with a part of these units. ``first``, ``last``: True if it has
    the first, the last stage. ``ranks``: number of ranks that train the same parameters."""
    master, computed = BYTES[layout.precision]
    zero, m = layout.zero, layout.microbatches
    part = sum(unit.part for unit in units.values())
    trained = sum(unit.part for unit in units.values() if unit.trained)
    if shards == 1:
        return _ring_all_reduce(ranks) * trained * master, 0.0
    only_forward = [units[name] for name in (EMBEDDING, TIED) if first and name in units and not any(
        family.is_behind_embedding(slot.weight.name) for slot in units[name].slots)]
    embedded = sum(unit.part for unit in only_forward)
    passes = 2 * (part - embedded) + embedded + (2 * units[TIED].part if first and last and TIED in units else 0)
    gathered = {1: trained, 2: trained, 3: m * passes}[zero]
    scattered = m * trained if layout.reduce == "microbatch" else trained
    sharded = (shards - 1) * (gathered * computed + scattered * master)
    return float(sharded), _ring_all_reduce(ranks // shards) * trained * master


def _context_axis(layout: Layout, shape: ModelShape, spans: list[StageSpan]) -> tuple[float, float]:
    """Return the bytes of ``cp`` and of ``cp_pairs`` for a rank of these stages."""
    context, computed = layout.degrees.context, BYTES[layout.precision][1]
    family, cut = family_of(shape), layout.tensor_cut()
    passes = 2 if blocks_together(layout.recompute) is None else 3  # forward and backward, or the forward twice
    ring = pairs = 0.0  # for each token
    for layer in (layer for span in spans for layer in span.layers):
        tensor = cut.size if cut.cuts(family.attention_of(layer)) else 1
        all_heads = heads_of(shape.heads, shape.kv_heads, tensor, 0)
        heads, kv_heads = len(all_heads.query), len(all_heads.kv)
        ring += 2 * kv_heads * shape.head_dim * (passes * (context - 1) * computed + context * max(4, computed))
        own = heads_of(heads, kv_heads, context, 0)
        queries, keys = len(own.query), len(own.kv)
        forward = heads - queries + 2 * (max(kv_heads, context) - keys) + (context - 1) * queries  # the last: outputs
        backward = (context - 1) * (queries + 2 * keys) + heads - queries
        pairs += ((passes - 1) * forward + backward) * shape.head_dim * computed / max(1, context - 1)
    tokens = layout.microbatches * layout.samples * layout.sequence // context * (context > 1)
    return (tokens * ring, 0.0) if layout.context_method == "ring" else (0.0, tokens * pairs)


def _ring_all_reduce(ranks: int) -> float:
    """Return the bytes that a rank sends in a ring's all-reduce, relative to the bytes that are reduced."""
    return 2 * (ranks - 1) / ranks
