"""Faults planted into ranks: functions replaced, acts before their steps, and numbers that are not finite among their gradients.

All that this file returns is called in the rank first.
"""

import os
from collections.abc import Callable
from functools import update_wrapper
from typing import Any

import torch

from hpc_mp.train.model import rotary_tables
from hpc_mp.train.optimizer import optimizer_state
from hpc_mp.train.optimizer.optimizer import Optimizer
from hpc_mp.train.rank.trainer import Trainer


def wrapped(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Callable[[], None]:
    """Put ``wrap`` of an attribute in its place. Raises AttributeError at once if there is none, not in the rank: a control whose
    target was renamed is noticed when its file is collected."""
    getattr(owner, name)
    return lambda: setattr(owner, name, wrap(getattr(owner, name)))


def planted(owner: Any, name: str) -> Callable[[Callable[..., Any]], Callable[[], None]]:
    """Decorate a function that takes the place of an attribute; its first argument is the attribute."""
    return lambda wrong: update_wrapper(
        wrapped(owner, name, lambda right: lambda *args, **more: wrong(right, *args, **more)), wrong)


# Every rank chooses by the positions that it has, as transformers does by itself.
frequencies_of_own_positions = wrapped(rotary_tables, "behind_the_last", lambda behind: lambda places, length: torch.cat(
    (places[:, :1], places), 1))
small_chunks = wrapped(optimizer_state, "chunk_elements", lambda elements: lambda parts: 1000)  # the last of a unit is shorter


def before_steps(act: Callable[[int], None]) -> Callable[[], None]:
    """Have a rank call ``act`` with the number of every step (from 0) before it."""

    @planted(Trainer, "_step")
    def acting(step: Callable[..., Any], trainer: Trainer, number: int, *rest: Any) -> Any:
        act(number)
        return step(trainer, number, *rest)

    return acting


def plant(value: float, rank: int, step: int) -> Callable[[], None]:
    """Have one number of one gradient of a rank be this after a step (from 0) of the attempt."""
    calls: list[Optimizer] = []

    @planted(Optimizer, "squared_norm")
    def spoilt(squared: Callable[..., torch.Tensor], optimizer: Optimizer) -> torch.Tensor:
        calls.append(optimizer)
        if len(calls) == step + 1 and int(os.environ["SLURM_PROCID"]) == rank:
            optimizer.gradients[-1][0][0] = value
        return squared(optimizer)

    return spoilt
