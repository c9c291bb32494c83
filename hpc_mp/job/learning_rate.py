"""``train.lr_schedule_options``: the options of the schedules of the learning rate, and their rules."""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.text import shown
from hpc_mp.job import values
from hpc_mp.layout.learning_rate import SCHEDULES, RateSettings, Shape, options_of

NEEDED = {  # schedule -> the options of which it needs one, and an example
    "cosine_with_min_lr": (("min_lr_rate", "min_lr"), "0.1"), "cosine_warmup_with_min_lr": (("min_lr_rate", "min_lr"), "0.1"),
    "warmup_stable_decay": (("num_decay_steps",), "100")}
LEAST = ("min_lr", "lr_end")  # the rates at which schedules end


class ScheduleOptions(values.Section):
    """The options of all schedules; a schedule takes some of them. None: the schedule's default."""

    num_cycles: values.Positive | None = None
    min_lr: values.Rate | None = None
    min_lr_rate: values.Weighting | None = None
    warmup_lr_rate: values.Weighting | None = None
    lr_end: values.Rate | None = None
    power: values.Positive | None = None
    timescale: values.Count | None = None
    num_stable_steps: values.NonNegative | None = None
    num_decay_steps: values.Count | None = None
    warmup_type: Shape | None = None
    decay_type: Shape | None = None
    min_lr_ratio: values.Weighting | None = None


def check_factors(factors: Mapping[str, float], parameters: Iterable[str]) -> None:
    """Check that each pattern of ``train.lr_factors`` matches a parameter that none before it matches. Raises HpcMpError."""
    left = set(parameters)
    for pattern, factor in factors.items():
        matched = {name for name in left if fnmatchcase(name, pattern)}
        if not matched:
            raise HpcMpError(f"train.lr_factors = {{ {shown(pattern)} = {factor:g} }}", "matches no parameter of the model, or "
                             "only such that patterns before it match",
                             f"use a pattern of their names, such as {min(left, default='*')}")
        left -= matched


def check_schedule(train: RateSettings, counted: bool) -> None:
    """Check the options of a schedule. Raises HpcMpError for one that it does not take, one that it needs, two of which it takes
    one, or steps that do not fit. ``counted``: True if the number of steps is known."""
    schedule, taken = train.lr_schedule, options_of(train.lr_schedule)
    options = {name: value for name in ScheduleOptions.model_fields
             if (value := getattr(train.lr_schedule_options, name)) is not None}
    for name, value in options.items():
        if name not in taken:
            takers = " or ".join(f'"{other}"' for other in SCHEDULES if name in options_of(other))
            raise HpcMpError(f"train.lr_schedule_options.{name} = {shown(value)}",
                             f'has no effect with lr_schedule = "{schedule}"', f"leave it out, or use lr_schedule = {takers}")
    needed, example = NEEDED.get(schedule, ((), ""))
    if needed and not options.keys() & {*needed}:
        raise HpcMpError(f'train.lr_schedule = "{schedule}"', f"needs {' or '.join(needed)}",
                         f"set for example lr_schedule_options = {{ {needed[0]} = {example} }}")
    if {"min_lr", "min_lr_rate"} <= options.keys():
        raise HpcMpError("train.lr_schedule_options", "has both min_lr and min_lr_rate", "leave one of them out")
    for name in LEAST:
        if name in taken and (least := options.get(name, 1e-7 if name == "lr_end" else None)) is not None \
                and least >= train.learning_rate:
            raise HpcMpError(f"train.lr_schedule_options.{name} = {least:g}",
                             f"is not less than train.learning_rate = {train.learning_rate:g}, from which the rate falls",
                             f"lower {name} or raise train.learning_rate")
    decay = options.get("num_decay_steps", 0)
    if counted and "num_stable_steps" not in options and train.warmup_steps + decay > train.steps:
        raise HpcMpError(f"train.lr_schedule_options.num_decay_steps = {decay}",
                         f"and warmup_steps = {train.warmup_steps} are more than train.steps = {train.steps}",
                         "lower one of them, or set num_stable_steps for a schedule that goes on beyond train.steps")
