"""Files to rows: JSON, parquet and Arrow, as streams. No file has to fit into memory.

pyarrow and the reader of zstd are imported only for files that need them.
"""

import csv
import gzip
import io
import json
import sys
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.extras import ZSTD
from hpc_mp.job.chats import UnusableRow
from hpc_mp.job.inputs import Kind, compression, kind
from hpc_mp.job.rows import COLUMNS

BLOCK = 1 << 16  # bytes that are read at once
TABLE_ROWS = 64  # rows of a table that are Python objects at once
LARGEST_WINDOW = 31  # of zstd --long=31, with which large corpora are compressed; a power of two
LARGEST_ROW = 1 << 30  # characters of one row in a .json file; more is taken for a missing bracket

Row = tuple[int, bytes | Mapping[str, Any], int]  # its number in the file, the row, bytes of the file consumed with it


def open_unpacked(path: Path) -> tuple[BinaryIO, BinaryIO]:
    """Open a file. Return its unpacked content, and the file itself, whose position tells how much was read. Raises OSError."""
    raw = path.open("rb")
    match compression(path):
        case ".gz":
            return io.BufferedReader(gzip.GzipFile(fileobj=raw), BLOCK), raw
        case ".zst":
            zstd = import_module(ZSTD)
            window = {zstd.DecompressionParameter.window_log_max: LARGEST_WINDOW}
            return io.BufferedReader(zstd.ZstdFile(raw, options=window), BLOCK), raw
    return raw, raw


def rows(path: Path, key: str = "data.files", columns: Collection[str] = COLUMNS) -> Iterator[Row]:
    """Yield the rows of a file that is no plain text: a line or object of JSON as bytes, a row of a table as a dict, with these
    ``columns``. Raises HpcMpError if the file is damaged, or pyarrow cannot read it, and OSError if it cannot be read."""
    with damage_named(path, key):
        yield from COLUMNAR[kind(path)](path, columns) if kind(path) in COLUMNAR else ROWS[kind(path)](path)


@contextmanager
def damage_named(path: Path, key: str) -> Iterator[None]:
    """Raise HpcMpError for what the readers of compressed files and tables raise if the content is not what its suffix says."""
    try:
        yield
    except (EOFError, zlib.error, csv.Error, ValueError, OSError, _zstd_error()) as error:  # pyarrow's: ValueErrors, or no errno
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise HpcMpError(f"{key}: {path}", f"is damaged, or not what its name says ({' '.join(str(error).split())})",
                         "fetch or write it again, and compare its size with the original's") from None


def _zstd_error() -> type[Exception]:
    """Return the error of the reader of zstd; EOFError while nothing has imported it."""
    return getattr(sys.modules.get(ZSTD), "ZstdError", EOFError)


def place(path: Path, number: int) -> str:
    """Return the place of a row in words."""
    return f"line {number}" if kind(path) == "jsonl" else f"row {number}"


def bad_row(path: Path, number: int, error: UnusableRow, key: str) -> HpcMpError:
    """Return the error for a row of a file."""
    return HpcMpError(f"{key}: {path}, {place(path, number)}", f"is not a row ({error})", error.remedy)


def _lines(path: Path) -> Iterator[Row]:
    file, raw = open_unpacked(path)
    with raw:
        if raw is file:
            for number, line in enumerate(file, start=1):
                yield number, line, len(line)
        else:
            yield from _measured(((number, line) for number, line in enumerate(file, start=1)), raw.tell, path)


def _objects(path: Path) -> Iterator[Row]:
    """Yield the objects of a .json file: those of one array, or one after another."""
    file, raw = open_unpacked(path)
    with raw, io.TextIOWrapper(file, encoding="utf-8-sig", errors="replace", newline="") as text:
        yield from _measured(enumerate(_values(text), start=1), raw.tell, path)


def _csv(path: Path) -> Iterator[Row]:
    """Yield the rows of a .csv or .tsv file, whose first row names the columns."""
    file, raw = open_unpacked(path)
    with raw, io.TextIOWrapper(file, encoding="utf-8-sig", errors="replace", newline="") as text:
        table = csv.DictReader(text, delimiter="\t" if ".tsv" in path.suffixes else ",")
        yield from _measured(enumerate(table, start=1), raw.tell, path)


def _values(file: io.TextIOBase) -> Iterator[bytes]:
    """Yield each value of an array, or of a file of values. What is no JSON is yielded too, as the last one."""
    decoder, text, ended = json.JSONDecoder(), "", False
    array: bool | None = None
    while True:
        start = len(text) - len(text.lstrip(" \t\r\n,"))
        if array is None and start < len(text):
            array = text[start] == "["
            start += array
            start += len(text[start:]) - len(text[start:].lstrip(" \t\r\n"))
        text = text[start:]
        if array and text.startswith("]"):
            text = text[1:].lstrip()
            array = False
        try:
            _, end = decoder.raw_decode(text)
            if end == len(text) and not ended:
                raise ValueError("a number may go on")
            yield text[:end].encode("utf-8", "surrogatepass")
            text = text[end:]
        except (ValueError, RecursionError):
            if ended or len(text) > LARGEST_ROW:
                if text or array:
                    yield (text or "[").encode("utf-8", "surrogatepass")
                return
            more = file.read(max(BLOCK, len(text)))  # doubled, so that a long row is not decoded over and over
            ended = not more
            text += more


def _parquet(path: Path, read: Collection[str]) -> Iterator[Row]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path, buffer_size=BLOCK, pre_buffer=False) as table:
        names = table.schema_arrow.names
        columns = [name for name in names if name in read]
        total, size = table.metadata.num_rows, path.stat().st_size
        batches = table.iter_batches(TABLE_ROWS, columns=columns or names[:1])
        for number, row in enumerate((row for batch in batches for row in batch.to_pylist()), start=1):
            yield number, _shape(row, names, read), size * number // total - size * (number - 1) // total


def _arrow(path: Path, read: Collection[str]) -> Iterator[Row]:
    """Yield the rows of an Arrow file, or of an Arrow stream as `datasets` writes it."""
    import pyarrow

    with pyarrow.OSFile(str(path)) as file:  # not mapped: its pages would count as this process's memory
        magic = file.read(6)
        file.seek(0)
        if magic == b"ARROW1":
            table = pyarrow.ipc.open_file(file)
            batches = (table.get_batch(number) for number in range(table.num_record_batches))
        else:
            batches = table = pyarrow.ipc.open_stream(file)
        names = table.schema.names
        columns = [name for name in names if name in read] or names[:1]
        parts = (part for batch in batches for part in _parts(batch.select(columns)))
        shaped = (_shape(row, names, read) for part in parts for row in part.to_pylist())
        yield from _measured(enumerate(shaped, start=1), file.tell, path)


def _parts(batch: Any) -> Iterator[Any]:
    """Yield a batch in parts. A file keeps no checksum, so that wrong lengths in it would be read as memory."""
    batch.validate(full=True)
    for first in range(0, batch.num_rows, TABLE_ROWS):
        yield batch.slice(first, TABLE_ROWS)


def _shape(row: Mapping[str, Any], names: list[str], read: Collection[str]) -> Mapping[str, Any]:
    """Return a row of a table without the empty entries by which tables make rows alike. The names of columns that were not read
    stay, for a message."""
    values = _without_nulls(row)
    return values if not values.keys().isdisjoint(read) else dict.fromkeys(names)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _measured(numbered: Iterator[tuple[int, Any]], position: Callable[[], int], path: Path) -> Iterator[Row]:
    """Yield rows with the bytes of the file that were read. Files are read in blocks, so that a row's own bytes are unknown: the
    bytes so far are counted with the last row before another block is read, the rest with the last row of all."""
    done, held = 0, next(numbered, None)
    while held is not None:
        read = position()
        following = next(numbered, None)
        now = path.stat().st_size if following is None else read if position() > read else done
        yield held[0], held[1], now - done
        done, held = now, following


ROWS: dict[Kind, Callable[[Path], Iterator[Row]]] = {"jsonl": _lines, "json": _objects, "csv": _csv}
COLUMNAR: dict[Kind, Callable[[Path, Collection[str]], Iterator[Row]]] = {"parquet": _parquet, "arrow": _arrow}
