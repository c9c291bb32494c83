"""gloo with one thread per rank that moves bytes, whatever the number of groups.

torch gives every group of gloo a device of its own, whose thread wakes a hundred times a second even when nothing comes. A rank
of tensor 2 × pipeline 4 × data 32 has ten groups, and 256 such ranks on one machine hardly did anything but wake. Here all groups
of a process share one device.

The world's group has another: its ranks connect when they first talk to each other, which few of them do; else each of W ranks
would open W sockets. The other groups connect at once: where two ranks both send first, gloo's late connections hang.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist

GLOO = "gloo_of_groups"
WORLD = "gloo_of_the_world"


def register() -> None:
    """Make both back ends known to torch, by these names."""
    for name, late in ((GLOO, False), (WORLD, True)):
        if name.upper() not in dist.Backend._plugins:
            dist.Backend.register_backend(name, _maker(late), devices=["cpu", "cuda"])


def _maker(late: bool) -> Callable[..., dist.ProcessGroupGloo]:
    def make(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
        options: Any = _gloo()._Options()
        options._devices, options._timeout = [_device(late)], timeout
        return dist.ProcessGroupGloo(store, rank, size, options)

    return make


@cache
def _device(late: bool) -> Any:
    """This process's own: it is made when a group first needs it."""
    return _gloo().create_default_device(lazy_init=late)


def _gloo() -> Any:
    """With the names that torch's stubs leave out."""
    return dist.ProcessGroupGloo
