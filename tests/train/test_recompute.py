"""Recomputation and activation offload change no result: with dropout, under every schedule, ZeRO stage and tensor degree."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import run_engine
from exact import EXACT, GPT2, LAYOUTS, LLAMA, ONE_STEP, WRONG, Engine, Reference, cases
from layouts import job, layout
from planting import planted

from hpc_mp.train.engine import activations, pipeline

RECOMPUTE = ("full", "selective", "every-2")
SCHEDULES = ("1f1b", "gpipe", "zero_bubble", "interleaved_1f1b", "breadth_first", "zero_bubble_v")
SEVERAL = ("interleaved_1f1b", "breadth_first")
DROPOUT = "train.dropout=0.2"
OFFLOAD = 'parallel.offload=["activations"]'


def degrees(schedule: str, zero: int) -> list[str]:
    """Four ranks: two tensor ranks without ZeRO, else two replicas; two stages of two and three layers, or four."""
    virtual = {"virtual_stages": 2} if schedule in SEVERAL else {}
    tensor, data = (1, 2) if zero else (2, 1)
    return layout(tensor, 2, data, schedule=schedule, zero=zero, microbatches=4, **virtual)


CASES: dict[str, tuple[str, list[str]]] = {}
for at, (mode, schedule) in enumerate(product(RECOMPUTE, SCHEDULES)):  # every mode meets every schedule and every ZeRO stage
    dropout = [DROPOUT] if at % 3 == 0 or mode == "selective" else []
    CASES[f"{mode} {schedule} zero{at % 4}"] = (
        (GPT2, LLAMA)[at // 2 % 2], [*degrees(schedule, at % 4), f'parallel.recompute="{mode}"', *dropout])
for at, (schedule, horizon) in enumerate(product(SCHEDULES, (0, 1, 2))):
    if (schedule, horizon) != ("1f1b", 2):  # two stages of it have no more than two computations between
        CASES[f"offload {schedule} horizon {horizon}"] = ((LLAMA, GPT2)[at % 2], [
            *degrees(schedule, (3, 0, 2, 1)[at % 4]), OFFLOAD, f"parallel.offload_horizon={horizon}",
            f'parallel.recompute="{("none", *RECOMPUTE)[(at + at // 4) % 4]}"', *([DROPOUT] if at % 2 else [])])
QUICK = {"full zero_bubble zero2", "selective gpipe zero3", "every-2 interleaved_1f1b zero3", "offload gpipe horizon 1",
         "offload zero_bubble_v horizon 0"}
assert CASES.keys() >= QUICK


@pytest.mark.parametrize("name", cases(CASES, QUICK))
def test_memory_savers_change_nothing(engine: Engine, reference: Reference, name: str) -> None:
    model, overrides = CASES[name]
    expected = engine(model, DROPOUT) if DROPOUT in overrides else reference(model)
    assert engine(model, *overrides).distance(expected) < EXACT


def test_what_is_computed_again_is_the_same_to_the_last_bit(engine: Engine) -> None:
    plain = ["train.dropout=0.2", *LAYOUTS["pp2 gpipe M3"]]
    for more in (['parallel.recompute="full"'], [OFFLOAD, "parallel.offload_horizon=1"]):
        assert engine(LLAMA, *plain, *more).distance(engine(LLAMA, *plain)) == 0.0


# --- negative controls: each breaks one thing, and the same comparison must see it -----------------------------------


@planted(pipeline.Pipeline, "_differentiate")
def clock_stands_still(differentiate: Any, line: pipeline.Pipeline, *args: object) -> None:
    """A backward does not set the clock: what is computed again is dropped as in the last forward."""
    set_clock, line.clock.set = line.clock.set, lambda moment: None  # type: ignore[method-assign]
    differentiate(line, *args)
    line.clock.set = set_clock  # type: ignore[method-assign]


@planted(activations.SavedStorage, "come_back")
def nothing_comes_back(come_back: Any, storage: activations.SavedStorage, here: torch.Tensor) -> None:
    """What returns from the host is not what left."""
    come_back(storage, here)
    here.zero_()


CONTROLS: dict[str, tuple[Callable[[], None], list[str]]] = {
    "full: the clock stands still": (clock_stands_still, [DROPOUT, 'parallel.recompute="full"']),
    "selective: the clock stands still": (clock_stands_still, [DROPOUT, 'parallel.recompute="selective"']),
    "offload: nothing comes back": (nothing_comes_back, [OFFLOAD, "parallel.offload_horizon=1"]),
}


@pytest.mark.parametrize("control", CONTROLS)
def test_a_broken_memory_saver_is_seen(place: Path, engine: Engine, control: str) -> None:
    sabotage, more = CONTROLS[control]
    right = engine(LLAMA, ONE_STEP, *([DROPOUT] if DROPOUT in more else []))
    broken = run_engine(job(place, LLAMA, [*layout(microbatches=3, schedule="gpipe"), *more, ONE_STEP]), before=sabotage)
    assert broken.distance(right) > WRONG
