"""Held-out text as samples: every token once, in order, in equal microbatches shared by all replicas."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.text import several
from hpc_mp.job import JobSpec
from hpc_mp.job.inputs import find_files
from hpc_mp.job.layout import read_shape
from hpc_mp.layout.models import ModelShape
from hpc_mp.train.data.rows import IGNORE, TokenRows
from hpc_mp.train.data.sample_rows import SampleRows, rows_of
from hpc_mp.train.data.sampler import positions
from hpc_mp.train.data.tokens import TokenSet, prepare, reading_of

KEY = "evaluate.files"

log = logging.getLogger(__name__)


def prepare_held_out(spec: JobSpec, vocabulary: int, cache: Path, progress: Callable[[int, int], None],
                     training: TokenSet) -> TokenSet | None:
    """Return the tokens of ``evaluate.files``, or of ``evaluate.share`` of the training's files, made with the training's
    tokenizer; None for a job that does not evaluate. A warning names each file that is also trained on. Everything else is as in
    ``prepare``. Raises HpcMpError for the reasons of ``prepare`` and ``HeldOut``."""
    if not spec.evaluate.active:
        return None
    share = spec.evaluate.share > 0
    files = find_files(spec.data.files) if share else find_files(spec.evaluate.files, KEY)
    if not share and (both := [str(path) for path in files if path in {*find_files(spec.data.files)}]):
        log.warning(f"{KEY} and data.files both name {several(both)}: this loss is not that on text new to the model")
    reading = replace(reading_of(spec, held_out=True), template=None)  # the training's tokenizer has it
    tokens = prepare(files, vocabulary=vocabulary, cache=cache, progress=progress, files_key="data.files" if share else KEY,
                    tokenizer_directory=training.tokenizer_directory, pretrained=None, reading=reading)
    held_out_samples(spec, read_shape(spec), tokens)
    return tokens


def held_out_samples(spec: JobSpec, shape: ModelShape, tokens: TokenSet) -> "HeldOut | SampleRows":
    """Return the held-out samples of a job. Raises HpcMpError if they have no label, or a row is too long."""
    return rows_of(spec, shape, tokens, KEY) or HeldOut(tokens, spec.data.sequence_length, spec.data.documents)


class HeldOut:
    """A token set as rows of one length: the inputs of row i are the tokens [i × S, i × S + S]; labels are shifted by one.

    The last row may have fewer tokens. Its missing part and all later rows have labels that do not count. Attention looks back
    only, so no other token sees them. ``sequence_length``: S, tokens. ``documents``: ``data.documents``, see ``rows``. Raises
    HpcMpError if no token counts as a label.
    """

    def __init__(self, token_set: TokenSet, sequence_length: int, documents: str = "joined") -> None:
        self.sequence_length = sequence_length
        self._count, self._rows = token_set.count, TokenRows(token_set, documents)
        if self._rows.label_count(0, token_set.count - 1) == 0:
            raise HpcMpError(f"{KEY} ({token_set.count} tokens)",
                             "holds no token whose loss could be taken: the first one has nothing before it",
                             "name more text, or leave evaluate.files out")

    def __len__(self) -> int:
        return -(-(self._count - 1) // self.sequence_length)

    def batch(self, rows: range) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return inputs and shifted labels of consecutive rows, each (rows, S), int64; uncounted labels are ``IGNORE``."""
        size = len(rows) * self.sequence_length
        inputs, labels = self._rows.at(rows.start * self.sequence_length, size)
        shape = len(rows), self.sequence_length
        return _filled(inputs, size, 0).reshape(shape), _filled(labels, size, IGNORE).reshape(shape)

    def documents(self, rows: range) -> NDArray[np.int64] | None:
        """Return the places in each row at which documents begin, see ``TokenRows.documents``; None if they are joined."""
        return self._rows.documents([row * self.sequence_length for row in rows], self.sequence_length)


def passes(rows: int, *, microbatch: int, microbatches: int, data_degree: int, data_rank: int) -> Sequence[list[range]]:
    """Return the rows that one replica evaluates: for each pass through the pipeline, one range per microbatch. Every row of 0 …
    rows - 1 is in exactly one range of one replica. All replicas have the same number of passes, because they compute together.
    The last pass extends beyond ``rows``."""
    together = microbatch * microbatches * data_degree
    return [positions(first, global_batch=together, data_degree=data_degree, data_rank=data_rank, microbatches=microbatches)
            for first in range(0, rows, together)]


def _filled(values: NDArray[np.int64], size: int, filler: int) -> NDArray[np.int64]:
    return np.pad(values, (0, size - len(values)), constant_values=filler)
