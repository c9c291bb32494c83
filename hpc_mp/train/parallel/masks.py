"""Which tokens of its sample a token sees: those from a first one up to itself, or all of its document.

The first one is that of the sample, of the token's document where documents are separate (``data.documents``), or of a window
that ends with the token, whichever comes last. Documents lie one behind the other, so that this one number for each token says it
all: ``(samples, sequence)``, or ``(1, sequence)`` where it is the same in all samples. Where there is none, attention is causal
or bidirectional by itself: torch's fused kernels know that and need no mask. Padding is a document of its own.

A mask is added to scores, in the format that computes, and all layers of a stage share it: of a boolean one torch would make an
array like it in each layer, and keep that for the backward.
"""

import torch
from torch import Tensor


def first_seen(begins: Tensor | None, window: int | None, positions: Tensor) -> Tensor | None:
    """The first token that each token sees; None: that of the sample.

    Args:
        begins: at which place of the sample each token's document begins, (samples, sequence); None: all at 0.
        window: how many tokens a token sees, itself included; None: all.
        positions: of all tokens of a sample.
    """
    if window is None or window >= len(positions):
        return begins
    first = (positions - (window - 1)).clamp(min=0).unsqueeze(0)
    return first if begins is None else torch.maximum(first, begins)


def added_mask(first: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask, added to scores, that shows a token those from ``first`` to itself: (samples, 1, sequence, sequence)."""
    places = torch.arange(first.shape[1], device=first.device)
    return _added((places > places.unsqueeze(1)) | (places < first.unsqueeze(2)), dtype)


def document_mask(begins: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to scores so that a token sees all of its document: (samples, 1, sequence, sequence)."""
    return _added(begins.unsqueeze(1) != begins.unsqueeze(2), dtype)


def _added(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return mask.masked_fill_(hidden, torch.finfo(dtype).min).unsqueeze(1)


def restarted(positions: Tensor, begins: Tensor | None) -> Tensor:
    """Positions of some tokens of a sample as places in their documents: (samples, tokens), or (1, tokens) without documents."""
    return positions.unsqueeze(0) if begins is None else positions - begins[:, positions]
