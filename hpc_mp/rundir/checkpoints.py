"""Checkpoint manifests: which checkpoint directories are complete, and what is wrong with the others.

A checkpoint is written as ``checkpoints/.step-00000010.TOKEN`` and renamed to ``checkpoints/step-00000010`` after
``complete.json`` lists every JSON file with its size and SHA-256, the indexes among them, which list the files with tensors
and their hashes. A directory without that marker, or one that disagrees with it, is never loaded.
"""

from __future__ import annotations

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
    """What a complete checkpoint holds beside tensors: file name -> (bytes, SHA-256)."""

    step: int
    files: Mapping[str, tuple[int, str]]


def checkpoint_name(step: int) -> str:
    return f"{STEP}{step:08d}"


def step_of(checkpoint: Path) -> int:
    """The step of a published checkpoint directory."""
    return int(checkpoint.name.removeprefix(STEP))


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the completion marker (durably). Raises OSError."""
    write_json(directory / MARKER, _document(manifest))


def read_manifest(directory: Path) -> Manifest:
    """Raises OSError, ValueError, KeyError, TypeError or AttributeError when there is no sound marker."""
    text = (directory / MARKER).read_text(encoding="utf-8")
    document = json.loads(text)
    manifest = Manifest(document["step"], {n: (f["bytes"], f["sha256"]) for n, f in document["files"].items()})
    if text != render_json(_document(manifest)):
        raise ValueError("its content changed")
    return manifest


def problem(directory: Path, hashes: bool = True) -> str | None:
    """Why a checkpoint must not be loaded, naming the file; None when it is complete and unharmed.

    Args:
        hashes: whether to read all tensors for it; without, only their files' sizes are looked at.
    """
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
            found = path.stat().st_size
            if found != size:
                return f"{name} has {found} bytes, {size} were saved"
            if sha256(path) != digest:
                return changed(name)
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return _problem_of_shards(directory, hashes)


def _problem_of_shards(directory: Path, hashes: bool) -> str | None:
    """Of the files with tensors, which the indexes list with their hashes."""
    files = read_indexes(directory).files
    for name, file in files.items():
        try:
            if reason := problem_of(directory / name, file, hashes):
                return reason
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    strangers = sorted(path.name for path in directory.glob("*.safetensors") if path.name not in files)
    return f"{strangers[0]} was not saved with it" if strangers else None


def _document(manifest: Manifest) -> dict[str, Any]:
    """The marker; its last entry is the SHA-256 of the others, so that a changed marker is told from changed files."""
    files = {name: {"bytes": size, "sha256": digest} for name, (size, digest) in sorted(manifest.files.items())}
    document = {"format": 2, "step": manifest.step, "files": files}
    return document | {"sha256": hashlib.sha256(render_json(document).encode()).hexdigest()}


def complete_steps(checkpoints: Path) -> list[Path]:
    """Published checkpoint directories, oldest first (unverified); a program's own ``step-10`` is none."""
    named = checkpoints.glob(STEP + "[0-9]" * len(checkpoint_name(0).removeprefix(STEP)))
    return sorted((path for path in named if path.is_dir()), key=lambda path: path.name)


def newest_complete(
    checkpoints: Path, hashes: bool = True, but: Collection[Path] = (),
) -> tuple[Path | None, list[tuple[Path, str]]]:
    """The newest checkpoint that verifies, and the newer ones that were skipped with the reason.

    Args:
        hashes: as in ``problem``.
        but: known not to be sound.
    """
    skipped: list[tuple[Path, str]] = []
    for path in (path for path in reversed(complete_steps(checkpoints)) if path not in but):
        reason = problem(path, hashes)
        if reason is None:
            return path, skipped
        skipped.append((path, reason))
    return None, skipped


def put_aside(path: Path) -> None:
    """Take a damaged checkpoint out of the series: it must not count as the newest, nor as one of those kept."""
    aside = path.with_name(f"damaged-{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)
