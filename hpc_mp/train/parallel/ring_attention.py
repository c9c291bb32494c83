"""Ring attention: causal attention over tokens that are divided among the ranks of a group (arXiv:2310.01889).

Every rank keeps its queries; keys and values travel once around the ring. The outputs of all parts are merged by the logarithm of
the sum of exponentials, as online softmax does. The backward sends keys and values around again, and behind them their gradients:
every rank adds its share until they have returned. Scores are recomputed, so that no array of sequence x sequence is kept.

Rank c holds the chunks c and 2 C - 1 - c of 2 C. All its queries see the first chunk of a part from an earlier rank; its second
chunk sees all of a part from a later rank. So each part of another rank costs half of all products, and needs no mask.

A part is computed by torch's fused kernel, which has no scores in memory (see ``flash``). It cannot drop weights by the engine's
hash, cap scores, or hide documents and what is outside of a window: then scores are plain products, for ``QUERIES`` queries at a
time.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hpc_mp.train.parallel import flash
from hpc_mp.train.parallel.collectives import Running, shift
from hpc_mp.train.parallel.dropout import HashDropout, keep
from hpc_mp.train.parallel.groups import Axis
from hpc_mp.train.parallel.soft_cap import capped, through_cap

QUERIES = 1024  # of a block, which bounds the memory of scores


@dataclass(frozen=True, slots=True)
class AttentionRing:
    """Facts that all blocks of one attention share."""

    axis: Axis
    positions: Callable[[int], Tensor]  # rank -> positions of its tokens, ascending
    scaling: float
    length: int  # number of tokens of a whole sample
    site: HashDropout  # dropout of attention weights; its rows are the numbers of this rank's query heads in the model
    keys: Tensor | None  # keys of dropout's hash for the current samples; None: no dropout
    first: Tensor | None  # first visible token of each token, (samples, length), see ``masks``; None: the first of the sample
    cap: float | None  # soft cap of scores, see ``soft_cap``; None: no cap

    def fused(self, query: Tensor) -> bool:
        """Return True if torch's fused kernel computes this."""
        return self.keys is None and self.first is None and self.cap is None and flash.computes(query)


@dataclass(frozen=True, slots=True)
class _AttentionBlock:
    """A block of scores: rows of this rank's queries and of the source's keys, and the positions of both. ``diagonal``: True if
    both are the same tokens, so that later keys are hidden from a query."""

    queries: slice
    keys: slice
    query_positions: Tensor
    key_positions: Tensor
    diagonal: bool


def ring_attention(query: Tensor, key: Tensor, value: Tensor, ring: AttentionRing) -> Tensor:
    """Return the causal attention of this rank's tokens, (batch, this rank's tokens, heads, head_dim). ``query``, ``key``,
    ``value``: (batch, heads, this rank's tokens, head_dim); the heads of keys and values divide those of queries."""
    grouped = query.unflatten(1, (key.shape[1], -1))  # (batch, key-value heads, query heads of each, tokens, head_dim)
    output: Tensor = _RingAttention.apply(grouped, torch.stack((key, value)), ring)
    return output.flatten(1, 2).transpose(1, 2).contiguous()


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, pair: Tensor, ring: AttentionRing) -> Tensor:
        """Merge the outputs of all turns. ``query``: (batch, key-value heads, query heads of each, tokens, head_dim). ``pair``:
        keys and values, (2, batch, key-value heads, tokens, head_dim)."""
        wide = torch.promote_types(query.dtype, torch.float32)
        output = torch.zeros(query.shape, dtype=wide, device=query.device)
        total = torch.full(query.shape[:-1], -torch.inf, dtype=wide, device=query.device)  # log of the sum of exponentials
        fused = ring.fused(query)
        for turn, current in enumerate(_around(pair, ring.axis)):
            for block in _blocks(ring, turn, query.shape[-2], query.shape[-2] if fused else QUERIES):
                queries, (key, value) = query[..., block.queries, :], current[..., block.keys, :].unbind()
                part, log_z = (flash.attend(queries, key, value, block.diagonal, ring.scaling) if fused
                               else _attend(queries, key, value, block, ring))
                _merge(output[..., block.queries, :], total[..., block.queries], part, log_z)
        result = output.to(query.dtype)
        ctx.save_for_backward(query, pair, result, total)
        ctx.ring = ring
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        query, pair, output, total = ctx.saved_tensors
        ring: AttentionRing = ctx.ring
        wide, fused = total.dtype, ring.fused(query)
        query_gradient = torch.zeros(query.shape, dtype=wide, device=query.device)
        share = None if fused else (gradient.to(wide) * output.to(wide)).sum(-1, keepdim=True)
        arrived, travelling = torch.empty(0), Running()
        for turn, current in enumerate(_around(pair, ring.axis)):
            own = torch.zeros(pair.shape, dtype=wide, device=query.device)
            for block in _blocks(ring, turn, query.shape[-2], query.shape[-2] if fused else QUERIES):
                queries, outer = (values[..., block.queries, :] for values in (query, gradient))
                key, value = current[..., block.keys, :].unbind()
                log_z = total[..., block.queries]
                result = output if share is None else share
                block_tensors = queries, key, value, outer, result[..., block.queries, :], log_z
                slopes = (flash.slopes(*block_tensors, block.diagonal, ring.scaling) if share is None
                          else _slopes(*block_tensors, block, ring))
                query_gradient[..., block.queries, :] += slopes[0]
                own[0, ..., block.keys, :] += slopes[1]
                own[1, ..., block.keys, :] += slopes[2]
            travelling.wait()
            if turn > 0:
                own += arrived
            arrived, travelling = shift(own, ring.axis)
        travelling.wait()
        return query_gradient.to(query.dtype), arrived.to(pair.dtype), None


def _around(pair: Tensor, axis: Axis) -> Iterator[Tensor]:
    """Yield this rank's keys and values, then those of the ranks before it. The next ones travel while a caller computes."""
    for turn in range(axis.size):
        coming, running = shift(pair, axis) if turn + 1 < axis.size else (pair, Running())
        yield pair
        running.wait()
        pair = coming


def _blocks(ring: AttentionRing, turn: int, tokens: int, limit: int) -> Iterator[_AttentionBlock]:
    """Yield the blocks of scores, of at most ``limit`` of this rank's queries, with the keys that it has at a turn."""
    source = (ring.axis.rank - turn) % ring.axis.size
    mine, theirs = ring.positions(ring.axis.rank), ring.positions(source)
    begin = tokens // 2 if source > ring.axis.rank else 0
    diagonal = source == ring.axis.rank
    for first in range(begin, tokens, limit):
        queries = slice(first, min(first + limit, tokens))
        keys = slice(0, queries.stop if diagonal else tokens // 2 if source < ring.axis.rank else tokens)
        yield _AttentionBlock(queries, keys, mine[queries], theirs[keys], diagonal)


def _merge(output: Tensor, total: Tensor, part: Tensor, log_z: Tensor) -> None:
    """Merge a block into what its queries have so far. ``total``, ``log_z``: logarithms of the sums of exponentials of both."""
    after = torch.logaddexp(total, log_z)
    output.mul_((total - after).exp().unsqueeze(-1)).add_(part * (log_z - after).exp().unsqueeze(-1))
    total.copy_(after)


def _attend(queries: Tensor, key: Tensor, value: Tensor, block: _AttentionBlock, ring: AttentionRing) -> tuple[Tensor, Tensor]:
    """Return the output of a block by itself, and the logarithm of the sum of exponentials of its scores."""
    scores = _scores(queries, key, block, ring)
    log_z = scores.logsumexp(-1)
    weights = _dropped((scores - log_z.unsqueeze(-1)).exp(), _kept(block, ring), ring)
    return _rows(weights.to(queries.dtype), value), log_z


def _slopes(queries: Tensor, key: Tensor, value: Tensor, outer: Tensor, share: Tensor, log_z: Tensor, block: _AttentionBlock,
            ring: AttentionRing) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values of a block. ``outer``, ``share``, ``log_z``: of all blocks of these
    queries: gradient of the output, its product with the output (which the backward of the softmax subtracts), logarithm of the
    sum."""
    scores = _scores(queries, key, block, ring)
    weights = (scores - log_z.unsqueeze(-1)).exp()
    mask = _kept(block, ring)
    weight_slopes = _dropped(_rows(outer, value.transpose(-1, -2)).to(log_z.dtype), mask, ring)
    slopes = through_cap(weights * (weight_slopes - share), scores, ring.cap)
    slopes = (slopes * ring.scaling).to(queries.dtype)
    return _rows(slopes, key), _columns(slopes, queries), _columns(_dropped(weights, mask, ring).to(queries.dtype), outer)


def _scores(queries: Tensor, key: Tensor, block: _AttentionBlock, ring: AttentionRing) -> Tensor:
    """Return the scores of a block, in at least fp32. A query may see no key of a source: the finite minimum keeps the logarithm
    of the sum finite, and the merge with the query's own token, which is in the first turn, leaves nothing of these scores."""
    scores = _rows(queries, key.transpose(-1, -2)).to(torch.promote_types(queries.dtype, torch.float32)) * ring.scaling
    scores = capped(scores, ring.cap)
    if block.diagonal:
        scores.masked_fill_(block.key_positions > block.query_positions.unsqueeze(1), -torch.inf)
    if ring.first is not None:
        unseen = block.key_positions < ring.first[:, block.query_positions].unsqueeze(2)  # (samples, queries, keys)
        scores.masked_fill_(unseen[:, None, None], torch.finfo(scores.dtype).min)
    return scores


def _rows(left: Tensor, right: Tensor) -> Tensor:
    """Return (…, groups, rows, n) @ (…, n, columns), with the same right factor for all groups of a key-value head."""
    return (left.flatten(-3, -2) @ right).unflatten(-2, left.shape[-3:-1])


def _columns(left: Tensor, right: Tensor) -> Tensor:
    """Multiply (…, groups, rows, n) and (…, groups, rows, columns) into (…, n, columns), summed over groups and rows."""
    return left.flatten(-3, -2).transpose(-1, -2) @ right.flatten(-3, -2)


def _kept(block: _AttentionBlock, ring: AttentionRing) -> Tensor | None:
    """Return a mask of the weights that dropout keeps, (samples, heads, queries, keys), as with whole samples; None: all."""
    if ring.keys is None:
        return None
    index = (ring.site.rows.view(-1, 1, 1) * ring.length + block.query_positions.unsqueeze(1)) * ring.length + block.key_positions
    return keep(ring.keys, index.to(torch.int32), ring.site.p)


def _dropped(weights: Tensor, mask: Tensor | None, ring: AttentionRing) -> Tensor:
    """Apply dropout to weights, or to their gradients."""
    return weights if mask is None else torch.where(mask.view(weights.shape), weights / (1.0 - ring.site.p), 0.0)
