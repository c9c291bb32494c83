"""Visibility in attention: a token sees the tokens from a first one up to itself, or its whole document.

The first visible token is the beginning of the sample, of the token's document if documents are separate (``data.documents``),
of a window that ends with the token, or of its chunk of the sample, whichever is last. Documents are contiguous, so that one
number per token is sufficient. Without it attention is causal or bidirectional by itself. Padding is a separate document.

In a batch, ``documents`` has the places in each sample at which its documents begin, (samples, documents), ascending from 0 and
filled up with the length of the sample. So the host knows a bound of their number from the shape, and no kernel waits for it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

QUERIES = 1024  # of a block of scores, which bounds the memory of a mask


@dataclass(frozen=True, slots=True)
class Visible:
    """The tokens that attention over whole samples may use.

    Attributes:
        first: first visible token of each token, (samples, sequence), or (1, sequence) if it is the same in all samples; of
            its document if attention is not causal.
        offsets: the first token of each document, counted over all samples, and the number of all tokens, int32. Documents may be
            empty.
        window: number of tokens that a token sees, including itself, on either side if attention is not causal; None: all of its
            document.
        causal: False: a token sees later ones too.
    """

    first: Tensor
    offsets: Tensor
    window: int | None
    causal: bool
    _whole: list[Tensor] = field(default_factory=list, compare=False, repr=False)

    def blocks(self) -> Iterator[tuple[slice, slice]]:
        """Yield blocks of queries, and the keys that include all that a block sees."""
        length = self.first.shape[1]
        for begin in range(0, length, QUERIES):
            end = min(begin + QUERIES, length)
            low, high = (max(0, begin - self.window + 1), end + self.window - 1) if self.window else (0, length)
            yield slice(begin, end), slice(low, end if self.causal else min(high, length))

    def whole(self, dtype: torch.dtype) -> Tensor:
        """Return ``mask`` of all tokens. The first call makes it, and all layers share it."""
        if not self._whole:
            self._whole.append(self.mask(dtype))
        return self._whole[0]

    def mask(self, dtype: torch.dtype, queries: slice = slice(None), keys: slice = slice(None)) -> Tensor:
        """Return what is added to the scores of a block, (samples or 1, 1, queries, keys), in the format of computation."""
        places = torch.arange(self.first.shape[1], device=self.first.device)
        rows, columns, first = places[queries, None], places[keys], self.first[:, queries, None]
        hidden = (columns > rows) | (columns < first) if self.causal else self.first[:, None, keys] != first
        if self.window and not self.causal:
            hidden |= (columns - rows).abs() >= self.window
        mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
        return mask.masked_fill_(hidden, torch.finfo(dtype).min).unsqueeze(1)


def in_chunks(documents: Tensor | None, begins: Tensor | None, chunk: int, samples: int, positions: Tensor) -> Tensor:
    """Return documents as in a batch, if every chunk of a document is one. Chunks are counted from its first token.
    ``documents``: (samples, documents); None: each sample is one. ``begins``: as for ``first_seen``. ``positions``: positions of
    all tokens of a sample, (sequence,)."""
    if documents is None or begins is None:
        return positions[::chunk].expand(samples, -1)
    first = begins + (positions - begins) // chunk * chunk
    return first.where(first == positions, 0).sort(1).values[:, -(len(positions) // chunk + documents.shape[1]):]


def begins_of(documents: Tensor, positions: Tensor) -> Tensor:
    """Return the place in its sample at which each token's document begins, (samples, sequence). ``documents``: as in a batch,
    (samples, documents). ``positions``: positions of all tokens of a sample, (sequence,)."""
    number = torch.searchsorted(documents, positions.repeat(len(documents), 1), right=True) - 1
    return documents.gather(1, number)


def first_seen(begins: Tensor | None, window: int | None, positions: Tensor) -> Tensor | None:
    """Return the first visible token of each token, (samples or 1, sequence); None: the first token of the sample. ``begins``:
    place in the sample at which each token's document begins, (samples, sequence); None: 0 for all. ``window``: number of tokens
    that a token sees, including itself; None: all. ``positions``: positions of all tokens of a sample, (sequence,)."""
    if window is None or window >= len(positions):
        return begins
    first = (positions - (window - 1)).clamp(min=0).unsqueeze(0)
    return first if begins is None else torch.maximum(first, begins)


def offsets_of(documents: Tensor | None, samples: int, length: int, device: torch.device) -> Tensor:
    """Return the first token of each document, counted over all samples, and the number of all tokens, int32. ``documents``: as
    in a batch, (samples, documents); None: each sample is one."""
    int32 = partial(torch.arange, dtype=torch.int32, device=device)
    before = length * int32(samples + 1)
    if documents is None:
        return before
    return torch.cat(((before[:-1, None] + documents).flatten(), before[-1:])).int()


def restarted(positions: Tensor, begins: Tensor | None) -> Tensor:
    """Return the places of tokens in their documents, (samples, tokens), or their positions, (1, tokens), without documents."""
    return positions.unsqueeze(0) if begins is None else positions - begins[:, positions]
