"""Activations: tensors that autograd saves in a forward for its backward. They are counted, and may be offloaded to the host.

A chunk's forward runs inside ``ChunkActivations.saved``. Its hooks record the storage of each tensor that autograd saves, so that
views of one array are counted once and moved once. Parameters and tables that a stage holds anyway are excluded. The storages of
an offloaded chunk are copied to the host when the forward is over, so that the copies have the values that the backward needs.
They are copied back before the backward, at the time that the schedule gives (``layout/schedule/residency.py``). On a GPU both
copies run in a separate stream, with pinned memory. On a CPU, where activations lie in host memory already, a second copy stands
for the host: it saves nothing, but it tests the mechanism.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hpc_mp.train.parallel.host_parameters import Bus

SMALL = 4096  # bytes: a smaller storage stays on the device, because its copy would cost more than it saves


class SavedStorage:
    """A storage that autograd has saved, on the device or on the host."""

    def __init__(self, storage: torch.UntypedStorage, device: torch.device, counter: "Activations") -> None:
        self.nbytes, self._counter, self._away = storage.nbytes(), counter, False
        self._bytes = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
        counter.count(self.nbytes, 0)

    def view(self, kind: Tensor, begin: int, size: torch.Size, stride: tuple[int, ...]) -> Tensor:
        """Return a saved tensor. ``kind``: an empty tensor of its format."""
        assert not self._away, "a backward needs a storage that is still on the host"
        return kind.new_empty(0).set_(self._bytes.untyped_storage(), begin, size, stride)

    def leave(self, stream: torch.cuda.Stream | None) -> None:
        """Begin to copy the bytes to the host. ``stream``: the current stream, which copies; None on a CPU."""
        target = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=stream is not None)
        target.copy_(self._bytes, non_blocking=True)
        if stream is not None:
            self._bytes.record_stream(stream)
        self._bytes, self._away = target, True
        self._counter.count(-self.nbytes, self.nbytes)

    def come_back(self, target: Tensor) -> None:
        """Begin to copy the bytes back to ``target``, (nbytes,) on the device."""
        self._bytes, self._away = target.copy_(self._bytes, non_blocking=True), False
        self._counter.count(self.nbytes, -self.nbytes)

    def __del__(self) -> None:
        self._counter.count(*((0, -self.nbytes) if self._away else (-self.nbytes, 0)))


class ChunkActivations:
    """Activations of one chunk's forward. ``others``: tensors that are no activations and stay on the device."""

    def __init__(self, activations: "Activations", others: Iterable[Tensor]) -> None:
        self._activations, self._others = activations, {_identity(tensor.untyped_storage()) for tensor in others}
        self._storages: dict[int, SavedStorage] = {}
        self._arrived: torch.cuda.Event | None = None

    @contextmanager
    def saved(self, leaves: bool) -> Iterator[None]:
        """Run the chunk's forward in this context. ``leaves``: begin to copy the storages to the host when it is over. Otherwise
        autograd alone refers to them afterwards, and frees them one by one."""
        with saved_tensors_hooks(self._pack, lambda saved: saved if isinstance(saved, Tensor) else saved()):
            yield
        if not leaves:
            self._storages = {}
            return
        with self._activations.copying() as stream:
            for saved in self._storages.values():
                saved.leave(stream)

    def _pack(self, tensor: Tensor) -> Tensor | Callable[[], Tensor]:
        storage = tensor.untyped_storage()
        identity = _identity(storage)
        if storage.nbytes() < SMALL or identity in self._others:
            return tensor
        if identity not in self._storages:
            self._storages[identity] = SavedStorage(storage, tensor.device, self._activations)
        return partial(self._storages[identity].view, tensor.new_empty(0), int(tensor.storage_offset()), tensor.size(),
                       tensor.stride())

    def come_back(self) -> None:
        """Begin to copy all storages back, ahead of the backward."""
        device = self._activations.device
        room = [torch.empty(saved.nbytes, dtype=torch.uint8, device=device) for saved in self._storages.values()]
        with self._activations.copying() as stream:
            for saved, target in zip(self._storages.values(), room, strict=True):
                saved.come_back(target)
            self._arrived = None if stream is None else stream.record_event()
        self._storages = {}

    def need(self) -> None:
        """Make the current stream wait for the copies, at the beginning of the backward."""
        if self._arrived is not None:
            torch.cuda.current_stream(self._activations.device).wait_event(self._arrived)


class Activations:
    """Counter of the activations of a rank: current bytes, and their peaks since ``begin``. ``here``, ``away``: bytes on the
    device and on the host. ``most_here``, ``most_away``: peaks of these."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.here = self.away = self.most_here = self.most_away = 0
        self.copying = Bus(device).copying

    def begin(self) -> None:
        """Reset the peaks."""
        self.most_here, self.most_away = self.here, self.away

    def count(self, device: int, host: int) -> None:
        """Add to the bytes on the device and on the host."""
        self.here, self.away = self.here + device, self.away + host
        self.most_here, self.most_away = max(self.most_here, self.here), max(self.most_away, self.away)

    def noted(self, tensors: Iterable[Tensor]) -> list[SavedStorage]:
        """Count the storages of these tensors as long as the returned list lives."""
        storages = {_identity(tensor.untyped_storage()): tensor.untyped_storage() for tensor in tensors}
        return [SavedStorage(storage, self.device, self) for storage in storages.values() if storage.nbytes() >= SMALL]


def _identity(storage: torch.UntypedStorage) -> int:
    """Return an identity that does not change when a storage is freed and filled again, as those of unsharded units are."""
    return storage._cdata
