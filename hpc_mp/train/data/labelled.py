"""Rows for classification: texts with a class to tokens, and these to samples.

Each row is a sample of its own, with the special tokens that the tokenizer's template adds, cut off at the sequence length and
filled up to it. What fills it up is a document of its own, which the row does not see. The class is the label of the token that
stands for the row: the last one of a decoder, the first one of a model whose tokens attend to later ones too.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hpc_mp.job import JobSpec
from hpc_mp.layout.models import ModelShape
from hpc_mp.train.data.held_out import HeldOut, held_out_of
from hpc_mp.train.data.pairs import PairRows, pairs_of
from hpc_mp.train.data.rows import IGNORE
from hpc_mp.train.data.sampler import Samples, permuted
from hpc_mp.train.data.tokens import TokenSet


def training_samples(spec: JobSpec, shape: ModelShape, tokens: TokenSet) -> "Samples | LabelledRows":
    """Return the samples of a job. Raises HpcMpError as ``Samples``."""
    if tokens.rows:
        return LabelledRows(tokens, spec.data.sequence_length, shape.bidirectional, spec.train.seed)
    return Samples(tokens, spec.data.sequence_length, spec.train.seed, spec.data.documents, spec.data.weights,
                   pairs_of(spec, tokens))


def held_out_samples(spec: JobSpec, shape: ModelShape, tokens: TokenSet) -> "HeldOut | LabelledRows | PairRows":
    """Return the held-out samples of a job. Raises HpcMpError as ``held_out_of``."""
    if tokens.rows:
        return LabelledRows(tokens, spec.data.sequence_length, shape.bidirectional)
    return held_out_of(spec, tokens)


class LabelledRows:
    """The rows of a token set as samples by position: in training order without end if there is a seed, else each once.

    Args:
        length: tokens of a sample.
        first: True if the first token of a row stands for it, which then sees later ones.
        seed: ``train.seed``; None: positions are the rows in their order, and those beyond them have no label.
    """

    def __init__(self, token_set: TokenSet, length: int, first: bool, seed: int | None = None) -> None:
        self.length, self.first, self.seed = length, first, seed
        self._tokens, self._classes = token_set.tokens(), token_set.classes()
        self._ends = np.append(token_set.documents(), token_set.count)

    def __len__(self) -> int:
        return len(self._classes)

    def row_at(self, position: int) -> int:
        """Return the number of the row at a position; one behind the last row stands for none."""
        epoch, place = divmod(position, len(self))
        if self.seed is None:
            return min(position, len(self))
        return permuted(place, len(self), seed=self.seed, epoch=epoch)

    def batch(self, positions: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return inputs, labels and kinds of tokens at n positions, each (n, length), int64."""
        ids, labels, types = (np.full((len(positions), self.length), filler, np.int64) for filler in (0, IGNORE, 0))
        for place, row in enumerate(map(self.row_at, positions)):
            if row == len(self):
                continue
            tokens = self._tokens[self._ends[row]:self._ends[row + 1]]
            ids[place, :len(tokens)] = tokens
            labels[place, 0 if self.first else len(tokens) - 1], second = self._classes[row]
            types[place, second:len(tokens)] = 1
        return ids, labels, types

    def documents(self, positions: Sequence[int]) -> NDArray[np.int64] | None:
        """Return the places at which each row and what fills it up begin, (n, 2); None if no row sees what is behind it."""
        if not self.first:
            return None
        sizes = np.append(np.diff(self._ends), 0)
        return np.stack([(0, sizes[row] or self.length) for row in map(self.row_at, positions)]).astype(np.int64)

    def label_count(self, positions: Sequence[int]) -> int:
        return sum(self.row_at(position) < len(self) for position in positions)
