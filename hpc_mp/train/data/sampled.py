"""The first tokens of a job, made in the same way as all its tokens, for a preview before tokenization."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpc_mp.train.data.documents import AS_THEY_ARE, DocumentReading, pieces
from hpc_mp.train.data.tokenizer import load
from hpc_mp.train.data.windows import encode

FILES = 8  # limit of files that are sampled, spread evenly over all files
PART = 1 << 16  # bytes sampled from each file


@dataclass(frozen=True)
class Sampled:
    """The beginning of a text in tokens. ``first``: tokens of the first document with its end; ``counted`` of them count in the
    loss. ``whole``: True if this is the whole document, not the beginning of a long one. ``tokens``, ``bytes``: totals of
    everything sampled; the ratio may differ elsewhere in the files."""

    first: int
    counted: int
    whole: bool
    tokens: int
    bytes: int


def sample(files: Sequence[Path], tokenizer: Path, reading: DocumentReading = AS_THEY_ARE) -> Sampled:
    """Sample the first document of the first file, and the tokens per byte of some files.

    Args:
        files: the result of ``find_files``, with some text in the first file.
        tokenizer: the directory of a tokenizer, as given by the user.
        reading: how files become documents; the tokenizer is added to it.

    Raises:
        HpcMpError: the tokenizer cannot be loaded, or a file cannot be read.
    """
    loaded = load(tokenizer)
    first = counted = tokens = size = 0
    whole = False
    for number, path in enumerate(files[:: -(-len(files) // FILES)]):
        looked = 0
        for piece, ids in encode(pieces([path], reading=replace(reading, tokenizer=tokenizer)), loaded.encoder, batch=1):
            count = len(ids) + (piece.last and loaded.end is not None and piece.spans is None)
            tokens += count
            looked += piece.size
            if number == 0 and not whole:
                first += count
                counted += count * piece.counts
                whole = piece.last
            if looked >= PART:
                break
        size += looked
    return Sampled(first, counted, whole, tokens, size)
