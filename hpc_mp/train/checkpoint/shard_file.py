"""One rank's file of a checkpoint: written tensor by tensor and hashed on the way, read and checked block by block.

The format is safetensors (github.com/huggingface/safetensors): eight bytes with the length of a JSON header, the header, then the
bytes of the tensors one after another. A tensor is a rectangle of a whole tensor, and its name states the rectangle:
``NAME[0:5, 0:32]``. A rank may have several rectangles of a weight, because its part of a unit may begin and end within a row.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from hpc_mp.layout.flat import Box, pieces, stretches
from hpc_mp.rundir import checkpoint_index

FORMATS: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I64": torch.int64,
}
NAMES = {dtype: name for name, dtype in FORMATS.items()}
ALIGNED = 8  # bytes: the header is padded with blanks to a multiple
PIECE = 1 << 20  # bytes of a part copied at once: values on a disk or a GPU need not be in memory as a whole


class Damaged(Exception):
    """A file is not what was saved."""


@dataclass(frozen=True, slots=True)
class LocalPart:
    """A part of a whole tensor that this rank holds: the tensor's name and shape, and the part's place in it. ``release``: called
    with the parts of ``values`` that have been written or filled."""

    name: str
    shape: tuple[int, ...]
    box: Box
    values: Tensor
    release: Callable[[Tensor], None] = lambda values: None

    def pieces(self) -> Iterator[Tensor]:
        """Yield the values in order, in pieces of at most ``PIECE`` bytes; each is released before the next one."""
        for box in pieces(tuple(self.values.shape), PIECE // self.values.element_size()):
            yield self.values[box]
            self.release(self.values[box])


def write_shard(path: Path, parts: Sequence[LocalPart]) -> checkpoint_index.CheckpointIndex:
    """Write the parts to one file and make it durable. Raises OSError. Return the file and its tensors. No file is written if
    there are no parts."""
    parts = [part for part in parts if part.values.numel()]
    if not parts:
        return checkpoint_index.CheckpointIndex({}, {})
    header = _header(parts)
    tensors: dict[str, checkpoint_index.StoredTensor] = {}
    with path.open("wb", buffering=0) as file:
        hashed = _HashedWriter(file.fileno())
        hashed.write(header)
        for part in parts:
            before = tensors[part.name].parts if part.name in tensors else ()
            rectangle = checkpoint_index.StoredPart(path.name, hashed.size, *_rectangle(part.box))
            tensors[part.name] = checkpoint_index.StoredTensor(NAMES[part.values.dtype], part.shape, (*before, rectangle))
            for piece in part.pieces():
                hashed.write(_bytes(piece))
        os.fsync(file.fileno())
    return checkpoint_index.CheckpointIndex({path.name: hashed.end()}, tensors)


def shard_bytes(parts: Iterable[LocalPart]) -> int:
    """Return the size of the file that ``write_shard`` makes of these parts; 0 if it makes none."""
    parts = [part for part in parts if part.values.numel()]
    return len(_header(parts)) + sum(part.values.nbytes for part in parts) if parts else 0


class ShardReader:
    """A reader of tensor rectangles from a checkpoint's files. Each block is hashed when it is first read. ``directory``: the
    checkpoint. ``index``: the index of the tensors that will be read."""

    def __init__(self, directory: Path, index: checkpoint_index.CheckpointIndex) -> None:
        self.directory, self._index = directory, index
        self._file, self._number, self._block = "", -1, b""  # the last block read

    def read(self, parts: Iterable[LocalPart]) -> None:
        """Fill rectangles of tensors, cast to their dtypes. Parts are read in file order, so that no block is read twice. Raises
        Damaged if a block is not what was saved, or the parts do not cover a rectangle, and OSError if a file cannot be read."""
        targets = [part for part in parts if part.values.numel()]
        sources = [(stored.file, stored.begin, number, stored) for number, part in enumerate(targets)
                 for stored in self._index.tensors[part.name].parts if _common(part.box, stored) is not None]
        filled = [0] * len(targets)
        for _, _, number, stored in sorted(sources, key=lambda source: source[:3]):
            part = targets[number]
            filled[number] += self._read_part(self._index.tensors[part.name].dtype, stored, part)
        for part, elements in zip(targets, filled, strict=True):
            if elements != part.values.numel():
                raise Damaged(f"{part.name} is not there as a whole: {elements} of {part.values.numel()} elements are")

    def _read_part(self, dtype: str, stored: checkpoint_index.StoredPart, part: LocalPart) -> int:
        """Copy the common elements of a stored part into a part, a piece at a time. Return their number."""
        common = _common(part.box, stored)
        if common is None:
            return 0
        size, shape = FORMATS[dtype].itemsize, tuple(side.stop - side.start for side in common)
        for piece in pieces(shape, PIECE // size):
            some = [slice(c.start + side.start, c.start + side.stop) for c, side in zip(common, piece, strict=True)]
            inside = tuple(slice(c.start - offset, c.stop - offset) for c, offset in zip(some, stored.offsets, strict=True))
            into = part.values[tuple(slice(c.start - b.start, c.stop - b.start) for c, b in zip(some, part.box, strict=True))]
            buffer = bytearray(into.numel() * size)
            view, done = memoryview(buffer), 0
            for at, count in stretches(stored.sizes, inside):
                self._copy(stored.file, stored.begin + at * size, view[done:done + count * size])
                done += count * size
            into.copy_(torch.frombuffer(buffer, dtype=FORMATS[dtype]).view(into.shape))
            part.release(into)
        return prod(shape)

    def _copy(self, name: str, begin: int, target: memoryview) -> None:
        """Copy bytes of a file, beginning at ``begin``, from checked blocks."""
        done = 0
        while done < len(target):
            number, offset = divmod(begin + done, checkpoint_index.BLOCK)
            block = self._checked(name, number)
            count = min(len(target) - done, len(block) - offset)
            if count <= 0:
                raise Damaged(f"{name} ends too early")
            target[done:done + count] = block[offset:offset + count]
            done += count

    def _checked(self, name: str, number: int) -> bytes:
        if (name, number) != (self._file, self._number):
            with (self.directory / name).open("rb", buffering=0) as file:
                block = os.pread(file.fileno(), checkpoint_index.BLOCK, number * checkpoint_index.BLOCK)
            hashes = self._index.files[name].blocks
            if number >= len(hashes) or checkpoint_index.block_hash(block) != hashes[number]:
                raise Damaged(checkpoint_index.changed(name))
            self._file, self._number, self._block = name, number, block
        return self._block


class _HashedWriter:
    """A file writer that hashes each block."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._hash, self._blocks = hashlib.sha256(), list[str]()
        self.size = 0

    def write(self, content: bytes | memoryview) -> None:
        left = memoryview(content)
        while left:
            room = checkpoint_index.BLOCK - self.size % checkpoint_index.BLOCK
            written = os.write(self._descriptor, left[:room])
            self._hash.update(left[:written])
            self.size += written
            if self.size % checkpoint_index.BLOCK == 0:
                self._next()
            left = left[written:]

    def end(self) -> checkpoint_index.HashedFile:
        if self.size % checkpoint_index.BLOCK:
            self._next()
        return checkpoint_index.HashedFile(self.size, tuple(self._blocks))

    def _next(self) -> None:
        self._blocks.append(self._hash.hexdigest())
        self._hash = hashlib.sha256()


def _header(parts: Sequence[LocalPart]) -> bytes:
    document: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for part in parts:
        end = begin + part.values.numel() * part.values.element_size()
        document[_key(part)] = {"dtype": NAMES[part.values.dtype], "shape": list(_rectangle(part.box)[1]),
                                "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNED)
    return len(text).to_bytes(8, "little") + text


def _key(part: LocalPart) -> str:
    """Return the part's name in the file, which states its rectangle: ``NAME[0:5, 0:32]``."""
    return f"{part.name}[{', '.join(f'{side.start}:{side.stop}' for side in part.box)}]"


def _rectangle(box: Box) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the offsets and sizes of a box."""
    return tuple(part.start for part in box), tuple(part.stop - part.start for part in box)


def _bytes(values: Tensor) -> memoryview:
    """Return a tensor's bytes on the host, copied only if it is not contiguous there."""
    flat = values.detach().to("cpu").contiguous().view(-1)
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]  # numpy's types do not say that it is a buffer


def _common(box: Box, part: checkpoint_index.StoredPart) -> Box | None:
    overlap = []
    for side, offset, size in zip(box, part.offsets, part.sizes, strict=True):
        start, stop = max(side.start, offset), min(side.stop, offset + size)
        if start >= stop:
            return None
        overlap.append(slice(start, stop))
    return tuple(overlap)
