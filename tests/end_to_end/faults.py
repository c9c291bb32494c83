"""Faults of one rank: ``rank`` is the entry of emulated ranks and trains as ``hpc-mp train`` does, until the planted fault.

``FAULT``, ``FAULT_RANK`` (several: with commas) and ``FAULT_STEP`` (from 1) in the environment say which, in whom and when; a
``FAULT`` that is none of ``FAULTS`` is an error of every save from then on. ``FAULT_AT`` instead of the
step: before which function of a rank's entry, "read_job" before it meets the others. ``FAULT_FILE``: ranks that are "held" wait
while it is there. As a program this is ``hpc-mp`` with such ranks.
"""

from __future__ import annotations

import builtins
import ctypes
import dataclasses
import errno
import functools
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOREVER = 3600


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
    import hpc_mp.train.rank.main as entry

    original = getattr(entry, name)

    def planted(*given: Any) -> Any:
        if os.environ["SLURM_PROCID"] == os.environ["FAULT_RANK"]:
            time.sleep(2.0)  # until the heartbeat beats
            FAULTS[os.environ["FAULT"]](None)
        return original(*given)

    setattr(entry, name, planted)


def user(trainer: Any) -> None:
    from hpc_mp.base.errors import HpcMpError

    raise HpcMpError("data.files = x", "is empty", "give text")


def raises(error: Callable[[], Exception]) -> Callable[[Any], None]:
    def fault(trainer: Any) -> None:
        raise error()

    return fault


def sends(number: signal.Signals) -> Callable[[Any], None]:
    return lambda trainer: os.kill(os.getpid(), number)


def stopped_anywhere(trainer: Any) -> None:
    """In the midst of whatever it does 20 ms later."""
    threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGSTOP)).start()


def loader(trainer: Any) -> None:
    type(trainer.samples).batch = lambda *_: time.sleep(FOREVER)


def forward(trainer: Any) -> None:
    from hpc_mp.train.engine.section import StageSection

    StageSection.forward = lambda *_: time.sleep(FOREVER)  # type: ignore[method-assign]


def saving(trainer: Any) -> None:
    from hpc_mp.train.checkpoint import checkpoint

    checkpoint.write_shard = lambda *_: time.sleep(FOREVER)


def unsaved(error: str) -> Callable[[Any], None]:
    """``write_shard`` raises it from now on: the name of an errno, else of a class of exceptions."""
    def raising(*_: Any) -> None:
        number = getattr(errno, error, None)
        raise getattr(builtins, error)("boom") if number is None else OSError(number, os.strerror(number))

    def fault(trainer: Any) -> None:
        from hpc_mp.train.checkpoint import checkpoint

        checkpoint.write_shard = raising

    return fault


def asleep(trainer: Any) -> None:
    time.sleep(FOREVER)


def held(trainer: Any) -> None:
    while os.path.exists(os.environ["FAULT_FILE"]):
        time.sleep(0.05)


def native(trainer: Any) -> None:
    """In C, with Python's lock: none of its threads runs, but its connections are there."""
    ctypes.PyDLL(None).sleep(FOREVER)


FAULTS: dict[str, Callable[[Any], None]] = {
    "user": user,
    "memory": raises(MemoryError),
    "error": raises(lambda: ValueError("boom\n\nin two lines ")),
    "space": raises(lambda: OSError(errno.ENOSPC, "No space left on device")),
    "exit": lambda trainer: os._exit(3),
    "killed": sends(signal.SIGKILL),
    "crashed": sends(signal.SIGSEGV),
    "aborted": lambda trainer: os.abort(),
    "stopped": sends(signal.SIGSTOP),
    "stopped anywhere": stopped_anywhere,
    "loader": loader,
    "forward": forward,
    "saving": saving,
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
