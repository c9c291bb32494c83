"""The beginning of every file that a job trains on, read at launch to check its format and to show its first row.

A node reads the whole text, perhaps hours later. Content that it would refuse or misinterpret is already visible in the first
bytes of a file.
"""

import codecs
import json
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job.inputs import kind
from hpc_mp.job.rows import SHAPES, UnusableRow, known_keys, row_parts

HEAD = 1 << 16  # bytes that are examined
LINE = 1 << 24  # maximum bytes of a first row; longer ones are left to the nodes
SHOWN = 200  # characters of a text that are kept: a job may have a hundred thousand files
READERS = 16  # files that are opened at once: a parallel file system takes milliseconds for each
TAKE_APART = "split it: jq -c '.[]' OLD.json > NEW.jsonl"

# First bytes of files that are not text: their kind, and the remedy.
UNPACK = "unpack it and name the text files inside"
EXPORT = f"write its rows as JSON lines, {SHAPES} each, into a .jsonl file"
TEXT_ONLY = "name text or .jsonl files only"
MAGIC: tuple[tuple[bytes, str, str], ...] = (
    (b"\x1f\x8b", "is compressed by gzip", UNPACK),
    (b"BZh", "is compressed by bzip2", UNPACK),
    (b"\xfd7zXZ\0", "is compressed by xz", UNPACK),
    (b"\x28\xb5\x2f\xfd", "is compressed by zstd", UNPACK),
    (b"\x04\x22\x4d\x18", "is compressed by lz4", UNPACK),
    (b"PK\x03\x04", "is a zip archive", UNPACK),
    (b"7z\xbc\xaf\x27\x1c", "is a 7z archive", UNPACK),
    (b"PAR1", "is parquet, which is not supported yet", EXPORT),
    (b"ARROW1", "is an Arrow file", EXPORT),
    (b"SQLite format 3\0", "is a SQLite database", EXPORT),
    (b"\x89HDF", "is HDF5", EXPORT),
    (b"\x93NUMPY", "is a NumPy array", EXPORT),
    (b"%PDF-", "is PDF", "extract its text, for example with pdftotext"),
    (b"\x7fELF", "is a program", TEXT_ONLY),
    (b"version https://git-lfs.github.com/", "is a Git LFS pointer, not the file itself", "fetch it with git lfs pull"),
    *((mark, f"is UTF-{bits}", f"convert it: iconv -f UTF-{bits} -t UTF-8 OLD > NEW") for mark, bits in (
        (codecs.BOM_UTF32_LE, 32), (codecs.BOM_UTF32_BE, 32), (codecs.BOM_UTF16_LE, 16), (codecs.BOM_UTF16_BE, 16))),
)


@dataclass(frozen=True, slots=True)
class FirstRow:
    """The first training row of a file.

    Attributes:
        size: the size of the file in bytes.
        parts: the beginnings of the texts of the first row, each with True if it counts in the loss; for a text file, its
            beginning. Empty if the examined part has only white space and rows without text.
    """

    path: Path
    size: int
    parts: tuple[tuple[str, bool], ...]


def first_rows(files: Sequence[Path], key: str = "data.files") -> tuple[FirstRow, ...]:
    """Return the first row of every file, in order.

    Args:
        key: the key of the job file that names the files.

    Raises:
        HpcMpError: a file does not match its suffix, is not UTF-8, or begins with a row that cannot be trained on; or no file
            contains any text.
    """
    with ThreadPoolExecutor(READERS) as pool:
        rows = tuple(pool.map(lambda path: _first(path, key), files))
    if files and not any(row.parts for row in rows) and all(row.size <= HEAD for row in rows):
        raise HpcMpError(f"{key}: {files[0]}" + (f" and {len(files) - 1} more" if files[1:] else ""),
                         "contains no text" if len(files) == 1 else "contain no text", "name files with text to train on")
    return rows


def _first(path: Path, key: str) -> FirstRow:
    value = f"{key}: {path}"
    try:
        with path.open("rb") as file:
            size, head = os.fstat(file.fileno()).st_size, file.read(HEAD)
            if kind(path) == "jsonl" and b"\n" not in head:
                head += file.readline(LINE)
    except OSError as error:
        raise HpcMpError(value, f"cannot be read ({error.strerror})", "make it readable or name another file") from None
    _check_text(value, head)
    parts = _jsonl(value, head, whole=len(head) == size) if kind(path) == "jsonl" else _text(value, head)
    return FirstRow(path, size, tuple((text[:SHOWN], counts) for text, counts in parts))


def _check_text(value: str, head: bytes) -> None:
    """Raise HpcMpError if the content is not UTF-8 text. A few bad bytes among good ones are replaced and counted later."""
    for mark, rule, remedy in MAGIC:
        if head.startswith(mark):
            raise HpcMpError(value, rule, remedy)
    if (position := head.find(b"\0")) >= 0:
        raise HpcMpError(value, f"is binary or not UTF-8 (it holds NUL bytes, the first after {position} bytes)",
                         f"{TEXT_ONLY}, convert it (iconv -f UTF-16 -t UTF-8), or remove them (tr -d '\\000')")
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)  # a character cut by the end of the head is not an error
    except UnicodeDecodeError as error:
        lost = head.decode("utf-8", "ignore")
        if sum(byte > 0x7F for byte in head) > 2 * sum(len(letter.encode()) for letter in lost if not letter.isascii()):
            raise HpcMpError(value, f"is not UTF-8 (byte 0x{head[error.start]:02x} at {error.start})",
                             "convert it, for example: iconv -f ISO-8859-1 -t UTF-8 OLD > NEW") from None


def _jsonl(value: str, head: bytes, *, whole: bool) -> Iterable[tuple[str, bool]]:
    """Return the first row with text that counts in the loss. All rows in the head are checked, except one cut by its end."""
    lines = head.removeprefix(codecs.BOM_UTF8).splitlines(keepends=True)
    parts: list[list[tuple[str, bool]]] = []
    for number, line in enumerate(lines if whole or head.endswith(b"\n") else lines[:-1], start=1):
        if line.isspace():
            continue
        if not parts and line.lstrip().startswith(b"["):
            raise HpcMpError(value, "holds a JSON array, but a .jsonl file has one row per line", TAKE_APART)
        try:
            parts.append(row_parts(line))
        except UnusableRow as error:
            raise bad_row(value, number, error) from None
    return next((row for row in parts if any(text.strip() for text, counts in row if counts)), ())


def bad_row(value: str, number: int, error: UnusableRow) -> HpcMpError:
    """Return the error for a line of a file."""
    remedy = error.remedy if SHAPES in error.remedy else f"{error.remedy}; rows are {SHAPES}"
    return HpcMpError(f"{value}, line {number}", f"is not a row ({error})", remedy)


def _text(value: str, head: bytes) -> Iterable[tuple[str, bool]]:
    """Return the beginning of a text. Refuse JSON rows in a file with another suffix."""
    text = head.decode("utf-8", "ignore").removeprefix("\ufeff")
    start = text.lstrip()
    row = _object(start.removeprefix("[").lstrip())
    if row is not None and known_keys(row):
        array = start.startswith("[")
        raise HpcMpError(value, f"holds {'a JSON array of' if array else 'JSON'} rows, but its name means raw text",
                         f"{TAKE_APART if array else 'rename it to .jsonl, with one row per line'}; rows are {SHAPES}")
    return ((text, True),) if start else ()


def _object(text: str) -> dict[str, object] | None:
    """Return the JSON object at the beginning of a text; None for other text."""
    try:
        value, _ = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
