"""The end of a program on all ranks: together, or because one of them has left.

All ranks call the same methods of a run. So a rank that ends its program with fewer calls than another one has begun will never
join the last of these, and nothing would end the wait: NCCL notices no lost connection. Each rank counts its calls, and one that
ends leaves the number in the ranks' store, where a thread of every other rank blocks until there is such a notice::

    left N           the N-th notice: a rank, its calls, and the error that has ended it; null: no rank needs another any longer
    notices, ended   how many notices there are, and how many ranks have ended
"""

import atexit
import json
import os
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from functools import lru_cache
from itertools import count
from typing import Any

import torch.distributed as dist

from hpc_mp.base.errors import HpcMpError

PATIENCE_S = 60.0  # that a rank waits at the end of its program for the others to end theirs
BRIEFLY_S = 5.0  # that it waits if it has failed, or for its connections to close; and the longest wait of its thread
OWN_S = 2.0  # for a rank's own error; and for the rank that left, because launchers report the rank that ends first
STORE_S = 0.2  # for rank 0, whose store answers the others
LONGEST = 200  # characters of an error that a notice has


class Ending:
    """The calls of this process, as a context of each call, and its end. Raises HpcMpError if another rank has left before it.

    Args:
        store: of all ranks of the default process group.
    """

    def __init__(self, store: dist.Store) -> None:
        self.rank, self.world, self._calls = dist.get_rank(), dist.get_world_size(), 0
        self._ended = self._said = False
        self._left: tuple[float, HpcMpError | None] = float("inf"), None  # the fewest calls of a rank that has ended
        self._store: Any = dist.PrefixStore("hpc-mp/ending", store)
        self._watch = threading.Thread(target=self._watched, name="ends of ranks", daemon=True)
        if self.world > 1:
            self._watch.start()
        atexit.register(self._end)

    def __enter__(self) -> None:
        self._calls += 1
        if self._left[1] is not None and self._calls > self._left[0]:
            self._calls -= 1
            raise self._left[1]

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._calls -= kind is not None  # a call that all ranks refuse is none

    def _watched(self) -> None:
        with suppress(dist.DistNetworkError):  # the process that holds the store has ended
            store = self._store.clone()  # torch's stores let one thread at a time wait
            for number in count(1):
                while not _there(store, f"left {number}"):
                    if self._ended:
                        return
                if (notice := json.loads(store.get(f"left {number}"))) is None:
                    return
                self._left = min(self._left, (notice[1], _gone(*notice)), key=lambda left: left[0])
                if self._calls > notice[1]:
                    time.sleep(OWN_S)
                if self._calls > notice[1]:  # no error of its own has ended the wait
                    self._say()
                    self._leave(None)
                    time.sleep(OWN_S)
                    os._exit(1)
        self._left = self._calls, _gone(0, self._calls, "its store cannot be reached")

    def _leave(self, notice: list[object] | None) -> None:
        self._store.set(f"left {self._store.add('notices', 1)}", json.dumps(notice))

    def _say(self) -> None:
        self._said = True
        print(f"rank {self.rank}: {self._left[1]}", file=sys.stderr, flush=True)

    def _end(self) -> None:
        """End the program with the others: gloo aborts a process that ends with open connections."""
        if self._said:
            os._exit(1)
        error = getattr(sys, "last_value", None)  # which has been printed
        calls, self._calls = self._calls, 0
        if isinstance(error, RuntimeError) and self._left[0] <= calls:  # a connection has been lost
            self._say()
        with suppress(dist.DistError):  # the process that holds the store has ended
            if self._store.add(f"ended with {calls} calls", 1) == 1:
                self._leave([self.rank, calls, f"{type(error).__name__}: {error}"[:LONGEST] if error else ""])
            if self._store.add("ended", 1) == self.world:
                self._leave(None)
        if self._watch.is_alive():
            self._watch.join(PATIENCE_S if error is None and dist.is_initialized() else BRIEFLY_S)
            time.sleep(0 if self.rank else STORE_S)
        closing = threading.Thread(target=_close, daemon=True)
        if error is None:
            closing.start()
            closing.join(BRIEFLY_S)
        if error is not None or closing.is_alive():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(int(error is not None))
        self._ended = True
        if self._watch.is_alive():
            self._watch.join(2 * BRIEFLY_S)  # a thread that wakes while the interpreter ends would abort it


@lru_cache(maxsize=1)
def ending_of(store: dist.Store) -> Ending:
    """Return the ending of the processes that share a store; a program has one, whatever number of models it divides."""
    return Ending(store)


def _there(store: dist.Store, key: str) -> bool:
    """Wait for a key for a while. Raises dist.DistNetworkError if the store is gone."""
    try:
        store.wait([key], timedelta(seconds=BRIEFLY_S))
    except dist.DistStoreError:
        return False
    return True


def _close() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _gone(rank: int, calls: int, error: str) -> HpcMpError:
    reason = f" ({error})" if error else ""
    return HpcMpError(f"rank {rank}", f"has ended its program{reason} after {calls} calls that all ranks make; this rank cannot "
                      "go on without it",
                      f"see what rank {rank} printed; every rank must call step and the other methods equally often")
