"""Ring attention: causal attention over tokens that the ranks of a group hold, a part each (arXiv:2310.01889).

Every rank keeps its queries; keys and values travel once around. What a rank attends to with each part is merged as softmax
allows, by the logarithm of the sum of exponentials. The backward sends keys and values around again, and behind them their
gradients, to which every rank adds its share until they are home; scores are computed anew, so that nothing of the size
sequence x sequence is kept.

Rank c holds the chunks c and 2 C - 1 - c of 2 C: of a part from an earlier rank all its queries see the first chunk, of one from
a later rank its second chunk sees all. So each part but its own costs a rank half of all products, and needs no mask.

Scores are plain products, on every device: fused kernels neither drop weights by our hash nor compute fp64.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hpc_mp.train.parallel.collectives import Running, shift
from hpc_mp.train.parallel.dropout import HashDropout, keep
from hpc_mp.train.parallel.groups import Axis
from hpc_mp.train.parallel.soft_cap import capped, through_cap

QUERIES = 1024  # whose scores are there at once: a bound for the memory that they take


@dataclass(frozen=True, slots=True)
class _AttentionRing:
    """Facts that all blocks of one attention share.

    Attributes:
        positions: rank -> the positions of its tokens.
        length: of a whole sample.
        heads: numbers of the query heads in the model.
        probability: with which weights are dropped.
        keys: for dropout's hash, of the samples of this moment.
        first: token of its sample that each token sees, (samples, length); None: that of the sample.
        cap: of scores, see ``soft_cap``.
    """

    axis: Axis
    positions: Callable[[int], Tensor]
    scaling: float
    length: int
    heads: Tensor
    probability: float
    keys: Tensor | None
    first: Tensor | None
    cap: float | None

    def source(self, turn: int) -> int:
        """Whose keys and values are here at a turn of the ring."""
        return (self.axis.rank - turn) % self.axis.size


@dataclass(frozen=True, slots=True)
class _AttentionBlock:
    """Queries that see keys: which rows of this rank's tokens and of the source's, and the positions of both. ``diagonal``: these
    are the same tokens, and keys that come after a query are hidden from it."""

    queries: slice
    keys: slice
    query_positions: Tensor
    key_positions: Tensor
    diagonal: bool


def ring_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float, axis: Axis, positions: Callable[[int], Tensor],
                   length: int, site: HashDropout, first: Tensor | None = None, cap: float | None = None) -> Tensor:
    """Attention of this rank's tokens to all tokens before them: (batch, this rank's tokens, heads, head_dim).

    Args:
        query, key, value: (batch, heads, this rank's tokens, head_dim); of keys and values a divisor of the query's heads.
        positions: rank -> the positions of its tokens, ascending.
        length: of a whole sample.
        site: the dropout of attention weights.
        first: token of its sample that each token sees, (batch, length), see ``masks``; None: that of the sample.
        cap: of scores, see ``soft_cap``; None: none.
    """
    probability = site.p if site.training else 0.0
    keys = site.clock.site_keys(site.site, query.device) if probability else None
    ring = _AttentionRing(axis, positions, scaling, length, site.rows, probability, keys, first, cap)
    grouped = query.unflatten(1, (key.shape[1], -1))  # (batch, key-value heads, queries of each, tokens, head_dim)
    output: Tensor = _RingAttention.apply(grouped, torch.stack((key, value)), ring)
    return output.flatten(1, 2).transpose(1, 2).contiguous()


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, pair: Tensor, ring: _AttentionRing) -> Tensor:
        """query: (batch, key-value heads, queries of each, tokens, head_dim); pair: keys and values, (2, batch, key-value heads,
        tokens, head_dim)."""
        wide = torch.promote_types(query.dtype, torch.float32)
        output = torch.zeros(query.shape, dtype=wide, device=query.device)
        total = torch.full(query.shape[:-1], -torch.inf, dtype=wide, device=query.device)  # log of the sum of exponentials
        here, running = pair, Running()
        for turn in range(ring.axis.size):
            if turn + 1 < ring.axis.size:
                coming, running = shift(here, ring.axis)
            for block in _blocks(ring, turn, query.shape[-2]):
                key, value = here[..., block.keys, :].unbind()
                scores = _scores(query[..., block.queries, :], key, block, ring)
                found = scores.logsumexp(-1)
                weights = _dropped((scores - found.unsqueeze(-1)).exp(), _kept(block, ring), ring).to(query.dtype)
                before, part = total[..., block.queries], output[..., block.queries, :]
                after = torch.logaddexp(before, found)
                part.mul_((before - after).exp().unsqueeze(-1)).add_(_rows(weights, value) * (found - after).exp().unsqueeze(-1))
                before.copy_(after)
            running.wait()
            if turn + 1 < ring.axis.size:
                here = coming
        result = output.to(query.dtype)
        ctx.save_for_backward(query, pair, result, total)
        ctx.ring = ring
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        query, pair, output, total = ctx.saved_tensors
        ring: _AttentionRing = ctx.ring
        wide = total.dtype
        share = (gradient.to(wide) * output.to(wide)).sum(-1, keepdim=True)  # what the softmax subtracts
        query_gradient = torch.zeros(query.shape, dtype=wide, device=query.device)
        here, running = pair, Running()
        arrived, travelling = torch.empty(0), Running()
        for turn in range(ring.axis.size):
            if turn + 1 < ring.axis.size:
                coming, running = shift(here, ring.axis)
            own = torch.zeros(pair.shape, dtype=wide, device=query.device)
            for block in _blocks(ring, turn, query.shape[-2]):
                key, value = here[..., block.keys, :].unbind()
                queries, outer = query[..., block.queries, :], gradient[..., block.queries, :]
                scores = _scores(queries, key, block, ring)
                weights = (scores - total[..., block.queries].unsqueeze(-1)).exp()
                kept = _kept(block, ring)
                wanted = _dropped(_rows(outer, value.transpose(-1, -2)).to(wide), kept, ring)
                slopes = through_cap(weights * (wanted - share[..., block.queries, :]), scores, ring.cap)
                slopes = (slopes * ring.scaling).to(query.dtype)
                query_gradient[..., block.queries, :] += _rows(slopes, key)
                own[0, ..., block.keys, :] += _columns(slopes, queries)
                own[1, ..., block.keys, :] += _columns(_dropped(weights, kept, ring).to(query.dtype), outer)
            travelling.wait()
            if turn > 0:
                own += arrived
            arrived, travelling = shift(own, ring.axis)
            running.wait()
            if turn + 1 < ring.axis.size:
                here = coming
        travelling.wait()
        return query_gradient.to(query.dtype), arrived.to(pair.dtype), None


def _blocks(ring: _AttentionRing, turn: int, tokens: int) -> Iterator[_AttentionBlock]:
    """Yield the blocks of this rank's queries that see keys which are here at a turn."""
    source = ring.source(turn)
    mine, theirs = ring.positions(ring.axis.rank), ring.positions(source)
    begin = tokens // 2 if source > ring.axis.rank else 0
    diagonal = source == ring.axis.rank
    for first in range(begin, tokens, QUERIES):
        queries = slice(first, min(first + QUERIES, tokens))
        keys = slice(0, queries.stop if diagonal else tokens // 2 if source < ring.axis.rank else tokens)
        yield _AttentionBlock(queries, keys, mine[queries], theirs[keys], diagonal)


def _scores(queries: Tensor, key: Tensor, block: _AttentionBlock, ring: _AttentionRing) -> Tensor:
    """In the format of sums. Of a source's keys a query may see none: a finite number keeps their sum one, and the sum with the
    query's own token, which comes first, leaves nothing of it."""
    scores = _rows(queries, key.transpose(-1, -2)).to(torch.promote_types(queries.dtype, torch.float32)) * ring.scaling
    scores = capped(scores, ring.cap)
    if block.diagonal:
        scores.masked_fill_(block.key_positions > block.query_positions.unsqueeze(1), -torch.inf)
    if ring.first is not None:
        unseen = block.key_positions < ring.first[:, block.query_positions].unsqueeze(2)  # (samples, queries, keys)
        scores.masked_fill_(unseen[:, None, None], torch.finfo(scores.dtype).min)
    return scores


def _rows(left: Tensor, right: Tensor) -> Tensor:
    """(…, groups, rows, n) by (…, n, columns), the same for all groups of a key-value head."""
    return (left.flatten(-3, -2) @ right).unflatten(-2, left.shape[-3:-1])


def _columns(left: Tensor, right: Tensor) -> Tensor:
    """(…, groups, rows, n) and (…, groups, rows, columns) -> (…, n, columns), summed over groups and rows."""
    return left.flatten(-3, -2).transpose(-1, -2) @ right.flatten(-3, -2)


def _kept(block: _AttentionBlock, ring: _AttentionRing) -> Tensor | None:
    """Which weights dropout leaves, (samples, heads, queries, keys), as one process with the whole sample; None: all of them."""
    if ring.keys is None:
        return None
    index = (ring.heads.view(-1, 1, 1) * ring.length + block.query_positions.unsqueeze(1)) * ring.length + block.key_positions
    return keep(ring.keys, index.to(torch.int32), ring.probability)


def _dropped(weights: Tensor, kept: Tensor | None, ring: _AttentionRing) -> Tensor:
    """Weights, or their gradients, without those that dropout takes."""
    return weights if kept is None else torch.where(kept.view(weights.shape), weights / (1.0 - ring.probability), 0.0)
