"""gloo with one I/O thread per rank, whatever the number of groups, and without unnecessary connections.

torch gives every gloo group its own device, whose thread wakes a hundred times a second even without messages. A rank of tensor
2 × pipeline 4 × data 32 has ten groups, and 256 such ranks on one machine spent most of their time on these wakes. Here all
groups of a process share one device. Its thread may wake late if it is idle; messages still wake it at once.

torch also requires a default group of all ranks, in which gloo connects every rank with every other. Here it has no back end:
messages among all ranks go along a ``groups.Tree``. (gloo can connect lazily, but two ranks that both send first then deadlock if
several groups share a device.)
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
SILENT = "silent"  # back end of the default group, through which no message passes
PR_SET_TIMERSLACK, PR_GET_TIMERSLACK = 29, 30  # linux/prctl.h
SLACK_NS = 50_000_000  # the upper bound, because closing a connection waits for the thread to wake


class Silent(dist.ProcessGroup):
    """A group of all ranks without connections: every message raises torch's error that there is no back end."""

    def _has_hooks(self) -> bool:
        """Return False. torch calls this when the group ends, and would warn about the missing back end."""
        return False


def register() -> None:
    """Register both back ends with torch."""
    silent: Callable[..., Any] = Silent  # torch's stubs lack the constructor
    makers = {GLOO: _connected, SILENT: lambda store, rank, size, timeout: silent(rank, size)}
    for name, maker in makers.items():
        if name.upper() not in dist.Backend._plugins:
            dist.Backend.register_backend(name, maker, devices=["cpu", "cuda"])


def _connected(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    gloo: Any = dist.ProcessGroupGloo  # torch's stubs lack some of its attributes
    options = gloo._Options()
    options._devices, options._timeout = [_device()], timeout
    return gloo(store, rank, size, options)


@cache
def _device() -> Any:
    """Return the device of this process, which is created at its first use."""
    gloo: Any = dist.ProcessGroupGloo
    with _late_timers():
        return gloo.create_default_device(lazy_init=False)


@contextmanager
def _late_timers() -> Iterator[None]:
    """Let threads that start in the block wake from a timer up to ``SLACK_NS`` late. A busy kernel then wakes all of them at its
    own ticks, and 256 ranks spend a sixth of two cores on wakes instead of a half."""
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
