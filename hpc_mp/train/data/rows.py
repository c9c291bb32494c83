"""Rows: consecutive tokens of a token set, with each token's label and the places where documents begin.

A row runs over the ends of documents. Its labels are its tokens shifted by one, and ``IGNORE`` for a token that does not count in
the loss. The other effects of documents depend on ``data.documents``:

======== ========================= ================================================ ==========================================
value    a token attends to        positions count                                  labels that do not count
======== ========================= ================================================ ==========================================
joined   all earlier tokens        from the row's first token                       prompts
separate earlier tokens of its     from the first token of the document, or of its  prompts, and the first token of each
         document                  part in the row                                  document, which nothing precedes
======== ========================= ================================================ ==========================================

The token that ends a document belongs to it and is a label like any other. The places where documents begin are recorded at
tokenization: a separator inside a text, as in a chat, ends no document.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hpc_mp.train.data.tokens import TokenSet

IGNORE = -100  # a label that does not count in the loss, as torch's cross_entropy has it


class TokenRows:
    """Rows of a token set. ``documents``: ``data.documents``."""

    def __init__(self, token_set: TokenSet, documents: str) -> None:
        self._tokens, self._loss = token_set.tokens(), token_set.loss()
        self._documents = token_set.documents() if documents == "separate" else None

    @property
    def masked(self) -> bool:
        """True if some tokens do not count in the loss."""
        return self._loss is not None or self._documents is not None

    def at(self, first: int, length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return inputs and labels of the row that begins with token ``first``, int64; fewer if the text ends earlier."""
        tokens = self._tokens[first:first + length + 1].astype(np.int64, subok=False)
        labels = tokens[1:]
        return tokens[:length], np.where(self._counts(first, len(labels)), labels, IGNORE) if self.masked else labels

    def label_count(self, first: int, length: int) -> int:
        """Return the number of a row's labels that count in the loss, without reading ids."""
        return int(self._counts(first, length).sum()) if self.masked else length

    def documents(self, firsts: Sequence[int], length: int) -> NDArray[np.int64] | None:
        """Return the places at which documents begin in the rows that begin with ``firsts``, (rows, documents), int64; None if
        documents are joined. They ascend from 0, where a document begins or goes on, and are filled up with ``length``."""
        if self._documents is None:
            return None
        inside = [self._inside(first, length - 1) for first in firsts]
        places = np.full((len(firsts), 1 + max(map(len, inside), default=0)), length, np.int64)
        places[:, 0] = 0
        for row, begins in zip(places, inside, strict=True):
            row[1:1 + len(begins)] = begins
        return places

    def _counts(self, first: int, length: int) -> NDArray[np.bool_]:
        """Return a mask of the labels of a row that count in the loss."""
        labels = slice(first + 1, first + 1 + length)
        counts = np.ones(length, np.bool_) if self._loss is None else self._loss[labels].astype(np.bool_, subok=False)
        if self._documents is not None:
            counts[self._inside(first, length) - 1] = False
        return counts

    def _inside(self, first: int, last: int) -> NDArray[np.int64]:
        """Return the places after the first token of a row, up to place ``last``, at which documents begin."""
        assert self._documents is not None
        begin, end = np.searchsorted(self._documents, (first, first + last), side="right")
        return self._documents[begin:end].astype(np.int64, subok=False) - first
