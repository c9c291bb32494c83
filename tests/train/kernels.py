"""Torch's fused kernels of a GPU, by plain products: what FlashAttention's documentation says of them."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def _flash_attention_forward(query: Tensor, key: Tensor, value: Tensor, query_offsets: Tensor, key_offsets: Tensor,
                             longest_query: int, longest_key: int, dropout: float, causal: bool, debug: bool, *,
                             scale: float | None, window_size_left: int, window_size_right: int) -> tuple[Tensor, Any]:
    """Attend within each sequence: query i sees the keys from i - left to i + right, without a bound where that is -1.

    Args:
        query: (tokens of all sequences, heads, head_dim); key, value: the same with the heads of keys and values.
        query_offsets, key_offsets: the first token of each sequence, and the number of tokens.
    """
    assert query_offsets.dtype == key_offsets.dtype == torch.int32 and not dropout and not debug
    assert int(query_offsets[-1]) == len(query) == len(key) and torch.equal(query_offsets, key_offsets)
    groups = query.shape[1] // key.shape[1]
    outputs = []
    for begin, end in pairwise(query_offsets.tolist()):
        assert end - begin <= longest_query == longest_key
        rows, columns, values = (states[begin:end].transpose(0, 1) for states in (query, key, value))
        scores = rows @ columns.repeat_interleave(groups, 0).transpose(1, 2) * (scale or query.shape[-1] ** -0.5)
        apart = torch.arange(end - begin) - torch.arange(end - begin).unsqueeze(1)  # key's place behind the query's
        left, right = (end - begin if bound < 0 else bound for bound in (window_size_left, 0 if causal else window_size_right))
        hidden = (apart > right) | (apart < -left)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        outputs.append((weights @ values.repeat_interleave(groups, 0)).transpose(0, 1))
    return torch.cat(outputs), None
