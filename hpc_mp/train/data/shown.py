"""Documents as they are trained: their tokens, and which of them count in the loss."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from hpc_mp.job import JobSpec
from hpc_mp.job.inputs import find_files
from hpc_mp.train.data.documents import AS_THEY_ARE, DocumentReading, TextPiece, pieces
from hpc_mp.train.data.tokenizer import load
from hpc_mp.train.data.tokens import job_tokenizer, reading_of
from hpc_mp.train.data.windows import encode

LONGEST = 4096  # tokens of a document that are shown


@dataclass(frozen=True)
class ShownDocument:
    """The tokens of a document.

    Attributes:
        number: its place among the documents of its file, from 1.
        ids, texts: its tokens, and the text of each.
        counts: for each token True if it counts in the loss as a label.
        whole: False if only its beginning is shown.
    """

    file: Path
    number: int
    ids: tuple[int, ...]
    texts: tuple[str, ...]
    counts: tuple[bool, ...]
    whole: bool


def shown_documents(spec: JobSpec, vocabulary: int, cache: Path, number: int) -> Iterator[ShownDocument]:
    """Yield the first documents of the first file of each pattern in ``data.files``, as ``prepare`` makes them.

    Args:
        vocabulary: rows of the model's embedding.
        cache: the directory that keeps tokenizers.
        number: documents of each pattern.

    Raises:
        HpcMpError: for the reasons of ``prepare``, as far as the text is read.
    """
    tokenizer = job_tokenizer(spec, vocabulary, cache)
    reading = replace(reading_of(spec), tokenizer=tokenizer.directory, template=None)
    for path in dict.fromkeys(find_files([pattern])[0] for pattern in spec.data.files):
        documents = _documents(encode(pieces([path], reading=reading), tokenizer.encoder, 1, reading.apart), tokenizer.end)
        for place, (ids, counts, whole) in enumerate(islice(documents, number), start=1):
            if spec.data.documents == "separate":
                counts[:1] = [False]  # nothing precedes it
            texts = [tokenizer.encoder.decode([token], skip_special_tokens=False) for token in ids]
            yield ShownDocument(path, place, tuple(ids), tuple(texts), tuple(counts), whole)


def _documents(encoded: Iterable[tuple[TextPiece, list[int]]], end: int | None) -> Iterator[tuple[list[int], list[bool], bool]]:
    """Yield the tokens of each document with its end, and whether they are all of it."""
    ids: list[int] = []
    counts: list[bool] = []
    for piece, some in encoded:
        if len(ids) < LONGEST:
            ids += some
            counts += [piece.counts] * len(some)
        if piece.last:
            if ids and end is not None and piece.spans is None:
                ids.append(end)
                counts.append(piece.counts)
            if ids:
                yield ids[:LONGEST], counts[:LONGEST], len(ids) <= LONGEST
            ids, counts = [], []


FILES = 8  # limit of files that are sampled, spread evenly over all files
PART = 1 << 16  # bytes sampled from each file


@dataclass(frozen=True)
class Sampled:
    """The beginning of a text in tokens. ``first``: tokens of the first document with its end; ``counted`` of them count in the
    loss. ``whole``: True if this is the whole document, not the beginning of a long one. ``tokens``, ``bytes``: totals of
    everything sampled, as is ``documents``; the ratio may differ elsewhere in the files."""

    first: int
    counted: int
    whole: bool
    tokens: int
    bytes: int
    documents: int


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
    first = counted = tokens = size = documents = 0
    whole = False
    for number, path in enumerate(files[:: -(-len(files) // FILES)]):
        looked = 0
        for piece, ids in encode(pieces([path], reading=replace(reading, tokenizer=tokenizer)), loaded.encoder, batch=1):
            count = len(ids) + (piece.last and loaded.end is not None and piece.spans is None)
            tokens += count
            looked += piece.size
            documents += piece.last
            if number == 0 and not whole:
                first += count
                counted += count * piece.counts
                whole = piece.last
            if looked >= PART:
                break
        size += looked
    return Sampled(first, counted, whole, tokens, size, documents)
