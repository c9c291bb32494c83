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


@pytest.mark.parametrize(("sections", "words"), [
    ({"program": {"command": []}}, "names no program"),
    ({"program": {"command": [""]}}, "names no program"),
    ({"program": {"command": "python 'my train.py' x"}}, 'command = ["python", "my train.py", "x"]'),
    ({"program": {"command": "python 'train.py"}}, "must be a list"),
    ({"program": {"command": ["x"], "stop_codes": [0]}}, "at least 1. Write 1 or more"),
    ({"program": {"command": ["x"], "env": {"A": "1"}}}, "program.env: is program.environment here"),
    ({"program": {"command": ["x"], "cwd": "/a"}}, "is program.directory here"),
    ({"program": {"command": ["x\0y"]}}, "NUL"),
    ({"program": {"command": ["x"], "environment": {"RANK": "1"}}}, "identifies a rank"),
    ({"program": {"command": ["x"], "environment": {"HPC_MP_RUN": "1"}}}, "is reserved for hpc-mp"),
    ({"program": {"command": ["x"], "environment": {"A-B": "1"}}}, "must consist of letters"),
    ({"program": {"command": ["x"], "start": "pmi"}}, "program.start"),
    ({"program": {"command": ["x"], "comand": 1}}, "Did you mean 'command'"),
    ({"model": {"config": {"model_type": "gpt2"}}, "train": {}}, "[model] [train] with [program]"),
    ({"parallel": {"tensor": 2}}, "it is unknown how the program numbers its ranks"),
    ({"program": {"command": ["x"], "axes": "megatrom"}}, "must be one of megatron"),
    ({"program": {"command": ["x"], "axes": "megatron", "start": "node"}}, "with this start hpc-mp does not number the ranks"),
    ({"program": {"command": ["x"], "axes": "DPT"}, "parallel": {"tensor": 3}, "job": {"ranks_per_node": 8}},
     "tensor(3) × pipeline(1)"),
    ({"program": {"command": ["x"], "axes": "DPT"}, "parallel": {"tensor": 2, "data": 2}, "job": {"ranks_per_node": 8}},
     "tensor(2) × pipeline(1) × data(2): does not equal the 8 ranks"),
    ({"program": {"command": ["x"], "axes": "DPT"}, "parallel": {"zero": 1}}, "is not a key of [parallel]"),
    ({"job": {"step_timeout": 5}}, "job.step_timeout = 5"),
    ({"program": {"command": ["x"], "start": "node"}, "slurm": {"mpi": "pmix"}}, "slurm.mpi = 'pmix'"),
    ({"program": {"command": ["x"], "start": "node"}, "slurm": {"mpi": "mpirun"}}, "slurm.mpi = 'mpirun'"),
    ({"program": {"command": ["x"], "start": "rank"}, "slurm": {"mpi": "mpirun"}}, "does so with torchrun's variables"),
    ({"program": {"command": ["x"], "start": "mpi"}, "slurm": {"mpi": "mpirun", "container": "x.sif"}}, "outside the image"),
    ({"slurm": {"python": "python3"}}, "slurm.python"),
    ({"environment": {"stage": True}, "slurm": {"container": "x.sif"}}, "has no effect on ranks in a container"),
    ({"environment": {"stage": True}, "slurm": {"conda": "train"}}, "is a name"),
    ({"program": {"command": ["x"], "stage": ["data", "data/../data/set"]}}, "is inside"),
    ({"program": {"command": ["x"], "stage": ["/"]}}, "is the root directory"),
    ({"job": {"nodes": 2**18}}, "is more than"),
    ({"slurm": {"chain": 1}, "sweep": {"runs": [{}, {"program.silent_limit": 5}]}}, "cannot follow the runs of a sweep"),
], ids=str)
def test_what_is_refused(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(HpcMpError) as refused:
        program(**sections)
    assert words in str(refused.value)
    assert refused.value.remedy


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
