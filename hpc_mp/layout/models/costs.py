"""What a layer costs to compute, and how many of them each pipeline stage gets for that."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_mp.job import JobSpec
from hpc_mp.layout.models.shape import ModelShape
from hpc_mp.layout.schedule.partition import partition


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """Forward floating-point operations per token of the embedding, of each block, and of norm + head + loss."""

    embedding: float
    blocks: tuple[float, ...]
    head: float


def layer_costs(shape: ModelShape, sequence_length: int) -> LayerCosts:
    """Two operations per weight of every matrix product and token, plus the attention products with half the sequence
    (causal), as in the appendix of "Training Compute-Optimal Large Language Models" (arXiv:2203.15556). The embedding
    is a look-up and costs nothing by that count.
    """
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    mlp = (3 if shape.gated_mlp else 2) * shape.hidden * shape.intermediate
    weights = shape.hidden * (q + 2 * kv) + q * shape.hidden + mlp
    attention = 2 * 2 * q * sequence_length / 2
    return LayerCosts(0.0, (2.0 * weights + attention,) * shape.layers, 2.0 * shape.hidden * shape.vocabulary)


def stage_layers(spec: JobSpec, shape: ModelShape) -> tuple[int, ...]:
    """The layers of every stage: as ``parallel.partition`` says, or for ``auto`` the cut whose most expensive stage is cheapest.

    A resolved job says them. They are computed for a job that has just been written, and for ranks started by hand.
    """
    if spec.parallel.partition != "auto":
        return spec.parallel.partition
    costs = layer_costs(shape, spec.data.sequence_length)
    return partition(costs.blocks, spec.parallel.pipeline, costs.embedding, costs.head)
