"""gloo with one thread per rank that moves bytes, whatever the number of groups, and no socket that nobody needs.

torch gives every group of gloo a device of its own, whose thread wakes a hundred times a second even when nothing comes. A rank
of tensor 2 × pipeline 4 × data 32 has ten groups, and 256 such ranks on one machine hardly did anything but wake. Here all groups
of a process share one device, whose thread may wake late when nothing comes; messages wake it at once, as ever.

torch also wants a default group of all ranks, in which gloo connects every one with every other. Here it has no back end: what
all ranks tell each other goes along a ``groups.Tree``. (gloo can connect late, but with a device that several groups share, two
ranks that both send first then wait for ever.)
"""

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist

GLOO = "gloo_of_groups"
SILENT = "silent"  # of a default group that no message passes through
PR_SET_TIMERSLACK, PR_GET_TIMERSLACK = 29, 30  # linux/prctl.h
SLACK_NS = 50_000_000  # closing a connection waits for the device's thread to wake, so that this is not more


class Silent(dist.ProcessGroup):
    """All ranks, none connected: every message is torch's error that there is no back end."""

    def _has_hooks(self) -> bool:
        """torch asks when the group ends, and warns where there is no back end to ask."""
        return False


def register() -> None:
    """Make both back ends known to torch, by these names."""
    makers: dict[str, Callable[..., Any]] = {GLOO: _connected, SILENT: _silent}
    for name, maker in makers.items():
        if name.upper() not in dist.Backend._plugins:
            dist.Backend.register_backend(name, maker, devices=["cpu", "cuda"])


def _silent(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Silent:
    return Silent(rank, size)  # type: ignore[call-arg]  # torch's stubs know no constructor that Python may extend


def _connected(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
    options: Any = _gloo()._Options()
    options._devices, options._timeout = [_device()], timeout
    return dist.ProcessGroupGloo(store, rank, size, options)


@cache
def _device() -> Any:
    """This process's own: it is made when a group first needs it."""
    with _late_timers():
        return _gloo().create_default_device(lazy_init=False)


@contextmanager
def _late_timers() -> Iterator[None]:
    """Threads that begin in the block may wake from a timer by ``SLACK_NS`` late. A busy kernel then wakes all of them at its own
    ticks, and 256 ranks spend a sixth of two cores on this instead of a half."""
    if sys.platform != "linux":
        yield
        return
    prctl = ctypes.CDLL(None).prctl
    before = prctl(PR_GET_TIMERSLACK)
    prctl(PR_SET_TIMERSLACK, ctypes.c_ulong(SLACK_NS))
    try:
        yield
    finally:
        prctl(PR_SET_TIMERSLACK, ctypes.c_ulong(before))


def _gloo() -> Any:
    """With the names that torch's stubs leave out."""
    return dist.ProcessGroupGloo
