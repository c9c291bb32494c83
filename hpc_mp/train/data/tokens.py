"""Documents to tokens: one memory-mapped file that every rank reads its samples from."""

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job import JobSpec
from hpc_mp.job.inputs import Kind, find_groups, kind
from hpc_mp.job.layout import read_config
from hpc_mp.job.rows import Labelled
from hpc_mp.rundir.checkpoints import sha256
from hpc_mp.train.data.bpe import trained_name
from hpc_mp.train.data.cache import HashMemory, entry, key
from hpc_mp.train.data.documents import AS_THEY_ARE, DocumentReading, check_rows, pieces, unreadable
from hpc_mp.train.data.tokenizer import Tokenizer, kept_name, resolve
from hpc_mp.train.data.windows import encode

FORMAT = 4  # increased when the same text and tokenizer give other files
SMALL = 1 << 26  # bytes that can be hashed in a tenth of a second
REPORT = 1 << 20  # bytes of text between two calls of ``progress``
TOKENS, LOSS, DOCUMENTS, CLASSES, META = "tokens.bin", "loss.bin", "documents.bin", "classes.bin", "meta.json"

REBUILD = "start the job again: what is not intact is tokenized anew"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TokenSet:
    """A directory of tokens. ``tokens.bin`` contains the ids, little-endian, one after another. ``loss.bin`` contains a byte per
    token, 1 if it counts as a label; it exists only if some token does not count. ``documents.bin`` contains the number of each
    document's first token, as 64 bits, for documents that have tokens. ``classes.bin`` exists only for classification: for each
    document the number of its class, and the place of the second text in it, each as 64 bits. ``meta.json`` describes their
    sources."""

    directory: Path
    count: int
    dtype: str  # uint16 or uint32
    tokenizer_directory: Path
    tokenizer_sha256: str  # of its tokenizer.json, wherever the file is
    has_loss_mask: bool
    parts: tuple[int, ...]  # tokens of the files of each weight, one after another; all tokens without weights
    rows: int = 0  # for classification

    def tokens(self) -> NDArray[Any]:
        """Return the ids, shape (count,), mapped from the file."""
        return np.memmap(self.directory / TOKENS, _little_endian(self.dtype), "r", shape=(self.count,))

    def loss(self) -> NDArray[np.uint8] | None:
        """Return 1 for each token that counts as a label, else 0, shape (count,), mapped from the file; None if all count."""
        return np.memmap(self.directory / LOSS, np.uint8, "r", shape=(self.count,)) if self.has_loss_mask else None

    def classes(self) -> NDArray[np.int64]:
        """Return what ``classes.bin`` holds, (rows, 2), mapped from the file."""
        return np.memmap(self.directory / CLASSES, _little_endian("int64"), "r", shape=(self.rows, 2))

    def documents(self) -> NDArray[np.int64]:
        """Return the number of each document's first token, ascending, mapped from the file."""
        return np.memmap(self.directory / DOCUMENTS, _little_endian("int64"), "r")


@dataclass(frozen=True)
class TokenizedFile:
    """A file that was tokenized."""

    path: Path
    kind: Kind
    size: int  # bytes
    sha256: str

    @property
    def content(self) -> str:
        """The identity of the content that the tokens depend on, without name or place."""
        return f"{self.kind} {self.sha256}"


def prepare(files: Sequence[Path], *, tokenizer_directory: Path | None, pretrained: Path | None, vocabulary: int,
            cache: Path, progress: Callable[[int, int], None] = lambda done, total: None, files_key: str = "data.files",
            model_type: str = "gpt2", begun: str | None = None, reading: DocumentReading = AS_THEY_ARE,
            groups: Sequence[int] = ()) -> TokenSet:
    """Tokenize ``files`` into the cache, or find the result there: the same bytes are tokenized once.

    Each document is followed by the tokenizer's end-of-document token, if it has one; the ends of chats are written by their
    template. Notes about the text for the user are logged as warnings on every call.

    Args:
        files: the result of ``find_files``, or of ``find_groups``, one after another.
        tokenizer_directory: ``data.tokenizer``.
        pretrained: the model's checkpoint, whose tokenizer is the second choice; the third is one trained on ``files``.
        vocabulary: rows of the model's embedding.
        cache: directory that keeps token sets and tokenizers, on a file system that all ranks see.
        progress: called with (bytes tokenized, bytes in total).
        files_key: the key of the job file that names the files.
        model_type: the model's type; a trained tokenizer splits text as this family does.
        begun: name of the tokenizer with which the run began, if it has begun. A tokenizer that was trained before families had
            their own rules splits text as GPT-2's does.
        reading: how files become documents; the tokenizer is added to it.
        groups: the number of files of each weight.

    Raises:
        HpcMpError: a file, a row or the tokenizer cannot be used, no token counts, or the cache cannot be written.
    """
    hashed = HashMemory(cache)
    sources = tuple(_source(path, hashed, files_key) for path in files)
    total = sum(source.size for source in sources)
    contents = [source.content for source in sources]
    if begun == trained_name(contents, vocabulary, reading=reading):
        model_type = "gpt2"
    tokenizer = resolve(files, contents, directory=tokenizer_directory, pretrained=pretrained, vocabulary=vocabulary, cache=cache,
                        poll=lambda: progress(0, total), model_type=model_type, reading=reading)

    def build(temporary: Path) -> None:
        own = replace(reading, tokenizer=tokenizer.directory, template=None)
        check_rows(files, files_key, own, poll=lambda: progress(0, total))
        meta = _tokenize(temporary, sources, tokenizer, progress, files_key, own, groups)
        (temporary / META).write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")

    directory = entry(cache / _name(tokenizer.directory.name, contents, reading, groups), build, hashed)
    hashed.keep()
    for note in _meta(directory)["notes"]:
        log.warning(note)
    return load_tokens(directory)


def prepare_job(spec: JobSpec, vocabulary: int, cache: Path, progress: Callable[[int, int], None],
                begun: str | None = None) -> TokenSet:
    """Return the tokens of a job. ``vocabulary`` is the rows of the model's embedding. The rest is as in ``prepare``."""
    grouped = find_groups(spec.data.files, spec.data.weights)
    return prepare(
        [path for group in grouped for path in group], vocabulary=vocabulary, cache=cache, progress=progress, begun=begun,
        model_type=read_config(spec)["model_type"], reading=reading_of(spec), groups=[*map(len, grouped)],
        tokenizer_directory=Path(spec.data.tokenizer) if spec.data.tokenizer else None,
        pretrained=Path(spec.model.pretrained) if spec.model.pretrained else None)


def job_tokenizer(spec: JobSpec, vocabulary: int, cache: Path) -> Tokenizer:
    """Return the tokenizer of a job, as ``prepare_job`` uses it. Raises HpcMpError as ``prepare``."""
    directory = Path(spec.data.tokenizer) if spec.data.tokenizer else None
    pretrained = Path(spec.model.pretrained) if spec.model.pretrained else None
    grouped, hashed, reading = find_groups(spec.data.files, spec.data.weights), HashMemory(cache), reading_of(spec)
    files = [path for group in grouped for path in group]
    contents = [] if directory or pretrained else [_source(path, hashed, "data.files").content for path in files]
    hashed.keep()
    return resolve(files, contents, directory=directory, pretrained=pretrained, vocabulary=vocabulary, cache=cache,
                   model_type=read_config(spec)["model_type"], reading=reading)


def reading_of(spec: JobSpec, *, held_out: bool = False) -> DocumentReading:
    """Return how the files of a job become documents: of its training, or of the share that is held out."""
    template = Path(spec.data.template) if spec.data.template else None
    apart = spec.data.prompt_length is not None
    return DocumentReading(spec.data.form, None, template, spec.evaluate.share, held_out, apart)


def find_prepared(spec: JobSpec, vocabulary: int, cache: Path) -> TokenSet | None:
    """Return the earlier result of ``prepare_job`` for this text; None if it does not exist. Return None also if the search would
    have to read much of the text. Raises HpcMpError if a file or the tokenizer does not exist."""
    grouped = find_groups(spec.data.files, spec.data.weights)
    hashed, files = HashMemory(cache), [path for group in grouped for path in group]
    new = [path for path in files if hashed.remembered(path) is None]
    if sum(path.stat().st_size for path in new) > SMALL:
        return None
    contents, reading = [f"{kind(path)} {hashed(path)}" for path in files], reading_of(spec)
    tokenizer = kept_name(contents, directory=Path(spec.data.tokenizer) if spec.data.tokenizer else None,
                          pretrained=Path(spec.model.pretrained) if spec.model.pretrained else None, vocabulary=vocabulary,
                          model_type=read_config(spec)["model_type"], reading=reading)
    try:
        return load_tokens(cache / _name(tokenizer, contents, reading, [*map(len, grouped)]))
    except HpcMpError:
        return None


def _name(tokenizer: str, contents: Sequence[str], reading: DocumentReading, groups: Sequence[int]) -> str:
    """Return the cache directory name of a token set. What has its default is left out, as before it had other values."""
    return f"tokens-{key(FORMAT, tokenizer, list(contents), *reading.choices, *([[*groups]] if len(groups) > 1 else ()))}"


def load_tokens(directory: Path) -> TokenSet:
    """Open a token set made by ``prepare``. Only sizes are checked, which is cheap enough for every rank. Raises HpcMpError if
    the token set does not exist or is incomplete."""
    meta = _meta(directory)
    token_set = TokenSet(directory, meta["count"], meta["dtype"], directory.parent / meta["tokenizer"],
                         meta["tokenizer_sha256"], meta["counted"] < meta["count"], tuple(meta.get("parts", [meta["count"]])),
                         meta.get("rows", 0))
    sizes = {TOKENS: token_set.count * np.dtype(token_set.dtype).itemsize, DOCUMENTS: meta["documents"] * 8}
    if token_set.has_loss_mask:
        sizes[LOSS] = token_set.count
    if token_set.rows:
        sizes[CLASSES] = token_set.rows * 16
    for name, size in sizes.items():
        path = directory / name
        if not path.exists() or path.stat().st_size != size:
            raise HpcMpError(f"token file {path}", f"is not complete: it should hold {size} bytes", REBUILD)
    return token_set


def _meta(directory: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((directory / META).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise HpcMpError(f"token set {directory}", f"cannot be read ({error})", REBUILD) from None


def _source(path: Path, hashed: HashMemory, files_key: str) -> TokenizedFile:
    try:
        return TokenizedFile(path, kind(path), path.stat().st_size, hashed(path))
    except OSError as error:
        raise unreadable(path, error, files_key) from None


def _tokenize(target: Path, sources: Sequence[TokenizedFile], tokenizer: Tokenizer,
              progress: Callable[[int, int], None], files_key: str, reading: DocumentReading,
              groups: Sequence[int]) -> dict[str, Any]:
    """Write the token files into ``target`` and return their metadata."""
    group_of = {source.path: group for group, (first, last) in enumerate(pairwise(accumulate(groups, initial=0)))
                for source in sources[first:last]}
    parts = [0] * max(1, len(groups))
    dtype = "uint16" if tokenizer.size <= 1 << 16 else "uint32"
    total = sum(source.size for source in sources)
    count = counted = done = shown = first = documents = cut = empty = 0  # first: the document's first token
    replaced: Counter[Path] = Counter()
    with ((target / TOKENS).open("wb") as tokens, (target / LOSS).open("wb") as loss, (target / DOCUMENTS).open("wb") as firsts,
          (target / CLASSES).open("wb") as classes):
        texts = pieces((source.path for source in sources), files_key, reading)
        for piece, ids in encode(texts, tokenizer.encoder, apart=reading.apart):
            some = count + len(ids) > first
            if piece.last and some and tokenizer.end is not None and piece.spans is None:  # a document without tokens has no end
                ids.append(tokenizer.end)
            tokens.write(np.array(ids, _little_endian(dtype)).tobytes())
            loss.write(bytes([piece.counts]) * len(ids))
            count += len(ids)
            counted += len(ids) * piece.counts
            parts[group_of.get(piece.source, 0)] += len(ids)
            if piece.last and some:
                firsts.write(first.to_bytes(8, "little"))
                first, documents = count, documents + 1
            if piece.example is not None:
                cut, empty = cut + piece.cut, empty + (not ids)
                classes.write(b"".join(number.to_bytes(8, "little") for number in (piece.example.label, piece.second) if ids))
            replaced[piece.source] += piece.replaced
            done += piece.size
            if done >= shown + REPORT:
                shown = done
                progress(done, total)
    _check_some(f"{files_key} ({len(sources)} files, {total} bytes)", tokenizer, count, counted, reading)
    if counted == count:
        (target / LOSS).unlink()
    progress(total, total)
    if not isinstance(reading.form, Labelled):
        (target / CLASSES).unlink()
    return {
        "format": FORMAT,
        "count": count,
        "counted": counted,
        "documents": documents,
        **({"parts": parts} if len(groups) > 1 else {}),
        **({"rows": documents} if (target / CLASSES).exists() else {}),
        "dtype": dtype,
        "tokenizer": tokenizer.directory.name,
        "tokenizer_sha256": sha256(tokenizer.directory / "tokenizer.json"),
        "sources": [vars(source) | {"path": str(source.path)} for source in sources],
        "notes": [*_row_notes(cut, empty, documents), *_notes(tokenizer, +replaced, isinstance(reading.form, Labelled))],
    }


def _check_some(value: str, tokenizer: Tokenizer, count: int, counted: int, reading: DocumentReading) -> None:
    if count == 0 and reading.share:
        raise HpcMpError(f"evaluate.share = {reading.share:g}",
                         f"leaves no document to {'evaluate' if reading.held_out else 'train on'}: a row, or a text file, is "
                         "held out whole",
                         "choose another share, use files of more documents, or name held-out files in evaluate.files")
    if count == 0:
        raise HpcMpError(value, f"give no token with the tokenizer {tokenizer.directory}",
                         "check that the files hold text and that the tokenizer is the model's")
    if counted == 0:
        raise HpcMpError(value, f"none of their {count} tokens counts in the loss: every completion is empty",
                         "check the completions of the rows")


def _row_notes(cut: int, empty: int, rows: int) -> Iterator[str]:
    if cut:
        yield f"{cut:,} of {rows:,} rows for classification have more tokens than data.sequence_length: they are cut off there"
    if empty:
        yield f"{empty:,} rows for classification give no token, beside {rows:,} others: they are left out"


def _notes(tokenizer: Tokenizer, replaced: Counter[Path], classified: bool) -> list[str]:
    notes = []
    if tokenizer.end is None and not classified:
        notes.append("the tokenizer has no eos_token: no token ends a document")
    if replaced:
        notes.append(f"{replaced.total()} undecodable byte sequences were replaced by U+FFFD in {len(replaced)} files, "
                     f"first in {next(iter(replaced))}: text is read as UTF-8")
    return notes


def _little_endian(dtype: str) -> np.dtype[Any]:
    return np.dtype(dtype).newbyteorder("<")
