"""What is looked for before a program is started: its own files, and the numbers of a launcher that is left out."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import executable

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job import ProgramSpec, resolve_any
from hpc_mp.launch.program.files import check_files
from hpc_mp.launch.program.launchers import check_command


def spec(here: Path, *command: str, **slurm: object) -> ProgramSpec:
    found = resolve_any({"program": {"command": list(command), "directory": str(here)}, "slurm": slurm}, here)
    assert isinstance(found, ProgramSpec)
    return found


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "run.sh").write_text("#!/bin/sh\n")
    executable(tmp_path, "tool", "")
    return tmp_path


def test_what_may_be_there(here: Path) -> None:
    """A path from the root may be in a container or on the nodes alone; what other programs do with their words nobody knows."""
    for words in ("python train.py", "python -u train.py --x", "python3.11 -m pkg", "./tool", "torch", "/opt/no/such",
                  "python /in/container.py", "python -c pass", "bash nothing.sh", "python -X importtime nothere.py"):
        check_files(spec(here, *words.split()), in_script=True)


@pytest.mark.parametrize(("words", "said"), [
    ("python nothere.py", "nothere.py: is not in"), ("python -u -O sub/train.py", "sub/train.py: is not in"),
    ("./nothere", "program.command[0] = './nothere': is not in"), ("./run.sh", "is not executable"),
    ("sub/run.sh", "is not in")])
def test_what_is_not_there(here: Path, words: str, said: str) -> None:
    with pytest.raises(HpcMpError) as refused:
        check_files(spec(here, *words.split()), in_script=False)
    assert said in str(refused.value) and refused.value.remedy


def test_a_file_of_the_directory_is_not_looked_up_on_path(here: Path) -> None:
    with pytest.raises(HpcMpError, match=r"(?i)is a file of .* write \./train.py, or its interpreter") as refused:
        check_files(spec(here, "train.py"), in_script=True)
    assert refused.value.value == "program.command[0] = 'train.py'"
    check_files(spec(here, "train.py", setup=["PATH=.:$PATH"]), in_script=True)
    check_files(spec(here, "nowhere.py"), in_script=True)


@pytest.mark.parametrize(("text", "rule"), [(None, "cannot be read"), ("srun ./a\n", "does not begin with #!")])
def test_a_job_script_that_sbatch_would_refuse(here: Path, text: str | None, rule: str) -> None:
    if text is not None:
        (here / "job.sbatch").write_text(text)
    job = resolve_any({"job": {}, "program": {"command": ["job.sbatch"], "start": "script"}}, here)
    assert isinstance(job, ProgramSpec)
    with pytest.raises(HpcMpError, match=rule):
        check_files(job, in_script=True)
    (here / "job.sbatch").write_text("#!/bin/bash\nsrun ./a\n")
    check_files(job, in_script=True)


@pytest.mark.parametrize(("words", "said"), [
    ("torchrun --nproc-per-node 2 t.py", "--nodes 1 --ranks-per-node 2 -- python t.py"),
    ("torchrun --nnodes=3 --nproc_per_node=4 t.py --lr 1", "--nodes 3 --ranks-per-node 4 -- python t.py --lr 1"),
    ("deepspeed --num_gpus 8 t.py", "--nodes 1 --ranks-per-node 8"), ("torchrun --nproc-per-node gpu t.py", "--ranks-per-node 1"),
    ("accelerate launch t.py", "--nodes 1 --ranks-per-node 1")])
def test_the_numbers_of_the_launcher_are_those_of_the_remedy(here: Path, words: str, said: str) -> None:
    with pytest.raises(HpcMpError) as refused:
        check_command(spec(here, *words.split()))
    assert said in refused.value.remedy
