"""Documents as they are trained: their tokens, and which of them count in the loss."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from hpc_mp.job import JobSpec
from hpc_mp.job.inputs import find_files
from hpc_mp.train.data.documents import TextPiece, pieces
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
        documents = _documents(encode(pieces([path], reading=reading), tokenizer.encoder, batch=1), tokenizer.end)
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
