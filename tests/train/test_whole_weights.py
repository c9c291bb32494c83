"""Muon and Adafactor: on every layout the parameters that torch's own optimizers make of whole matrices on one process."""

import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engines import run_engine
from exact import EXACT, LAYOUTS, ONE_STEP, WRONG, Engine, Launched, Plain, Reference, cases
from layouts import job, relaunch, run_whole
from planting import plant, wrapped

from hpc_mp.job.layout import layout_of, read_shape
from hpc_mp.planner.memory import state_bytes
from hpc_mp.rundir import RunDirectory
from hpc_mp.train.optimizer import whole_weights

MUON = ('train.optimizer="muon"',)
ADAFACTOR = ('train.optimizer="adafactor"', "train.learning_rate=0.05", 'train.lr_factors={"*.mlp.*" = 0.5}')
ROWS = [
    ("llama", "tp2", MUON), ("gpt2", "dp2 zero3", MUON), ("llama", "tp2", ADAFACTOR), ("llama-tied", "dp2 zero3", ADAFACTOR),
    ("llama", "tp2 pp2 dp2 zero1", MUON), ("llama-tied", "tp2 pp2 dp2 zero3", ADAFACTOR), ("gpt2", "sp2 dp2 zero2", MUON),
    ("mixtral", "dp2 zero1", MUON), ("mixtral", "tp2", ADAFACTOR), ("mixtral", "ep2 zero1", MUON),
    *(("llama with two key-value heads", name, MUON) for name in ("tp4", "tp3")),
    ("llama", "cp2 ring", ADAFACTOR), ("gpt2", "dp4 zero3 shard2", MUON),
]
QUICK = ROWS[:4]


@pytest.mark.parametrize(("model", "name", "keys"), cases(ROWS, QUICK))
def test_every_layout_updates_as_torch_does(engine: Engine, reference: Reference, model: str, name: str,
                                            keys: tuple[str, ...]) -> None:
    assert engine(model, *keys, *LAYOUTS[name]).distance(reference(model, *keys)) < EXACT


def first_tensor_rank_alone() -> None:
    """Owners update what they have of a matrix themselves, and take the rest for zeros."""
    wrapped(whole_weights, "_exchange", lambda exchange: lambda like, sent, rows, lengths, axis: [
        [values if number == 0 else torch.zeros_like(values) for values in row]
        for number, row in enumerate(exchange(like, sent, rows, lengths, axis))] if rows == 2 else exchange(
            like, sent, rows, lengths, axis))()


PLANTED: dict[str, tuple[tuple[str, ...], str, Callable[[], None]]] = {
    "a matrix without the rows of other ranks": (MUON, "tp2", first_tensor_rank_alone),
    "statistics of a part": (ADAFACTOR, "dp2 zero3", first_tensor_rank_alone),
    "one rate for all": (ADAFACTOR, "tp2", wrapped(whole_weights.Owned, "update", lambda update: lambda self, *given: (
        update(replace(self, factor=1.0), *given)))),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_seen(place: Path, engine: Engine, fault: str) -> None:
    keys, name, spoil = PLANTED[fault]
    spoilt = run_engine(job(place, "llama", [ONE_STEP, *keys, *LAYOUTS[name]]), before=spoil)
    assert spoilt.distance(engine("llama", ONE_STEP, *keys)) > WRONG


RESUMED = [("llama", MUON, "dp2 zero3", "tp2"), ("llama-tied", ADAFACTOR, "tp2", "pp2 1f1b M3"),
           ("llama-tied", ADAFACTOR, "tp2 pp2 dp2 zero3", "one")]


@pytest.mark.parametrize(("model", "keys", "before", "after"), cases(RESUMED, RESUMED[:2]))
def test_resume_on_another_layout_is_exact(place: Path, engine: Engine, launched: Launched, model: str, keys: tuple[str, ...],
                                           before: str, after: str, tmp_path: Path) -> None:
    first = launched(model, *keys, *LAYOUTS[before], "train.steps=3")
    shutil.copytree(first.path, tmp_path / "copy", symlinks=True)
    resumed = relaunch(RunDirectory(tmp_path / "copy"), place, model, [*keys, *LAYOUTS.get(after, ()), "train.steps=6"])
    assert resumed.distance(engine(model, *keys, "train.steps=6")) < EXACT


@pytest.mark.parametrize(("model", "name", "keys"), [ROWS[0], ROWS[1], ROWS[3]])
def test_the_planner_counts_the_state_of_owners(place: Path, engine: Engine, model: str, name: str,
                                                keys: tuple[str, ...]) -> None:
    spec = job(place, model, [*keys, *LAYOUTS[name]])
    shape = read_shape(spec)
    predicted, held = state_bytes(layout_of(spec, shape), shape), dict[tuple[int, int], int]()
    for rank in engine(model, *keys, *LAYOUTS[name]).ranks:
        at = rank.place.pp, rank.place.tp
        held[at] = max(held.get(at, 0), rank.memory["optimizer"])
    assert held == {at: told.optimizer for at, told in predicted.items()}
    whole = engine(model, *keys).ranks[0].memory["optimizer"]
    assert max(held.values()) < 0.6 * whole, "two ranks share the state out"


@pytest.mark.parametrize(("keys", "name"), cases([(MUON, "tp2"), (ADAFACTOR, "dp2 zero3")], [(MUON, "tp2")]))
def test_a_skipped_step_changes_nothing(place: Path, plain: Plain, keys: tuple[str, ...], name: str) -> None:
    found = run_whole(job(place, "llama", [*keys, *LAYOUTS[name]]), before=plant(math.nan, 1, 1))
    right = plain(job(place, "llama", keys), skipped=(1,))
    assert found.norms[1] is None and replace(found, norms=right.norms).distance(right) < EXACT
