"""Layouts, and the models that each of them meets in ``make test``; in ``make prove`` every layout meets every model."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import layouts
import pytest
from layouts import Result, layout

from hpc_mp.job import JobSpec
from hpc_mp.layout.models import FAMILIES, read_shape, stage_layers
from hpc_mp.planner.memory import state_bytes
from hpc_mp.rundir import RunDirectory

Engine = Callable[..., Result]  # (model, *overrides): the engine by itself, on forked ranks
Trained = Callable[[JobSpec], Result]  # the same for any job
Launched = Callable[..., RunDirectory]  # (model, *overrides): a whole run
Plain = Callable[..., Result]  # (job, skipped, documents): one process of plain transformers
Reference = Callable[..., Result]  # (model, *overrides): the same for the common text

ONE_STEP = "train.steps=1"
HELD_OUT = ('evaluate.files=["held-out.jsonl"]', "evaluate.every=2")
EXACT = 1e-12
WRONG = 1e-6  # a broken layout is off by at least this much

OPTIMIZERS = {
    "adamw": (),
    "sgd": ('train.optimizer="sgd"', "train.learning_rate=0.5", "train.momentum=0.9", "train.clip=0.0"),
}

TENSOR: dict[str, list[str]] = {"tp2": layout(2), "tp4": layout(4)}
PIPELINE_SIZES = ((2, 1), (2, 2), (2, 3), (4, 2), (4, 4), (4, 6))  # stages, microbatches
PLAIN = ("gpipe", "1f1b", "zero_bubble")  # one stage per rank
SEVERAL = ("interleaved_1f1b", "breadth_first", "zero_bubble_v")  # two: four stages for five layers
PIPELINE: dict[str, list[str]] = {
    **{f"pp{p} {schedule} M{m}": layout(pipeline=p, schedule=schedule, microbatches=m)
       for schedule, (p, m) in product(PLAIN, PIPELINE_SIZES)},
    **{f"pp2 {schedule} M{m}": layout(pipeline=2, schedule=schedule, microbatches=m,
                                      **({} if schedule == "zero_bubble_v" else {"virtual_stages": 2}))
       for schedule, m in product(SEVERAL, (2, 4, 6))},
    "pp1 interleaved_1f1b M3": layout(schedule="interleaved_1f1b", microbatches=3, virtual_stages=3),
    "pp2 interleaved_1f1b layers 1+1+1+2": layout(pipeline=2, schedule="interleaved_1f1b", microbatches=2, virtual_stages=2,
                                                  partition=[1, 1, 1, 2]),
    "pp2 layers 1+4": layout(pipeline=2, partition=[1, 4], microbatches=4),
    "pp4 layers 2+1+1+1": layout(pipeline=4, partition=[2, 1, 1, 1], microbatches=4),
}
ZERO: dict[str, list[str]] = {
    **{f"dp{d} zero{z}": layout(data=d, zero=z, microbatches=3) for d, z in product((2, 4), range(4))},
    "dp4 zero1 shard2": layout(data=4, zero=1, shard_degree=2),
    "dp4 zero3 shard2": layout(data=4, zero=3, shard_degree=2, microbatches=2),
}
# Whole gradients add up, and are summed once per step.
ONCE: dict[str, list[str]] = {
    **{f"dp2 zero{zero} once": layout(data=2, zero=zero, microbatches=3, reduce="step") for zero in (2, 3)},
    **{f"pp2 dp2 zero{zero} {schedule} once": layout(pipeline=2, data=2, zero=zero, microbatches=4, schedule=schedule,
                                                     reduce="step", **more)
       for zero, (schedule, more) in product((2, 3), (
           ("1f1b", {}), ("zero_bubble", {}), ("interleaved_1f1b", {"virtual_stages": 2}), ("zero_bubble_v", {})))},
    "dp4 zero3 shard2 once": layout(data=4, zero=3, shard_degree=2, microbatches=3, reduce="step"),
    "pp2 dp4 zero2 shard2 zero_bubble once": layout(pipeline=2, data=4, zero=2, shard_degree=2, microbatches=2,
                                                    schedule="zero_bubble", reduce="step"),
    "sp2 pp2 dp2 zero3 once": layout(2, 2, 2, zero=3, microbatches=3, sequence="true", reduce="step"),
    "dp2 zero3 every-2 once": layout(data=2, zero=3, microbatches=3, recompute="every-2", reduce="step"),
    "pp3 dp2 zero3 layers 0+5+0 once": layout(pipeline=3, data=2, partition=[0, 5, 0], microbatches=3, zero=3, reduce="step"),
    "dp2 zero3 M1 once": layout(data=2, zero=3, microbatches=1, reduce="step"),
}
PRODUCTS: dict[str, list[str]] = {
    **{f"tp2 pp2 dp2 zero{z}": layout(2, 2, 2, zero=z, microbatches=3) for z in range(4)},
    "tp2 dp2 zero3": layout(2, data=2, zero=3, microbatches=2),
    "tp2 dp3 zero1": layout(2, data=3, zero=1),  # 307 rows cut twice, unevenly
    "tp4 dp2 zero1": layout(4, data=2, zero=1),
    "pp2 dp2 zero2": layout(pipeline=2, data=2, zero=2, microbatches=4),
    "tp2 pp4 zero1": layout(2, 4, microbatches=6),
    "tp2 pp2 M3": layout(2, 2, microbatches=3),
    "tp2 pp2 dp2 zero2 interleaved_1f1b": layout(2, 2, 2, zero=2, microbatches=2, schedule="interleaved_1f1b", virtual_stages=2),
    "tp2 pp2 dp2 zero3 zero_bubble": layout(2, 2, 2, zero=3, microbatches=3, schedule="zero_bubble"),
    "tp2 pp2 dp2 zero1 zero_bubble_v": layout(2, 2, 2, zero=1, microbatches=3, schedule="zero_bubble_v"),
    "pp2 dp2 zero3 zero_bubble_v": layout(pipeline=2, data=2, zero=3, microbatches=4, schedule="zero_bubble_v"),
    "pp2 dp2 zero2 breadth_first": layout(pipeline=2, data=2, zero=2, microbatches=3, schedule="breadth_first", virtual_stages=2),
    "pp2 dp4 zero2 shard2": layout(pipeline=2, data=4, zero=2, microbatches=2, shard_degree=2),
    "dp4 zero2 shard1": layout(data=4, zero=2, shard_degree=1, microbatches=2),
}
CONTEXT: dict[str, list[str]] = {
    **{f"cp{c} {method}": layout(context=c, context_method=f'"{method}"')
       for c, method in ((2, "ring"), (4, "ring"), (2, "ulysses"), (8, "ulysses"))},  # 8: more than key-value heads
    **{f"tp2 cp2 {method}": layout(2, context=2, context_method=f'"{method}"') for method in ("ring", "ulysses")},
    "tp2 pp2 cp2 ring": layout(2, 2, context=2, microbatches=2),
    **{f"sp2 cp2 {method} zero2": layout(
        2, data=2, context=2, zero=2, context_method=f'"{method}"', sequence="true", microbatches=2)
       for method in ("ring", "ulysses")},
    **{f"pp2 cp2 {method} {schedule}": layout(
        pipeline=2, context=2, context_method=f'"{method}"', schedule=schedule, microbatches=2)
       for method, schedule in product(("ring", "ulysses"), ("1f1b", "zero_bubble", "zero_bubble_v"))},
    "pp2 cp2 ring interleaved_1f1b": layout(pipeline=2, context=2, schedule="interleaved_1f1b", virtual_stages=2, microbatches=2),
    **{f"dp2 cp2 zero{z}": layout(data=2, context=2, zero=z, microbatches=3) for z in range(4)},
    "dp2 cp2 zero3 once": layout(data=2, context=2, zero=3, microbatches=3, reduce="step"),
    "dp2 cp2 zero1 shard2": layout(data=2, context=2, zero=1, shard_degree=2),
    "dp2 cp2 ulysses zero3 shard2 CDPT": [
        *layout(data=2, context=2, zero=3, context_method='"ulysses"', shard_degree=2, microbatches=2), 'parallel.order="CDPT"'],
}
SEQUENCE: dict[str, list[str]] = {
    "sp2": layout(2, sequence="true"),
    "sp4 dp2 zero1": layout(4, data=2, zero=1, sequence="true"),
    **{f"sp2 dp2 zero{zero}": layout(2, data=2, zero=zero, microbatches=3, sequence="true") for zero in range(4)},
    "sp2 pp2 zero_bubble": layout(2, 2, microbatches=3, schedule="zero_bubble", sequence="true"),
    "sp2 pp2 dp2 zero3 interleaved_1f1b": layout(2, 2, 2, zero=3, microbatches=2, schedule="interleaved_1f1b", virtual_stages=2,
                                                 sequence="true"),
    "sp2 pp2 dp2 zero2 zero_bubble_v": layout(2, 2, 2, zero=2, microbatches=3, schedule="zero_bubble_v", sequence="true"),
}
# The embedding alone on a stage, the head alone, and both.
ENDS: dict[str, list[str]] = {
    "pp2 layers 0+5": layout(pipeline=2, partition=[0, 5], microbatches=3),
    "pp2 layers 5+0": layout(pipeline=2, partition=[5, 0], microbatches=3, schedule="gpipe"),
    "pp3 zero_bubble layers 0+5+0": layout(pipeline=3, partition=[0, 5, 0], microbatches=4, schedule="zero_bubble"),
    "pp3 dp2 zero1 layers 0+5+0": layout(pipeline=3, data=2, partition=[0, 5, 0], microbatches=3, zero=1),
    "pp3 dp2 zero3 layers 0+5+0": layout(pipeline=3, data=2, partition=[0, 5, 0], microbatches=3, zero=3),
    "tp2 pp2 sequence layers 0+5": layout(2, 2, partition=[0, 5], microbatches=3, sequence="true"),
    "pp2 interleaved_1f1b layers 0+2+3+0": layout(pipeline=2, partition=[0, 2, 3, 0], virtual_stages=2, microbatches=4,
                                                  schedule="interleaved_1f1b"),
    "pp2 dp2 zero2 breadth_first layers 0+2+3+0": layout(pipeline=2, data=2, partition=[0, 2, 3, 0], virtual_stages=2,
                                                         microbatches=2, zero=2, schedule="breadth_first"),
    "pp2 dp2 zero3 zero_bubble_v layers 0+2+3+0": layout(pipeline=2, data=2, partition=[0, 2, 3, 0], microbatches=2, zero=3,
                                                         schedule="zero_bubble_v"),
    "pp7 as many stages as there can be": layout(pipeline=7, microbatches=3),
}
# For the model with five experts: three and two of them, or three of which the last has one.
EXPERT: dict[str, list[str]] = {
    **{f"ep2 zero{zero}": layout(data=2, expert=2, zero=zero, microbatches=2) for zero in range(4)},
    **{f"ep2 dp4 zero{zero}": layout(data=4, expert=2, zero=zero, microbatches=2) for zero in range(4)},
    "ep2 dp4 zero1 shard2": layout(data=4, expert=2, zero=1, shard_degree=2),
    "ep2 dp4 zero3 shard2": layout(data=4, expert=2, zero=3, shard_degree=2, microbatches=2),
    "ep2 dp6 zero2 shard2": layout(data=6, expert=2, zero=2, shard_degree=2, microbatches=2),  # three with the same: no shards
    "ep3 zero1": layout(data=3, expert=3, zero=1),
    "tp2 ep2 zero2": layout(2, data=2, expert=2, zero=2, microbatches=3),
    "sp2 ep2 zero3": layout(2, data=2, expert=2, zero=3, microbatches=2, sequence="true"),
    "sp2 ep2 experts whole": layout(2, data=2, expert=2, sequence="true", tensor_modules=["*.self_attn", "lm_head"]),
    "pp2 ep2 1f1b": layout(pipeline=2, data=2, expert=2, zero=0, microbatches=3),
    "pp2 ep2 zero_bubble": layout(pipeline=2, data=2, expert=2, zero=2, microbatches=3, schedule="zero_bubble"),
    "pp2 ep2 zero3 zero_bubble_v": layout(pipeline=2, data=2, expert=2, zero=3, microbatches=2, schedule="zero_bubble_v"),
    "tp2 pp2 ep2 zero3": layout(2, 2, 2, expert=2, zero=3, microbatches=3),
    "tp2 pp2 ep2 zero1 interleaved_1f1b": layout(2, 2, 2, expert=2, zero=1, microbatches=2, schedule="interleaved_1f1b",
                                                 virtual_stages=2),
    "ep2 spread": layout(2, 2, 2, expert=2, zero=1, microbatches=2, order="spread"),
    "ep2 zero3 full": layout(data=2, expert=2, zero=3, microbatches=2, recompute="full"),
    "pp2 ep2 every-2 zero_bubble": layout(pipeline=2, data=2, expert=2, microbatches=2, schedule="zero_bubble",
                                          recompute="every-2"),
    "ep2 dp4 zero3 once": layout(data=4, expert=2, zero=3, microbatches=2, reduce="step"),
    "ep2 offload": layout(data=2, expert=2, offload=["optimizer"], microbatches=2),
}
LAYOUTS = TENSOR | PIPELINE | ZERO | ONCE | PRODUCTS | CONTEXT | SEQUENCE | ENDS | EXPERT

GPT2, LLAMA, TIED = FIRST = ("gpt2", "llama", "llama-tied")
GPTJ, MIXTRAL = "gptj", "mixtral"
OWN_ATTENTION = tuple(name for name, family in FAMILIES.items() if family.own_attention)
WHOLE_SAMPLES = (*OWN_ATTENTION, MIXTRAL)  # which has a window: no context layouts
UNTIED = "gpt2-untied"
MODELS = tuple(model for model in layouts.MODELS if model != UNTIED)  # the untied gpt2 has tests of its own
# The models that a layout runs with in ``make test``: every kind of cut, schedule and ZeRO stage once or twice, ties where
# embedding and head lie on different stages or are cut. ``make prove`` has all pairs.
COVER: dict[str, tuple[str, ...]] = {
    "tp2": (GPT2, LLAMA, GPTJ, MIXTRAL), "tp4": (LLAMA,),
    "pp2 gpipe M3": (GPT2,), "pp4 gpipe M6": (LLAMA,),
    "pp2 1f1b M1": (TIED,), "pp2 1f1b M3": (GPT2,), "pp4 1f1b M6": (LLAMA,),
    "pp2 zero_bubble M3": (LLAMA,), "pp4 zero_bubble M6": (TIED,),
    "pp2 interleaved_1f1b M4": (GPT2,), "pp2 breadth_first M4": (LLAMA,), "pp2 zero_bubble_v M4": (TIED,),
    "pp1 interleaved_1f1b M3": (TIED,), "pp2 layers 1+4": (LLAMA, GPTJ, MIXTRAL),
    "pp2 layers 0+5": (LLAMA,), "pp3 dp2 zero3 layers 0+5+0": (TIED,), "pp2 dp2 zero3 zero_bubble_v layers 0+2+3+0": (LLAMA,),
    "dp2 zero0": (GPT2,), "dp2 zero1": (LLAMA,), "dp2 zero2": (GPT2,), "dp2 zero3": (TIED, MIXTRAL),
    "dp4 zero1": (GPT2,), "dp4 zero3 shard2": (TIED,),
    "pp2 dp2 zero2 1f1b once": (TIED,), "pp2 dp2 zero3 interleaved_1f1b once": (TIED,),
    "pp2 dp2 zero3 zero_bubble once": (LLAMA,), "dp4 zero3 shard2 once": (GPT2,),
    "tp2 pp2 dp2 zero1": (TIED,), "tp2 pp2 dp2 zero3": (LLAMA,), "tp2 dp3 zero1": (LLAMA,),
    "tp2 pp2 dp2 zero2 interleaved_1f1b": (GPT2,), "tp2 pp2 dp2 zero3 zero_bubble": (TIED,),
    "pp2 dp2 zero3 zero_bubble_v": (TIED,), "cp2 ring": (GPT2,), "cp4 ring": (TIED,), "tp2 cp2 ulysses": (TIED,),
    "dp2 cp2 zero3": (LLAMA,), "sp2 cp2 ring zero2": (LLAMA,),
    "sp2": (GPT2,), "sp2 dp2 zero3": (TIED,), "sp2 pp2 zero_bubble": (GPT2,), "pp2 ep2 zero_bubble": (MIXTRAL,),
}


def disk_of(place: Path) -> str:
    """The key that names a directory on a disk for what is offloaded."""
    (place / "disk").mkdir(exist_ok=True)
    return f'parallel.offload_directory="{place / "disk"}"'


def cases(every: Iterable[Any], quick: Container[Any]) -> list[Any]:
    """Return cases of ``pytest.mark.parametrize``; those that ``quick`` lacks are for ``make prove``."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if case in quick else pytest.mark.prove)
            for case in every]


def paired(
    names: Iterable[str], models: Iterable[str] = MODELS, quick: Mapping[str, tuple[str, ...]] = COVER,
) -> list[Any]:
    """Return every model with every layout of these names, but for layouts that a model refuses; pairs that ``quick`` lacks are
    for ``make prove``."""
    every = [(model, name) for model, name in product(models, names)
             if (model not in WHOLE_SAMPLES or name not in CONTEXT) and (model == MIXTRAL or name not in EXPERT)]
    return cases(every, [(model, name) for model, name in every if model in quick.get(name, ())])


def pairs(*given: Any, **named: Any) -> pytest.MarkDecorator:
    """Runs a test with the pairs that ``paired`` returns."""
    return pytest.mark.parametrize(("model", "name"), paired(*given, **named))


def check_state(spec: JobSpec, result: Result) -> None:
    """Compare the bytes that the first of the ranks with the same parameters holds with the planner's prediction."""
    shape = read_shape(spec)
    predicted = state_bytes(shape, spec, stage_layers(spec, shape))
    fullest = [rank for rank in result.ranks if rank.place.dp == rank.place.cp == 0]
    assert len(fullest) == spec.parallel.tensor * spec.parallel.pipeline
    for rank in result.ranks:
        told, held = predicted[rank.place.pp, rank.place.tp], rank.memory
        assert all(held[kind] <= getattr(told, kind) for kind in ("optimizer", "host", "disk"))
    for rank in fullest:
        told, held = predicted[rank.place.pp, rank.place.tp], rank.memory
        assert (held["optimizer"], held["host"], held["disk"]) == (told.optimizer, told.host, told.disk)
        if "parameters" in spec.parallel.offload:
            assert held["parameters"] == 0, "none of them is on the device between two steps"
        elif spec.parallel.zero <= 2:  # ZeRO-3 holds more of these while a step computes
            assert held["parameters"] == told.parameters
        if spec.reduce == "step":  # else a rank holds more of these
            assert held["gradients"] == told.gradients


def check_evaluations(result: Result, expected: Result) -> None:
    """Compare the loss and the number of labels of every evaluation."""
    for (step, loss, labels), (own, right, counted) in zip(result.evaluations, expected.evaluations, strict=True):
        assert (step, labels) == (own, counted) and abs(loss - right) < EXACT
