"""How much memory a rank uses."""

import resource
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import torch

from hpc_mp.train.optimizer.optimizer import Optimizer
from hpc_mp.train.parallel.data_axis import Unit

POLL_S = 0.5  # between two polls of a process that may be about to be killed for its memory
CHANGE = 1 / 16  # that is worth a write: a dozen of them on the way from 1 to 2 GB


def peak_bytes(device: torch.device) -> int:
    """Largest memory so far: allocated on the GPU, or the resident set of the process on a CPU (``ru_maxrss`` is in KiB)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def limit_bytes(device: torch.device, ranks_per_node: int) -> int:
    """Return the bytes that a rank may use: the GPU's memory, or its share of the machine's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return psutil.virtual_memory().total // ranks_per_node


def state_bytes(units: Iterable[Unit], optimizer: Optimizer) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer state that this rank holds between steps, and those that lie elsewhere."""
    units = list(units)
    here = {id(storage): storage.nbytes() for unit in units
            for storage in (unit.whole.untyped_storage(), *(() if unit.away else (unit.master.untyped_storage(),)))}
    away = sum(array.nbytes for unit in units if unit.away for array in unit.away.arrays)
    return {
        "parameters": sum(here.values()),
        "gradients": sum(unit.gradient.held.nbytes for unit in units),
        "optimizer": optimizer.home.nbytes.device,
        "host": away + optimizer.home.nbytes.host,
        "disk": optimizer.home.nbytes.disk,
    }


@contextmanager
def resident_noted(file: Path) -> Iterator[None]:
    """While the block runs, ``file`` says how many bytes this process holds: nobody can ask it once it was killed for them."""
    done = threading.Event()
    thread = threading.Thread(target=_note, args=(file, done), name="memory", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _note(file: Path, done: threading.Event) -> None:
    process, noted = psutil.Process(), 0
    while True:
        resident = process.memory_info().rss
        if abs(resident - noted) > CHANGE * noted:
            with suppress(OSError):  # a disk that is full now may not be so later
                with open(file, "r+" if file.exists() else "w", encoding="ascii") as note:
                    note.write(f"{resident:<20d}\n")  # over the number that was there: never an empty file
                noted = resident
        if done.wait(POLL_S):
            return
