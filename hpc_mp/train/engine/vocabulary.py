"""The two ends of a model, cut along the vocabulary: the embedding, and the head with the loss of the next token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from hpc_mp.train.engine.collectives import all_reduce
from hpc_mp.train.engine.gradients import Sink
from hpc_mp.train.engine.groups import Axis
from hpc_mp.train.engine.projection import Projection, TensorAxis

IGNORED = -100  # Hugging Face's label for tokens that do not count in the loss


class VocabularyEmbedding(nn.Module):
    """Token embedding: ids (batch, sequence) -> (batch, sequence, hidden).

    Args:
        padding: the row that gets no gradient; None for none.
        outer: the tensor axis, whose hidden states come out.
        tensor: the axis along which the rows are cut.
    """

    def __init__(self, name: str, vocabulary: int, padding: int | None, outer: TensorAxis, tensor: TensorAxis) -> None:
        super().__init__()
        self.name, self.padding, self.outer, self.tensor = name, padding, outer, tensor
        self.start, self.length = tensor.part(vocabulary)
        self.weight: nn.Parameter
        self.sink: Sink

    @property
    def owned(self) -> set[str]:
        return {self.name}

    def adopt(self, parameters: Mapping[str, nn.Parameter], sinks: Mapping[str, Sink]) -> None:
        self.weight, self.sink = parameters[self.name], sinks[self.name]

    def forward(self, ids: Tensor) -> Tensor:
        if self.tensor.size == 1:
            ids = self.outer.share(ids, 1)
        return self.tensor.leave(_Rows.apply(self.weight, ids, self))


class _Rows(torch.autograd.Function):
    """The rows of an embedding that this rank holds, zeros for all others. Gradients go to the rows alone."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, embedding: VocabularyEmbedding) -> Tensor:
        index = ids - embedding.start
        outside = (index < 0) | (index >= embedding.length)
        ctx.embedding = embedding
        ctx.save_for_backward(ids)
        if embedding.tensor.size == 1:
            return F.embedding(ids, weight)
        rows = weight if embedding.length else weight.new_zeros(1, weight.shape[1])
        return F.embedding(index.masked_fill(outside, 0), rows).masked_fill_(outside.unsqueeze(-1), 0.0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        embedding = ctx.embedding
        ids, = ctx.saved_tensors
        index = (ids - embedding.start).flatten()
        rows = gradient.flatten(0, 1)
        mine = (index >= 0) & (index < embedding.length)
        if embedding.padding is not None:
            mine &= ids.flatten() != embedding.padding
        index, rows = index.clamp(0, embedding.length - 1), rows.masked_fill(~mine.unsqueeze(-1), 0.0)
        embedding.sink.add_rows(index[:len(index) * bool(embedding.length)], rows[:len(index) * bool(embedding.length)])
        return None, None, None


class NextToken(nn.Module):
    """The objective: the cross entropy of the next token, summed, and how many tokens it is the sum of.

    Args:
        head: cut along the vocabulary, or whole on every rank: then each computes the loss of the tokens that it has.
        outer: the tensor axis, whose hidden states come in.
    """

    def __init__(self, head: Projection, vocabulary: int, outer: TensorAxis) -> None:
        super().__init__()
        self.head, self.outer, self.tensor = head, outer, head.tensor
        self.start = self.tensor.part(vocabulary)[0]

    def forward(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """hidden: (batch, sequence, hidden); labels: (batch, sequence), shifted already, ``IGNORED`` where none counts."""
        count = (labels != IGNORED).sum()
        if self.tensor.size == 1:
            labels = self.outer.share(labels, 1)
        logits = self.head(self.tensor.enter(hidden)).flatten(0, 1)
        logits, labels = logits.to(torch.promote_types(logits.dtype, torch.float32)), labels.flatten()
        if self.tensor.size == 1:
            loss = self.outer.total(F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum"))
        else:
            loss = _VocabularyCrossEntropy.apply(logits, labels, self.start, self.tensor.axis)
        return loss, count


class _VocabularyCrossEntropy(torch.autograd.Function):
    """Sum over tokens of the cross entropy of logits whose vocabulary is cut over an axis."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, start: int, axis: Axis) -> Tensor:
        width = logits.shape[-1]
        if width == 0:  # a column that no token can be
            logits = logits.new_full((len(logits), 1), float("-inf"))
        counted = labels != IGNORED
        local = labels - start
        mine = counted & (local >= 0) & (local < width)
        index = local.clamp(0, max(width, 1) - 1)

        highest = logits.amax(dim=-1)
        all_reduce(highest, axis, dist.ReduceOp.MAX).wait()
        shifted = logits - highest.unsqueeze(-1)
        target = shifted.gather(-1, index.unsqueeze(-1)).squeeze(-1).masked_fill(~mine, 0.0)
        exponentials = shifted.exp_()
        parts = torch.stack((exponentials.sum(dim=-1), target))
        all_reduce(parts, axis).wait()
        total, target = parts.unbind()

        ctx.width = width
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(-1)), index, mine, counted)
        return (total.log() - target).masked_fill(~counted, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, index, mine, counted = ctx.saved_tensors
        found = probabilities * counted.unsqueeze(-1)
        found.scatter_add_(-1, index.unsqueeze(-1), -mine.to(found.dtype).unsqueeze(-1))
        return found[:, :ctx.width] * gradient, None, None, None
