"""Context parallelism: the ranks of a context group share the tokens of every sample.

Each rank computes all layers for its own positions; only attention needs the tokens of other ranks. There are two methods:

- ``ulysses`` (DeepSpeed-Ulysses, arXiv:2309.14509): each rank holds one chunk of adjacent tokens. An all-to-all around attention
  exchanges tokens for heads: each rank attends with some of the heads over the whole sequence, with the attention function of a
  single rank. As on tensor ranks, heads may be cut unevenly, and several ranks get the same key-value head.
- ``ring``: keys and values travel from rank to rank, see ``ring_attention``. To balance the work under the causal mask, the
  sequence is cut into 2 C chunks, and rank c holds the chunks c and 2 C - 1 - c (Llama 3, arXiv:2407.21783, 3.3.2).

Parameters and their gradients do not depend on it: context ranks are ranks of the data axis, whose sums are plain, because the
loss is divided by the number of labels of the global batch.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpc_mp.layout.models.tensor import Heads, heads_of
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
    """The context axis as one rank sees it. With size 1 the rank has whole samples. ``positions``: positions of this rank's
    tokens in their sample, (sequence / ranks,), ascending."""

    def __init__(self, axis: Axis, method: str, sequence: int, device: torch.device) -> None:
        self.axis, self.sequence = axis, sequence
        self.method = METHODS[method if axis.size > 1 else "ulysses"]
        self.positions = self.positions_of(axis.rank, device)

    def positions_of(self, rank: int, device: torch.device) -> Tensor:
        return self.method.positions(torch.arange(self.sequence, device=device), self.axis.size, rank)

    def own(self, tokens: Tensor) -> Tensor:
        """Return this rank's columns of a tensor with one number per token, (samples, sequence)."""
        return tokens if self.axis.size == 1 else tokens[:, self.positions]

    def attach(self, attention: Any, heads: Heads, functions: Callable[[str], AttentionFunction]) -> None:
        """Make an attention module of transformers attend over the whole sequence. ``attention``: the module, whose attributes
        ``config`` and ``context`` are set. ``heads``: those of this tensor rank. ``functions``: transformers' table of attention
        functions."""
        if self.axis.size == 1:
            return
        attention.config = copy.copy(attention.config)  # the model's other modules share it
        attention.context = partial(self.method.attend, self, functions(str(attention.config._attn_implementation)))
        attention.config._attn_implementation = CONTEXT
        self.method.attach(attention, self.axis, heads)


@dataclass(frozen=True, slots=True)
class Method:
    """A method of attention over tokens that several ranks hold."""

    positions: Callable[[Tensor, int, int], Tensor]  # (all positions, ranks, rank) -> positions of a rank
    attend: AttentionFunction  # (axis, attention function for whole sequences, arguments as from transformers) -> its result
    # (module, axis, heads of this tensor rank) -> None; adapts a module to the axis
    attach: Callable[[Any, Axis, Heads], None] = lambda module, axis, heads: None


def _balanced(positions: Tensor, ranks: int, rank: int) -> Tensor:
    """Return an early chunk and a late one, whose causal work has the same sum on every rank."""
    chunks = positions.chunk(2 * ranks)
    return torch.cat((chunks[rank], chunks[2 * ranks - 1 - rank]))


def context_attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Visible | None,
                      **more: Any) -> AttentionResult:
    """Attend by the method of the module's axis. ``query``, ``key``, ``value``: (batch, heads, this rank's tokens, head_dim).
    ``attention_mask``: what tokens of whole samples see; None: all before them."""
    return cast(AttentionFunction, module.context)(module, query, key, value, attention_mask, **more)


def _fewer_heads(module: Any, axis: Axis, heads: Heads) -> None:
    """Adapt a module to its share of heads between the two exchanges."""
    own = heads_of(len(heads.query), len(heads.kv), axis.size, axis.rank)
    module.num_key_value_groups = len(own.query) // len(own.kv)
    module.attention_site.rows = module.attention_site.rows[own.query.start:own.query.stop]


def _ulysses(context: ContextAxis, inner: AttentionFunction, module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
             mask: Visible | None, **more: Any) -> AttentionResult:
    axis, size = context.axis, value.shape[-1]
    value = as_wide(value, key)
    ranks = [heads_of(query.shape[1], key.shape[1], axis.size, rank) for rank in range(axis.size)]
    queries = [len(heads.query) for heads in ranks]
    inputs = [len(heads.query) + 2 * len(heads.kv) for heads in ranks]
    # (every receiver's heads of q, k and v, batch, this rank's tokens, head_dim): one message to each rank
    sent = torch.cat([part[:, numbers.start:numbers.stop] for heads in ranks for part, numbers in (
        (query, heads.query), (key, heads.kv), (value, heads.kv))], 1).movedim(1, 0)
    own = ranks[axis.rank]
    received = _exchanged(sent, axis, inputs, [inputs[axis.rank]] * axis.size).unflatten(0, (axis.size, -1))
    query, key, value = received.permute(2, 1, 0, 3, 4).flatten(2, 3).split([len(own.query), *[len(own.kv)] * 2], 1)
    output, _ = inner(module, query, key, value[..., :size], mask, **more)  # (batch, sequence, own heads, head_dim)
    back = output.unflatten(1, (axis.size, -1)).permute(1, 3, 0, 2, 4).flatten(0, 1)
    return _exchanged(back, axis, [queries[axis.rank]] * axis.size, queries).permute(1, 2, 0, 3), None


def as_wide(value: Tensor, key: Tensor) -> Tensor:
    """Return values of narrower heads than the keys', as latent attention has them, filled up with zeros to travel with these."""
    return F.pad(value, (0, key.shape[-1] - value.shape[-1])) if value.shape[-1] < key.shape[-1] else value


def _exchanged(x: Tensor, axis: Axis, sent: Sequence[int], come: Sequence[int]) -> Tensor:
    """Return the all-to-all of (what each rank gets, …); gradients go the same way back."""
    exchange = partial(all_to_all, axis=axis)
    return with_backward(partial(exchange, sent=sent, come=come), partial(exchange, sent=come, come=sent), x)


def _ring(context: ContextAxis, inner: AttentionFunction, module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
          mask: Visible | None, scaling: float, softcap: float | None = None, **more: Any) -> AttentionResult:
    site = cast(HashDropout, module.attention_site)
    keys = site.clock.site_keys(site.site, query.device) if site.training and site.p else None
    ring = AttentionRing(context.axis, partial(context.positions_of, device=query.device), scaling, context.sequence, site, keys,
                         None if mask is None else mask.first, softcap)
    return ring_attention(query, key, as_wide(value, key), ring)[..., :value.shape[-1]], None


METHODS: Mapping[str, Method] = {
    "ulysses": Method(lambda positions, ranks, rank: positions.chunk(ranks)[rank], _ulysses, _fewer_heads),
    "ring": Method(_balanced, _ring),
}
