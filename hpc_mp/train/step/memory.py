"""Memory of a rank: its peak, its limit, its state between steps, and a record of its resident set."""

import resource
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import torch

from hpc_mp.train.optimizer.optimizer import Optimizer
from hpc_mp.train.parallel.data_axis import TrainedUnit, Unit

POLL_S = 0.5  # seconds between two polls: the process may be about to be killed for its memory
CHANGE = 1 / 16  # smallest relative change that is written: a dozen writes on the way from 1 to 2 GB


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory in bytes: allocations on a GPU, or the resident set on a CPU (``ru_maxrss`` is in KiB)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def limit_bytes(device: torch.device, ranks_per_node: int) -> int:
    """Return the bytes that a rank may use: the GPU's memory, or its share of the machine's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return psutil.virtual_memory().total // ranks_per_node


def state_bytes(units: Iterable[Unit], optimizer: Optimizer) -> dict[str, int]:
    """Return the bytes of parameters, gradients and optimizer state on the device between steps, and those on host and disk."""
    units = list(units)
    storages = {id(storage): storage.nbytes() for unit in units
                for storage in (unit.whole.untyped_storage(), *(() if unit.away else (unit.master.untyped_storage(),)))}
    away = sum(array.nbytes for unit in units if unit.away for array in unit.away.arrays)
    return {
        "parameters": sum(storages.values()),
        "gradients": sum(unit.gradient.held.nbytes for unit in units if isinstance(unit, TrainedUnit)),
        "optimizer": optimizer.home.nbytes.device + (0 if optimizer.whole is None else optimizer.whole.nbytes),
        "host": away + optimizer.home.nbytes.host,
        "disk": optimizer.home.nbytes.disk,
    }


@contextmanager
def resident_noted(file: Path) -> Iterator[None]:
    """Keep this process's resident bytes in ``file`` while the block runs, so that they are known after an out-of-memory kill."""
    done = threading.Event()
    thread = threading.Thread(target=_note, args=(file, done), name="memory", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _note(file: Path, done: threading.Event) -> None:
    process, noted, ended = psutil.Process(), 0, False
    while not ended:
        resident = process.memory_info().rss
        if abs(resident - noted) > CHANGE * noted:
            with suppress(OSError):  # a full disk may have room later
                with open(file, "r+" if file.exists() else "w", encoding="ascii") as note:
                    note.write(f"{resident:<20d}\n")  # overwrites the last number: the file is never empty
                noted = resident
        ended = done.wait(POLL_S)
