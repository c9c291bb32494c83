"""Rows of the files that are a sample each: texts with a class, and prompts with their completions. Filled up on the right.

A text with a class has the special tokens that the tokenizer's template adds, and is cut off at the sequence length. What fills
it up is a document of its own, which the row does not see. The class is the label of the token that stands for the row: the last
one of a decoder, the first one of a model whose tokens attend to later ones too.

A prompt and its completion, of a model with an encoder, are one row of ids: ``data.prompt_length`` places of the encoder, then
those of the decoder. The encoder gets the prompt and the token that ends documents. The decoder gets the completion behind the
token that it starts with, and learns the completion and its end.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job import JobSpec
from hpc_mp.layout.models import ModelShape
from hpc_mp.train.data.rows import IGNORE
from hpc_mp.train.data.tokenizer import load
from hpc_mp.train.data.tokens import TokenSet

Arrays = tuple[NDArray[np.int64], ...]  # inputs, labels, and kinds of tokens if there are some


class SampleRows(ABC):
    """Rows of a token set by number, with the methods of ``TokenRows`` and ``HeldOut``. Rows behind the last have no label.

    Attributes:
        parts: rows of the files of each weight.
    """

    masked = True

    def __init__(self, token_set: TokenSet, sequence_length: int) -> None:
        self._tokens, begins, self.sequence_length = token_set.tokens(), token_set.documents(), sequence_length
        self._ends, self._sizes = np.append(begins, token_set.count), np.diff(begins, append=token_set.count)
        self.parts: list[int] = np.diff(np.searchsorted(begins, np.cumsum([0, *token_set.parts]))).tolist()

    def __len__(self) -> int:
        return len(self._sizes)

    @abstractmethod
    def at(self, row: int, length: int) -> Arrays:
        """Return the sample of a row, each array of shape (length,), int64."""

    @abstractmethod
    def documents(self, rows: Iterable[int], length: int = 0) -> NDArray[np.int64] | None: ...

    @abstractmethod
    def label_count(self, row: int, length: int) -> int: ...

    def batch(self, rows: Iterable[int]) -> Arrays:
        """Return the samples of rows, each array of shape (rows, S), int64."""
        return tuple(map(np.stack, zip(*(self.at(row, self.sequence_length) for row in rows), strict=True)))


class LabelledRows(SampleRows):
    """Texts with a class. ``first``: True if the first token of a row stands for it, which then sees later ones."""

    def __init__(self, token_set: TokenSet, sequence_length: int, first: bool) -> None:
        super().__init__(token_set, sequence_length)
        self._first, self._classes = first, token_set.classes()

    def at(self, row: int, length: int) -> Arrays:
        ids, labels, types = (np.full(length, filler, np.int64) for filler in (0, IGNORE, 0))
        if row < len(self):
            size = self._sizes[row]
            ids[:size] = self._tokens[self._ends[row]:self._ends[row + 1]]
            labels[0 if self._first else size - 1], second = self._classes[row]
            types[second:size] = 1
        return ids, labels, types

    def documents(self, rows: Iterable[int], length: int = 0) -> NDArray[np.int64] | None:
        """Return the places at which each row and what fills it up begin, (rows, 2); None if no row sees what is behind it."""
        if not self._first:
            return None
        return np.array([(0, self._sizes[row] if row < len(self) else self.sequence_length) for row in rows], np.int64)

    def label_count(self, row: int, length: int) -> int:
        return 1


class PairRows(SampleRows):
    """Prompts with their completions.

    Args:
        start: the token that the decoder starts with.
        key: of the job file, which names the files.

    Raises:
        HpcMpError: a prompt or a completion is too long, or a row is something else.
    """

    def __init__(self, token_set: TokenSet, sequence_length: int, prompt_length: int, start: int, key: str) -> None:
        super().__init__(token_set, sequence_length)
        self._prompt, self._start = prompt_length, start
        self._end = [] if (end := load(token_set.tokenizer_directory).end) is None else [end]
        loss, sizes = token_set.loss(), self._sizes
        self.responses = sizes if loss is None else np.add.reduceat(loss, self._ends[:-1], dtype=np.int64)
        self.prompts = sizes - self.responses + len(self._end)
        runs = np.stack((sizes - self.responses, self.responses), 1).ravel()
        if loss is not None and not np.array_equal(np.repeat(np.tile(np.array([0, 1], np.uint8), len(sizes)), runs), loss):
            raise HpcMpError(key, "has a row in which a prompt follows on a completion: a chat, for example",
                             "write one prompt and one completion in each row, both as strings")
        for name, longest, limit in (("prompt", int(self.prompts.max()), prompt_length),
                                  ("completion", int(self.responses.max()), sequence_length - prompt_length)):
            if longest > limit:
                raise HpcMpError(f"{key}: a {name} of {longest} tokens with its end", f"has more than the {limit} places that "
                                 f"data.sequence_length({sequence_length}) and data.prompt_length({prompt_length}) leave for it",
                                 "raise them, or shorten the row")

    def at(self, row: int, length: int) -> Arrays:
        inputs, labels, first = np.zeros(length, np.int64), np.full(length, IGNORE, np.int64), self._prompt
        inputs[first] = self._start
        if row < len(self):
            end, response = self._ends[row + 1], self.responses[row]
            prompt = [*self._tokens[self._ends[row]:end - response], *self._end]
            inputs[:len(prompt)] = prompt
            labels[first:first + response] = self._tokens[end - response:end]
            inputs[first + 1:first + response] = labels[first:first + response - 1]
        return inputs, labels

    def documents(self, rows: Iterable[int], length: int = 0) -> NDArray[np.int64]:
        """Return the places in which prompts begin and end, (rows, 2), int64."""
        return np.array([(0, self.prompts[row] if row < len(self) else 1) for row in rows], np.int64)

    def label_count(self, row: int, length: int) -> int:
        return int(self.responses[row])


def rows_of(spec: JobSpec, shape: ModelShape, token_set: TokenSet, key: str = "data.files") -> SampleRows | None:
    """Return the rows of a job that are its samples; None if its text is cut into them. Raises HpcMpError as ``PairRows``."""
    if token_set.rows:
        return LabelledRows(token_set, spec.data.sequence_length, shape.bidirectional)
    return PairRows(token_set, spec.data.sequence_length, shape.prompt, shape.start, key) if shape.prompt else None
