"""Checkpoints of a user's own model: saved on one layout and continued on another, all equals plain torch that never stopped."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from beside import STEPS, Reference, apart
from exact import EXACT, WRONG, cases
from lists import lay, listed, plain, trained
from modules import alone, fewer, parts, row, written
from planting import planted
from ranks import run_ranks

from hpc_mp.rundir import problem
from hpc_mp.rundir.checkpoint_index import read_indexes
from hpc_mp.train.step.engine import Engine

MODELS: dict[str, tuple[Callable[..., Any], Callable[..., Reference], int]] = {
    "list": (listed, plain, 7),
    "module": (partial(parts, written), partial(alone, written), 6),
    "fewer cut points": (partial(parts, fewer), partial(alone, written), 4),
    "sequential": (partial(parts, row), partial(alone, row), 7),
}
FOUR = {7: (1, 2, 2, 2), 6: (1, 2, 1, 2), 4: (1, 1, 1, 1)}
WHOLE = range(2 * STEPS)
CASES = [*((model, model, name) for model in ("list", "module", "sequential") for name in ("one", "pp4 zero3")),
         ("module", "fewer cut points", "pp4 zero3")]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``saved(model)``: the checkpoint behind half of the steps; computed once."""

    @cache
    def compute(model: str) -> Path:
        make, _, count = MODELS[model]
        layout, path = lay(2, 2, 2, layers=(3, count - 3), zero=1), tmp_path_factory.mktemp("listed") / "half"
        run_ranks(layout.ranks, trained, layout, make, WHOLE[:STEPS], None, path)
        return path

    return compute


def continued(model: str, name: str, path: Path, before: Callable[[], None] = lambda: None) -> float:
    """Train the other half. Returns the largest difference from all steps without a stop."""
    make, reference, count = MODELS[model]
    layout = lay(layers=(count,)) if name == "one" else lay(pipeline=4, data=2, layers=FOUR[count], microbatches=4, zero=3)

    def rank() -> Any:
        before()
        return trained(layout, make, WHOLE[STEPS:], path)

    return apart(run_ranks(layout.ranks, rank), partial(reference, len(WHOLE)))


@pytest.mark.parametrize(("model", "then", "name"), cases(CASES, (("sequential", "sequential", "one"),)))
def test_a_checkpoint_continues_on_another_layout(saved: Callable[[str], Path], model: str, then: str, name: str) -> None:
    assert continued(then, name, saved(model)) < EXACT


def test_a_checkpoint_has_the_names_of_the_module_and_is_complete(saved: Callable[[str], Path]) -> None:
    path, names = saved("sequential"), {name for name, _ in row().named_parameters()}
    stored = read_indexes(path).tensors.keys()
    assert problem(path) is None and stored == {f"{slot}{name}" for name in names for slot in (
        "", "optimizer.exp_avg.", "optimizer.exp_avg_sq.")}


def test_forgotten_updates_would_be_seen(saved: Callable[[str], Path]) -> None:
    @planted(Engine, "restored")
    def from_the_first(restored: Callable[..., None], engine: Engine, updates: int) -> None:
        restored(engine, 0)

    assert continued("sequential", "one", saved("sequential"), from_the_first) > WRONG
