"""Activations: tensors that autograd keeps from a forward to its backward. They are counted; with offload they wait on the host.

A chunk's forward runs inside ``ChunkActivations.hooks``: whatever autograd saves there is noted by its storage, so that views of
one array count once and move once. Parameters and tables that a stage keeps anyway are none of it. After the forward the storages
of a chunk that leaves are copied to the host; before its backward they are copied back, when the schedule says so
(``layout/schedule/residency.py``). Both run on a stream of their own on GPUs, from and to pinned memory. On a CPU, where
activations lie in host memory already, a copy beside them takes the part of the host: nothing is gained there but the proof.

Copies are made when the forward is over, so that they hold what a backward would have found.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hpc_mp.train.parallel.host_parameters import Bus

SMALL = 4096  # bytes: what is smaller stays where it is, a copy of it would take longer than it is worth


class SavedStorage:
    """An array that autograd keeps, on the device or on the host."""

    def __init__(self, storage: torch.UntypedStorage, device: torch.device, counter: "Activations") -> None:
        self.nbytes = storage.nbytes()
        self._device, self._counter = device, counter
        self._here: Tensor | None = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
        self._there: Tensor | None = None
        counter.count(self.nbytes, 0)

    @property
    def storage(self) -> torch.UntypedStorage:
        assert self._here is not None, "a backward needs what is still away"
        return self._here.untyped_storage()

    def leave(self, stream: torch.cuda.Stream | None) -> None:
        assert self._here is not None
        self._there = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=stream is not None)
        self._there.copy_(self._here, non_blocking=True)
        if stream is not None:
            self._here.record_stream(stream)
        self._here = None
        self._counter.count(-self.nbytes, self.nbytes)

    def come_back(self, here: Tensor) -> None:
        """``here``: where to, bytes on the device."""
        assert self._there is not None
        self._here = here.copy_(self._there, non_blocking=True)
        self._there = None
        self._counter.count(self.nbytes, -self.nbytes)

    def __del__(self) -> None:
        self._counter.count(*((-self.nbytes, 0) if self._here is not None else (0, -self.nbytes)))


class SavedView(NamedTuple):
    """A tensor that autograd keeps: which part of which storage. ``kind`` is an empty tensor of its format."""

    whole: SavedStorage
    kind: Tensor
    begin: int
    size: torch.Size
    stride: tuple[int, ...]

    def tensor(self) -> Tensor:
        return self.kind.new_empty(0).set_(self.whole.storage, self.begin, self.size, self.stride)


class ChunkActivations:
    """Activations of one chunk's forward.

    Args:
        others: tensors that stay where they are, and are no activations.
    """

    def __init__(self, activations: "Activations", others: Iterable[Tensor]) -> None:
        self._activations, self._others = activations, {_identity(tensor.untyped_storage()) for tensor in others}
        self._storages: dict[int, SavedStorage] = {}
        self._arrived: torch.cuda.Event | None = None

    def hooks(self) -> AbstractContextManager[Any]:
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Tensor | SavedView:
        storage = tensor.untyped_storage()
        identity = _identity(storage)
        if storage.nbytes() < SMALL or identity in self._others:
            return tensor
        if identity not in self._storages:
            self._storages[identity] = SavedStorage(storage, tensor.device, self._activations)
        begin = int(tensor.storage_offset())
        return SavedView(self._storages[identity], tensor.new_empty(0), begin, tensor.size(), tensor.stride())

    def _unpack(self, saved: Tensor | SavedView) -> Tensor:
        return saved.tensor() if isinstance(saved, SavedView) else saved

    def stay(self) -> None:
        """The forward is over: from now on autograd alone knows what it keeps, and lets go of it piece by piece."""
        self._storages = {}

    def leave(self) -> None:
        """The forward is over: copy everything to the host."""
        with self._activations.copying() as stream:
            for saved in self._storages.values():
                saved.leave(stream)

    def come_back(self) -> None:
        """The backward is near: begin to copy everything back."""
        device = self._activations.device
        room = [torch.empty(saved.nbytes, dtype=torch.uint8, device=device) for saved in self._storages.values()]
        with self._activations.copying() as stream:
            for saved, here in zip(self._storages.values(), room, strict=True):
                saved.come_back(here)
            self._arrived = None if stream is None else stream.record_event()
        self._storages = {}

    def need(self) -> None:
        """The backward begins."""
        if self._arrived is not None:
            torch.cuda.current_stream(self._activations.device).wait_event(self._arrived)


class Activations:
    """All that a rank keeps for its backwards: bytes now, and the most since ``begin``.

    Attributes:
        here, away: bytes on the device and on the host.
        most_here, most_away: their peaks.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.here = self.away = self.most_here = self.most_away = 0
        self.copying = Bus(device).copying

    def begin(self) -> None:
        self.most_here, self.most_away = self.here, self.away

    def count(self, here: int, away: int) -> None:
        self.here, self.away = self.here + here, self.away + away
        self.most_here, self.most_away = max(self.most_here, self.here), max(self.most_away, self.away)

    def noted(self, tensors: Iterable[Tensor]) -> list[SavedStorage]:
        """Count these tensors for as long as the list lives."""
        storages = {_identity(tensor.untyped_storage()): tensor.untyped_storage() for tensor in tensors}
        return [SavedStorage(storage, self.device, self) for storage in storages.values() if storage.nbytes() >= SMALL]


def _identity(storage: torch.UntypedStorage) -> int:
    """Stays the same when a storage is emptied and filled again, as those of gathered units are."""
    return storage._cdata
