"""The schedules of the learning rate: bit for bit those of transformers, and the three that are our own."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_job import JOB
from transformers import get_scheduler

from hpc_mp.job import resolve
from hpc_mp.job.spec import Train
from hpc_mp.layout.learning_rate import learning_rate, options_of

STEPS = 23
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "constant_with_warmup": [{}],
    "cosine_with_restarts": [{}, {"num_cycles": 3}],
    "polynomial": [{}, {"lr_end": 1e-5, "power": 2.5}, {"lr_end": 0.0}],
    "inverse_sqrt": [{}, {"timescale": 9}],
    "cosine_with_min_lr": [{"min_lr": 1e-5}, {"min_lr_rate": 0.1, "num_cycles": 1.25}],
    "cosine_warmup_with_min_lr": [
        {"min_lr_rate": 0.1}, {"min_lr": 1e-4, "warmup_lr_rate": 0.3}, {"min_lr": 0.0, "num_cycles": 1}],
    "warmup_stable_decay": [
        {"num_decay_steps": 4, "min_lr_ratio": 0.2, "num_cycles": 0.25}, {"num_decay_steps": 7, "decay_type": "1-sqrt"},
        {"num_decay_steps": 3, "num_stable_steps": 2, "min_lr_ratio": 0.1, "warmup_type": "1-sqrt", "decay_type": "linear"},
        {"num_decay_steps": 2, "num_stable_steps": 90, "warmup_type": "cosine"}],
}
CASES = [(name, options, warmup) for name, several in OPTIONS.items() for options in several for warmup in (0, 1, 6)]


def train(schedule: str, options: dict[str, Any], warmup: int, rate: float = 3e-4) -> Train:
    tree = tomllib.loads(JOB)
    tree["train"] |= {"lr_schedule": schedule, "lr_schedule_options": options, "warmup_steps": warmup, "learning_rate": rate,
                      "steps": STEPS}
    return resolve(tree, Path("/")).train


def of_transformers(schedule: str, options: dict[str, Any], warmup: int, rate: float) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    scheduler = get_scheduler(schedule, optimizer, warmup, STEPS, scheduler_specific_kwargs=dict(options))
    rates = []
    for _ in range(STEPS):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(("schedule", "options", "warmup"), CASES)
def test_every_step_has_the_rate_of_transformers(schedule: str, options: dict[str, Any], warmup: int) -> None:
    settings = train(schedule, options, warmup)
    theirs = of_transformers(schedule, options, warmup, settings.learning_rate)
    assert [learning_rate(number, settings) for number in range(STEPS)] == theirs
    late = [learning_rate(number + 1, settings) for number in range(STEPS - 1)]
    assert len({*theirs}) == 1 or late != theirs[:-1], "a schedule that is one step late is another"


def test_every_option_counts() -> None:
    """Each one is in a case above, whose rates are others without it."""
    for schedule, several in OPTIONS.items():
        assert {*options_of(schedule)} == {name for options in several for name in options}
        for options in several:
            for name in options.keys() - {"num_decay_steps", "min_lr", "min_lr_rate"}:
                whole, without = (train(schedule, {key: value for key, value in options.items() if key != left_out}, 6)
                                  for left_out in ("", name))
                assert any(learning_rate(n, whole) != learning_rate(n, without) for n in range(STEPS)), (schedule, name)


@given(st.integers(1, 9), st.integers(10, 40))
def test_the_three_of_our_own_never_train_at_zero(warmup: int, steps: int) -> None:
    """And are those of transformers but for the warm-up, which ends one step earlier there."""
    for schedule in ("constant", "linear", "cosine"):
        settings = train(schedule, {}, warmup).model_copy(update={"steps": steps})
        rates = [learning_rate(number, settings) for number in range(steps)]
        assert min(rates) > 0 and rates[:warmup] == pytest.approx([3e-4 * (n + 1) / warmup for n in range(warmup)], rel=1e-15)
        like = {"constant": ("constant_with_warmup", {}), "linear": ("polynomial", {"lr_end": 0.0}),
                "cosine": ("cosine_with_min_lr", {"min_lr": 0.0})}[schedule]
        theirs = train(*like, warmup).model_copy(update={"steps": steps})
        assert rates[warmup:] == pytest.approx([learning_rate(n, theirs) for n in range(warmup, steps)], rel=1e-12)
        assert rates[0] != learning_rate(0, theirs) == 0
