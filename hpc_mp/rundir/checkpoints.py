"""Checkpoint manifests: the complete checkpoint directories, and the problems of the others.

A checkpoint is written as ``checkpoints/.step-00000010.TOKEN``. ``complete.json`` then lists every JSON file with its size and
SHA-256; the indexes among them list the tensor files and their hashes. Last, the directory is renamed to
``checkpoints/step-00000010``. A directory without that marker, or one that disagrees with it, is never loaded.
"""

import hashlib
import json
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_mp.base.files import render_json, write_json
from hpc_mp.rundir.checkpoint_index import changed, problem_of, read_indexes
from hpc_mp.rundir.layout import MARKER, STEP


@dataclass(frozen=True, slots=True)
class Manifest:
    """The files of a complete checkpoint other than tensors: file name -> (bytes, SHA-256)."""

    step: int
    files: Mapping[str, tuple[int, str]]


def checkpoint_name(step: int) -> str:
    return f"{STEP}{step:08d}"


def step_of(checkpoint: Path) -> int:
    """Return the step of a published checkpoint directory."""
    return int(checkpoint.name.removeprefix(STEP))


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the completion marker (durably). Raises OSError."""
    write_json(directory / MARKER, _document(manifest))


def read_manifest(directory: Path) -> Manifest:
    """Read the marker. Raises OSError, ValueError, KeyError, TypeError or AttributeError if no sound marker exists."""
    text = (directory / MARKER).read_text(encoding="utf-8")
    document = json.loads(text)
    manifest = Manifest(document["step"], {n: (f["bytes"], f["sha256"]) for n, f in document["files"].items()})
    if text != render_json(_document(manifest)):
        raise ValueError("its content changed")
    return manifest


def problem(directory: Path, hashes: bool = True) -> str | None:
    """Return the reason for which a checkpoint must not be loaded, with the file; None if it is complete and sound. ``hashes``:
    True to read and verify all tensors; False checks only the sizes of their files."""
    try:
        manifest = read_manifest(directory)
    except FileNotFoundError:
        return f"{MARKER} is missing (the save was not finished)"
    except OSError as error:
        return f"{MARKER} cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MARKER} is damaged (it is not what the save wrote)"
    for name, (size, digest) in manifest.files.items():
        path = directory / name
        try:
            length = path.stat().st_size
            if length != size:
                return f"{name} has {length} bytes, but {size} were saved"
            if sha256(path) != digest:
                return changed(name)
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return _problem_of_shards(directory, hashes)


def _problem_of_shards(directory: Path, hashes: bool) -> str | None:
    """Check the tensor files, which the indexes list with their hashes."""
    files = read_indexes(directory).files
    for name, file in files.items():
        try:
            if reason := problem_of(directory / name, file, hashes):
                return reason
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    strangers = sorted(path.name for path in directory.glob("*.safetensors") if path.name not in files)
    return f"{strangers[0]} does not belong to it" if strangers else None


def _document(manifest: Manifest) -> dict[str, Any]:
    """Return the marker. Its last entry is the SHA-256 of the others; it distinguishes a changed marker from changed files."""
    files = {name: {"bytes": size, "sha256": digest} for name, (size, digest) in sorted(manifest.files.items())}
    document = {"format": 2, "step": manifest.step, "files": files}
    return document | {"sha256": hashlib.sha256(render_json(document).encode()).hexdigest()}


def complete_steps(checkpoints: Path) -> list[Path]:
    """Return published checkpoint directories, oldest first (unverified). A program's own ``step-10`` is not one."""
    named = checkpoints.glob(STEP + "[0-9]" * len(checkpoint_name(0).removeprefix(STEP)))
    return sorted((path for path in named if path.is_dir()), key=lambda path: path.name)


def newest_complete(checkpoints: Path, hashes: bool = True,
                    but: Collection[Path] = ()) -> tuple[Path | None, list[tuple[Path, str]]]:
    """Return the newest sound checkpoint, and the newer skipped ones with the reason. ``hashes``: as in ``problem``. ``but``:
    checkpoints known to be damaged."""
    skipped: list[tuple[Path, str]] = []
    for path in (path for path in reversed(complete_steps(checkpoints)) if path not in but):
        reason = problem(path, hashes)
        if reason is None:
            return path, skipped
        skipped.append((path, reason))
    return None, skipped


def put_aside(path: Path) -> None:
    """Remove a damaged checkpoint from the series: it must count neither as the newest nor as a kept one."""
    aside = path.with_name(f"damaged-{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)
