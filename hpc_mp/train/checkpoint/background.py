"""Checkpoints that are written while training goes on: it waits for a copy of the state, not for the disk.

The state of a step is copied into host memory, which is pinned beside a GPU and kept from one checkpoint to the next. A thread
hashes the copy and writes it to this rank's file, without a message to other ranks. When all ranks have written, they publish the
checkpoint together between two steps; until then it has a temporary name, and an end of the run leaves the earlier checkpoints.
"""

from collections.abc import Sequence
from dataclasses import replace
from threading import Thread

import torch

from hpc_mp.train.checkpoint.checkpoint import Writing
from hpc_mp.train.checkpoint.shard_file import LocalPart
from hpc_mp.train.device.readback import Instant

ALIGNMENT = 64  # bytes, of each part in the copy


class Snapshot:
    """Host memory for a copy of a rank's parts of a checkpoint. ``parts``: parts of the same sizes as those that will be
    copied."""

    def __init__(self, parts: Sequence[LocalPart]) -> None:
        pinned = any(part.values.is_cuda for part in parts)
        self._room = torch.empty(snapshot_bytes(parts), dtype=torch.uint8, pin_memory=pinned)
        self._room.zero_()  # so that no copy waits for pages

    def copied(self, parts: Sequence[LocalPart]) -> tuple[list[LocalPart], list[Instant]]:
        """Copy parts, and return the copies; they are complete when the instants have passed."""
        copies, begin = [], 0
        for part in parts:
            room = self._room[begin:begin + part.values.nbytes].view(part.values.dtype).view(part.values.shape)
            copies.append(replace(part, values=room.copy_(part.values, non_blocking=True), release=lambda values: None))
            part.release(part.values)
            begin += _room_of(part)
        return copies, [Instant.here(device) for device in {part.values.device for part in parts}]


class BackgroundWriter:
    """The thread that writes a rank's parts of one checkpoint. ``writing``: the checkpoint that is not published yet; None if
    there is none."""

    def __init__(self, parts: Sequence[LocalPart]) -> None:
        self.writing: Writing | None = None
        self._snapshot, self._thread = Snapshot(parts), Thread()

    @property
    def busy(self) -> bool:
        """True while this rank has not written its parts."""
        return self.writing is not None and self._thread.is_alive()

    def begin(self, writing: Writing, parts: Sequence[LocalPart]) -> None:
        """Copy the parts, and begin to write the copies. ``writing`` is prepared."""
        copies, instants = self._snapshot.copied(parts)

        def write() -> None:
            for instant in instants:
                if instant.event is not None:
                    instant.event.synchronize()
            writing.write(copies)

        self.writing, self._thread = writing, Thread(target=write, name="checkpoint", daemon=True)
        self._thread.start()

    def written(self) -> Writing:
        """Wait until this rank has written its parts. Return the checkpoint, which is to be published."""
        writing, self.writing = self.writing, None
        assert writing is not None
        self._thread.join()
        return writing


def snapshot_bytes(parts: Sequence[LocalPart]) -> int:
    """Return the host memory that a copy of these parts takes."""
    return sum(map(_room_of, parts))


def _room_of(part: LocalPart) -> int:
    return -(-part.values.nbytes // ALIGNMENT) * ALIGNMENT
