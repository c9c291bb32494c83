"""The learning rate of every step: ranks train by it, and a launch predicts it, so both halves share this function."""

import math
from typing import Protocol


class RateSettings(Protocol):
    """The settings that determine the rate; the job file's ``[train]`` table has these fields."""

    @property
    def learning_rate(self) -> float: ...
    @property
    def lr_schedule(self) -> str: ...
    @property
    def warmup_steps(self) -> int: ...
    @property
    def steps(self) -> int: ...


def learning_rate(number: int, settings: RateSettings) -> float:
    """Return the rate of optimizer step ``number`` (from 0): linear warm-up over ``warmup_steps`` that ends at the full rate,
    then constant, or down to zero at ``steps`` along a line or half a cosine (arXiv:1608.03983)."""
    if number < settings.warmup_steps:
        return settings.learning_rate * (number + 1) / settings.warmup_steps
    progress = (number - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
    falls = {"constant": 1.0, "linear": 1.0 - progress, "cosine": 0.5 * (1.0 + math.cos(math.pi * progress))}
    return settings.learning_rate * falls[settings.lr_schedule]


LEAP = 0.05  # relative difference from the previous rate, and from the expected one, that counts as a leap


def leap(done: int, last: float, before: RateSettings, now: RateSettings) -> float | None:
    """Return the rate of the next step if it is a leap; None if training continues smoothly.

    It is a leap if the rate under ``now`` differs both from the last step's rate and from the rate under ``before``.

    Args:
        done: number of completed steps, at least 1; fewer than ``now.steps``.
        last: the rate of the last completed step.
    """
    comes = learning_rate(done, now)
    foreseen = learning_rate(done, before) if done < before.steps else last
    smooth = any(abs(comes - rate) <= LEAP * max(rate, comes) for rate in (last, foreseen))
    return None if smooth else comes
