"""Job files with [sweep] and with [program]: which runs they mean, what they say, and what they refuse."""

import itertools
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_job import JOB
from tables import table

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job import JobSpec, ProgramSpec, dump_job, load_any, load_job, load_sweep, resolve_any
from hpc_mp.job.sweep import MOST_RUNS, Sweep, runs_of, summary_of, words_of

PLAIN = table(__file__, "sweep.toml", "plain")
KEYS = ("train.seed", "train.learning_rate", "train.clip", "model.config.n_layer")


def written(folder: Path, sweep: str) -> Path:
    path = folder / "job.toml"
    path.write_text(PLAIN + sweep)
    return path


@given(st.dictionaries(st.sampled_from(KEYS), st.lists(st.integers(0, 99), min_size=1, max_size=5, unique=True), min_size=1))
def test_a_grid_is_every_combination_once_the_last_key_fastest(grid: dict[str, list[int]]) -> None:
    found = runs_of(Sweep(grid=grid))
    assert [tuple(values.values()) for values in found] == list(itertools.product(*grid.values()))
    assert all(list(values) == list(grid) for values in found)
    assert summary_of(Sweep(grid=grid), found).startswith(f"{len(found)} run")
    assert runs_of(Sweep(runs=found)) == found, "a grid is the runs that it lists"


@pytest.mark.parametrize("sweep", table(__file__, "sweep.toml", "ways"))
def test_every_way_to_write_it_means_the_same_runs(tmp_path: Path, sweep: str) -> None:
    specs = load_sweep(written(tmp_path, sweep))
    assert [(spec.train.seed, spec.train.learning_rate) for spec in specs] == [(1, 1e-3), (1, 3e-4), (2, 1e-3), (2, 3e-4)]
    assert words_of(runs_of(specs[0].sweep)[1]) == "train.seed = 1, train.learning_rate = 0.0003"
    assert {spec.train.global_batch for spec in specs} == {8}, "all else is as in the file"


def test_values_of_every_kind(tmp_path: Path) -> None:
    layers = [{"model_type": "gpt2", "n_layer": number, "n_embd": 32, "n_head": 2, "vocab_size": 64} for number in (1, 3)]
    specs = load_sweep(JobSpec.model_validate({
        "model": {"config": layers[0]}, "data": {"files": ["x"], "sequence_length": 8}, "train": {"steps": 1, "global_batch": 2},
        "sweep": {"grid": {"model.config": layers, "train.betas": [[0.9, 0.95], [0.9, 0.999]], "train.epochs": [2]}}}))
    assert [(spec.model.config or {})["n_layer"] for spec in specs] == [1, 1, 3, 3]
    assert [spec.train.betas[1] for spec in specs] == [0.95, 0.999] * 2
    assert {spec.train.epochs for spec in specs} == {2}, "epochs take the place of the file's steps"


def test_the_job_file_of_a_run_is_that_of_the_run_alone(tmp_path: Path) -> None:
    first, second = load_sweep(written(tmp_path, "[sweep]\ngrid = { train.seed = [1, 2] }"))
    (tmp_path / "run.toml").write_text(dump_job(second))
    assert load_job(tmp_path / "run.toml").train.seed == 2 and load_sweep(tmp_path / "run.toml")[0].sweep == Sweep()
    assert first.sweep.given and len(runs_of(first.sweep)) == 2


def test_runs_of_release_0_1_are_read(tmp_path: Path) -> None:
    """Each of their job files names an empty ``slurm.array``."""
    assert load_job(written(tmp_path, "[slurm]\narray = []\nretries = 5\n")).slurm.retries == 5


def test_a_grid_of_the_command_line_takes_the_place_of_the_files(tmp_path: Path) -> None:
    for grid in ('"train.seed" = [1, 2], "train.clip" = [1.0]', "train = { seed = [1, 2], clip = [1.0] }"):
        specs = load_sweep(written(tmp_path, f"[sweep]\ngrid = {{ {grid} }}"), ["sweep.grid.train.seed=[7, 8, 9]"])
        assert [spec.train.seed for spec in specs] == [7, 8, 9]


REFUSED = tomllib.loads(Path(__file__).with_name("refused.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("mistake", REFUSED["sweep"])
def test_what_it_refuses(tmp_path: Path, mistake: str) -> None:
    text, value, words = REFUSED["sweep"][mistake]
    with pytest.raises(HpcMpError) as refused:
        load_sweep(written(tmp_path, f"[sweep]\n{text}\n"))
    assert value in refused.value.value and words in str(refused.value)


@pytest.mark.parametrize(("override", "words"), [
    ("train.seed=3", "has no effect: each run of the sweep has its own train.seed"), ("train.steps=7", "")])
def test_overrides_beside_a_sweep(tmp_path: Path, override: str, words: str) -> None:
    path = written(tmp_path, "[sweep]\ngrid = { train.seed = [1, 2] }")
    if words:
        with pytest.raises(HpcMpError, match=words):
            load_sweep(path, [override])
    else:
        assert [spec.train.steps for spec in load_sweep(path, [override])] == [7, 7]


@pytest.mark.parametrize("override", ["sweep.grid.train.seed=[1, 2]", 'sweep.grid={ "train.seed" = [1, 2] }'])
def test_a_sweep_of_the_command_line(tmp_path: Path, override: str) -> None:
    assert [spec.train.seed for spec in load_sweep(written(tmp_path, ""), [override])] == [1, 2]


@pytest.mark.parametrize(("keys", "values", "runs"), [(9, 1000, "1,000,000,000,000,000,000,000,000,000"), (2, 34, "1,156")])
def test_too_many_runs_are_refused_before_they_are_made(keys: int, values: int, runs: str) -> None:
    huge: dict[str, Any] = {f"train.k{number}": list(range(values)) for number in range(keys)}
    with pytest.raises(HpcMpError, match=f"makes {runs} runs, but {MOST_RUNS:,} are the maximum"):
        runs_of(Sweep(grid=huge))


TEXT = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=30)


def program(**sections: Any) -> ProgramSpec:
    spec = resolve_any({"program": {"command": ["./solve"]}} | sections, Path("/home/ann"))
    assert isinstance(spec, ProgramSpec)
    return spec


def test_a_job_file_of_a_program(tmp_path: Path) -> None:
    file = tmp_path / "a dir" / "job.toml"
    file.parent.mkdir()
    file.write_text('[job]\nnodes = 2\n[program]\ncommand = ["python", "train.py", "a b"]\ndirectory = "code"\n'
                    'environment = { A = "$HOME;" }\n')
    spec = load_any(file, ["job.ranks_per_node=3", "program.silent_limit=60"])
    assert isinstance(spec, ProgramSpec) and spec.ranks == 6
    assert spec.program.command == ("python", "train.py", "a b") and spec.program.environment == {"A": "$HOME;"}
    assert spec.program.directory == str(tmp_path / "a dir" / "code") and spec.program.silent_limit == 60
    assert program().program.directory == "/home/ann", "where the job file lies"


@given(st.lists(TEXT, max_size=5), st.dictionaries(st.from_regex(r"[A-Z_a-z]\w{0,9}", fullmatch=True).filter(str.isascii), TEXT))
def test_what_is_written_into_the_run_is_read_as_it_was(arguments: list[str], environment: dict[str, str]) -> None:
    try:
        spec = program(program={"command": ["x", *arguments], "environment": environment})
    except HpcMpError as refused:
        assert "program.environment" in refused.value
        return
    again = resolve_any(tomllib.loads(dump_job(spec)), Path("/elsewhere"))
    assert isinstance(again, ProgramSpec) and again.program == spec.program and again.job == spec.job


@pytest.mark.parametrize("words", REFUSED["program"])
def test_what_is_refused(words: str) -> None:
    with pytest.raises(HpcMpError) as refused:
        program(**REFUSED["program"][words])
    assert words in str(refused.value) and refused.value.remedy


def test_a_misspelt_table_is_all_that_is_wrong() -> None:
    with pytest.raises(HpcMpError) as refused:
        resolve_any({"programm": {"command": ["./solve"]}, "job": {"nodes": 2}}, Path("/home/ann"))
    assert (refused.value.rule, refused.value.remedy) == ("is not a key of a job file", "did you mean 'program'?")


def test_a_verb_for_trainings_refuses_a_program(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text('[program]\ncommand = ["x"]\n')
    with pytest.raises(HpcMpError, match=r"starts a program .*`hpc-mp launch` starts it"):
        load_job(file)
    file.write_text(JOB)
    assert load_job(file).train.steps == 10


def test_runs_of_a_sweep_have_their_own_variables(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text('[program]\ncommand = ["x"]\n[sweep.grid]\n"program.environment.LR" = ["1", "2"]\n')
    assert [run.program.environment for run in load_sweep(file) if isinstance(run, ProgramSpec)] == [{"LR": "1"}, {"LR": "2"}]
