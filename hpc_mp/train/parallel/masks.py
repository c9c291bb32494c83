"""Attention masks: a token sees the tokens from a first one up to itself, or its whole document.

The first visible token is the beginning of the sample, of the token's document if documents are separate (``data.documents``), or
of a window that ends with the token, whichever is last. Documents are contiguous, so that one number per token is sufficient:
``(samples, sequence)``, or ``(1, sequence)`` if it is the same in all samples. Without it attention is causal or bidirectional by
itself: torch's fused kernels need no mask then. Padding is a separate document.

A mask is added to scores, in the format of computation, and all layers of a stage share it: torch would convert a boolean mask in
each layer, and keep the result for the backward.
"""

import torch
from torch import Tensor


def first_seen(begins: Tensor | None, window: int | None, positions: Tensor) -> Tensor | None:
    """Return the first visible token of each token, (samples or 1, sequence); None: the first token of the sample.

    Args:
        begins: place in the sample at which each token's document begins, (samples, sequence); None: 0 for all.
        window: number of tokens that a token sees, including itself; None: all.
        positions: positions of all tokens of a sample, (sequence,).
    """
    if window is None or window >= len(positions):
        return begins
    first = (positions - (window - 1)).clamp(min=0).unsqueeze(0)
    return first if begins is None else torch.maximum(first, begins)


def added_mask(first: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask, (samples, 1, sequence, sequence), with which a token sees the tokens from ``first`` to itself."""
    places = torch.arange(first.shape[1], device=first.device)
    return _added((places > places.unsqueeze(1)) | (places < first.unsqueeze(2)), dtype)


def document_mask(begins: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask, (samples, 1, sequence, sequence), with which a token sees its whole document."""
    return _added(begins.unsqueeze(1) != begins.unsqueeze(2), dtype)


def _added(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return mask.masked_fill_(hidden, torch.finfo(dtype).min).unsqueeze(1)


def restarted(positions: Tensor, begins: Tensor | None) -> Tensor:
    """Return the places of tokens in their documents, (samples, tokens), or their positions, (1, tokens), without documents."""
    return positions.unsqueeze(0) if begins is None else positions - begins[:, positions]
