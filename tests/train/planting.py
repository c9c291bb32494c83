"""Faults planted into ranks: acts before their steps, and numbers that are not finite among their gradients."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from hpc_mp.train.rank.trainer import Trainer


def wrapped(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Callable[[], None]:
    """Put ``wrap`` of an attribute in its place; to be called in the rank first, as all that this file returns."""
    return lambda: setattr(owner, name, wrap(getattr(owner, name)))


def before_steps(act: Callable[[int], None]) -> Callable[[], None]:
    """Have a rank call ``act`` with the number of every step (from 0) before it."""

    def planted() -> None:
        step = Trainer._step

        def acting(self: Trainer, number: int, *rest: Any) -> Any:
            act(number)
            return step(self, number, *rest)

        Trainer._step = acting  # type: ignore[method-assign]

    return planted


def plant(value: float, rank: int, step: int) -> Callable[[], None]:
    """Have one number of one gradient of a rank be this after a step (from 0) of the attempt; called in every rank first."""

    def planted() -> None:
        from hpc_mp.train.engine.optimizer import Optimizer
        squared, calls = Optimizer.squared_norm, []

        def spoilt(self: Optimizer) -> torch.Tensor:
            calls.append(1)
            if len(calls) == step + 1 and int(os.environ["SLURM_PROCID"]) == rank:
                self.gradients[-1][0][0] = value
            return squared(self)

        Optimizer.squared_norm = spoilt  # type: ignore[method-assign]

    return planted
