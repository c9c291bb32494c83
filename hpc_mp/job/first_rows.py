"""The beginning of every file that a job trains on, read at launch to check its format and to show its first row.

A node reads the whole text, perhaps hours later. Content that it would refuse or misinterpret is already visible in the first
bytes of a file.
"""

import codecs
import json
import tomllib
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.extras import ZSTD, installed
from hpc_mp.job.chats import Chat, UnusableRow
from hpc_mp.job.inputs import TABLES, compression, kind
from hpc_mp.job.row_files import bad_row, damage_named, open_unpacked, rows
from hpc_mp.job.rows import SHAPES, Content, Example, Labelled, RowForm, Texts, columns_of, known_keys, row_content

HEAD = 1 << 16  # bytes that are examined
LINE = 1 << 24  # maximum bytes of a first row; longer ones are left to the nodes
SHOWN = 200  # characters of a text that are kept: a job may have a hundred thousand files
READERS = 16  # files that are opened at once: a parallel file system takes milliseconds for each
FIRST_ROWS = 64  # rows of a table or an array that are examined

TEXT_ONLY = "name text, .jsonl or .parquet files only"
# The first bytes of files that are not text, the kind of these files, and the remedy.
MAGIC = tuple((mark.encode("latin-1"), rule, remedy.format(shapes=SHAPES)) for mark, rule, remedy in tomllib.loads(
    Path(__file__).with_name("first_bytes.toml").read_text(encoding="utf-8"))["kinds"])


@dataclass(frozen=True, slots=True)
class FirstRow:
    """The first training row of a file.

    Attributes:
        size: the size of the file in bytes.
        parts: the beginnings of the texts of the first row, each with True if it counts in the loss; for a text file, its
            beginning. Empty if the examined part has only white space and rows without text, or cannot be read here.
        chat: True if it is a chat, which a template writes as text.
        plain: True if its bytes are those of its text; False for compressed files and tables.
    """

    path: Path
    size: int
    parts: Texts
    plain: bool = True
    chat: bool = False


def first_rows(files: Sequence[Path], key: str = "data.files", form: RowForm = "auto") -> tuple[FirstRow, ...]:
    """Return the first row of every file, in order. ``key``: the key of the job file that names the files. ``form``:
    ``data.form``. Raises HpcMpError if a file does not match its suffix, is not UTF-8, or begins with a row that cannot be
    trained on; or no file contains any text."""
    with ThreadPoolExecutor(READERS) as pool:
        first = tuple(pool.map(lambda path: _first(path, key, form), files))
    if files and not any(row.parts for row in first) and all(row.size <= HEAD and row.plain for row in first):
        raise HpcMpError(f"{key}: {files[0]}" + (f" and {len(files) - 1} more" if files[1:] else ""),
                         "contains no text" if len(files) == 1 else "contain no text", "name files with text to train on")
    return first


def _first(path: Path, key: str, form: RowForm) -> FirstRow:
    value = f"{key}: {path}"
    if isinstance(form, Labelled) and kind(path) == "text":
        raise HpcMpError(value, "is plain text, which has no class", "name files of rows: .jsonl, .json, .csv, .tsv, .parquet or "
                         ".arrow")
    try:
        size = path.stat().st_size
        if kind(path) in TABLES:
            with path.open("rb") as file:
                _check_magic(value, file.read(64), own=(b"PAR1", b"ARROW1"))
            return _first_row(path, size, _row(path, key, form))
        head, whole = _head(path, key)
    except OSError as error:
        raise HpcMpError(value, f"cannot be read ({error.strerror})", "make it readable or name another file") from None
    if head is None:  # nothing here unpacks it
        return _first_row(path, size, ())
    _check_text(value, head)
    match kind(path):
        case "jsonl":
            content = _jsonl(path, head, key, form, whole=whole)
        case "json" | "csv":
            content = _row(path, key, form)
        case _:
            content = _text(value, head)
    return _first_row(path, size, content)


def _first_row(path: Path, size: int, content: Content) -> FirstRow:
    parts = tuple((text[:SHOWN], counts) for text, counts in _texts(content))
    plain = kind(path) not in TABLES and compression(path) is None
    return FirstRow(path, size, parts, plain, isinstance(content, Chat))


def _head(path: Path, key: str) -> tuple[bytes | None, bool]:
    """Return the beginning of a file's unpacked content, and True if that is all. None: no library here unpacks it."""
    if compression(path) == ".zst" and not installed(ZSTD):
        return None, False
    file, raw = open_unpacked(path)
    with raw, damage_named(path, key):
        head = file.read(HEAD)
        if kind(path) == "jsonl" and b"\n" not in head:
            head += file.readline(LINE)
        return head, not file.read(1)


def _row(path: Path, key: str, form: RowForm) -> Content:
    """Return the first row with text of a table, or of a .json file, among its first ones. Nothing, if pyarrow is missing."""
    if kind(path) in TABLES and not installed("pyarrow"):
        return ()
    for number, row, _ in islice(rows(path, key, columns_of(form)), FIRST_ROWS):
        try:
            content = row_content(row, form)
        except UnusableRow as error:
            raise bad_row(path, number, error, key) from None
        if _has_text(content):
            return content
    return ()


def _texts(content: Content) -> Texts:
    """Return the texts of a row; of a chat its messages before the last answer that counts, and this answer."""
    if isinstance(content, Example):
        return ((f"{' / '.join(content.texts)} → class {content.label}", True),)
    if not isinstance(content, Chat):
        return content
    last = max(place for place, counts in enumerate(content.counts) if counts)
    before = " ".join(f"{message['role']}: {_said(message)}" for message in content.messages[:last])
    return (*(((before, False),) if before else ()), (_said(content.messages[last]), True))


def _said(message: Mapping[str, Any]) -> str:
    content = message.get("content") or message.get("tool_calls") or ""
    if isinstance(content, list):
        return "".join(part.get("text") or json.dumps(part, ensure_ascii=False, default=str) for part in content)
    return str(content)


def _has_text(content: Content) -> bool:
    return any(text.strip() for text, counts in _texts(content) if counts)


def _check_magic(value: str, head: bytes, own: Collection[bytes] = ()) -> None:
    """Raise HpcMpError if a file begins as one of another kind."""
    for mark, rule, remedy in MAGIC:
        if head.startswith(mark) and mark not in own:
            raise HpcMpError(value, rule, remedy)


def _check_text(value: str, head: bytes) -> None:
    """Raise HpcMpError if the content is not UTF-8 text. A few bad bytes among good ones are replaced and counted later."""
    _check_magic(value, head)
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


def _jsonl(path: Path, head: bytes, key: str, form: RowForm, *, whole: bool) -> Content:
    """Return the first row with text that counts in the loss. All rows in the head are checked, except one cut by its end."""
    lines = head.removeprefix(codecs.BOM_UTF8).splitlines(keepends=True)
    contents: list[Content] = []
    for number, line in enumerate(lines if whole or head.endswith(b"\n") else lines[:-1], start=1):
        if line.isspace():
            continue
        if not contents and line.lstrip().startswith(b"["):
            raise HpcMpError(f"{key}: {path}", "holds a JSON array, but a .jsonl file has one row per line", "rename it to .json")
        try:
            contents.append(row_content(line, form))
        except UnusableRow as error:
            raise bad_row(path, number, error, key) from None
    return next(filter(_has_text, contents), ())


def _text(value: str, head: bytes) -> Texts:
    """Return the beginning of a text. Refuse JSON rows in a file with another suffix."""
    text = head.decode("utf-8", "ignore").removeprefix("\ufeff")
    start = text.lstrip()
    row = _object(start.removeprefix("[").lstrip())
    if row is not None and known_keys(row):
        array = start.startswith("[")
        raise HpcMpError(value, f"holds {'a JSON array of' if array else 'JSON'} rows, but its name means raw text",
                         f"rename it to .json{'' if array else 'l, with one row per line'}; rows are {SHAPES}")
    return ((text, True),) if start else ()


def _object(text: str) -> dict[str, object] | None:
    """Return the JSON object at the beginning of a text; None for other text."""
    try:
        value, _ = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
