"""Prompts with their responses, as the samples of a model with an encoder: one row of the files each.

A sample is one row of ids: ``data.prompt_length`` places of the encoder, then those of the decoder. The encoder gets the prompt
and the token that ends documents. The decoder gets the response behind the token that it starts with, and learns the response and
its end. Both are filled up on the right.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job import JobSpec
from hpc_mp.job.layout import read_config
from hpc_mp.layout.models.families.t5 import start_token
from hpc_mp.train.data.rows import IGNORE
from hpc_mp.train.data.tokenizer import load
from hpc_mp.train.data.tokens import TokenSet


class PairRows:
    """Rows of a token set by number, with the methods of ``TokenRows`` and ``HeldOut``. Rows behind the last have no label.

    Args:
        start: the token that the decoder starts with.
        key: of the job file, which names the files.

    Attributes:
        parts: rows of the files of each weight.

    Raises:
        HpcMpError: a prompt or a response is too long, or a row is something else.
    """

    masked = True

    def __init__(self, token_set: TokenSet, sequence_length: int, prompt_length: int, start: int, key: str) -> None:
        self._tokens, self._begins, self._start = token_set.tokens(), token_set.documents(), start
        self.sequence_length, self._prompt = sequence_length, prompt_length
        self._end = [] if (end := load(token_set.tokenizer_directory).end) is None else [end]
        self._ends = np.append(self._begins[1:], token_set.count)
        loss, sizes = token_set.loss(), np.diff(self._begins, append=token_set.count)
        self.responses = sizes if loss is None else np.add.reduceat(loss, self._begins, dtype=np.int64)
        self.prompts = sizes - self.responses + len(self._end)
        runs = np.stack((sizes - self.responses, self.responses), 1).ravel()
        if loss is not None and not np.array_equal(np.repeat(np.tile(np.array([0, 1], np.uint8), len(sizes)), runs), loss):
            raise HpcMpError(key, "has a row in which a prompt follows on a completion: a chat, for example",
                             "write one prompt and one completion in each row, both as strings")
        self.parts = np.diff(np.searchsorted(self._begins, np.cumsum([0, *token_set.parts]))).tolist()
        for name, longest, limit in (("prompt", int(self.prompts.max()), prompt_length),
                                  ("completion", int(self.responses.max()), sequence_length - prompt_length)):
            if longest > limit:
                raise HpcMpError(f"{key}: a {name} of {longest} tokens with its end", f"has more than the {limit} places that "
                                 f"data.sequence_length({sequence_length}) and data.prompt_length({prompt_length}) leave for it",
                                 "raise them, or shorten the row")

    def __len__(self) -> int:
        return len(self._begins)

    def at(self, row: int, length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return inputs and labels of a row, int64."""
        inputs, labels, first = np.zeros(length, np.int64), np.full(length, IGNORE, np.int64), self._prompt
        inputs[first] = self._start
        if row < len(self):
            end, response = self._ends[row], self.responses[row]
            prompt = [*self._tokens[self._begins[row]:end - response], *self._end]
            inputs[:len(prompt)] = prompt
            labels[first:first + response] = self._tokens[end - response:end]
            inputs[first + 1:first + response] = labels[first:first + response - 1]
        return inputs, labels

    def batch(self, rows: range) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return inputs and labels of consecutive rows, each (rows, S), int64."""
        inputs, labels = zip(*(self.at(row, self.sequence_length) for row in rows), strict=True)
        return np.stack(inputs), np.stack(labels)

    def label_count(self, row: int, length: int) -> int:
        return int(self.responses[row])

    def documents(self, rows: Sequence[int], length: int = 0) -> NDArray[np.int64]:
        """Return the places in which prompts begin and end, (rows, 2), int64."""
        ends = [self.prompts[row] if row < len(self) else 1 for row in rows]
        return np.stack((np.zeros(len(ends), np.int64), np.array(ends, np.int64)), 1)


def pairs_of(spec: JobSpec, token_set: TokenSet, key: str = "data.files") -> PairRows | None:
    """Return the rows of a job whose model has an encoder; None for all other jobs. Raises HpcMpError as ``PairRows``."""
    if spec.data.prompt_length is None:
        return None
    return PairRows(token_set, spec.data.sequence_length, spec.data.prompt_length, start_token(read_config(spec)), key)
