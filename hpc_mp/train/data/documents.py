"""Files to documents, as a stream of pieces, so that no file has to fit into memory."""

import codecs
import io
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job.first_rows import bad_row
from hpc_mp.job.inputs import Kind, kind
from hpc_mp.job.rows import UnusableRow, row_parts

# Bytes of a piece. The pieces of a batch are encoded in parallel, one core each: small enough that a batch of a few MiB
# keeps many cores busy, large enough that little text is encoded twice around the cuts.
PIECE = 1 << 16


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


def pieces(files: Iterable[Path], files_key: str = "data.files") -> Iterator[TextPiece]:
    """Yield the documents of ``files`` in order.

    A text file is one document in UTF-8; undecodable bytes are replaced and counted. A row of a JSON lines file is one document:
    ``{"text": …}``, or ``{"prompt": …, "completion": …}`` whose prompt does not count in the loss. Other keys are ignored.

    Args:
        files_key: the key of the job file that names the files.

    Raises:
        HpcMpError: a file cannot be read, a text file is binary, or a row is malformed (with file and line).
    """
    for path in files:
        try:
            with path.open("rb") as file:
                yield from READERS[kind(path)](path, file, files_key)
        except OSError as error:
            raise unreadable(path, error, files_key) from None


def unreadable(path: Path, error: OSError, files_key: str) -> HpcMpError:
    """Return the error for a file that existed at launch and cannot be read now."""
    return HpcMpError(f"{files_key}: {path}", f"cannot be read ({error.strerror})", "make it readable or name another file")


def _text(path: Path, file: BinaryIO, files_key: str) -> Iterator[TextPiece]:
    file.seek(len(codecs.BOM_UTF8) if file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8 else 0)
    done = 0
    for raw, last in _cut(file):
        if (at := raw.find(b"\0")) >= 0:
            raise HpcMpError(f"{files_key}: {path}",
                             f"is binary or not UTF-8 (it holds NUL bytes, the first after {done + at} bytes)",
                             "name text files only, convert it (iconv -f UTF-16 -t UTF-8), or take them out (tr -d '\\000')")
        done += len(raw)
        yield _piece(path, raw, counts=True, joined=not last, last=last, size=len(raw))


def _rows(path: Path, file: BinaryIO, files_key: str) -> Iterator[TextPiece]:
    for number, line in enumerate(file, start=1):
        if line.isspace():
            continue
        try:
            parts = row_parts(line)
        except UnusableRow as error:
            raise bad_row(f"{files_key}: {path}", number, error) from None
        for part, (text, counts) in enumerate(parts, start=1):
            # JSON can name a lone surrogate, which UTF-8 cannot encode: it is replaced like undecodable bytes.
            for raw, end in _cut(io.BytesIO(text.encode("utf-8", "surrogatepass"))):
                last = end and part == len(parts)
                yield _piece(path, raw, counts=counts, joined=not end, last=last, size=len(line) if last else 0)


READERS: dict[Kind, Callable[[Path, BinaryIO, str], Iterator[TextPiece]]] = {"text": _text, "jsonl": _rows}


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
