"""Layouts, and the models that each of them meets in ``make test``; in ``make prove`` every layout meets every model."""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import combinations, product
from math import prod
from pathlib import Path
from typing import Any

import layouts
import pytest
from covering import cover
from layouts import Result, layout
from tables import table

from hpc_mp.job import JobSpec
from hpc_mp.job.layout import layout_of, read_shape
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

PLAIN = ("gpipe", "1f1b", "zero_bubble")  # one stage per rank
SEVERAL = ("interleaved_1f1b", "breadth_first", "zero_bubble_v")  # two: four stages for five layers
GROUPS: dict[str, dict[str, dict[str, Any]]] = {axis: table(__file__, "exact.toml", axis) for axis in (
    "tensor", "pipeline", "zero", "once", "products", "context", "sequence", "ends", "expert")}
KEYS = {name: keys for rows in GROUPS.values() for name, keys in rows.items()}
LAYOUTS = {name: layout(**keys) for name, keys in KEYS.items()}


def keys_of(also: list[str], how: str | dict[str, Any]) -> list[str]:
    """Return the overrides of a layout, which has a name or is given by its degrees and further keys, and others behind them."""
    return [*(LAYOUTS[how] if isinstance(how, str) else layout(**how) if how else ()), *also]


def keyed(rows: Mapping[str, Any]) -> dict[str, tuple[str, list[str]]]:
    """Return the model and the overrides of each row of a model, overrides, and a layout."""
    return {name: (model, keys_of(*row)) for name, (model, *row) in rows.items()}


GPT2, LLAMA, TIED = ("gpt2", "llama", "llama-tied")
GPTJ, MIXTRAL = "gptj", "mixtral"
UNTIED = "gpt2-untied"
MODELS = tuple(model for model in layouts.MODELS if model != UNTIED)  # the untied gpt2 has tests of its own
COVER: dict[str, list[str]] = table(__file__, "exact.toml", "cover")


def disk_of(place: Path) -> str:
    """The key that names a directory on a disk for what is offloaded."""
    (place / "disk").mkdir(exist_ok=True)
    return f'parallel.offload_directory="{place / "disk"}"'


def cases(every: Iterable[Any], quick: Container[Any]) -> list[Any]:
    """Return cases of ``pytest.mark.parametrize``; those that ``quick`` lacks are for ``make prove``."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if case in quick else pytest.mark.prove)
            for case in every]


def together(names: Iterable[str], models: Iterable[str] = MODELS) -> list[tuple[str, str]]:
    """Return every model with every layout of these names, but for layouts that a model refuses."""
    return [(model, name) for model, name in product(models, names) if model == MIXTRAL or name not in GROUPS["expert"]]


def paired(names: Iterable[str], models: Iterable[str] = MODELS, quick: Mapping[str, Sequence[str]] = COVER) -> list[Any]:
    """Return cases of what ``together`` returns; pairs that ``quick`` lacks are for ``make prove``."""
    every = together(names, models)
    return cases(every, [(model, name) for model, name in every if model in quick.get(name, ())])


def pairs(*given: Any, **named: Any) -> pytest.MarkDecorator:
    """Runs a test with the pairs that ``paired`` returns."""
    return pytest.mark.parametrize(("model", "name"), paired(*given, **named))


DEGREES = ("tensor", "pipeline", "data", "context", "expert")
# What cuts the modules of a model; then what is done with its parameters as flat numbers and its layers as units, alike for all
# models but for a weight that two units have.
CUTS = ("tensor", "pipeline", "context", "expert", "context_method", "sequence", "partition")
FLAT = ("data", "zero", "schedule", "reduce", "shard_degree")


def settings_of(keys: Mapping[str, Any]) -> frozenset[tuple[str, Any]]:
    """Return the kind of cut on every axis, with the values that other keys have by default."""
    given = dict.fromkeys((*CUTS, *FLAT)) | dict.fromkeys((*DEGREES, "zero", "microbatches"), 1) | {"schedule": "1f1b"} | keys
    ranks, count, part = given["pipeline"], given["microbatches"], given["partition"]
    given["microbatches"] = "one" if count == 1 else "fewer" if count < ranks else "as many" if count == ranks else "more"
    given["partition"] = part and ("without layers" if 0 in part else "uneven")
    given["zero"] = given["zero"] if given["data"] * given["context"] > 1 else None
    return frozenset((key, str(value)) for key, value in given.items())


def shown(model: str, name: str) -> frozenset[Any]:
    """Return the facts that a proof of a layout with a model shows: that the layout works, that every two settings go together,
    that a setting goes with the model; and that two settings of ``CUTS`` do, with a tied weight also those of ``FLAT``."""
    settings = sorted(settings_of(KEYS[name]))
    met = [setting for setting in settings if setting[0] in CUTS or (model == TIED and setting[0] in FLAT)]
    return frozenset([name, *combinations(settings, 2), *product([model], settings), *product([model], combinations(met, 2))])


def ranks_of(name: str) -> int:
    return prod(KEYS[name].get(axis, 1) for axis in DEGREES[:-1])


def covering(every: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return few of the models with layouts that show all that ``every`` shows, by the number of ranks, so that the same ranks
    train them one after another."""
    return sorted(cover({case: shown(*case) for case in every}, lambda case: 1 + ranks_of(case[1])),
                  key=lambda case: ranks_of(case[1]))


def check_state(spec: JobSpec, result: Result) -> None:
    """Compare the bytes that the first of the ranks with the same parameters holds with the planner's prediction."""
    shape = read_shape(spec)
    predicted = state_bytes(layout_of(spec, shape), shape)
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
    for (step, loss, labels), (own, right, counted) in zip(result.evaluations, expected.evaluations, strict=True):
        assert (step, labels) == (own, counted) and abs(loss - right) < EXACT
