"""The check of all rows of a job before the first one is tokenized: those that cannot be used are named together, and at once."""

from collections.abc import Callable, Sequence
from pathlib import Path

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job.chats import UnusableRow
from hpc_mp.job.inputs import kind
from hpc_mp.job.row_files import bad_row, rows
from hpc_mp.job.rows import row_content
from hpc_mp.train.data.documents import DocumentReading, unreadable, written

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
            for number, row, _ in rows(path, files_key):
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
