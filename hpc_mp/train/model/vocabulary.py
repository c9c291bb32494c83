"""The two ends of a model, cut along the vocabulary: the embedding, and the head with the loss."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from hpc_mp.train.parallel.collectives import all_reduce
from hpc_mp.train.parallel.projection import Projection, SunkWeight, TensorAxis
from hpc_mp.train.parallel.soft_cap import capped, through_cap
from hpc_mp.train.parallel.surroundings import NO_TERMS, LossTerms
from hpc_mp.train.pipeline.stage import Batch

LossFunction = Callable[[Any, Batch], tuple[Tensor, Tensor]]  # (outputs, batch) -> (sum, count)
IGNORED = -100  # Hugging Face's label for tokens that do not count in the loss
CHUNK = 1 << 26  # logits that are there at once: 0.8 GB with their gradient, and enough rows for a product to fill a GPU
TILE = 64  # rows, of which a chunk has a multiple, as matrix units like it


class VocabularyEmbedding(SunkWeight):
    """Token embedding: ids (batch, sequence) -> (batch, sequence, hidden).

    Args:
        padding: the row that gets no gradient; None for none.
        scale: what hidden states are multiplied with; ``rounded``: to their format first.
        outer: the tensor axis, whose hidden states come out.
        tensor: the axis along which the rows are cut.
    """

    def __init__(self, name: str, vocabulary: int, padding: int | None, scale: float, rounded: bool,
                 outer: TensorAxis, tensor: TensorAxis) -> None:
        super().__init__(name)
        self.padding, self.scale, self.rounded, self.outer, self.tensor = padding, scale, rounded, outer, tensor
        self.start, self.length = tensor.part(vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        if self.tensor.size == 1:
            ids = self.outer.share(ids, 1)
        hidden: Tensor = self.tensor.leave(_Rows.apply(self.weight, ids, self))
        if self.scale == 1.0:
            return hidden
        return hidden * (float(torch.tensor(self.scale).to(hidden.dtype)) if self.rounded else self.scale)


class _Rows(torch.autograd.Function):
    """The rows of an embedding that this rank holds, zeros for all others. Gradients go to the rows alone."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, embedding: VocabularyEmbedding) -> Tensor:
        ctx.embedding = embedding
        ctx.save_for_backward(ids)
        if embedding.tensor.size == 1:
            return F.embedding(ids, weight)
        mine, index = _own(ids - embedding.start, embedding.length)
        rows = weight if embedding.length else weight.new_zeros(1, weight.shape[1])
        return F.embedding(index, rows).masked_fill_(~mine.unsqueeze(-1), 0.0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        embedding = ctx.embedding
        ids, = ctx.saved_tensors
        mine, index = _own((ids - embedding.start).flatten(), embedding.length)
        if embedding.padding is not None:
            mine &= ids.flatten() != embedding.padding
        rows, some = gradient.flatten(0, 1).masked_fill(~mine.unsqueeze(-1), 0.0), slice(None if embedding.length else 0)
        assert embedding.sink is not None, "a backward of rows that are not trained"
        embedding.sink.add_rows(index[some], rows[some])
        return None, None, None


class NextToken(nn.Module):
    """The objective: the cross entropy of the next token, summed, with the terms that a training adds to it, and how many tokens
    it is the sum of.

    Args:
        head: cut along the vocabulary, or whole on every rank: then each computes the loss of the tokens that it has.
        outer: the tensor axis, whose hidden states come in.
        cap: of logits, see ``soft_cap``; None: none.
        compile: True if the two functions of a chunk's logits are compiled, for each shape of their arguments.
        terms: of the loss of a training.
    """

    def __init__(self, head: Projection, vocabulary: int, outer: TensorAxis, cap: float | None, compile: bool,
                 terms: LossTerms = NO_TERMS) -> None:
        super().__init__()
        self.head, self.outer, self.tensor, self.cap = head, outer, head.tensor, cap
        self.terms, self.vocabulary = terms, vocabulary
        self.start, _ = self.tensor.part(vocabulary)
        width = -(-vocabulary // self.tensor.size)  # the largest part: all ranks have the same chunks
        rows = max(1, (2 if compile else 1) * CHUNK // width)  # compiled functions have no logits in fp32
        self.rows = rows - rows % TILE if rows > TILE else rows
        functions: tuple[Callable[..., Any], ...] = _scores, _slopes
        self.scores, self.slopes = (torch.compile(one, dynamic=False) if compile else one for one in functions)

    def forward(self, hidden: Tensor, batch: Batch, own: Callable[[Tensor], Tensor],
                gradient: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the sum and the count.

        Args:
            hidden: (batch, sequence, hidden).
            batch: has ``labels``, (batch, sequence), shifted already, ``IGNORED`` where none counts.
            own: takes those of this context rank.
            gradient: of the loss, by which the forward computes gradients already; None: the loss is that of an evaluation.
        """
        labels = own(batch["labels"])
        count = (labels != IGNORED).sum()
        if self.tensor.size == 1:
            labels = self.outer.share(labels, 1)
        rows = self.tensor.enter(hidden).flatten(0, 1)
        loss: Tensor = _CrossEntropy.apply(rows, labels.flatten(), self, self.head.weight, gradient)
        return self.outer.total(loss) if self.tensor.size == 1 else loss, count

    def over_axis(self, own: Tensor, matched: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``own`` and ``matched`` of the words of all ranks, given those of this rank's words."""
        axis = self.tensor.axis
        if axis.size == 1:
            return own, matched
        highest = own.clone()
        all_reduce(highest, axis, dist.ReduceOp.MAX).wait()
        sums = torch.stack(((own - highest).exp(), matched))
        all_reduce(sums, axis).wait()
        return highest + sums[0].log(), sums[1]


class SampleClass(NextToken):
    """The objective of classification: the cross entropy of a sample's class. It is the label of the token that stands for the
    sample; no other token has one. The head is whole on every rank."""

    def forward(self, hidden: Tensor, batch: Batch, own: Callable[[Tensor], Tensor],
                gradient: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the sum and the count; in an evaluation counts of each class, (3, classes): of its samples, of those that the
        model takes for it, and of those among these for which this is right."""
        loss, count = super().forward(hidden, batch, own, gradient)
        if gradient is not None:
            return loss, count
        labels = self.outer.share(own(batch["labels"]), 1)
        pooled = labels != IGNORED
        classes, taken = labels[pooled], self.head.product(hidden[pooled]).argmax(1)
        counts = [values.bincount(minlength=self.vocabulary) for values in (classes, taken, classes[classes == taken])]
        return loss, self.outer.total(torch.stack(counts).double())


class LogitsObjective(nn.Module):
    """A user's objective: a function of the logits of all tokens and words; every tensor rank computes it.

    Args:
        head: a column projection.
        cap: soft cap of logits; None: none.
        function: called with an object whose ``logits`` are (samples, tokens, words), in fp32 at least, and with the batch.
    """

    def __init__(self, head: Projection, vocabulary: int, cap: float | None, function: LossFunction) -> None:
        super().__init__()
        self.head, self.vocabulary, self.cap, self.function = head, vocabulary, cap, function
        self.words = TensorAxis(head.tensor.axis, (), head.tensor.weights)  # its ranks have all tokens

    def forward(self, hidden: Tensor, batch: Batch, *_: object) -> tuple[Tensor, Tensor]:
        """Return the sum and the count. ``hidden``: (samples, tokens, hidden)."""
        logits = self.head(self.head.tensor.enter(hidden))
        if self.words.size > 1:
            begin, length = self.words.part(self.vocabulary)
            padded = F.pad(logits, (begin, self.vocabulary - begin - length))
            logits = self.words.leave(padded)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return self.function(SimpleNamespace(logits=capped(logits, self.cap)), batch)


class _CrossEntropy(torch.autograd.Function):
    """Sum over tokens of the cross entropy of a head's logits, whose vocabulary may be cut over an axis.

    A chunk of tokens at a time: the logits of all of them would be the largest array of a step (8,192 tokens of 128,256 words in
    fp32: 4.2 GB, and as much for their gradient). The forward turns a chunk's logits into their gradient at once, so that the
    backward needs no logits; the last chunk's weight gradient is left to the backward. The weight is an argument so that
    autograd knows that a gradient is wanted; it gets none here.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, labels: Tensor, objective: NextToken, weight: Tensor,
                gradient: Tensor | None) -> Tensor:
        head, losses, gradients = objective.head, [], []
        terms = NO_TERMS if gradient is None else objective.terms
        target = TokenTarget(1.0 - terms.smoothing, terms.smoothing / objective.vocabulary, terms.z, objective.cap)
        columns = hidden, labels - objective.start, labels != IGNORED
        chunks = list(zip(*(column.split(objective.rows) for column in columns), strict=True))
        for number, (rows, places, counted) in enumerate(chunks, 1):
            logits = head.product(rows)
            scores = objective.scores(logits, places, target)
            total, matched = objective.over_axis(scores.own, scores.matched)
            loss = total - matched + target.z * total.square() if target.z else total - matched
            losses.append(loss.masked_fill(~counted, 0.0).sum())
            if gradient is None:
                continue
            slopes = objective.slopes(logits, scores, places, total, counted * gradient.to(total.dtype), target)
            del scores  # its shares are as large as logits in fp32
            gradients.append(head.input_gradient(slopes))
            if head.trained and number < len(chunks):
                head.add_weight_gradient(rows, slopes, more=True)
        if gradient is not None:
            ctx.objective = objective
            ctx.save_for_backward(torch.cat(gradients), *((rows, slopes) if head.trained else ()))
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None, None, None, None]:
        gradient, *last = ctx.saved_tensors
        tensor = ctx.objective.tensor
        if last:
            tensor.weights.put_off(ctx.objective.head.add_weight_gradient, *last)
        if tensor.size == 1:
            tensor.weights.meanwhile()
        return gradient, None, None, None, None


class TokenTarget(NamedTuple):
    """The distribution over words that a token's logits are compared with, and how."""

    own: float  # the share of the token's own word, in addition to every
    every: float  # the share of each word
    z: float  # factor of the z loss
    cap: float | None  # of logits


class _Scores(NamedTuple):
    """Scores of a chunk's tokens among this rank's words."""

    own: Tensor  # logarithm of the sum of the exponentials of each token's logits, (tokens,)
    matched: Tensor  # this rank's part of the mean of a token's logits over the target, (tokens,)
    shares: Tensor | None  # logits less ``own``, (tokens, words), for ``_slopes``, which overwrites them; None: only logits are


def _scores(logits: Tensor, places: Tensor, target: TokenTarget) -> _Scores:
    """Return the scores of tokens.

    Args:
        logits: (tokens, words of this rank).
        places: of each token's word among these, (tokens,); outside of them if another rank has it.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    if logits.shape[1] == 0:  # a rank that has no word
        none = logits.new_zeros(len(logits), dtype=wide)
        return _Scores(torch.full_like(none, float("-inf")), none, None)
    logits = capped(logits, target.cap)
    mine, index = _own(places, logits.shape[1])
    shares = logits.log_softmax(1, dtype=wide)
    word, log_share = (values.gather(1, index.unsqueeze(1)).squeeze(1).to(wide) for values in (logits, shares))
    matched = word.masked_fill(~mine, 0.0)
    if target.every:
        matched = target.own * matched + target.every * logits.sum(1, dtype=wide)
    return _Scores(word - log_share, matched, None if torch.compiler.is_compiling() else shares)  # compiled: not written


def _slopes(logits: Tensor, scores: _Scores, places: Tensor, total: Tensor, weights: Tensor, target: TokenTarget) -> Tensor:
    """The gradient of the logits, in their format.

    Args:
        total: the logarithm of the sum of the exponentials of all words, (tokens,).
        weights: of each token's loss, (tokens,).
    """
    if logits.shape[1] == 0:
        return logits
    logits = capped(logits, target.cap)
    mine, index = _own(places.unsqueeze(1), logits.shape[1])
    if scores.shares is None:
        slopes = (logits - (total - weights.log()).unsqueeze(1)).exp_()
    else:
        slopes = scores.shares.add_((scores.own - total + weights.log()).unsqueeze(1)).exp_()
    if target.z:
        slopes *= (1.0 + 2.0 * target.z * total).unsqueeze(1)
    if target.every:
        slopes -= (target.every * weights).unsqueeze(1)
    own = slopes.gather(1, index) - mine * (target.own * weights).unsqueeze(1)
    slopes = slopes.to(logits.dtype).scatter_(1, index, own.to(logits.dtype))
    return through_cap(slopes, logits, target.cap)


def _own(places: Tensor, words: int) -> tuple[Tensor, Tensor]:
    """Return a mask of the tokens whose word is among these, and the word's place, both of the shape of ``places``."""
    return (places >= 0) & (places < words), places.clamp(0, max(0, words - 1))
