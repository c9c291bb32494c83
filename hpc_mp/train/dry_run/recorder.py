"""Allocations and messages of a rank while a block runs, counted at torch's dispatcher, for real and fake tensors.

Memory is counted by storages: a storage that an operation returns is alive until its last reference is gone. Messages are counted
when torch.distributed hands them to a back end: gloo, NCCL or the fake one.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

VALUE_OF = torch.ops.aten._local_scalar_dense.default
DEVICE_OF = torch.ops.prim.device.default  # queried so often of fake tensors that a short answer saves a third of the time


@dataclass(frozen=True, slots=True)
class MessageKind:
    """An operation of torch.distributed: its name, the argument with the message, and the share that each of ``n`` ranks
    sends."""

    name: str
    argument: int
    share: Callable[[int], float]


def _each_other(n: int) -> float:
    return (n - 1) / n


MESSAGES: Mapping[str, MessageKind] = {
    "c10d::allreduce_": MessageKind("all-reduce", 0, lambda n: 2 * (n - 1) / n),
    "c10d::_allgather_base_": MessageKind("all-gather", 0, _each_other),
    "c10d::gather_": MessageKind("gather", 1, lambda n: 1.0),
    "c10d::broadcast_": MessageKind("broadcast", 0, _each_other),
    "c10d::_reduce_scatter_base_": MessageKind("reduce-scatter", 1, _each_other),
    "c10d::alltoall_base_": MessageKind("all-to-all", 1, _each_other),
    "c10d::alltoall_base_ with sizes": MessageKind("all-to-all with sizes", 1, lambda n: 1.0),  # only what is for others
    "c10d::send": MessageKind("send", 0, lambda n: 1.0),
    "c10d::recv_": MessageKind("receive", 0, lambda n: 0.0),
}


@dataclass(frozen=True, slots=True, order=True)
class SentMessages:
    """All messages of one kind and size on an axis."""

    axis: str  # the axis that connects the ranks
    kind: str
    ranks: int  # number of ranks
    bytes: int  # size of each message: the whole that a ring reduces or gathers, or what one rank sends to another
    elements: int  # size of each message in numbers
    count: int  # number of messages
    sent: float  # total bytes that this rank sent, by a ring or directly


@dataclass(frozen=True, slots=True)
class Peak:
    """A peak of memory: bytes in total, gathered parameters among them, and bytes of gradient slabs."""

    bytes: int = 0
    gathered: int = 0
    slabs: int = 0
    where: str = ""


class Recorder(TorchDispatchMode):
    """A dispatch mode that counts while it is entered. Fake tensors have no values: a request for one returns 1.

    Attributes:
        live: bytes that are allocated now, without ``gathered``.
        gathered: storages of gathered parameters, which come and go by resizing, unseen by the dispatcher.
        hosts: storages in host memory, which are not counted.
        slabs: called for the bytes of gradient slabs at every new peak.
        peaks: the peak of every kind of action.
        messages: (axis, kind, ranks, bytes, elements) -> count.
    """

    def __init__(self, axes: Mapping[str, str]) -> None:
        super().__init__()
        self.axes = axes
        self.live = 0
        self.gathered: Sequence[torch.UntypedStorage] = ()
        self.hosts: Sequence[torch.UntypedStorage] = ()
        self._uncounted: frozenset[int] = frozenset()
        self.slabs: Callable[[], int] = lambda: 0
        self.peaks: dict[str, Peak] = {}
        self.messages: Counter[tuple[str, str, int, int, int]] = Counter()
        self._kind, self._where, self._highest = "build", "build", 0
        self._alive: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}  # bytes by the object's address

    def at(self, kind: str, where: str) -> None:
        """Set the current action: its kind, and a description."""
        self._kind, self._where = kind, where
        self._highest = self.peaks[kind].bytes if kind in self.peaks else 0

    def gathers(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Mark storages that come and go by resizing from now on."""
        self.gathered = tuple(storages)
        self._forget(self.gathered)

    def on_host(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Mark storages that are in host memory."""
        self.hosts = tuple(storages)
        self._forget(self.hosts)

    def _forget(self, storages: Sequence[torch.UntypedStorage]) -> None:
        keys = frozenset(map(id, storages))  # several arrays may lie in one storage
        self._uncounted |= keys
        for key in keys:
            self._freed(key)

    def sent(self) -> list[SentMessages]:
        shares = {kind.name: kind.share for kind in MESSAGES.values()}
        return sorted(SentMessages(axis, kind, ranks, size, elements, count, shares[kind](ranks) * size * count)
                      for (axis, kind, ranks, size, elements), count in self.messages.items())

    def __torch_dispatch__(self, function: Any, types: Sequence[type], args: Sequence[Any] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        if function is VALUE_OF and isinstance(args[0], FakeTensor):
            return 1.0 if args[0].dtype.is_floating_point else 1
        if function is DEVICE_OF and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        if function.namespace == "c10d":
            self._count(function.name(), args)
        result = function(*args, **(kwargs or {}))
        self._track(result)
        now = self.live + sum(storage.nbytes() for storage in self.gathered)
        if now > self._highest:
            self._highest = now
            self.peaks[self._kind] = Peak(now, now - self.live, self.slabs(), self._where)
        return result

    def _count(self, name: str, args: Sequence[Any]) -> None:
        sized = name == "c10d::alltoall_base_" and len(args[4]) > 0
        kind = MESSAGES[f"{name} with sizes" if sized else name]
        objects = (arg for arg in args if isinstance(arg, torch.ScriptObject))
        group = dist.ProcessGroup.unbox(next(arg for arg in objects if "ProcessGroup" in str(arg._type())))
        what = args[kind.argument]
        for tensor in [what] if isinstance(what, Tensor) else what:
            size, elements = tensor.nbytes, tensor.numel()
            if sized:
                others, rows = sum(args[4]) - args[4][group.rank()], max(1, sum(args[4]))
                size, elements = size * others // rows, elements * others // rows
            self.messages[self.axes[group.group_name], kind.name, group.size(), size, elements] += 1

    def _track(self, result: Any) -> None:
        if isinstance(result, Tensor):
            storage = result.untyped_storage()
            key = id(storage)
            if key not in self._alive and key not in self._uncounted and result.device.type != "meta":
                self._alive[key] = storage.nbytes(), weakref.ref(storage, partial(self._freed, key))
                self.live += self._alive[key][0]
        elif isinstance(result, list | tuple):
            for element in result:
                self._track(element)

    def _freed(self, key: int, _: object = None) -> None:
        self.live -= self._alive.pop(key)[0]
