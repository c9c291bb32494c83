"""The files that a job trains on. Their content is not read here, but in `first_rows`."""

import glob
import json
import os
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job.rows import SHAPES

Kind = Literal["text", "jsonl", "json", "csv", "parquet", "arrow"]

# Suffixes of files that hold rows; all other suffixes that are not refused are text.
KINDS: dict[str, Kind] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".parquet": "parquet", ".arrow": "arrow",
                          ".feather": "arrow", ".csv": "csv", ".tsv": "csv"}
TABLES: frozenset[Kind] = frozenset({"parquet", "arrow"})  # what pyarrow reads
COMPRESSED = (".gz", ".zst")  # behind the suffix of a text or of JSON

# suffix: (the rule it breaks, the remedy)
REFUSED: dict[str, tuple[str, str]] = {
    **dict.fromkeys((".xls", ".xlsx", ".ods"),
                    ("a table of this kind is neither raw text nor rows of JSON, CSV or parquet",
                     f"save it as .csv, or write one row per line into a .jsonl file, {SHAPES}")),
    **dict.fromkeys((".bz2", ".xz", ".lz4", ".zip", ".7z", ".tar", ".tgz"),
                    ("archives are not read, nor other compression than .gz and .zst",
                     "unpack it and name the files inside, or compress it by gzip or zstd")),
    **dict.fromkeys((".bin", ".npy", ".npz", ".pkl", ".pt", ".pth", ".safetensors", ".h5", ".sqlite", ".pyc",
                     ".so", ".o", ".a", ".pdf", ".doc", ".docx", ".png", ".jpg", ".jpeg", ".gif", ".mp3", ".mp4",
                     ".orc", ".avro", ".tfrecord", ".idx", ".db"),
                    ("a binary file is not text", "name text, .jsonl or .parquet files only, with a narrower pattern")),
}


def kind(path: Path) -> Kind:
    """Return the format of a file by its suffix, without that of its compression."""
    return KINDS.get(_suffix(path), "text")


def compression(path: Path) -> str | None:
    """Return ``.gz`` or ``.zst``; None for a file that is not compressed."""
    suffix = path.suffix.lower()
    return suffix if suffix in COMPRESSED else None


def _suffix(path: Path) -> str:
    return (path.with_suffix("") if compression(path) else path).suffix.lower()


def find_groups(patterns: Sequence[str], weights: Sequence[float]) -> tuple[tuple[Path, ...], ...]:
    """Return the files of each pattern, for patterns with weights; else all files as one group. Raises HpcMpError as
    ``find_files``, or if two patterns with weights match the same file."""
    if not weights:
        return (find_files(patterns),)
    groups = tuple(find_files([pattern]) for pattern in patterns)
    owners: dict[tuple[int, int], str] = {}
    for pattern, group in zip(patterns, groups, strict=True):
        for path in group:
            if (other := owners.setdefault(_identity(str(path), "data.files"), pattern)) != pattern:
                raise HpcMpError(f"data.files: {path}", f"has two weights: {other} and {pattern} both match it",
                                 "write patterns that share no file")
    return groups


def find_files(patterns: Sequence[str], key: str = "data.files") -> tuple[Path, ...]:
    """Return the files that absolute ``patterns`` match, sorted by path, each file once.

    A pattern is a path or a glob (``*``, ``?``, ``[…]``, ``**`` for any depth). Leading parts that exist exactly as
    written are taken literally, so a directory called ``runs [old]`` is not a pattern. Directories that a glob matches
    are skipped.

    A directory that ``datasets`` saved (``save_to_disk``) stands for its Arrow files, in its own order. ``key``: the key of the
    job file that has the patterns. Raises HpcMpError if a pattern matches no file, or names a directory, an unreadable file or an
    unsupported kind.
    """
    files: dict[tuple[int, int], Path] = {}
    for name in sorted({name for pattern in patterns for name in _matches(pattern, key)}):
        for file in _saved_files(Path(name), key) or (name,):
            files.setdefault(_identity(file, key), Path(file))
    return tuple(files.values())


def _saved_files(directory: Path, key: str) -> tuple[str, ...]:
    """Return the files of a directory that ``datasets`` saved; empty for anything else. Raises HpcMpError."""
    try:
        if (directory / "dataset_dict.json").exists():
            splits = json.loads((directory / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
            raise HpcMpError(f"{key}: {directory}", f"holds {len(splits)} splits of a data set: {', '.join(splits)}",
                             f"name one, for example {directory / splits[0]}")
        if not (directory / "state.json").exists():
            return ()
        state = json.loads((directory / "state.json").read_text(encoding="utf-8"))
        return tuple(str(directory / file["filename"]) for file in state["_data_files"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise HpcMpError(f"{key}: {directory}", f"is no whole data set ({type(error).__name__}: {error})",
                         "save it again with save_to_disk, or name its .arrow or .parquet files") from None


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
    value, suffix = f"{key}: {name}", _suffix(Path(name))
    try:
        status = os.stat(name)
    except OSError as error:
        raise HpcMpError(value, f"cannot be read ({error.strerror})", "fix the link or name another file") from None
    if stat.S_ISDIR(status.st_mode):
        raise HpcMpError(value, "is a directory, and no data set that `datasets` saved",
                         f"name the files in it, for example {name}/*.txt")
    if not stat.S_ISREG(status.st_mode):
        raise HpcMpError(value, "is not a regular file", "write its text into a regular file and name that file")
    if suffix in REFUSED:
        raise HpcMpError(value, *REFUSED[suffix])
    if kind(Path(name)) in TABLES and compression(Path(name)):
        raise HpcMpError(value, f"is a compressed {suffix} file, which must be read in any order",
                         "unpack it: parquet and Arrow are compressed inside")
    if not os.access(name, os.R_OK):
        raise HpcMpError(value, "cannot be read (permission denied)", "make it readable or name another file")
    return status.st_dev, status.st_ino
