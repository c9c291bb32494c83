"""The GPUs of this machine."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from hpc_mp.base.command import CommandFailed, Runner, ask

_QUERY = ("nvidia-smi", "--query-gpu=index,name,memory.total", "--format=csv,noheader,nounits")
_PATIENCE_S = 30.0  # without its persistence daemon the driver wakes every GPU first
_ask_driver = functools.partial(ask, timeout=_PATIENCE_S)


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. ``memory`` is in bytes, None where the driver does not tell (GPUs that share the host's memory)."""

    index: int
    name: str
    memory: int | None


def find_gpus(ask: Runner = _ask_driver) -> tuple[Gpu, ...]:
    """The GPUs that ``nvidia-smi`` sees; none where there is no driver."""
    try:
        answer = ask(_QUERY)
    except CommandFailed:
        return ()
    return tuple(_gpu(line) for line in answer.splitlines() if line.strip())


def _gpu(line: str) -> Gpu:
    index, name, memory = (field.strip() for field in line.split(","))
    return Gpu(int(index), name, int(memory) * 2**20 if memory.isdigit() else None)
