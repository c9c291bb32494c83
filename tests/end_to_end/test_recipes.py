"""Each recipe of ``examples`` has the losses of transformers' Trainer, on the same samples from the same first values."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from example_programs import PATH, ROOT

pytestmark = [pytest.mark.prove, pytest.mark.timeout(900)]

RECIPES = ("gptj", "opt", "mixtral", "bert", "qwen3", "gemma3")
SAME = 5e-3  # of losses: what 60 steps make of rounding in fp32, most for gemma3
Losses = dict[str, list[float]]


def started(where: Path, *words: str) -> str:
    done = subprocess.run([sys.executable, *words], cwd=where, capture_output=True, text=True, timeout=600,
                          env={**os.environ, "PATH": PATH, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def both(where: Path, name: str) -> Losses:
    losses: Losses = json.loads(started(where, "beside_trainer.py", f"{name}/runs/{name}", "--json"))
    return losses


def distance(losses: Losses) -> float:
    ours, theirs = losses.values()
    return max(abs(one - other) for one, other in zip(ours, theirs, strict=True))


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``recipe(name)``: the folder of the examples in which this recipe has run."""

    @cache
    def ran(name: str) -> Path:
        where = tmp_path_factory.mktemp(name)
        for script in ("prepare.py", "beside_trainer.py"):
            shutil.copy(ROOT / "examples" / script, where)
        shutil.copytree(ROOT / "examples" / name, where / name, ignore=shutil.ignore_patterns("runs", "model", "data"))
        started(where, "prepare.py", name)
        started(where, "-m", "hpc_mp", "launch", f"{name}/job.toml", "--on", "local", "--wait")
        return where

    return ran


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_learns_as_the_trainer_does(recipe: Callable[[str], Path], name: str) -> None:
    losses = both(recipe(name), name)
    assert len(losses["hpc-mp"]) == 60 and losses["hpc-mp"][0] - losses["hpc-mp"][-1] > 0.1
    assert distance(losses) < SAME


def test_samples_in_another_order_would_be_seen(recipe: Callable[[str], Path]) -> None:
    job = max(recipe("gptj").glob("gptj/runs/gptj/0*/job.toml"))
    text = job.read_text()
    assert text.count("seed = 1\n") == 1
    job.write_text(text.replace("seed = 1\n", "seed = 2\n"))
    assert distance(both(recipe("gptj"), "gptj")) > 10 * SAME
