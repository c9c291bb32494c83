"""Faults of one rank: ``rank`` is the entry of emulated ranks and trains as ``hpc-mp train`` does, until the planted fault.

``FAULT``, ``FAULT_RANK`` (several: with commas) and ``FAULT_STEP`` (from 1) in the environment say which, in whom and when; a
``FAULT`` that is none of ``FAULTS`` is an error of every save from then on. ``FAULT_AT`` instead of the
step: before which function of a rank's entry, "read_job" before it meets the others. ``FAULT_FILE``: ranks that are "held" wait
while it is there. As a program this is ``hpc-mp`` with such ranks.
"""

import builtins
import ctypes
import dataclasses
import errno
import functools
import os
import pkgutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpc_mp.base.errors import HpcMpError

FOREVER = 3600
CHECKPOINT = "hpc_mp.train.checkpoint.checkpoint"


def rank(job_file: Path) -> int:
    import hpc_mp.train.rank.main
    from hpc_mp.train.rank import trainer

    step_ = trainer.Trainer._step

    def step(self: Any, number: int, *rest: Any) -> Any:
        strike(self, number)
        return step_(self, number, *rest)

    trainer.Trainer._step = step  # type: ignore[assignment, method-assign]
    if "FAULT_AT" in os.environ:
        plant_at(os.environ["FAULT_AT"])
    return hpc_mp.train.rank.main.main(job_file)


def strike(trainer: Any, number: int) -> None:
    """Do in this step, from 0, what the fault says, if this process turns out to be the rank."""
    import torch.distributed as dist

    if str(dist.get_rank()) in os.environ["FAULT_RANK"].split(",") and number + 1 == int(os.environ["FAULT_STEP"]):
        fault = os.environ["FAULT"]
        (FAULTS[fault] if fault in FAULTS else unsaved(fault))(trainer)


def plant_at(name: str) -> None:
    from hpc_mp.train.rank import bootstrap, main

    owner = main if hasattr(main, name) else bootstrap
    original = getattr(owner, name)

    def planted(*given: Any) -> Any:
        if os.environ["SLURM_PROCID"] == os.environ["FAULT_RANK"]:
            time.sleep(2.0)  # until the heartbeat beats
            FAULTS[os.environ["FAULT"]](None)
        return original(*given)

    setattr(owner, name, planted)


def raises(error: Callable[[], Exception]) -> Callable[..., None]:
    def fault(*_: Any) -> None:
        raise error()

    return fault


def sends(number: signal.Signals) -> Callable[[Any], None]:
    return lambda trainer: os.kill(os.getpid(), number)


def stopped_anywhere(trainer: Any) -> None:
    """In the midst of whatever it does 20 ms later."""
    threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGSTOP)).start()


def asleep(*_: Any) -> None:
    time.sleep(FOREVER)


def in_place_of(owner: str, name: str, deed: Callable[..., None]) -> Callable[[Any], None]:
    """From now on the function of that module or class does this."""
    return lambda trainer: setattr(pkgutil.resolve_name(owner), name, deed)


def unsaved(error: str) -> Callable[[Any], None]:
    """``write_shard`` raises it from now on: the name of an errno, else of a class of exceptions."""
    number = getattr(errno, error, None)
    raising = raises(lambda: getattr(builtins, error)("boom") if number is None else OSError(number, os.strerror(number)))
    return in_place_of(CHECKPOINT, "write_shard", raising)


def held(trainer: Any) -> None:
    while os.path.exists(os.environ["FAULT_FILE"]):
        time.sleep(0.05)


def native(trainer: Any) -> None:
    """In C, with Python's lock: none of its threads runs, but its connections are there."""
    ctypes.PyDLL(None).sleep(FOREVER)


FAULTS: dict[str, Callable[[Any], None]] = {
    "user": raises(lambda: HpcMpError("data.files = x", "is empty", "give text")),
    "memory": raises(MemoryError),
    "error": raises(lambda: ValueError("boom\n\nin two lines ")),
    "space": raises(lambda: OSError(errno.ENOSPC, "No space left on device")),
    "exit": lambda trainer: os._exit(3),
    "killed": sends(signal.SIGKILL),
    "crashed": sends(signal.SIGSEGV),
    "aborted": lambda trainer: os.abort(),
    "stopped": sends(signal.SIGSTOP),
    "stopped anywhere": stopped_anywhere,
    "loader": lambda trainer: setattr(type(trainer.samples), "batch", asleep),
    "forward": in_place_of("hpc_mp.train.model.transformers_stage:TransformersStage", "forward", asleep),
    "saving": in_place_of(CHECKPOINT, "write_shard", asleep),
    "asleep": asleep,
    "native": native,
    "held": held,
}

if __name__ == "__main__":
    import hpc_mp.launch.backends.local
    from hpc_mp.cli.main import main
    from hpc_mp.launch.backends import BACKENDS

    start = functools.partial(hpc_mp.launch.backends.local.start, entry="faults:rank")
    BACKENDS["local"] = dataclasses.replace(BACKENDS["local"], start=start)
    main()
