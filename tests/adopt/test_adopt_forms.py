"""``hpc-mp adopt`` on forms that public scripts have: what a directive leaves open, here-documents, pipes, jobs handed in."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from test_adopt import SEEN_BY_THE_SCRIPT, adopted, fates, run, unaccounted
from test_adopt import stubs as stubs

from hpc_mp.adopt import AdoptedJob, Fate
from hpc_mp.launch.render import render
from hpc_mp.lint.sbatch import lint

HEAD = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=2\n#SBATCH --time=5\n"


def checked(text: str, directory: Path, *arguments: str) -> AdoptedJob:
    """A script as a job file, every line accounted for, whose job script has no error."""
    job = adopted(text, directory, *arguments)
    assert unaccounted(job, text) == []
    script = render(job.spec, directory / "runs" / "job" / "0001", python=sys.executable).text
    assert [finding for finding in lint(script, directory=directory) if finding.severity == "error"] == []
    return job


@pytest.mark.parametrize("directive", [
    "--mem=!MEMORY", "--account=$PROJECT", "--mem-per-cpu=<memory>", "--cpus-per-task=<CPUS>", "--gres=gpu:{{gpus}}",
    "--cpus-per-task=$N", "--time={{time}}", "--nodelist=${HOSTS}"])
def test_a_directive_that_is_to_be_filled_in_is_named(directive: str, tmp_path: Path) -> None:
    head = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=2\n"
    job = checked(f"{head}#SBATCH {directive}\nsrun ./solve\n", tmp_path)
    assert fates(job)[4][0] is Fate.LOST
    assert (job.spec.job.nodes, job.spec.job.ranks_per_node) == (2, 2)


def test_options_of_which_sbatch_drops_one_do_not_stand_together(tmp_path: Path) -> None:
    job = checked(f"{HEAD}#SBATCH --threads-per-core=1\n#SBATCH --cores-per-socket=8\nsrun ./solve\n", tmp_path)
    assert fates(job)[5][0] is Fate.LOST and job.spec.slurm.extra["cores-per-socket"] == "8"


def test_a_here_document_that_no_command_reads_is_a_comment(tmp_path: Path) -> None:
    job = checked(f"{HEAD}<<notes\nTo train: srun python other.py\n- it's \"odd\nnotes\nexport A=1\nsrun python t.py\n", tmp_path)
    assert (job.spec.program.command, job.spec.slurm.setup) == (("python", "t.py"), ())
    assert {fates(job)[line][0] for line in (5, 6, 7, 8)} == {Fate.DROPPED}


def test_here_documents_in_each_other_leave_statements_whole(tmp_path: Path) -> None:
    inner = 'TEXT=$(cat <<EOF\nif [ "$A" = \\"x\\" ]; then\ncat <<INNER | tee f\nray start \\"$B\\" \\\\\nINNER\ndone\nEOF\n)\n'
    job = checked(f'{HEAD}{inner}srun bash -c "$TEXT"\n', tmp_path)
    assert fates(job)[5] == (Fate.KEPT, "slurm.setup") and 6 not in fates(job)


def test_what_reads_the_output_of_the_program_is_not_the_program(tmp_path: Path) -> None:
    assert checked(f"{HEAD}srun solve --in a | plot -Tsvg > a.svg\n", tmp_path).spec.program.command == ("solve", "--in", "a")
    job = checked(f"{HEAD}for i in 1 2; do\n  solve $i | plot > $i.svg\ndone\n", tmp_path)
    assert job.spec.slurm.setup[-2].count("ADOPTED_COMMAND=") == 1


def test_a_script_that_only_hands_in_jobs_says_so(tmp_path: Path) -> None:
    job = checked("#!/bin/bash\nfor i in 1 2; do\nsbatch <<EOF\n#!/bin/bash\nsrun ./solve $i\nEOF\ndone\n", tmp_path)
    assert job.spec.program.command[0] == "/bin/bash" and "hands in jobs" in " ".join(job.notes)


def test_names_to_be_filled_in_leave_the_rest_as_it_is(tmp_path: Path) -> None:
    job = checked(f"{HEAD}cd /scratch/<user name>/run\nconda activate <env>\nexport A=1\nsrun python t.py --in <path/to/data>\n",
                  tmp_path)
    assert job.spec.program.command == ("python", "t.py", "--in", "<path/to/data>")
    assert [each.first for each in job.lost] == [5, 6, 8] and "<env>" in job.lost[1].text
    assert job.spec.environment.set == {"A": "1"}


def test_a_default_that_a_colon_sets_is_no_print(tmp_path: Path) -> None:
    job = checked(f'{HEAD}: "${{IMAGE:=a.sif}}"\nDATA=${{DATA:=/data}}\nsrun ./solve "$IMAGE" $DATA\n', tmp_path)
    assert {fates(job)[line] for line in (5, 6)} == {(Fate.KEPT, "slurm.setup")}
    job = checked(f'{HEAD}X=${{Y:=1}}\nsrun ./solve $Y\n', tmp_path)
    assert "X=${Y:=1}" in job.spec.slurm.setup


def test_a_size_that_the_text_does_not_tell_is_named(tmp_path: Path) -> None:
    body = "N=8\nif true; then\n  N=$(( SLURM_NNODES * 2 ))\nfi\nsrun -K -c 1 -n $N -N $SLURM_NNODES ./solve a\n"
    job = checked(f"{HEAD}{body}", tmp_path)
    assert job.spec.program.command == ("./solve", "a") and job.spec.job.nodes == 2
    job = checked(f"{HEAD}srun -n $(cat sizes) ./solve\n", tmp_path)
    assert job.spec.program.command == ("./solve",) and "--ntasks=$(cat sizes)" in job.lost[0].why


def test_a_container_of_pyxis_is_carried_over_where_keys_say_the_same(tmp_path: Path) -> None:
    options = "--container-image=$IMAGE --container-mounts=/data:/data,$PWD:/code --container-workdir /code --container-writable"
    job = checked(f"{HEAD}IMAGE=/images/torch.sqsh\nsrun {options} python t.py\n", tmp_path)
    slurm = job.spec.slurm
    assert (slurm.container, slurm.container_runtime) == ("/images/torch.sqsh", "pyxis")
    assert slurm.container_mounts == ("/data:/data", f"{tmp_path}:/code") and fates(job)[6][0] is Fate.LOST
    assert "--container-writable has no counterpart" in job.lost[0].why
    assert job.spec.program.command == ("env", "-C", "/code", "python", "t.py")  # no directory outside is called so
    options = "--container-image=a.sqsh --container-mounts=/data,./b:/b --container-workdir=/data/c"
    job = checked(f"{HEAD}srun {options} python t.py\n", tmp_path)
    assert job.spec.program.directory == "/data/c" and job.lost == ()
    assert job.spec.slurm.container_mounts == ("/data", f"{tmp_path}/b:/b")
    job = checked(f"{HEAD}srun --container-image=$(pick) --container-mounts=/a python t.py\n", tmp_path)
    assert job.spec.slurm.container is None and "--container-image is known to the job's shell alone" in job.lost[0].why
    job = checked(f"{HEAD}#SBATCH --container-image=/a.sqsh\n#SBATCH --container-mount-home\npython t.py\n", tmp_path)
    assert job.spec.slurm.container == "/a.sqsh"
    assert {line: fates(job)[line] for line in (5, 6)} == {5: (Fate.KEPT, "slurm.container"), 6: (Fate.LOST, "")}


@pytest.mark.parametrize("call", ["main a", 'for m in "${MODELS[@]}"; do main $m; done', "all() {\n  main a\n  main b\n}\nall",
                                  "if true; then main a; fi\nmain b"])
def test_a_function_that_starts_the_program_is_called_once(call: str, stubs: Path, tmp_path: Path) -> None:
    body = f"MODELS=(a b)\ndeclare -A LR=([a]=1 [b]=2)\nmain() {{\n  local m=$1\n  srun python t.py $m ${{LR[$m]}}\n}}\n{call}\n"
    text = HEAD + body
    job = checked(text, tmp_path)
    theirs = run(text, [], stubs, tmp_path, SEEN_BY_THE_SCRIPT)
    lines = "\n".join(('PROGRAM=("$@")', "set --", *job.spec.slurm.setup, 'exec "${PROGRAM[@]}"'))
    ours = run(lines, list(job.spec.program.command), stubs, tmp_path, {})
    assert ours[-1][1:] == theirs[0][1:] == ["python", "t.py", "a", "1"]
    assert any("the loop" in each.why for each in job.lost) == ("for" in call)


def test_what_a_statement_around_the_program_reads_stays(stubs: Path, tmp_path: Path) -> None:
    text = f'{HEAD}MODE=fast\nWHERE=sub\nif [ "$MODE" = fast ]; then\n  mkdir -p $WHERE && cd $WHERE\n  srun python t.py\nfi\n'
    job = checked(text, tmp_path)
    assert {"MODE=fast", "WHERE=sub"} <= set(job.spec.slurm.setup)
