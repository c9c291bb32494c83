"""Context parallelism: the ranks of a context group share the tokens of every sample.

Each rank computes all layers for its own positions; only attention needs the tokens of other ranks. There are two methods:

- ``ulysses`` (DeepSpeed-Ulysses, arXiv:2309.14509): each rank holds one chunk of adjacent tokens. An all-to-all around attention
  exchanges tokens for heads: each rank attends with some of the heads over the whole sequence, with the attention function of a
  single rank. Key-value heads that do not split evenly are repeated until they do.
- ``ring``: keys and values travel from rank to rank, see ``ring_attention``. To balance the work under the causal mask, the
  sequence is cut into 2 C chunks, and rank c holds the chunks c and 2 C - 1 - c (Llama 3, arXiv:2407.21783, 3.3.2).

Parameters and their gradients do not depend on it: context ranks are ranks of the data axis, whose sums are plain, because the
loss is divided by the number of labels of the global batch.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import gcd
from typing import Any, cast

import torch
from torch import Tensor, nn

from hpc_mp.train.parallel.collectives import all_to_all
from hpc_mp.train.parallel.custom_backward import with_backward
from hpc_mp.train.parallel.dropout import HashDropout
from hpc_mp.train.parallel.groups import Axis
from hpc_mp.train.parallel.masks import Visible
from hpc_mp.train.parallel.ring_attention import AttentionRing, ring_attention

CONTEXT = "hpc_mp_context"  # the name of our attention function in transformers' table

AttentionResult = tuple[Tensor, Tensor | None]  # (batch, sequence, heads, head_dim), and attention weights or None
AttentionFunction = Callable[..., AttentionResult]


class ContextAxis:
    """The context axis as one rank sees it. With size 1 the rank has whole samples.

    Attributes:
        positions: positions of this rank's tokens in their sample, (sequence / ranks,), ascending.
    """

    def __init__(self, axis: Axis, method: str, sequence: int, device: torch.device) -> None:
        self.axis, self.sequence = axis, sequence
        self.method = METHODS[method if axis.size > 1 else "ulysses"]
        self.positions = self.positions_of(axis.rank, device)

    def positions_of(self, rank: int, device: torch.device) -> Tensor:
        return self.method.positions(torch.arange(self.sequence, device=device), self.axis.size, rank)

    def own(self, tokens: Tensor) -> Tensor:
        """Return this rank's columns of a tensor with one number per token, (samples, sequence)."""
        return tokens if self.axis.size == 1 else tokens[:, self.positions]

    def attach(self, attention: Any, heads: int, functions: Callable[[str], AttentionFunction]) -> None:
        """Make an attention module of transformers attend over the whole sequence.

        Args:
            attention: the module, whose attributes ``config`` and ``context`` are set.
            heads: number of query heads of this tensor rank.
            functions: transformers' table of attention functions.
        """
        if self.axis.size == 1:
            return
        attention.config = copy.copy(attention.config)  # the model's other modules share it
        attention.context = partial(self.method.attend, self, functions(str(attention.config._attn_implementation)))
        attention.config._attn_implementation = CONTEXT
        self.method.attach(attention, self.axis, heads)


@dataclass(frozen=True, slots=True)
class Method:
    """A method of attention over tokens that several ranks hold.

    Attributes:
        positions: (all positions, ranks, rank) -> positions of a rank.
        attend: (axis, attention function for whole sequences, arguments as from transformers) -> its result.
        attach: (module, axis, query heads of this tensor rank) -> None; adapts a module to the axis.
    """

    positions: Callable[[Tensor, int, int], Tensor]
    attend: AttentionFunction
    attach: Callable[[Any, Axis, int], None] = lambda module, axis, heads: None


def _balanced(positions: Tensor, ranks: int, rank: int) -> Tensor:
    """Return an early chunk and a late one, whose causal work has the same sum on every rank."""
    chunks = positions.chunk(2 * ranks)
    return torch.cat((chunks[rank], chunks[2 * ranks - 1 - rank]))


def context_attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Visible | None,
                      **more: Any) -> AttentionResult:
    """Attend by the method of the module's axis.

    Args:
        query, key, value: (batch, heads, this rank's tokens, head_dim).
        attention_mask: what tokens of whole samples see; None: all before them.
    """
    return cast(AttentionFunction, module.context)(module, query, key, value, attention_mask, **more)


def _fewer_heads(module: Any, axis: Axis, heads: int) -> None:
    """Adapt a module to its share of heads between the two exchanges."""
    groups = getattr(module, "num_key_value_groups", 1)
    module.num_key_value_groups = groups // _copies(heads // groups, axis.size)
    module.attention_site.rows = module.attention_site.rows.chunk(axis.size)[axis.rank]


def _copies(kv_heads: int, ranks: int) -> int:
    """Return the number of copies of each key-value head that makes them split evenly, as query heads do."""
    return ranks // gcd(kv_heads, ranks)


def _ulysses(context: ContextAxis, inner: AttentionFunction, module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
             mask: Visible | None, **more: Any) -> AttentionResult:
    axis = context.axis
    copies = _copies(key.shape[1], axis.size)
    parts = [query, key, value] if copies == 1 else [query, *(part.repeat_interleave(copies, 1) for part in (key, value))]
    # (receiver, batch, receiver's heads of q, k and v, this rank's tokens, head_dim): one message to each rank
    sent = torch.cat([part.unflatten(1, (axis.size, -1)) for part in parts], 2).movedim(1, 0)
    received = _exchanged(sent, axis)
    query, key, value = (part.movedim(0, 2).flatten(2, 3)
                         for part in received.split([part.shape[1] // axis.size for part in parts], 2))
    output, _ = inner(module, query, key, value, mask, **more)  # (batch, sequence, own heads, head_dim)
    return _exchanged(output.unflatten(1, (axis.size, -1)).movedim(1, 0), axis).movedim(0, 2).flatten(2, 3), None


def _exchanged(x: Tensor, axis: Axis) -> Tensor:
    """Return the all-to-all of (ranks, …); gradients go the same way back."""
    exchange = partial(all_to_all, axis=axis)
    return with_backward(exchange, exchange, x)


def _ring(context: ContextAxis, inner: AttentionFunction, module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
          mask: Visible | None, scaling: float, softcap: float | None = None, **more: Any) -> AttentionResult:
    site = cast(HashDropout, module.attention_site)
    keys = site.clock.site_keys(site.site, query.device) if site.training and site.p else None
    ring = AttentionRing(context.axis, partial(context.positions_of, device=query.device), scaling, context.sequence, site, keys,
                         None if mask is None else mask.first, softcap)
    return ring_attention(query, key, value, ring), None


METHODS: Mapping[str, Method] = {
    "ulysses": Method(lambda positions, ranks, rank: positions.chunk(ranks)[rank], _ulysses, _fewer_heads),
    "ring": Method(_balanced, _ring),
}
