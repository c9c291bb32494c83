"""The order of training samples: a function of only the seed and the global position.

Positions count sequences from the start of the training, over all replicas and epochs. A sample depends only on its position, so
a run that continues with another layout sees each sample exactly once.

In a mixture (``data.weights``) positions are counted in blocks. In each block every part has its slots, in an order that is drawn
anew for each block, so that a short stretch of a run has nearly the shares of the whole. A part that ends is passed again, and
each pass has its own order.
"""

import hashlib
import struct
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job import JobSpec
from hpc_mp.job.epochs import samples_of
from hpc_mp.layout.models import ModelShape
from hpc_mp.train.data.rows import TokenRows
from hpc_mp.train.data.sample_rows import Arrays, SampleRows, rows_of
from hpc_mp.train.data.tokens import TokenSet


def positions(first: int, *, global_batch: int, data_degree: int, data_rank: int, microbatches: int) -> list[range]:
    """Return the global positions that one replica trains in an optimizer step, one range per microbatch. ``first``: the position
    of the step's first sample. ``global_batch``: sequences per optimizer step over all replicas; a multiple of data_degree ×
    microbatches. ``data_degree``, ``data_rank``: number of replicas, and the number of this one, from 0."""
    size = global_batch // (data_degree * microbatches)
    own = first + data_rank * microbatches * size
    return [range(own + m * size, own + (m + 1) * size) for m in range(microbatches)]


class Samples:
    """Sequences of a token set in training order, without end: each epoch is shuffled by (seed, epoch).

    Sequence i is the tokens [i × S, i × S + S]: S inputs, and the same shifted by one as labels. Sequences run over the ends of
    documents, see ``rows``. Tokens after the last whole sequence are not used. In a mixture each part has sequences of its own.
    ``sequence_length``: S, tokens. ``seed``, ``documents``, ``weights``: ``train.seed``, ``data.documents`` and ``data.weights``.
    ``rows``: those that are the samples instead.
    Raises HpcMpError if the text, or a part of a mixture, is shorter than one sequence.
    """

    def __init__(self, token_set: TokenSet, sequence_length: int, seed: int, documents: str = "joined",
                 weights: Sequence[float] = (), rows: SampleRows | None = None) -> None:
        parts = token_set.parts if weights else (token_set.count,)
        if (least := min(parts)) <= (sequence_length if rows is None else 0):
            text = f"the files of data.weights[{parts.index(least)}] have" if weights else "the text has"
            raise HpcMpError(f"data.sequence_length = {sequence_length}",
                             f"{text} {least} tokens, and one sequence with its labels takes "
                             f"{sequence_length} + 1 = {sequence_length + 1}",
                             f"use more text, or a sequence_length of at most {least - 1}")
        self.sequence_length = sequence_length
        self.seed = seed
        self._slots = slots(weights) if weights else ()
        self._sizes = [samples_of(count, sequence_length) for count in parts] if rows is None else rows.parts
        self._firsts = [*accumulate(parts if rows is None else rows.parts, initial=0)]
        self._rows: TokenRows | SampleRows = TokenRows(token_set, documents) if rows is None else rows
        self._step = sequence_length if rows is None else 1

    def __len__(self) -> int:
        """Return the number of samples per epoch; of a mixture those of all its parts."""
        return sum(self._sizes)

    @property
    def masked(self) -> bool:
        """True if some tokens do not count in the loss."""
        return self._rows.masked

    def at(self, position: int) -> Arrays:
        """Return inputs and labels at a global position (0, 1, … without end), each of shape (S,), int64. Labels are already
        shifted, and ``IGNORE`` for a token that does not count in the loss. Of texts with a class, kinds of tokens too."""
        return self._rows.at(self.first_token(position), self.sequence_length)

    def first_token(self, position: int) -> int:
        """Return the number of the first token of the sequence at a global position."""
        part, number = self._source(position)
        epoch, place = divmod(number, self._sizes[part])
        sample = permuted(place, self._sizes[part], seed=self.seed + (part << 64), epoch=epoch)
        return self._firsts[part] + sample * self._step

    def _source(self, position: int) -> tuple[int, int]:
        """Return the part of a mixture at a global position, and the number of samples that it gives before; without weights all
        text is one part."""
        if not self._slots:
            return 0, position
        block, place = divmod(position, BLOCK)
        part, number = block_order(self._slots, self.seed, block)[place]
        return part, block * self._slots[part] + number

    def label_count(self, positions: Iterable[int]) -> int:
        """Return the number of tokens of these sequences that count in the loss, without reading ids."""
        if not self.masked:
            return self.sequence_length * sum(1 for _ in positions)
        return sum(self._rows.label_count(self.first_token(position), self.sequence_length) for position in positions)

    def batch(self, positions: Iterable[int]) -> Arrays:
        """Return the same at n global positions, each of shape (n, S)."""
        return tuple(map(np.stack, zip(*map(self.at, positions), strict=True)))

    def documents(self, positions: Iterable[int]) -> NDArray[np.int64] | None:
        """Return the places in each sequence at which documents begin, see ``TokenRows.documents``; None if they are joined."""
        return self._rows.documents([self.first_token(position) for position in positions], self.sequence_length)


def training_samples(spec: JobSpec, shape: ModelShape, tokens: TokenSet) -> Samples:
    """Return the samples of a job. Raises HpcMpError as ``Samples`` and ``rows_of``."""
    return Samples(tokens, spec.data.sequence_length, spec.train.seed, spec.data.documents, spec.data.weights,
                   rows_of(spec, shape, tokens))


BLOCK = 1000  # positions; shares are exact to a thousandth


def slots(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the slots of each part in a block, in proportion to its weight, rounded by the method of the largest remainder.
    Raises HpcMpError if a part would have none."""
    exact = [BLOCK * weight / sum(weights) for weight in weights]
    whole = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda part: (whole[part] - exact[part], part))
    for part in by_remainder[:BLOCK - sum(whole)]:
        whole[part] += 1
    if 0 in whole:
        raise HpcMpError(f"data.weights[{whole.index(0)}] = {weights[whole.index(0)]:g}",
                         f"is less than a thousandth of all weights, {sum(weights):g}", "raise it, or leave those files out")
    return tuple(whole)


@lru_cache(maxsize=4)
def block_order(sizes: tuple[int, ...], seed: int, block: int) -> tuple[tuple[int, int], ...]:
    """Return, for each position of a block, its part and how many samples of this part come before it in the block. ``sizes``:
    the result of ``slots``."""
    ends, numbers = [*accumulate(sizes)], [0] * len(sizes)
    order = []
    for place in range(BLOCK):
        part = bisect_right(ends, permuted(place, BLOCK, seed=seed, epoch=-1 - block))
        order.append((part, numbers[part]))
        numbers[part] += 1
    return tuple(order)


ROUNDS = 8
WORD = (1 << 64) - 1


def permuted(place: int, size: int, *, seed: int, epoch: int) -> int:
    """Return the item at ``place`` (0 … size - 1) of a permutation: for fixed (size, seed, epoch) a bijection of range(size).
    ``seed`` and ``epoch`` are any integers; each pair gives its own order.

    The permutation is a balanced Feistel network (Luby and Rackoff 1988) on the next even number of bits, walked along its cycle
    until the value is below ``size`` (Black and Rogaway 2002). This takes at most 4 steps on average. It is pure integer
    arithmetic and gives the same result on every machine.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    keys = struct.unpack(f"<{ROUNDS}Q", hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=8 * ROUNDS).digest())
    item = place
    while True:
        left, right = item >> half, item & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        item = left << half | right
        if item < size:
            return item


def _mix(word: int) -> int:
    """Spread 64 bits over 64 bits: the finalizer of SplitMix64 (Steele, Lea and Flood 2014, constants by Stafford)."""
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB & WORD
    return word ^ word >> 31
