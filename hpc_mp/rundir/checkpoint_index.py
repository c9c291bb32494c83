"""The location of every tensor of a checkpoint, and the hashes with which a reader of a part of a file verifies that part.

A checkpoint's tensors are in safetensors files, one for each rank that wrote some, as rectangles of whole tensors. The ranks of
a stage list their tensors in one ``index-00000.json``. A reader opens only the files that it needs, not the headers of
thousands. Files are hashed in blocks while they are written. A reader hashes only the blocks that it reads.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

BLOCK = 16 << 20  # bytes of a file that are hashed together: a terabyte has 60,000 hashes
INDEX = "index-{stage:05d}.json"
INDEXES = "index-*.json"


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A rectangle of a tensor: its file, its first byte, and its position in the whole tensor."""

    file: str
    begin: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A whole tensor: its format as safetensors names it, its shape, and its parts."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[StoredPart, ...]


@dataclass(frozen=True, slots=True)
class HashedFile:
    """The size of a file and the SHA-256 of each of its blocks, in hexadecimal."""

    bytes: int
    blocks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CheckpointIndex:
    """The files and tensors that some ranks have written."""

    files: Mapping[str, HashedFile]
    tensors: Mapping[str, StoredTensor]


def merged(indexes: Iterable[CheckpointIndex]) -> CheckpointIndex:
    """Combine indexes; parts of the same tensor are joined."""
    files: dict[str, HashedFile] = {}
    tensors: dict[str, StoredTensor] = {}
    parts: defaultdict[str, list[StoredPart]] = defaultdict(list)
    for index in indexes:
        files.update(index.files)
        tensors.update(index.tensors)
        for name, tensor in index.tensors.items():
            parts[name] += tensor.parts
    return CheckpointIndex(files, {name: replace(tensor, parts=tuple(parts[name])) for name, tensor in tensors.items()})


def read_indexes(checkpoint: Path) -> CheckpointIndex:
    """Read the index of all stages. Raises OSError, ValueError, KeyError or TypeError if one cannot be read."""
    return merged(index_of(json.loads(path.read_text(encoding="utf-8"))) for path in sorted(checkpoint.glob(INDEXES)))


def document_of(index: CheckpointIndex) -> dict[str, Any]:
    """Return the JSON form that ``index_of`` reads. A part is ``[file, begin, offsets, sizes]``. The form is ``{"files": {NAME:
    [bytes, [hash, …]]}, "tensors": {NAME: [dtype, shape, [part, …]]}}``."""
    return {"files": {name: [file.bytes, file.blocks] for name, file in index.files.items()},
            "tensors": {name: [tensor.dtype, tensor.shape, [[p.file, p.begin, p.offsets, p.sizes] for p in tensor.parts]]
                        for name, tensor in index.tensors.items()}}


def index_of(document: Mapping[str, Any]) -> CheckpointIndex:
    return CheckpointIndex(
        {name: HashedFile(size, tuple(blocks)) for name, (size, blocks) in document["files"].items()},
        {name: StoredTensor(dtype, tuple(shape), tuple(StoredPart(file, begin, tuple(offsets), tuple(sizes))
                                                       for file, begin, offsets, sizes in parts))
         for name, (dtype, shape, parts) in document["tensors"].items()})


def block_hash(content: bytes | memoryview) -> str:
    return hashlib.sha256(content).hexdigest()


def problem_of(path: Path, file: HashedFile, hashes: bool) -> str | None:
    """Return a file's problem, found by its size or, with ``hashes``, by all its blocks; None if it is sound. Raises OSError."""
    size = path.stat().st_size
    if size != file.bytes:
        return f"{path.name} has {size} bytes, but {file.bytes} were saved"
    if hashes and any(block_hash(block) != digest for block, digest in zip(_blocks(path), file.blocks, strict=True)):
        return changed(path.name)
    return None


def changed(name: str) -> str:
    return f"{name} does not have its saved SHA-256 (the content changed)"


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            yield block
