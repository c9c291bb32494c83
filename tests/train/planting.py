"""What is not finite, planted into the gradients of a rank."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch


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
