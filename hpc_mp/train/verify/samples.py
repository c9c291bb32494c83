"""Samples of a verification: drawn tokens, of which some do not count in the loss, in documents of several lengths."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from hpc_mp.job import JobSpec
from hpc_mp.layout.models import ModelShape
from hpc_mp.train.data.rows import IGNORE

COUNTED = 0.8  # share of the labels that count, so that their number differs among microbatches and ranks
CUTS = ((), (9,), (4, 17), (15,))  # places at which documents begin, of samples in turn


class DrawnSamples:
    """Samples by position, as ``trainer.share`` takes them, of a shrunk job and its model: of text, prompts with completions, or
    rows with a class, which ``LabelledRows`` describes.

    Attributes:
        separate: True if documents do not see each other; of a row, what fills it up is one.
    """

    def __init__(self, spec: JobSpec, shape: ModelShape) -> None:
        self.vocabulary, self.length = shape.vocabulary, spec.data.sequence_length
        self.prompt, self.classes = shape.prompt, shape.classes
        self.separate = shape.bidirectional if shape.classes else spec.data.documents == "separate"

    def at(self, position: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return inputs and labels of a sample, (length,)."""
        generator = np.random.default_rng(position)
        tokens = generator.integers(0, self.vocabulary, self.length + 1)
        labels = np.where(generator.random(self.length) < COUNTED, tokens[1:], IGNORE)
        labels[[cut - 1 for cut in self.cuts(position)]] = IGNORE  # nothing precedes the first token of a document
        labels[:self.prompt] = IGNORE
        if self.classes:
            labels[:] = IGNORE
            labels[0 if self.separate else self.cuts(position)[0] - 1] = position % self.classes
        return tokens[:-1], labels

    def cuts(self, position: int) -> tuple[int, ...]:
        """Return the places behind the first token at which documents begin that are separate, and the end of a row."""
        if self.classes:
            return self.length - position % 5,
        return CUTS[position % len(CUTS)] if self.separate else ()

    def batch(self, positions: Iterable[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        inputs, labels = zip(*map(self.at, positions), strict=True)
        return np.stack(inputs), np.stack(labels)

    def documents(self, positions: Iterable[int]) -> NDArray[np.int64] | None:
        """Return the places at which documents begin, as ``TokenRows.documents`` does, or those of prompts of several lengths."""
        if self.prompt:
            return np.array([[0, self.prompt - position % 4] for position in positions], np.int64)
        limit = max(map(len, CUTS))
        rows = [[0, *cuts, *[self.length] * (limit - len(cuts))] for cuts in map(self.cuts, positions)]
        return np.array(rows, np.int64) if self.separate else None

    def label_count(self, positions: Iterable[int]) -> int:
        return sum(int((self.at(position)[1] != IGNORE).sum()) for position in positions)
