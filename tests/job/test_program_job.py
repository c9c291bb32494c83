"""Job files with ``[program]``: what they say, what they refuse, and what is left of them in a run directory."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_job import JOB

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job import ProgramSpec, dump_job, load_any, load_job, load_sweep, resolve_any

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


REFUSED = tomllib.loads(Path(__file__).with_name("refused.toml").read_text(encoding="utf-8"))["program"]


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_refused(words: str) -> None:
    with pytest.raises(HpcMpError) as refused:
        program(**REFUSED[words])
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
