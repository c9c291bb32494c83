"""The learning rate of every step: ranks train by it, and a launch predicts it, so both halves share this function.

A schedule is a function of the step whose value is a factor of ``learning_rate``. Its keyword arguments are the options that it
takes, with their defaults. ``constant``, ``linear`` and ``cosine`` are our own: the warm-up begins above zero, so that no step
trains at rate 0. All others are transformers' schedules, bit for bit and with transformers' names of options
(transformers/optimization.py); the first step of their warm-up has rate 0, except in ``cosine_warmup_with_min_lr``.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

ScheduleOfRate = Literal["constant", "linear", "cosine", "constant_with_warmup", "cosine_with_restarts", "polynomial",
                         "inverse_sqrt", "cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay"]
Shape = Literal["linear", "cosine", "1-sqrt"]


class RateSettings(Protocol):
    """The settings that determine the rate; the job file's ``[train]`` table has these fields."""

    learning_rate: float
    lr_schedule: ScheduleOfRate
    @property
    def lr_schedule_options(self) -> object:
        """An object with an attribute for each option of any schedule, whose value is None for the default."""
    warmup_steps: int
    steps: int


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """Step ``number`` (from 0) of ``steps``, of which the first ``warmup`` are the warm-up; ``rate``: the full rate."""

    number: int
    warmup: int
    steps: int
    rate: float

    @property
    def warmed(self) -> bool:
        return self.number >= self.warmup

    @property
    def rise(self) -> float:
        """The factor during transformers' warm-up, which begins at zero."""
        return self.number / max(1, self.warmup)

    @property
    def progress(self) -> float:
        """The share of the steps after the warm-up that are done."""
        return (self.number - self.warmup) / max(1, self.steps - self.warmup)


def wave(progress: float, cycles: float) -> float:
    """Return so many periods of a cosine, between 1 and 0 (arXiv:1608.03983)."""
    return 0.5 * (1.0 + math.cos(math.pi * cycles * 2.0 * progress))


def above(factor: float, least: float) -> float:
    """Return a factor between 0 and 1, scaled to the range between ``least`` and 1."""
    return factor * (1 - least) + least


def ours(fall: Callable[[float], float]) -> Callable[[ScheduledStep], float]:
    """Return a schedule whose warm-up ends with the full rate, and whose factor then is a function of the progress."""
    return lambda step: fall(step.progress) if step.warmed else (step.number + 1) / step.warmup


def constant_with_warmup(step: ScheduledStep) -> float:
    return 1.0 if step.warmed else step.rise


def cosine_with_restarts(step: ScheduledStep, *, num_cycles: int = 1) -> float:
    if not step.warmed:
        return step.rise
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * ((num_cycles * step.progress) % 1.0))))


def polynomial(step: ScheduledStep, *, lr_end: float = 1e-7, power: float = 1.0) -> float:
    if not step.warmed:
        return step.rise
    left = 1 - (step.number - step.warmup) / (step.steps - step.warmup)
    return float((step.rate - lr_end) * left**power + lr_end) / step.rate


def inverse_sqrt(step: ScheduledStep, *, timescale: int | None = None) -> float:
    if not step.warmed:
        return step.rise
    scale = timescale or step.warmup or 10_000
    return 1.0 / math.sqrt((step.number + (scale - step.warmup)) / scale)


def cosine_with_min_lr(step: ScheduledStep, *, num_cycles: float = 0.5, min_lr: float | None = None,
                       min_lr_rate: float | None = None) -> float:
    if not step.warmed:
        return step.rise
    return max(0.0, above(wave(step.progress, num_cycles), least_factor(step, min_lr, min_lr_rate)))


def cosine_warmup_with_min_lr(step: ScheduledStep, *, num_cycles: float = 0.5, min_lr: float | None = None,
                              min_lr_rate: float | None = None, warmup_lr_rate: float | None = None) -> float:
    if not step.warmed and warmup_lr_rate is None:
        return (step.number + 1.0) / max(1.0, step.warmup)
    if not step.warmed and warmup_lr_rate is not None:
        return warmup_lr_rate + (1.0 - warmup_lr_rate) * step.number / max(1, step.warmup - 1)
    progress = (step.number - step.warmup + 1.0) / max(1.0, step.steps - step.warmup)
    return max(0.0, above(wave(progress, num_cycles), least_factor(step, min_lr, min_lr_rate)))


def least_factor(step: ScheduledStep, min_lr: float | None, min_lr_rate: float | None) -> float:
    """Return the least factor, given as a rate or as a factor; 0 if neither is."""
    return min_lr / step.rate if min_lr is not None else min_lr_rate or 0.0


def warmup_stable_decay(step: ScheduledStep, *, num_decay_steps: int = 0, num_stable_steps: int | None = None,
                        warmup_type: Shape = "linear", decay_type: Shape = "cosine", min_lr_ratio: float = 0,
                        num_cycles: float = 0.5) -> float:
    rises: Mapping[Shape, Callable[[float], float]] = {
        "linear": lambda done: done, "cosine": lambda done: 0.5 * (1.0 - math.cos(math.pi * done)),
        "1-sqrt": lambda done: 1.0 - math.sqrt(1.0 - done)}
    falls: Mapping[Shape, Callable[[float], float]] = {
        "linear": lambda done: 1.0 - done, "cosine": lambda done: wave(done, num_cycles),
        "1-sqrt": lambda done: 1.0 - math.sqrt(done)}
    if not step.warmed:
        return max(0.0, above(rises[warmup_type](step.rise), min_lr_ratio))
    stable = step.steps - step.warmup - num_decay_steps if num_stable_steps is None else num_stable_steps
    decayed = step.number - step.warmup - stable
    if decayed < 0:
        return 1.0
    if decayed >= num_decay_steps:
        return min_lr_ratio
    return max(0.0, above(falls[decay_type](decayed / num_decay_steps), min_lr_ratio))


SCHEDULES: Mapping[str, Callable[..., float]] = {
    "constant": ours(lambda progress: 1.0), "linear": ours(lambda progress: 1.0 - progress),
    "cosine": ours(lambda progress: wave(progress, 0.5)),
    **{function.__name__: function for function in (
        constant_with_warmup, cosine_with_restarts, polynomial, inverse_sqrt, cosine_with_min_lr, cosine_warmup_with_min_lr,
        warmup_stable_decay)}}
UNENDING = ("constant", "constant_with_warmup", "inverse_sqrt")  # schedules that do not depend on the number of all steps


def options_of(schedule: str) -> tuple[str, ...]:
    """Return the names of the options that a schedule takes."""
    return tuple(inspect.signature(SCHEDULES[schedule]).parameters)[1:]


def learning_rate(number: int, settings: RateSettings) -> float:
    """Return the rate of optimizer step ``number`` (from 0)."""
    schedule = SCHEDULES[settings.lr_schedule]
    options = {name: value for name in options_of(settings.lr_schedule)
               if (value := getattr(settings.lr_schedule_options, name)) is not None}
    step = ScheduledStep(number, settings.warmup_steps, settings.steps, settings.learning_rate)
    return settings.learning_rate * schedule(step, **options)


LEAP = 0.05  # relative difference from the previous rate, and from the expected one, that counts as a leap


def leap(done: int, last: float, before: RateSettings, now: RateSettings) -> float | None:
    """Return the rate of the next step if it is a leap; None if training continues smoothly. It is a leap if the rate under
    ``now`` differs both from the last step's rate and from the rate under ``before``. ``done``: number of completed steps, at
    least 1; fewer than ``now.steps``. ``last``: the rate of the last completed step."""
    comes = learning_rate(done, now)
    foreseen = learning_rate(done, before) if done < before.steps else last
    smooth = any(abs(comes - rate) <= LEAP * max(rate, comes) for rate in (last, foreseen))
    return None if smooth else comes
