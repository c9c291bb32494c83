"""Results that all tests of a process share: the engine's for each model and its overrides, and those of plain transformers."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from engines import Crews
from exact import EXACT, Engine, Launched, Plain, Reference, Trained, check_evaluations
from layouts import Result, job, run_whole, start, write_text
from plain import plain as of_plain_transformers
from plain import training_of

from hpc_mp.job import JobSpec, dump_job
from hpc_mp.rundir import RunDirectory


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the text of the jobs, and with held-out rows in which prompts do not count."""
    directory = tmp_path_factory.mktemp("exact")
    write_text(directory)
    rows = (directory / "text.jsonl").read_text().splitlines()[::17]  # more rows than a step has, the last of them short
    (directory / "held-out.jsonl").write_text("\n".join(reversed(rows)) + "\n")
    return directory


@pytest.fixture(scope="session")
def crews() -> Iterator[Crews]:
    running = Crews()
    yield running
    running.end()


@pytest.fixture(scope="session")
def trained(crews: Crews) -> Trained:
    """``trained(job)``: the result of the engine by itself; computed once."""
    known: dict[str, Result] = {}

    def compute(spec: JobSpec) -> Result:
        key = dump_job(spec)
        if key not in known:
            known[key] = crews.train(spec)
        return known[key]

    return compute


@pytest.fixture(scope="session")
def engine(place: Path, trained: Trained) -> Engine:
    """``engine(model, *overrides)``: the same for a job of the common text."""
    return lambda model, *overrides: trained(job(place, model, overrides))


@pytest.fixture(scope="session")
def launched(place: Path) -> Launched:
    """``launched(model, *overrides)``: the directory of a whole run; computed once. Whoever changes it copies it first."""

    @cache
    def compute(model: str, *overrides: str) -> RunDirectory:
        spec = job(place, model, overrides)
        run = start(spec)
        run_whole(spec, run=run)
        return run

    return compute


@pytest.fixture(scope="session")
def plain(crews: Crews) -> Plain:
    """``plain(job, skipped, documents)``: the result of plain transformers; computed once for each training, of any layout."""
    known: dict[object, Result] = {}

    def compute(spec: JobSpec, skipped: tuple[int, ...] = (), documents: tuple[int, ...] = ()) -> Result:
        key = training_of(spec), skipped, documents
        if key not in known:
            (known[key],) = crews.call(1, of_plain_transformers, spec, skipped, documents)
        return known[key]

    return compute


@pytest.fixture(scope="session")
def reference(place: Path, engine: Engine, plain: Plain) -> Reference:
    """``reference(model, *overrides)``: the result of plain transformers, which one rank equals; computed once."""

    @cache
    def compute(model: str, *keys: str) -> Result:
        found, one = plain(job(place, model, keys)), engine(model, *keys)
        assert found.losses[0] - found.losses[-1] > 1e-3, "the model must move, or nothing is shown"
        assert one.distance(found) < EXACT, "one rank must be exact too"
        check_evaluations(one, found)
        return found

    return compute
