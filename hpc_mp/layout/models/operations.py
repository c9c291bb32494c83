"""Floating-point operations that the training of a token takes, without recomputation (arXiv:2204.02311, appendix B).

For each token, an element of a matrix takes 2 operations forward, 2 for the gradient of its input, and 2 for its own if it is
trained. A token meets the matrices of its own experts alone; embeddings are looked up and not multiplied. Attention takes
12 × heads × head size for each key that a token sees, forward and backward: of a sample of s tokens, s / 2 keys on average if
attention is causal, w − w² / 2s in a window of w, and s in both directions. Samples count as one document, and mixers other than
attention by their matrices.
"""

from math import prod

from hpc_mp.layout.models import ModelShape, Weight, family_of
from hpc_mp.layout.models.adapter_weights import adapted_weights


def training_operations(shape: ModelShape, sequence: int) -> float:
    """Return the operations of a token in samples of this length."""
    family, layers = family_of(shape), range(shape.layers)
    weights = [*(weight for layer in layers for weight in family.block_weights(shape, layer)),
               *(weight for weight in family.embedding_weights(shape) if family.is_behind_embedding(weight.name)),
               *family.norm_weights(shape), *family.head_weights(shape)]
    adapters = [factor for _, *factors in adapted_weights(family, shape).values() for factor in factors]
    products = sum((6 if weight.trained and shape.adapters is None else 4) * _met(weight, shape) for weight in weights)
    products += sum(6 * _met(factor, shape) for factor in adapters)
    keys = sum(_keys(shape, layer, sequence) for layer in layers if layer not in family.unattended)
    return products + 12 * shape.heads * shape.head_dim * keys


def _met(weight: Weight, shape: ModelShape) -> float:
    """Return the number of elements of a weight by which a token is multiplied."""
    if len(weight.shape) < 2 or weight.name.endswith("bias"):
        return 0.0
    return prod(weight.shape) * (shape.experts_per_token / shape.experts if weight.experts else 1.0)


def _keys(shape: ModelShape, layer: int, sequence: int) -> float:
    """Return the number of keys that a token sees on average."""
    window = min(shape.window_of(layer) or sequence, sequence)
    if shape.bidirectional:
        return float(window)
    return window / 2 if shape.chunked else window - window**2 / (2 * sequence)
