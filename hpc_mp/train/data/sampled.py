"""The first tokens of a job, made as all are, for whoever wants to see them before the rest is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_mp.train.data.documents import pieces
from hpc_mp.train.data.tokenizer import load
from hpc_mp.train.data.windows import encode

FILES = 8  # that are looked into, spread evenly over all of them
PART = 1 << 16  # bytes of each


@dataclass(frozen=True)
class Sampled:
    """The beginning of a text in tokens.

    Attributes:
        first: tokens of the first document, its end included; ``counted`` of them count in the loss.
        whole: whether that is the whole document, and not the beginning of a long one.
        tokens, bytes: of all that was looked at; what a byte of the files gives elsewhere may differ.
    """

    first: int
    counted: int
    whole: bool
    tokens: int
    bytes: int


def sample(files: Sequence[Path], tokenizer: Path) -> Sampled:
    """The first document of the first file that has one, and how many tokens there are in a byte of some files.

    Args:
        files: as ``find_files`` returns them, some text in the first one.
        tokenizer: the directory of a tokenizer, as it was given.

    Raises:
        HpcMpError: the tokenizer cannot be loaded, or a file cannot be read.
    """
    loaded = load(tokenizer)
    first = counted = tokens = size = 0
    whole = False
    for number, path in enumerate(files[:: -(-len(files) // FILES)]):
        looked = 0
        for piece, ids in encode(pieces([path]), loaded.encoder, batch=1):
            made = len(ids) + (piece.last and loaded.end is not None)
            tokens += made
            looked += piece.size
            if number == 0 and not whole:
                first += made
                counted += made * piece.counts
                whole = piece.last
            if looked >= PART:
                break
        size += looked
    return Sampled(first, counted, whole, tokens, size)
