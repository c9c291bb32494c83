"""What the ranks of `hpc-mp bench` run in place of their program, forked by the emulator: programs with something wrong."""

import os
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hpc_mp.doctor.bench.ranks.program import forked


def wrong_data(path: Path) -> int:
    real = dist.all_reduce

    def call(receive: Any, **keywords: Any) -> Any:
        done = real(receive, **keywords)
        if dist.get_rank() == 1 and len(receive) > 100:
            receive[17] += 1
        return done

    dist.all_reduce = call
    return forked(path)


def crash(path: Path) -> int:
    """Rank 1 fails once all have met."""
    real = dist.gather_object

    def call(*arguments: Any, **keywords: Any) -> None:
        if dist.get_rank() == 1:
            raise RuntimeError("the card fell off the bus")
        real(*arguments, **keywords)

    dist.gather_object = call
    return forked(path)


def hang(path: Path) -> int:
    """All ranks sleep; a file named by a rank's process says that it lives."""
    (path.parent / f"lives-{os.getpid()}").touch()
    time.sleep(600)
    return 0
