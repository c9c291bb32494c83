"""Layouts, and the models that each of them meets in ``make test``; in ``make prove`` every layout meets every model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import product

import layouts
import pytest
from layouts import Result, layout

from hpc_mp.job.checks import BUILT_SCHEDULES
from hpc_mp.rundir import RunDirectory

Engine = Callable[..., tuple[Result, RunDirectory]]  # (model, *overrides): a run of forked ranks
Reference = Callable[..., Result]  # (model, optimizer): one process of plain transformers

EXACT = 1e-12
WRONG = 1e-6  # a broken layout is off by at least this much

OPTIMIZERS = {
    "adamw": (),
    "sgd": ('train.optimizer="sgd"', "train.learning_rate=0.5", "train.momentum=0.9", "train.clip=0.0"),
}

TENSOR: dict[str, list[str]] = {"tp2": layout(2), "tp4": layout(4)}
PIPELINE_SIZES = ((2, 1), (2, 2), (2, 3), (4, 2), (4, 4), (4, 6))  # stages, microbatches
PIPELINE: dict[str, list[str]] = {
    **{f"pp{p} {schedule} M{m}": layout(pipeline=p, schedule=schedule, microbatches=m)
       for schedule, (p, m) in product(BUILT_SCHEDULES, PIPELINE_SIZES)},
    "pp2 layers 1+4": layout(pipeline=2, partition=[1, 4], microbatches=4),
    "pp4 layers 2+1+1+1": layout(pipeline=4, partition=[2, 1, 1, 1], microbatches=4),
}
ZERO: dict[str, list[str]] = {
    **{f"dp{d} zero{z}": layout(data=d, zero=z, microbatches=3) for d, z in product((2, 4), range(4))},
    "dp4 zero1 shard2": layout(data=4, zero=1, shard_degree=2),
    "dp4 zero3 shard2": layout(data=4, zero=3, shard_degree=2, microbatches=2),
}
PRODUCTS: dict[str, list[str]] = {
    **{f"tp2 pp2 dp2 zero{z}": layout(2, 2, 2, zero=z, microbatches=3) for z in range(4)},
    "tp2 dp2 zero3": layout(2, data=2, zero=3, microbatches=2),
    "tp2 dp3 zero1": layout(2, data=3, zero=1),  # 307 rows cut twice, unevenly
    "tp4 dp2 zero1": layout(4, data=2, zero=1),
    "pp2 dp2 zero2": layout(pipeline=2, data=2, zero=2, microbatches=4),
    "tp2 pp4 zero1": layout(2, 4, microbatches=6),
}
LAYOUTS = TENSOR | PIPELINE | ZERO | PRODUCTS

GPT2, LLAMA, TIED = FIRST = ("gpt2", "llama", "llama-tied")
UNTIED = "gpt2-untied"
MODELS = tuple(model for model in layouts.MODELS if model != UNTIED)  # the untied gpt2 has tests of its own
OTHERS = tuple(model for model in MODELS if model not in FIRST)  # meet one layout of each kind in ``make test``
# The models that a layout runs with in ``make test``. Every schedule, every ZeRO stage and every product meets gpt2 and llama
# or the tied llama; ties matter where embedding and head lie on different stages or are cut.
COVER: dict[str, tuple[str, ...]] = {
    "tp2": MODELS, "tp4": (GPT2, LLAMA),
    **{f"pp{p} {schedule} M{m}": (FIRST[(at + p // 4 + 2 * turn) % 3],)  # each of these once with 2 stages, once with 4
       for turn, schedule in enumerate(BUILT_SCHEDULES) for at, (p, m) in enumerate(PIPELINE_SIZES)},
    "pp2 layers 1+4": (LLAMA, TIED, *OTHERS), "pp4 layers 2+1+1+1": (GPT2,),
    "dp2 zero0": (GPT2,), "dp2 zero1": (LLAMA,), "dp2 zero2": (GPT2,), "dp2 zero3": (LLAMA, TIED, *OTHERS),
    "dp4 zero0": (LLAMA,), "dp4 zero1": (GPT2,), "dp4 zero2": (LLAMA,), "dp4 zero3": (GPT2,),
    "dp4 zero1 shard2": (GPT2,), "dp4 zero3 shard2": (TIED,),
    "tp2 pp2 dp2 zero0": (LLAMA,), "tp2 pp2 dp2 zero1": (TIED,), "tp2 pp2 dp2 zero2": (GPT2,), "tp2 pp2 dp2 zero3": (LLAMA,),
    "tp2 dp2 zero3": (TIED,), "tp2 dp3 zero1": (LLAMA,), "pp2 dp2 zero2": (TIED,),
}


def pairs(
    names: Iterable[str], models: Iterable[str] = MODELS, quick: Mapping[str, tuple[str, ...]] = COVER,
) -> pytest.MarkDecorator:
    """Runs a test with every model and every layout of these names; pairs that ``quick`` lacks are for ``make prove``."""
    return pytest.mark.parametrize(("model", "name"), [
        pytest.param(model, name, id=f"{model}-{name}", marks=() if model in quick.get(name, ()) else pytest.mark.prove)
        for model, name in product(models, names)])
