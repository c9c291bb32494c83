"""Models without a table, read from their code in transformers, equal one process of plain transformers in fp64 to 1e-12."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import read_types
from engines import run_engine
from exact import EXACT, WRONG, Plain, Trained, cases
from layouts import JOB, layout
from planting import wrapped
from tables import table

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job import JobSpec, load_job
from hpc_mp.layout.models import reading

LAYOUTS = {"pp2": layout(1, 2, microbatches=3), "zero3": layout(data=2, zero=3), "tp2": layout(2), "tp3": layout(3),
           "tp2 pp2": layout(2, 2, microbatches=3), "sequence": layout(2, sequence="true")}
EXACTLY: list[str] = table(__file__, "read_models.toml", "exact")
QUICK = {("mistral", "tp2 pp2"), ("gpt-sw3", "pp2"), ("deepseek_v2", "zero3"), ("gemma3_text", "sequence")}
REFUSED: dict[str, str] = table(__file__, "read_models.toml", "refused")

Job = Callable[..., JobSpec]  # (type, *overrides)


@pytest.fixture(scope="module")
def job(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    def write(kind: str, *overrides: str) -> JobSpec:
        config = read_types.tiny(kind)
        assert (refusal := read_types.read(config)) is None, refusal
        return load_job(read_types.write_job(place, config, JOB), overrides)

    return write


@pytest.mark.parametrize(("kind", "name"), cases([(kind, name) for kind in EXACTLY for name in LAYOUTS], QUICK))
def test_a_type_equals_one_process(trained: Trained, plain: Plain, job: Job, kind: str, name: str) -> None:
    assert trained(job(kind, *LAYOUTS[name])).distance(plain(job(kind))) < EXACT


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_divided_is_refused(kind: str) -> None:
    refusal = read_types.read(read_types.tiny(kind))
    assert isinstance(refusal, HpcMpError) and REFUSED[kind] in refusal.rule


forgotten_factor = wrapped(reading, "sheet_of", lambda right: lambda config: replace(right(config), head_scale=1.0))


def test_a_forgotten_factor_is_seen(plain: Plain, job: Job) -> None:
    spec = job("cohere")
    assert run_engine(spec, before=forgotten_factor).distance(plain(spec)) > WRONG
