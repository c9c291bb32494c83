"""One run of the engine per model and overrides for all tests of a process; whoever compares with it gets the same one."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from exact import EXACT, OPTIMIZERS, Engine, Reference
from layouts import Result, job, run_engine, run_plain, start, write_text

from hpc_mp.rundir import RunDirectory


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the text of the jobs."""
    directory = tmp_path_factory.mktemp("exact")
    write_text(directory)
    return directory


@pytest.fixture(scope="session")
def engine(place: Path) -> Engine:
    """``engine(model, *overrides)``: the result and the run directory; computed once."""

    @cache
    def compute(model: str, *overrides: str) -> tuple[Result, RunDirectory]:
        spec = job(place, model, overrides)
        run = start(spec)
        return run_engine(spec, run=run), run

    return compute


@pytest.fixture(scope="session")
def reference(place: Path, engine: Engine) -> Reference:
    """``reference(model, optimizer)``: the result of plain transformers; computed once."""

    @cache
    def compute(model: str, optimizer: str = "adamw") -> Result:
        one, _ = engine(model, *OPTIMIZERS[optimizer])  # fills the token cache; one rank must be exact too
        plain = run_plain(job(place, model, OPTIMIZERS[optimizer]))
        assert plain.losses[0] - plain.losses[-1] > 1e-3, "the model must move, or nothing is shown"
        assert one.distance(plain) < EXACT
        return plain

    return compute
