"""The files that a job trains on. Their content is not read here, but in `first_rows`."""

import glob
import os
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job.rows import SHAPES

Kind = Literal["text", "jsonl"]

KINDS: dict[str, Kind] = {".jsonl": "jsonl", ".ndjson": "jsonl"}  # all other suffixes that are not refused are text

# suffix: (the rule it breaks, the remedy)
REFUSED: dict[str, tuple[str, str]] = {
    ".parquet": ("parquet is not supported yet", 'write its rows as JSON lines, {"text": …} each, into a .jsonl file'),
    ".json": ("a .json file is neither raw text nor one row per line",
              f"write one row per line into a .jsonl file, {SHAPES}; jq -c '.[]' OLD.json > NEW.jsonl splits an array"),
    **dict.fromkeys((".csv", ".tsv", ".xls", ".xlsx", ".ods"),
                    ("a table is neither raw text nor JSON lines",
                     f"write one row per line into a .jsonl file, {SHAPES}; to train on a CSV's raw text, rename it to .txt")),
    **dict.fromkeys((".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip", ".7z", ".tar", ".tgz"),
                    ("compressed files and archives are not read", "unpack it and name the text files inside")),
    **dict.fromkeys((".arrow", ".bin", ".npy", ".npz", ".pkl", ".pt", ".pth", ".safetensors", ".h5", ".sqlite", ".pyc",
                     ".so", ".o", ".a", ".pdf", ".doc", ".docx", ".png", ".jpg", ".jpeg", ".gif", ".mp3", ".mp4",
                     ".feather", ".orc", ".avro", ".tfrecord", ".idx", ".db"),
                    ("a binary file is not text", "name text or .jsonl files only, with a narrower pattern")),
}


def kind(path: Path) -> Kind:
    """Return the format of a file: ``jsonl`` (one JSON object per line) by its suffix, else ``text``."""
    return KINDS.get(path.suffix.lower(), "text")


def find_files(patterns: Sequence[str], key: str = "data.files") -> tuple[Path, ...]:
    """Return the files that absolute ``patterns`` match, sorted by path, each file once.

    A pattern is a path or a glob (``*``, ``?``, ``[…]``, ``**`` for any depth). Leading parts that exist exactly as
    written are taken literally, so a directory called ``runs [old]`` is not a pattern. Directories that a glob matches
    are skipped.

    Args:
        key: the key of the job file that has the patterns.

    Raises:
        HpcMpError: a pattern matches no file, or names a directory, an unreadable file or an unsupported kind.
    """
    files: dict[tuple[int, int], Path] = {}
    for name in sorted({name for pattern in patterns for name in _matches(pattern, key)}):
        files.setdefault(_identity(name, key), Path(name))
    return tuple(files.values())


def find_program(command: Sequence[str]) -> None:
    """Check that the first word of ``notify.command`` is a program that can be started here. Raises HpcMpError."""
    if command and shutil.which(command[0]) is None:
        raise HpcMpError(f"notify.command = [{command[0]!r}, …]", "is not a program that can be started here",
                         "name one on PATH, or the path of an executable file that all nodes see")


def _matches(pattern: str, key: str) -> list[str]:
    root = next(path for path in (Path(pattern), *Path(pattern).parents) if os.path.lexists(path))
    if root == Path(pattern):
        return [str(root)]
    relative = str(Path(pattern).relative_to(root))
    names = (os.path.join(root, name) for name in glob.iglob(relative, root_dir=root, recursive=True))
    files = [name for name in names if not os.path.isdir(name)]
    if not files:
        raise HpcMpError(f"{key}: {pattern}", f"matches no file (looked in {root})",
                         "check the path; ** matches any depth: corpus/**/*.txt")
    return files


def _identity(name: str, key: str) -> tuple[int, int]:
    """Return the device and inode of a file, which must be readable and of a supported kind."""
    value, suffix = f"{key}: {name}", os.path.splitext(name)[1].lower()
    try:
        status = os.stat(name)
    except OSError as error:
        raise HpcMpError(value, f"cannot be read ({error.strerror})", "fix the link or name another file") from None
    if stat.S_ISDIR(status.st_mode):
        raise HpcMpError(value, "is a directory", f"name the files in it, for example {name}/*.txt")
    if not stat.S_ISREG(status.st_mode):
        raise HpcMpError(value, "is not a regular file", "write its text into a regular file and name that file")
    if suffix in REFUSED:
        raise HpcMpError(value, *REFUSED[suffix])
    if not os.access(name, os.R_OK):
        raise HpcMpError(value, "cannot be read (permission denied)", "make it readable or name another file")
    return status.st_dev, status.st_ino
