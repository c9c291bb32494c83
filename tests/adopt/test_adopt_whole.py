"""``hpc-mp adopt``: a script that starts several programs is the program itself, and finds what it would find under Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_adopt import adopted, fates
from test_adopt_forms import checked

from hpc_mp.adopt import Fate

ONCE = "#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH --ntasks=4\n#SBATCH --time=5\n"
BODIES = ["for i in 1 2; do\n  python t.py $i\ndone", "while read x; do python t.py $x; done < list",
          "python t.py 1 &\npython t.py 2 &\nwait", "for i in 1 2; do torchrun --nproc_per_node=2 t.py $i; done",
          "f() {\n  ./solve $1\n}\nf a\nf b", "for i in 1 2; do ./solve $i & done\nwait\ncp out there"]


@pytest.mark.parametrize("body", BODIES)
def test_a_script_that_starts_several_programs_on_its_node_is_the_program(body: str, tmp_path: Path) -> None:
    job = checked(f"{ONCE}{body}\n", tmp_path, "one")
    assert job.spec.program.command == ("/bin/bash", str(tmp_path / "script.sbatch"), "one") and job.lost == ()
    assert (job.spec.program.start, job.spec.job.nodes, job.spec.slurm.extra["cpus-per-task"]) == ("node", 1, 4)
    assert "starts its programs" in job.account[-1].why


@pytest.mark.parametrize("body", ["python t.py &\nwait", "for i in 1 2; do srun python t.py $i; done",
                                  "make &\npython t.py\nwait", "for i in 1; do mpirun -np 4 ./solve; done",
                                  "for i in 1 2; do make $i; done\npython t.py"])
def test_others_start_one(body: str, tmp_path: Path) -> None:
    assert str(tmp_path / "script.sbatch") not in checked(f"{ONCE}{body}\n", tmp_path).spec.program.command
    several = checked(f"{ONCE.replace('--nodes=1', '--nodes=2')}for i in 1 2; do python t.py $i; done\n", tmp_path)
    assert "the loop" in several.lost[-1].why


def test_the_program_itself_finds_what_slurm_says_to_a_script(tmp_path: Path) -> None:
    body = ("#SBATCH --cpus-per-task=2\n#SBATCH --array=3,5\n#SBATCH --export=ALL,MODE=fast\nmodule load gcc\n"
            "cd $SLURM_SUBMIT_DIR\nfor i in $(seq $SLURM_NTASKS); do "
            "./solve -t $SLURM_CPUS_PER_TASK $SLURM_ARRAY_TASK_COUNT $1; done\n")
    job = checked(f"{ONCE}{body}", tmp_path)
    assert job.spec.program.environment == {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_NTASKS": "4", "SLURM_CPUS_PER_TASK": "2",
                                            "SLURM_ARRAY_TASK_COUNT": "2"}
    assert job.spec.environment.set == {"MODE": "fast"} and job.spec.slurm.extra["cpus-per-task"] == 8
    assert "type module" in job.spec.slurm.setup[0] and "export -f module" in job.spec.slurm.setup[1]
    assert any("line 10 reads $1" in note for note in job.notes)
    assert checked(f"{ONCE}for i in 1 2; do ./solve; done\n", tmp_path).spec.slurm.setup == ()


def test_lines_of_a_here_document_are_of_the_program_too(tmp_path: Path) -> None:
    job = checked(f"{ONCE}cat > job.sh <<EOF\n#!/bin/bash\n#SBATCH --mem=1\nsrun x\nEOF\nsbatch job.sh\n", tmp_path)
    assert {fates(job)[line] for line in range(5, 11)} == {(Fate.KEPT, "program.command")}


def test_silence_ends_only_programs_of_which_it_is_known_to_be_a_hang(tmp_path: Path) -> None:
    def limit(line: str) -> float:
        job = checked(f"{ONCE}{line}\n", tmp_path)
        assert any("program.silent_limit" in note for note in job.notes) == (job.spec.program.silent_limit > 0)
        return job.spec.program.silent_limit

    quiet = ("python t.py", "srun ./wrf.exe", "mpirun ./solve", "srun -n 1 python t.py", BODIES[0])
    assert {limit(line) for line in quiet} == {0}
    assert {limit(line) for line in ("srun python t.py", "torchrun --nproc_per_node=4 t.py", "mpirun python t.py")} == {3600}


def test_an_argument_of_a_function_or_of_awk_is_none_of_the_script(tmp_path: Path) -> None:
    for body in ("f() {\n  echo $1 > log\n}\nf a\nsrun ./solve", "N=$(ps | awk '{print $1}')\nsrun ./solve $N",
                 "N=\"$(ps | awk '{print $1}')\"\nsrun ./solve $N",
                 "if true; then  # not $1\n  # $2\n  make\nfi\nsrun ./solve $$", "cat > x <<EOF\nexec \\$*\nEOF\nsrun ./solve"):
        assert not any("argument of the script" in note for note in checked(f"{ONCE}{body}\n", tmp_path).notes)
    job = checked(f"{ONCE}# $1\nX=${{1:-2}}\nsrun ./solve $X\n", tmp_path)
    assert any("line 6 reads ${1:-2}" in note for note in job.notes)


def test_an_array_that_only_the_command_line_names_is_asked_for(tmp_path: Path) -> None:
    job = adopted(f"{ONCE}python t.py $SLURM_ARRAY_TASK_ID\n", tmp_path)
    assert any("write [sweep]" in note for note in job.notes)
    job = adopted(f"{ONCE}#SBATCH --array=1-2\npython t.py $SLURM_ARRAY_TASK_ID\n", tmp_path)
    assert not any("[sweep]" in note for note in job.notes)
