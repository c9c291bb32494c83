"""What the control half and the engine need to know of a model family, as a table: no torch, no transformers.

A family says where Hugging Face keeps the embedding, the blocks, the last norm and the head, which weights there are
with the shapes the engine gives them, and along which dimension tensor parallelism cuts each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hpc_mp.layout.models.shape import ModelShape

# How a projection is cut (Megatron-LM, arXiv:1909.08053): "column" cuts its outputs, "row" its inputs; "fused" is a
# column projection whose output holds q, k and v side by side and is cut inside each of the three.
Projection = Literal["column", "row", "fused"]


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter in the engine's shape; ``cut`` is the dimension that tensor parallelism cuts (None: every rank has all)."""

    name: str
    shape: tuple[int, ...]
    cut: int | None = None
    init: Literal["normal", "residual", "ones", "zeros"] = "normal"


@dataclass(frozen=True, slots=True)
class Family:
    """The table of one family.

    Attributes:
        model_type: Hugging Face's name.
        architecture: the causal-LM class written into an exported config.
        modules: the transformers modules that a rank needs (imported before ranks are forked).
        read: config dictionary -> ModelShape, with Hugging Face's defaults.
        embedding, position, blocks, norm, head: module names inside the causal-LM class (position may be None).
        rotary: the module that makes rotary cosines and sines, embedding_dropout: the dropout after the embedding.
        projections: name inside a block -> how it is cut.
        transposed: whether projections store (in, out) as GPT-2's Conv1D does, instead of (out, in).
        enters: modules of a block whose input is shared by column projections (one gradient all-reduce each).
        block_weights, outer_weights: the parameters of one block, and of embedding / norm / head, by full name.
        dropouts: config keys that hold a dropout probability.
        checkpoint_prefixes: prefixes that a checkpoint may leave out (bare GPT-2 checkpoints have no ``transformer.``).
    """

    model_type: str
    architecture: str
    modules: tuple[str, ...]
    read: Callable[[Mapping[str, Any]], ModelShape]
    embedding: str
    position: str | None
    blocks: str
    norm: str
    head: str
    rotary: str | None
    embedding_dropout: str | None
    projections: Mapping[str, Projection]
    transposed: bool
    enters: tuple[str, ...]
    block_weights: Callable[[ModelShape], tuple[Weight, ...]]
    embedding_weights: Callable[[ModelShape], tuple[Weight, ...]]
    norm_weights: Callable[[ModelShape], tuple[Weight, ...]]
    head_weights: Callable[[ModelShape], tuple[Weight, ...]]
    dropouts: tuple[str, ...]
    checkpoint_prefixes: tuple[str, ...] = ()

    def stage_weights(self, shape: ModelShape, layers: range, first: bool, last: bool) -> tuple[Weight, ...]:
        """All parameters of a stage under their Hugging Face names. A tied head appears once when it shares the
        embedding's stage, and on the last stage as a copy under the embedding's name."""
        weights: list[Weight] = []
        if first:
            weights += self.embedding_weights(shape)
        for layer in layers:
            weights += [Weight(f"{self.blocks}.{layer}.{w.name}", w.shape, w.cut, w.init) for w in self.block_weights(shape)]
        if last:
            weights += self.norm_weights(shape)
            if not shape.tied:
                weights += self.head_weights(shape)
            elif not first:
                weights.append(next(w for w in self.embedding_weights(shape) if w.name == f"{self.embedding}.weight"))
        return tuple(weights)
