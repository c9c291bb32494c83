"""``hpc-mp adopt``: what a program finds besides its words is what it would find under the script: variables, a file, CPUs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from launching import python_program
from test_adopt import adopted, fates, run
from test_adopt import stubs as stubs
from test_adopt_forms import checked

from hpc_mp.adopt import AdoptedJob, Fate

HEAD = "#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH --ntasks-per-node=4\n#SBATCH --time=5\n"


def environment(job: AdoptedJob) -> dict[str, str]:
    return {name: str(value) for name, value in job.spec.program.environment.items()}


def test_variables_that_srun_exports_reach_the_program(tmp_path: Path) -> None:
    job = checked(f"{HEAD}M=fast\nsrun --export=ALL,MODE=$M,LEVEL=3 ./solve\n", tmp_path)
    assert environment(job) == {"MODE": "fast", "LEVEL": "3"}
    assert "the program gets MODE, LEVEL" in job.account[-1].why
    job = checked(f'{HEAD}srun --export="ALL,WHERE=$SCRATCH/x" ./solve a\n', tmp_path)
    assert any('WHERE="$SCRATCH/x"' in line for line in job.spec.slurm.setup)


@pytest.mark.parametrize("line", ["srun ./solve -v 'a b' < {}", "if true; then srun ./solve -v 'a b' < {} | tee out; fi"])
@pytest.mark.parametrize("file", ["in.txt", '"$IN"', "$(echo in.txt)"])
def test_every_rank_reads_the_file_that_the_program_was_given(line: str, file: str, stubs: Path, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("deck")
    python_program(tmp_path / "solve", "import json, os, sys\nwith open(os.environ['SEEN'], 'a') as seen:\n"
                                       "    seen.write(json.dumps([sys.argv[1:], 'solve', sys.stdin.read()]) + '\\n')\n")
    job = checked(f"{HEAD}IN=in.txt\n{line.format(file)}\n", tmp_path)
    assert job.lost == ()
    lines = "\n".join(('PROGRAM=("$@")', *job.spec.slurm.setup, f"cd {tmp_path}", '"${PROGRAM[@]}"'))
    assert run(lines, list(job.spec.program.command), stubs, tmp_path, {}) == [[["-v", "a b"], "solve", "deck"]]


@pytest.mark.parametrize("line", ["export CUDA_VISIBLE_DEVICES=1\npython t.py", "CUDA_VISIBLE_DEVICES=1 python t.py",
                                  "export CUDA_VISIBLE_DEVICES=1\nmake data\npython t.py"])
def test_the_gpus_that_a_script_shows_its_program_are_those_it_sees(line: str, tmp_path: Path) -> None:
    head = "#!/bin/bash\n#SBATCH --gres=gpu:2\n#SBATCH --time=5\n"
    assert environment(checked(f"{head}{line}\n", tmp_path))["CUDA_VISIBLE_DEVICES"] == "1"
    by_srun = checked(f"{head}{line.replace('python', 'srun python')}\n", tmp_path)  # srun sets it anew, theirs and ours
    assert "CUDA_VISIBLE_DEVICES" not in environment(by_srun)


def test_a_program_without_srun_keeps_the_cpus_of_its_tasks_and_finds_their_number(tmp_path: Path) -> None:
    job = checked(f"{HEAD}python t.py\n", tmp_path)
    assert job.spec.slurm.extra["cpus-per-task"] == 4 and "CPUs of 4 tasks" in job.account[2].why
    assert environment(job) == {"SLURM_NTASKS": "4", "SLURM_NPROCS": "4"}
    job = checked(f"{HEAD}#SBATCH --cpus-per-task=2\npython t.py\n", tmp_path)
    assert job.spec.slurm.extra["cpus-per-task"] == 8 and environment(job)["SLURM_CPUS_PER_TASK"] == "2"
    assert "cpus-per-task" not in checked(f"{HEAD}#SBATCH --exclusive\npython t.py\n", tmp_path).spec.slurm.extra
    assert environment(checked(f"{HEAD}srun python t.py\n", tmp_path)) == {}


def test_ranks_in_place_of_a_torchrun_find_the_cpus_of_its_task(tmp_path: Path) -> None:
    head = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n#SBATCH --cpus-per-task=32\n#SBATCH --time=5\n"
    job = checked(f"{head}srun torchrun --nnodes=2 --nproc-per-node=4 t.py\n", tmp_path)
    assert job.spec.slurm.extra["cpus-per-task"] == 8 and environment(job)["SLURM_CPUS_PER_TASK"] == "32"


def test_the_number_of_gpus_that_a_shell_of_a_rank_reads_is_there(tmp_path: Path) -> None:
    head = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --gpus-per-node=a100:4\n#SBATCH --ntasks-per-node=1\n#SBATCH --time=5\n"
    job = checked(f"{head}srun bash -c 'torchrun --nproc-per-node $SLURM_GPUS_PER_NODE t.py'\n", tmp_path)
    assert environment(job)["SLURM_GPUS_PER_NODE"] == "a100:4"
    assert environment(checked(f"{head}srun ./solve\n", tmp_path)) == {}


@pytest.mark.parametrize(("array", "element", "expected"), [("3,5", "1", ["9", "2", "3", "5", "10"]),
                                                            ("4", None, ["7", "1", "4", "4", "8"])])
def test_an_array_counts_as_the_script_counts(array: str, element: str | None, expected: list[str], stubs: Path,
                                              tmp_path: Path) -> None:
    words = " ".join(f"$SLURM_ARRAY_{name}" for name in ("JOB_ID", "TASK_COUNT", "TASK_MIN", "TASK_MAX"))
    head = f"#!/bin/bash\n#SBATCH --array={array}\n#SBATCH --time=5\n"
    job = adopted(f"{head}srun python {words} $((SLURM_ARRAY_TASK_ID*2))\n", tmp_path)
    ours = {"SLURM_JOB_ID": "7"} | ({} if element is None else {  # as Slurm says it of ours
        "SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": element, "SLURM_ARRAY_TASK_MIN": "0"})
    lines = "\n".join(('PROGRAM=("$@")', *job.spec.slurm.setup, '"${PROGRAM[@]}"'))
    assert run(lines, list(job.spec.program.command), stubs, tmp_path, ours)[-1][2:] == expected


@pytest.mark.parametrize("line", ["parallel -j 4 'srun -n1 python t.py {}' ::: 1 2", "bash run.sh", "./run.sh"])
def test_a_program_that_may_start_steps_leaves_room_for_them(line: str, tmp_path: Path) -> None:
    job = checked(f"{HEAD}{line}\n", tmp_path)
    assert "export SLURM_OVERLAP=1 SLURM_CPU_BIND=none" in job.spec.slurm.setup
    assert any("SLURM_OVERLAP" in note for note in job.notes)
    assert "export SLURM_OVERLAP=1" in checked(f"{HEAD}mpirun ./run.sh\n", tmp_path).spec.slurm.setup
    assert not any("OVERLAP" in each for each in checked(f"{HEAD}srun {line.partition(' ')[0]}\n", tmp_path).spec.slurm.setup)


@pytest.mark.parametrize(("first", "second"), [("--mem=8G", "--mem-per-cpu=1G"), ("--core-spec=1", "--thread-spec=2")])
def test_of_options_that_sbatch_refuses_together_the_last_is_kept(first: str, second: str, tmp_path: Path) -> None:
    job = checked(f"{HEAD}#SBATCH {first}\n#SBATCH {second}\nsrun ./solve\n", tmp_path)
    assert fates(job)[5][0] is Fate.LOST and second.partition("=")[0].lstrip("-") in job.spec.slurm.extra


@pytest.mark.parametrize("value", ["@[QUEUE]", "{queue}"])
def test_a_value_of_a_template_is_to_be_filled_in(value: str, tmp_path: Path) -> None:
    job = checked(f"{HEAD}#SBATCH --qos={value}\nsrun ./solve\n", tmp_path)
    assert fates(job)[5][0] is Fate.LOST and job.spec.slurm.qos is None


def test_a_script_whose_statements_cannot_be_told_apart_is_the_program_itself(tmp_path: Path) -> None:
    text = f"""{HEAD}A="${{{{x}}}}"
for i in $(seq 1 {{n}}); do
    if {{w}}; then
        d=$(mktemp -d -p "{{t}}" s.X) || {{{{
            (>&2 echo "E {{t}}."); exit 1; }}}}
    fi
    cmd=$({{m}}prepare -id ${{{{e}}}}{{a}})
    if [ $? -eq 0 ]; then
        srun bash -c "$cmd" &
    fi
done
num=${{{{#p[@]}}}}
for ((i=0; i<$num; i++)); do
    echo "$i"
done
"""
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    job = checked(text, tmp_path)
    assert job.spec.program.command[:1] == ("/bin/bash",) and job.lost


def test_a_comment_in_a_here_document_does_nothing_that_lasts(tmp_path: Path) -> None:
    job = checked(f"{HEAD}: <<'X'\nnotes > here\nX\nsrun ./solve\n: <<'X'\nmore\nX\n: > empty\n", tmp_path)
    assert job.spec.slurm.setup == () and fates(job)[9][0] is Fate.DROPPED and fates(job)[12][0] is Fate.LOST


def test_options_of_other_schedulers_are_named(tmp_path: Path) -> None:
    job = checked("#!/bin/bash\n#PBS -l nodes=2\n# PBS is another one\nmpirun -np 2 ./solve\n", tmp_path)
    assert (fates(job)[2][0], fates(job)[3][0]) == (Fate.LOST, Fate.DROPPED)


def test_cpus_and_gpus_that_srun_alone_is_told(tmp_path: Path) -> None:
    job = checked("#!/bin/bash\n#SBATCH -N 2\n#SBATCH -t 5\nsrun -n 16 -c 7 --gpus-per-task=1 ./solve\n", tmp_path)
    assert job.spec.job.ranks_per_node == 8 and job.spec.slurm.extra["cpus-per-task"] == 7
    assert any("gpus-per-task=1" in each.why for each in job.lost)


def test_a_script_of_another_shell_has_room_for_its_steps(tmp_path: Path) -> None:
    job = checked("#!/bin/tcsh\n#SBATCH --ntasks=4\n#SBATCH -t 5\n@ n = 2\nsrun -n 4 ./solve\n", tmp_path)
    assert job.spec.slurm.setup == ("export SLURM_OVERLAP=1 SLURM_CPU_BIND=none",) and job.spec.slurm.extra["cpus-per-task"] == 4
    assert environment(job)["SLURM_NTASKS"] == "4"


@pytest.mark.parametrize("word", ["$a/$b/$c", "--l=$a,$b,$c,$a", "$a/$b.txt", "$a-$b-x", "$a/$b/c/$a.$b.gz", "${a}/$b/x"])
def test_a_word_of_several_variables_is_one_word(word: str, stubs: Path, tmp_path: Path) -> None:
    text = f"{HEAD}a=1\nb=two\nc=$(echo 3)\nW={word}\nexport E={word}\nsrun python {word} $W $E\n"
    job = checked(text, tmp_path)
    lines = "\n".join(('PROGRAM=("$@")', *job.spec.slurm.setup, '"${PROGRAM[@]}"'))
    names = {name: str(value) for name, value in job.spec.environment.set.items()}
    expected = word.replace("${a}", "1").replace("$a", "1").replace("$b", "two").replace("$c", "3")
    assert run(lines, list(job.spec.program.command), stubs, tmp_path, names)[-1][2:] == [expected] * 3


def test_a_line_that_begins_with_a_backslash_is_a_command_of_its_own(tmp_path: Path) -> None:
    job = checked(f"{HEAD}make x\n\\rm -f y\nsrun ./solve\n", tmp_path)
    assert job.spec.slurm.setup[1:3] == ("make x", "\\rm -f y")


def test_what_is_piped_into_the_program_is_named(tmp_path: Path) -> None:
    job = checked(f"{HEAD}cat deck | srun ./solve a\n", tmp_path)
    assert fates(job)[5][0] is Fate.LOST and "piped" in job.lost[0].why
    assert not any("break" in line for line in job.spec.slurm.setup)  # in a pipe it would leave nothing behind


def test_what_every_environment_has_is_exported_by_setting_it(tmp_path: Path) -> None:
    job = checked(f"{HEAD}PATH=$PATH:/opt/bin\nLANG=C\nMINE=1\nsrun ./solve\n", tmp_path)
    assert job.spec.slurm.setup[-2] == "PATH=$PATH:/opt/bin" and fates(job)[7][0] is Fate.DROPPED
    assert job.spec.environment.set == {"LANG": "C"}
    gpus = checked(f"{HEAD}#SBATCH --gres=gpu:2\nCUDA_VISIBLE_DEVICES=1\npython t.py\n", tmp_path)
    assert environment(gpus)["CUDA_VISIBLE_DEVICES"] == "1"


@pytest.mark.parametrize("directive", ["--gpus-per-node=0", "--gres=gpu:0", "--gpus=0"])
def test_no_gpus_are_none(directive: str, tmp_path: Path) -> None:
    job = checked(f"{HEAD}#SBATCH {directive}\npython t.py\n", tmp_path)
    assert job.spec.slurm.gpu_request == "none" and fates(job)[5][0] is Fate.DROPPED


@pytest.mark.parametrize(("directive", "kind", "count"), [
    ("--gres=gpu:6000:1", "6000", "1"), ("--gres=gpu:1080ti:2", "1080ti", "2"), ("--gpus-per-node=3090:2", "3090", "2"),
    ("--gres=gpu:2080ti", "2080ti", "1"), ("--gres=gpu:a100", "a100", "1"), ("--gres=gpu:2", None, "2")])
def test_gpus_may_be_called_by_numbers(directive: str, kind: str | None, count: str, tmp_path: Path) -> None:
    head = f"#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH --ntasks-per-node={count}\n#SBATCH --time=5\n"
    slurm = checked(f"{head}#SBATCH {directive}\nsrun ./solve\n", tmp_path).spec.slurm
    assert (slurm.gpu_type, slurm.gpu_request != "none") == (kind, True)


def test_cpus_of_gpus_stand_without_those_of_tasks(tmp_path: Path) -> None:
    gpus = "#SBATCH --gpus-per-node=2\n#SBATCH --cpus-per-gpu=4\n"
    for body in (f"{gpus}python t.py", f"{gpus}srun -c 4 ./solve"):
        assert "cpus-per-task" not in checked(f"{HEAD}{body}\n", tmp_path).spec.slurm.extra
    job = checked(f"{HEAD}{gpus}#SBATCH --cpus-per-task=3\nsrun ./solve\n", tmp_path)
    assert job.spec.slurm.extra["cpus-per-task"] == 3 and "contradicts --cpus-per-task" in job.lost[0].why


def test_sizes_that_the_text_does_not_tell_and_that_differ_are_named(tmp_path: Path) -> None:
    job = checked(f"{HEAD}let n=2**2\nmpirun -np $n ./solve\n", tmp_path)
    assert "-np $n is known to the job's shell alone: 1 × 4 ranks" in job.lost[0].why
    assert checked("#!/bin/bash\n#SBATCH --time=5\nmpirun -np $SLURM_NTASKS ./solve\n", tmp_path).lost == ()
    job = checked("#!/bin/bash\n#SBATCH --time=5\n#SBATCH -N 3\n#SBATCH -n 101\nsrun ./solve\n", tmp_path)
    assert "102 in place of 101" in next(each.why for each in job.account if "-n 101" in each.text)


def test_the_program_is_the_one_of_the_most_ranks(tmp_path: Path) -> None:
    body = "srun -n 1 decompose\nsrun -n $SLURM_NTASKS simple -parallel\nsrun -n 1 reconstruct"
    job = checked(f"{HEAD}{body}\n", tmp_path)
    assert job.spec.program.command == ("simple", "-parallel") and job.spec.job.ranks_per_node == 4
    assert "cd /data || exit" in checked(f"{HEAD}#SBATCH --workdir=/data\nsrun ./solve\n", tmp_path).spec.slurm.setup


def test_an_option_of_a_sites_own_is_named(tmp_path: Path) -> None:
    job = checked(f"{HEAD}srun --environment=/images/torch.toml --cpu-bind=cores python t.py\n", tmp_path)
    assert "--environment" in job.lost[0].why and "--cpu-bind: left out" in job.lost[0].why


@pytest.mark.parametrize(("body", "program"), [
    ("python setup.py build_ext\npython test_it.py", ("python", "test_it.py")), ("mpirun --version\n./solve", ("./solve",)),
    ("python - <<EOF\nimport torch\nEOF\npython test.py", ("python", "test.py")),
    ("mpirun hostname | sort\n./solve", ("./solve",)), ("lfs setstripe d\n./solve", ("./solve",)),
    ("port() {\n  comm -23 a b | ./pick\n}\nP=$(port)\n./solve", ("./solve",)),
    ("N=$(( 2 * 2 ))\nrun=\"srun -n ${N} -N 1\"\neval \"$run ./solve a\"", ("./solve", "a"))])
def test_what_prepares_or_answers_is_not_the_program(body: str, program: tuple[str, ...], tmp_path: Path) -> None:
    job = checked(f"{HEAD}{body}\n", tmp_path)
    words = "\n".join((*job.spec.program.command, *job.spec.slurm.setup))
    assert job.spec.program.command == program or "[@]:5" in words


def test_what_only_shows_something_is_dropped_behind_the_program_too(tmp_path: Path) -> None:
    behind = "env | grep SLURM\nscontrol show job $SLURM_JOB_ID\nsacct -j 1 | head\ndeactivate\necho '-> done'\ncp a b"
    job = checked(f"{HEAD}srun ./solve\n{behind}\n", tmp_path)
    assert [fates(job)[line][0] for line in range(6, 12)] == [*[Fate.DROPPED] * 5, Fate.LOST]


def test_what_stands_in_options_alone_is_not_said_to_stand_in_the_command(tmp_path: Path) -> None:
    job = checked(f"{HEAD}LOG=a.log\nX=1\ntime srun -o $LOG ./solve $X\n", tmp_path)
    assert "job file says" in job.account[4].why and job.account[5].why == "its value stands in the command"
    assert "“time” is left out" in job.account[6].why


def test_ml_says_as_much_as_module(tmp_path: Path) -> None:
    job = checked(f"{HEAD}ml gcc/12 cuda\nml list\nmodule av\nsrun ./solve\n", tmp_path)
    assert (job.spec.slurm.modules, job.spec.slurm.setup) == (("gcc/12", "cuda"), ())
    assert [fates(job)[line][0] for line in (5, 6, 7)] == [Fate.KEPT, Fate.DROPPED, Fate.DROPPED]
    for line in ("ml unload xalt", "ml swap gcc icc", "ml use /opt/modules", "ml -xalt"):
        other = checked(f"{HEAD}{line}\nmodule load gcc\nsrun ./solve\n", tmp_path)
        assert other.spec.slurm.modules == () and line in other.spec.slurm.setup


@pytest.mark.parametrize(("first", "second", "program"), [
    ("truncate -s 1G a", "./solve", 1), ("python main_retrieval.py", "python main_index.py", 1),
    ("qiime tree", "qiime barplot", 1),
    ("python train.py", "python test.py", 0), ("python runModel.py", "python runEval.py", 0),
    ("./solve", "python evalAll.py", 1),
    ("python fit.py", "python plotAll.py", 0)])
def test_a_name_tells_training_by_its_words(first: str, second: str, program: int, tmp_path: Path) -> None:
    command = checked(f"{HEAD}{first}\n{second}\n", tmp_path).spec.program.command
    assert list(command) == (first, second)[program].split()


def test_variables_that_mpirun_is_given_in_other_forms(tmp_path: Path) -> None:
    job = checked(f"{HEAD}mpirun -genv I_MPI_FABRICS=ofi -env A b -x MASTER_PORT=12802 -x MASTER_ADDR=$H ./solve\n", tmp_path)
    assert environment(job) == {"I_MPI_FABRICS": "ofi", "A": "b"} and job.lost == ()
    assert 'MASTER_PORT=12802 MASTER_ADDR="$H" ./solve' in "\n".join((*job.spec.slurm.setup, *job.spec.program.command))
    assert "gres" not in checked(f"{HEAD}#SBATCH --gres=$${{gres}}\nsrun ./solve\n", tmp_path).spec.slurm.extra


@pytest.mark.parametrize(("line", "nodes", "ranks"), [
    ("ibrun --npernode=1 ./solve", 2, 1), ("mpirun -n 6 -ppn 3 ./solve", 2, 3), ("mpirun -np 3 -N 3 ./solve", 1, 3),
    ("mpirun -np $(cat n) -perhost 2 ./solve", 2, 2)])
def test_ranks_of_a_node_are_as_many_as_mpirun_is_told(line: str, nodes: int, ranks: int, tmp_path: Path) -> None:
    job = checked(f"{HEAD.replace('--nodes=1', '--nodes=2')}{line}\n", tmp_path)
    assert (job.spec.job.nodes, job.spec.job.ranks_per_node, job.lost) == (nodes, ranks, ())


@pytest.mark.parametrize("line", ["prun ./solve", "aprun -n 8 -N 4 ./solve"])
def test_launchers_of_a_site_start_ranks_through_mpi(line: str, tmp_path: Path) -> None:
    job = checked(f"{HEAD.replace('--nodes=1', '--nodes=2')}{line}\n", tmp_path)
    assert (job.spec.program.start, job.spec.job.nodes, job.spec.job.ranks_per_node) == ("mpi", 2, 4) and job.lost == ()
    assert job.spec.program.command == ("./solve",)


def test_a_backslash_at_the_end_and_a_comment_behind_a_statement_say_nothing(tmp_path: Path) -> None:
    job = checked(f"{HEAD}srun ./solve \\\n  -x \\\n", tmp_path)
    assert job.lost == () and job.spec.program.command == ("./solve", "-x")
    whole = checked(f"{HEAD}A=1  # one\nfor i in 1 2; do ./solve; done\n", tmp_path)
    assert fates(whole)[5] == (Fate.KEPT, "program.command")


def test_a_name_between_options_is_to_be_filled_in(tmp_path: Path) -> None:
    job = checked(f"{HEAD}srun snakemake --cores <cores> --fast\n", tmp_path)
    assert job.spec.program.command == ("snakemake", "--cores", "<cores>", "--fast") and "filled in" in job.lost[0].why
    usage = 'usage() {\n  echo "Use it: $0 -c <config> -i <image>"\n}\n'
    job = checked(f"{HEAD}{usage}usage\nsrun python <code>.py\n", tmp_path)
    assert job.spec.program.command == ("python", "<code>.py") and [each.first for each in job.lost] == [9]
    assert fates(checked(f"{HEAD}#SBATCH --mail-user=$USER@x.org\nsrun a\n", tmp_path))[5][0] is Fate.LOST
    assert fates(checked(f"{HEAD}#SBATCH --export==x\nsrun a\n", tmp_path))[5][0] is Fate.LOST
