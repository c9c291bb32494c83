"""Files to documents, as a stream of pieces, so that no file has to fit into memory.

All rows of a job are checked before the first one is tokenized: those that cannot be used are named together, and at once.
"""

import codecs
import hashlib
import io
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job.chats import Chat, UnusableRow
from hpc_mp.job.inputs import kind
from hpc_mp.job.row_files import bad_row, damage_named, open_unpacked, rows
from hpc_mp.job.rows import Content, Example, RowForm, Texts, columns_of, row_content
from hpc_mp.train.data.chat_template import RenderedChat, Span, load_template

# Bytes of a piece. The pieces of a batch are encoded in parallel, one core each: small enough that a batch of a few MiB
# keeps many cores busy, large enough that little text is encoded twice around the cuts.
PIECE = 1 << 16
HALF_PAIR = re.compile("[\ud800-\udfff]")  # half of a pair of UTF-16, which JSON can name and UTF-8 cannot encode


@dataclass(frozen=True)
class TextPiece:
    """A part of a document; the whole document if it is small."""

    source: Path
    text: str
    counts: bool   # True if its tokens are labels of the loss
    joined: bool   # True if the next piece is of the same text; a prompt and its completion are two texts
    last: bool     # True if it ends its document
    size: int      # bytes of the file consumed with it
    replaced: int  # undecodable byte sequences that became U+FFFD
    spans: tuple[Span, ...] | None = None  # of a chat: the characters whose tokens count, instead of ``counts``
    example: Example | None = None  # for classification: what is encoded, instead of ``text``
    second: int = 0  # its first token of the second text, once it is encoded
    cut: bool = False  # True if it was longer


@dataclass(frozen=True)
class DocumentReading:
    """The way in which files become documents.

    Attributes:
        form: ``data.form``.
        tokenizer: the directory whose chat template writes chats as text. Without it a chat is the contents of its messages, on
            which a tokenizer is trained.
        template: ``data.template``, if it takes the place of the tokenizer's own.
        share: ``evaluate.share``, the share of the documents that is held out.
        held_out: True to read that share, False to read the others.
        apart: True if a completion does not continue its prompt, because a decoder gets it.
    """

    form: RowForm = "auto"
    tokenizer: Path | None = None
    template: Path | None = None
    share: float = 0.0
    held_out: bool = False
    apart: bool = False

    @property
    def choices(self) -> tuple[object, ...]:
        """The values that change the documents of the same files, for names in a cache; without those that have their default."""
        return (*((self.form,) if self.form != "auto" else ()), *(((self.share, self.held_out),) if self.share else ()),
                *(("apart",) if self.apart else ()))

    def takes(self, content: bytes) -> bool:
        """Return True if the document with this content is read. Equal documents are on the same side."""
        if not self.share:
            return True
        draw = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")
        return (draw < self.share * 2**64) == self.held_out


AS_THEY_ARE = DocumentReading()


def pieces(files: Iterable[Path], files_key: str = "data.files", reading: DocumentReading = AS_THEY_ARE) -> Iterator[TextPiece]:
    """Yield the documents of ``files`` in order.

    A text file is one document in UTF-8; undecodable bytes are replaced and counted. A row of another file is one document. A
    prompt does not count in the loss, and of a chat only the assistant's turns do. ``files_key``: the key of the job file that
    names the files. Raises HpcMpError if a file cannot be read, a text file is binary, or a row is malformed (with file and row).
    """
    for path in files:
        try:
            yield from (_text if kind(path) == "text" else _rows)(path, files_key, reading)
        except OSError as error:
            raise unreadable(path, error, files_key) from None


def unreadable(path: Path, error: OSError, files_key: str) -> HpcMpError:
    """Return the error for a file that existed at launch and cannot be read now."""
    return HpcMpError(f"{files_key}: {path}", f"cannot be read ({error.strerror})", "make it readable or name another file")


def _text(path: Path, files_key: str, reading: DocumentReading) -> Iterator[TextPiece]:
    file, raw = open_unpacked(path)
    done = consumed = 0
    with raw, damage_named(path, files_key):
        for number, (block, last) in enumerate(_cut(file)):
            content = block.removeprefix(codecs.BOM_UTF8) if number == 0 else block
            if number == 0 and not reading.takes(content):
                return
            if (at := content.find(b"\0")) >= 0:
                raise HpcMpError(f"{files_key}: {path}",
                                 f"is binary or not UTF-8 (it holds NUL bytes, the first after {done + at} bytes)",
                                 "name text files only, convert it (iconv -f UTF-16 -t UTF-8), or take them out (tr -d '\\000')")
            done += len(content)
            size = len(content) if raw is file else raw.tell() - consumed
            consumed += size
            yield _piece(path, content, counts=True, joined=not last, last=last, size=size)


def _rows(path: Path, files_key: str, reading: DocumentReading) -> Iterator[TextPiece]:
    skipped = 0  # bytes of rows that are not read here
    for number, row, size in rows(path, files_key, columns_of(reading.form)):
        if isinstance(row, bytes) and row.isspace():
            skipped += size
            continue
        try:
            content = row_content(row, reading.form)
            if not reading.takes(repr(content).encode("utf-8", "backslashreplace")):
                skipped += size
                continue
            document = written(content, reading)
        except UnusableRow as error:
            raise bad_row(path, number, error, files_key) from None
        yield from _document(path, document, size + skipped)
        skipped = 0


def written(content: Content, reading: DocumentReading) -> Texts | RenderedChat | Example:
    """Return the texts of a row, a chat in the words of its template. Raises UnusableRow if the template refuses it."""
    if not isinstance(content, Chat):
        return content
    if reading.tokenizer is None:
        return contents(content)
    return load_template(reading.tokenizer, reading.template).render(content)


def _document(path: Path, document: Texts | RenderedChat | Example, size: int) -> Iterator[TextPiece]:
    """Yield the pieces of a row. A text is cut if it is long; a chat is one piece, whose spans are of its whole text; so is an
    example, whose end the tokenizer's template writes."""
    if isinstance(document, Example):
        texts, numbers = zip(*(HALF_PAIR.subn("\ufffd", text) for text in document.texts), strict=True)
        yield TextPiece(path, "\n".join(texts), counts=True, joined=False, last=True, size=size, replaced=sum(numbers), spans=(),
                        example=replace(document, texts=texts))
        return
    if isinstance(document, RenderedChat):
        text, replaced = HALF_PAIR.subn("\ufffd", document.text)
        yield TextPiece(path, text, counts=False, joined=False, last=True, size=size, replaced=replaced, spans=document.spans)
        return
    for part, (text, counts) in enumerate(document, start=1):
        # JSON can name a lone surrogate, which UTF-8 cannot encode: it is replaced like undecodable bytes.
        for raw, end in _cut(io.BytesIO(text.encode("utf-8", "surrogatepass"))):
            last = end and part == len(document)
            yield _piece(path, raw, counts=counts, joined=not end, last=last, size=size if last else 0)


def contents(chat: Chat) -> Texts:
    """Return the contents of a chat's messages, without a template."""
    parts = (("".join(part["text"] for part in content) if isinstance(content, list) else content, counts)
             for message, counts in zip(chat.messages, chat.counts, strict=True) if (content := message.get("content")))
    return tuple(parts) or (("", False),)


def _piece(path: Path, raw: bytes, *, counts: bool, joined: bool, last: bool, size: int) -> TextPiece:
    text = raw.decode("utf-8", "replace")
    replaced = text.count("\ufffd") - raw.count("\ufffd".encode())
    return TextPiece(path, text, counts, joined, last, size, replaced)


def _cut(file: BinaryIO) -> Iterator[tuple[bytes, bool]]:
    """Yield parts of at most a few ``PIECE`` bytes, each with True if it is the last; at least one part."""
    held = file.read(PIECE)
    while len(block := file.read(PIECE)) == PIECE:
        held += block
        at = _boundary(held)
        yield held[:at], False
        held = held[at:]
    yield held + block, True


def _boundary(raw: bytes) -> int:
    """Return the cut position: after the last line end, else before the last space, else between two characters."""
    if newline := raw.rfind(b"\n") + 1:
        return newline
    if (space := raw.rfind(b" ")) > 0:
        return space
    starts = (at for at in range(len(raw) - 1, len(raw) - 5, -1) if raw[at] & 0xC0 != 0x80)
    return next(starts, len(raw))


MOST = 1000  # unusable rows after which the search ends: then the format is wrong, not a row
NAMED = 40  # places that the message lists
POLL = 4096  # rows between two calls of ``poll``


def check_rows(files: Sequence[Path], files_key: str, reading: DocumentReading,
               poll: Callable[[], object] = lambda: None) -> None:
    """Read every row and write each chat by its template. ``files_key``: the key of the job file that names the files. ``poll``:
    called repeatedly; an exception from it ends the check. Raises HpcMpError if a file cannot be read, or rows cannot be used.
    The first is explained and the others are named; ``several`` explains each."""
    errors: list[HpcMpError] = []
    places: list[str] = []
    for path in files:
        if kind(path) == "text" or len(errors) >= MOST:
            continue
        try:
            for number, row, _ in rows(path, files_key, columns_of(reading.form)):
                if number % POLL == 0:
                    poll()
                if isinstance(row, bytes) and row.isspace():
                    continue
                try:
                    written(row_content(row, reading.form), reading)
                except UnusableRow as error:
                    errors.append(bad_row(path, number, error, files_key))
                    places.append(f"{path.name} {number}")
                    if len(errors) >= MOST:
                        break
        except OSError as error:
            raise unreadable(path, error, files_key) from None
    if len(errors) == 1:
        raise errors[0]
    if errors:
        others = ", ".join(places[1:NAMED]) + (" …" if len(places) > NAMED else "")
        total = f"at least {MOST}" if len(errors) >= MOST else str(len(errors))
        end = "" if errors[0].remedy.endswith((".", "?", "!")) else "."
        raise HpcMpError(errors[0].value, errors[0].rule, f"{errors[0].remedy}{end} {total} rows cannot be used; the others are "
                         f"{others}", tuple(errors))
