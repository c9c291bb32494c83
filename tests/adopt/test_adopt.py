"""``hpc-mp adopt``: scripts of our own, whose program sees the same words as under the script, and whose lines are all accounted
for."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from launching import python_program

from hpc_mp.adopt import AdoptedJob, Fate, adopt
from hpc_mp.adopt.keys import job_text
from hpc_mp.base.errors import HpcMpError
from hpc_mp.cli.adopt import command
from hpc_mp.job.load import load_any
from hpc_mp.launch.render import render
from hpc_mp.lint.sbatch import lint

GOLDEN = sorted((Path(__file__).parents[1] / "golden" / "adopt").glob("*.sbatch"))
NAMES = [path.name for path in GOLDEN]


def adopted(text: str, directory: Path, *arguments: str) -> AdoptedJob:
    return adopt(text, directory=directory, job_directory=directory, file=directory / "script.sbatch", arguments=arguments)


def golden(name: str, directory: Path, *arguments: str) -> AdoptedJob:
    return adopted(next(path for path in GOLDEN if path.name == name).read_text(), directory, *arguments)


def fates(job: AdoptedJob) -> dict[int, tuple[Fate, str]]:
    """By the first line of each entry."""
    return {each.first: (each.fate, each.where) for each in job.account}


def unaccounted(job: AdoptedJob, text: str) -> list[int]:
    """Lines that are not blank and stand in no entry, or in several."""
    covered = Counter(number for each in job.account for number in range(each.first, each.last + 1))
    return [number for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), start=1)
            if line.strip() and covered[number] != 1]


@pytest.mark.parametrize("path", GOLDEN, ids=NAMES)
def test_the_job_file_is_valid_its_script_passes_the_linter_and_every_line_is_accounted_for(path: Path, tmp_path: Path) -> None:
    text = path.read_text()
    job = adopted(text, tmp_path)
    assert unaccounted(job, text) == []
    (tmp_path / "job.toml").write_text(job_text(job.tree, path.name, job.lost, job.notes))
    assert load_any(tmp_path / "job.toml") == job.spec
    script = render(job.spec, tmp_path / "runs" / "job" / "0001", python=sys.executable).text
    assert [finding for finding in lint(script, directory=tmp_path) if finding.severity == "error"] == []


def test_a_line_that_nobody_accounts_for_would_be_seen(tmp_path: Path) -> None:
    text = "#!/bin/bash\nsrun python a.py\n"
    job = adopted(text, tmp_path)
    assert unaccounted(job, text) == [] and unaccounted(job, f"{text}echo more\n") == [3]


def test_directives_modules_and_variables_become_keys(tmp_path: Path) -> None:
    job = golden("plain.sbatch", tmp_path)
    slurm = job.spec.slurm
    asked = job.spec.job
    assert (asked.name, asked.nodes, asked.ranks_per_node, asked.time_limit) == ("llama", 2, 4, "04:00:00")
    assert (slurm.partition, slurm.account, slurm.gpu_request, slurm.gpu_type) == ("gpu", "proj", "gres", "a100")
    assert slurm.extra == {"mail-type": "END", "cpus-per-task": 8, "exclusive": False, "mem": False}
    assert (slurm.modules, slurm.venv, slurm.setup) == (("gcc/12", "cuda/12.8"), str(tmp_path / "venv"), ())
    assert job.spec.environment.set == {"WANDB_MODE": "offline", "NCCL_DEBUG": "WARN"}
    assert job.spec.program.command == ("python", "train.py", "--lr", "3e-4", "--name", "a b", "--dollar", "$HOME")
    assert fates(job)[18] == (Fate.REPLACED, "the variables of a rank") and fates(job)[20] == (Fate.DROPPED, "")


def test_torchrun_is_left_out_for_ranks_and_its_arguments_stay(tmp_path: Path) -> None:
    spec = golden("torchrun.sbatch", tmp_path).spec
    assert (spec.program.start, spec.job.nodes, spec.job.ranks_per_node) == ("rank", 2, 4)
    assert spec.program.environment == {"OMP_NUM_THREADS": "1", "SLURM_CPUS_PER_TASK": "32"}
    assert spec.slurm.extra["cpus-per-task"] == 8
    assert not any("torchrun " in line or "head_node" in line for line in (*spec.slurm.setup, *spec.program.command))


def test_accelerate_is_told_by_us_where_its_machines_meet(tmp_path: Path) -> None:
    program = golden("accelerate.sbatch", tmp_path).spec.program
    assert program.start == "node" and program.command[:10] == (
        "accelerate", "launch", "--num_machines", "{nodes}", "--machine_rank", "{node_rank}",
        "--main_process_ip", "{master_addr}", "--main_process_port", "{master_port}")
    assert program.command[-5:] == ("--mixed_precision", "bf16", "train.py", "--batch", "8")


def test_what_cannot_be_carried_over_is_named_with_its_line(tmp_path: Path) -> None:
    found = {name: [each.first for each in golden(name, tmp_path).lost]
             for name in ("loop.sbatch", "mpi.sbatch", "branch.sbatch", "variables.sbatch", "plain.sbatch")}
    assert found == {
        "loop.sbatch": [11], "mpi.sbatch": [], "branch.sbatch": [5], "variables.sbatch": [15, 17, 19], "plain.sbatch": []}


def test_ranks_that_meet_through_mpi(tmp_path: Path) -> None:
    """mpirun's variables are kept, its sizes become the job's, and what has no counterpart is named."""
    job = golden("mpi.sbatch", tmp_path)
    assert (job.spec.program.start, job.spec.program.environment) == ("mpi", {"OMPI_MCA_btl": "tcp,self"})
    assert job.spec.program.command == ("./solver", "input.nml")
    head = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=2\n#SBATCH --time=5\n"
    bound = adopted(f"{head}mpirun -x A=1 -x B -genv C 2 --bind-to core -N 2 ./solve -n 3\n", tmp_path)
    assert bound.spec.program.environment == {"A": "1", "C": "2"} and bound.spec.program.command == ("./solve", "-n", "3")
    assert "--bind-to core" in bound.lost[0].why
    shell = adopted(f"{head}mpirun -x A=/a:$HOME ./solve\n", tmp_path)
    assert shell.spec.program.environment == {} and shell.spec.program.command == ("bash", "-c", 'exec env A="/a:$HOME" ./solve')
    twice = adopted(f"{head}mpirun -N 1 bash -c 'echo $(hostname)'\nmpirun -np 4 ./solve\n", tmp_path)
    assert twice.spec.program.command == ("./solve",) and twice.spec.job.ranks_per_node == 2
    step = adopted(f"{head}srun --mpi=pmix_v4 ./solve\n", tmp_path)
    assert (step.spec.program.start, step.spec.slurm.mpi, step.lost) == ("rank", "pmix", ())
    assert "--mpi=cray_shasta" in adopted(f"{head}srun --mpi=cray_shasta ./solve\n", tmp_path).lost[0].why


def test_an_array_becomes_a_sweep(tmp_path: Path) -> None:
    sweep = golden("loop.sbatch", tmp_path).spec.sweep
    assert sweep.grid == {"program.environment.SLURM_ARRAY_TASK_ID": ["3", "6", "9"]} and sweep.simultaneous == 2


def test_a_script_of_another_language_is_the_program_itself(tmp_path: Path) -> None:
    program = golden("program.sbatch", tmp_path).spec.program
    assert program.start == "node" and program.command == ("/usr/bin/env", "python3", str(tmp_path / "script.sbatch"))


@pytest.mark.parametrize(("line", "kind", "nodes", "ranks"), [
    ("srun python t.py", "rank", 2, 4), ("srun -N 1 -n 3 python t.py", "rank", 1, 3), ("python t.py", "node", 1, 8),
    ("srun --ntasks-per-node=1 python t.py", "node", 2, 8), ("torchrun --nproc_per_node 2 t.py", "rank", 1, 2),
    ("srun python -m torch.distributed.run --nnodes 2 --nproc-per-node=8 -m pkg.train", "rank", 2, 8),
    ("srun python -m torch.distributed.launch --nproc_per_node=8 t.py", "node", 2, 8),
    ("srun singularity exec --nv i.sif torchrun --nproc_per_node=8 t.py", "node", 2, 8),
    ("accelerate launch --num_processes 8 t.py", "node", 1, 8), ("mpirun -np 8 ./solve", "mpi", 2, 4),
    ("srun bash -c 'torchrun --nproc_per_node=8 --node_rank $SLURM_NODEID t.py'", "node", 2, 8)])
def test_who_starts_the_ranks_and_how_many(line: str, kind: str, nodes: int, ranks: int, tmp_path: Path) -> None:
    head = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=4\n#SBATCH --gpus-per-node=8\n#SBATCH --time=5\n"
    spec = adopted(f"{head}{line}\n", tmp_path).spec
    assert (spec.program.start, spec.job.nodes, spec.job.ranks_per_node) == (kind, nodes, ranks)


# --- the program sees the same words --------------------------------------------------------------------------------

STUB = """
import json, os, sys
with open(os.environ["SEEN"], "a") as file:
    print(json.dumps([os.getcwd(), os.path.basename(sys.argv[0]), *sys.argv[1:]]), file=file)
"""
SRUN = """
import os, sys
words = sys.argv[1:]
while words[0].startswith("-"):
    words.pop(0)
os.execvp(words[0], words)
"""
SEEN_BY_ALL = {"SLURM_JOB_ID": "77", "SLURM_NNODES": "2", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]"}
SEEN_BY_THE_SCRIPT = {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_NODEID": "0"}


@pytest.fixture
def stubs(tmp_path: Path) -> Path:
    """Programs that note the directory and the words that they are given."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in {**dict.fromkeys(("python", "torchrun", "scontrol", "module", "deepspeed"), STUB), "srun": SRUN}.items():
        python_program(programs / name, text)
    return programs


def run(script: str, words: list[str], stubs: Path, directory: Path, environ: dict[str, str]) -> list[list[str]]:
    """What the programs of a script have noted."""
    seen = stubs.parent / "seen"
    seen.unlink(missing_ok=True)
    path = {"PATH": f"{stubs}:{os.environ['PATH']}", "SEEN": str(seen), "HOME": "/home/me", "HPC_MP_RUN": str(stubs)}
    subprocess.run(["bash", "-c", script, "script", *words], cwd=directory, env={**path, **SEEN_BY_ALL, **environ}, check=True,
                   stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    noted = [json.loads(line) for line in seen.read_text().splitlines()]
    return [words for words in noted if words[1] not in ("scontrol", "module")]


def both(text: str, stubs: Path, directory: Path, *arguments: str) -> tuple[list[str], list[str]]:
    """The last words that a program of the script sees, and those that our program sees."""
    theirs = run(text, list(arguments), stubs, directory, SEEN_BY_THE_SCRIPT | {"MASTER_ADDR": "n1"})
    spec = adopted(text, directory, *arguments).spec
    names = " ".join(f"{name}={value!r}" for name, value in {**spec.environment.set, **spec.program.environment}.items())
    end = f"cd {shlex.quote(spec.program.directory)}", f"export MASTER_ADDR=n1 {names}", 'exec "${PROGRAM[@]}"'
    lines = "\n".join(('PROGRAM=("$@")', "set --", *spec.slurm.setup, *end))
    ours = run(lines, list(spec.program.command), stubs, directory, {})
    return theirs[-1], ours[-1]


WORDS = [
    "--lr $LR", '"$LR"', "'$LR'", '"a $LR b"', "$LIST", '"$LIST"', '"${ARR[@]}"', "${ARR[0]}", "$(echo one two)",
    '"$(printf "a\\nb")"', "$((2 * N))", "${N}x", "*.txt", "'*.txt'", "{a,b}", "~/x", "\\$N", "tcp://$MASTER_ADDR:1", "$PWD/d",
    "$EMPTY", '"$EMPTY"', "é", "'a;b|c'", '"q\\"q"', "$SLURM_JOB_ID", "$SLURM_NTASKS", "--x=$N", "${LR:-5}", "${NONE:-7}",
    "${LR%4}", "#no", "a#b", "$'t\\tt'", '"$1"', "$@"]
HEAD = """#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks=4
LR=3e-4
N=8
LIST="one  two"
ARR=(x "y z" "")
EMPTY=
"""


@pytest.mark.parametrize("word", WORDS)
def test_a_word_arrives_as_under_the_script(word: str, stubs: Path, tmp_path: Path) -> None:
    (work := tmp_path / "a b").mkdir()
    for name in ("1.txt", "2.txt"):
        (work / name).touch()
    theirs, ours = both(f"{HEAD}srun python t.py -- {word} end\n", stubs, work, "arg one", "two")
    assert ours == theirs


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(WORDS), max_size=6), st.sampled_from(["", "if true; then\n{}\nfi\n", "for i in 1; do {} & "
    "done\n", "f() {{ {}; }}\nf\n"]))
def test_words_arrive_together_and_from_inside_of_statements(words: list[str], around: str) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (programs := work / "bin").mkdir()
        for name, text in (("python", STUB), ("srun", SRUN)):
            python_program(programs / name, text)
        line = f"srun python t.py {' '.join(word for word in words if not word.startswith('#') and '*' not in word)}"
        text = HEAD + (around.format(line) if around else line) + ("\nwait\n" if "&" in around else "\n")
        theirs, ours = both(text, programs, work, "arg one", "two")
        assert [re.sub(r"^python$", "", word) for word in ours] == [re.sub(r"^python$", "", word) for word in theirs]


def test_another_word_would_be_seen(stubs: Path, tmp_path: Path) -> None:
    theirs = run(f"{HEAD}srun python t.py $LR", [], stubs, tmp_path, SEEN_BY_THE_SCRIPT)
    ours = run(f"{HEAD}srun python t.py \\$LR", [], stubs, tmp_path, SEEN_BY_THE_SCRIPT)
    assert theirs != ours


@pytest.mark.parametrize("there", [True, False])
def test_the_branch_that_the_script_takes_is_the_program(there: bool, stubs: Path, tmp_path: Path) -> None:
    if there:
        (tmp_path / "last.pt").touch()
    text = next(path for path in GOLDEN if path.name == "branch.sbatch").read_text()
    theirs, ours = both(text.replace("|| exit 1", ""), stubs, tmp_path)
    assert ours == theirs and ("--resume" in ours) == there


def test_torchrun_and_its_python_see_the_same_arguments(stubs: Path, tmp_path: Path) -> None:
    theirs, ours = both(next(path for path in GOLDEN if path.name == "torchrun.sbatch").read_text(), stubs, tmp_path)
    assert theirs[1] == "torchrun" and ours[1:3] == ["python", "-u"]
    assert ours[3:] == theirs[theirs.index("train.py"):] and "out dir/77" in ours


# --- whatever the text is -------------------------------------------------------------------------------------------

LINES = ["#SBATCH --nodes=2", "#SBATCH -n 3 --mem=1G", "##SBATCH -x", "# words", "", "  ", "A=1; B=$A", "export X=a "
    "Y", "cd /tmp", "if true", "then",
         "fi", "for i in 1 2; do", "done", "srun python a.py \\", "  --x 1", "echo done; srun "
             "hostname", "cat <<EOF", "EOF", "f() {", "}",
         "module load a", "wait", "conda activate e", "(", ")", "'", "mpirun -np 2 "
                                                                     "./a", "x=$(", "export A=<FILL>", "trap x EXIT", "é=ü",
         "torchrun --nproc_per_node=2 t.py &", "source env.sh", "exit 1", "#SBATCH --time=5", "\\"]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(LINES), max_size=12))
def test_each_line_of_any_script_is_accounted_for_once(lines: list[str]) -> None:
    text = "\n".join(("#!/bin/bash", *lines, ""))
    try:
        job = adopted(text, Path("/tmp"))
    except HpcMpError as refused:  # a clear refusal says what to do
        assert refused.remedy
        return
    assert unaccounted(job, text) == []


# --- the command ----------------------------------------------------------------------------------------------------


def test_the_command_writes_a_job_file_once_and_says_what_became_of_lines(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script = str(next(path for path in GOLDEN if path.name == "plain.sbatch"))
    first = CliRunner().invoke(command, [script])
    assert first.exit_code == 0 and "not carried over" in first.output and "     22  replaced  srun" in first.output
    assert tomllib.loads(Path("job.toml").read_text())["job"]["nodes"] == 2
    again = CliRunner().invoke(command, [script])
    assert isinstance(again.exception, HpcMpError) and again.exception.rule == "exists"
    assert CliRunner().invoke(command, [script, "--force"]).exit_code == 0


def test_the_difference_writes_nothing_and_json_has_the_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script = str(next(path for path in GOLDEN if path.name == "torchrun.sbatch"))
    shown = CliRunner().invoke(command, [script, "--diff"]).output
    assert "-srun torchrun \\" in shown and "+#SBATCH --ntasks-per-node=4" in shown and not list(tmp_path.iterdir())
    document = json.loads(CliRunner().invoke(command, [script, "--json", "-o", "-"]).output)
    assert {each["fate"] for each in document["account"]} <= {fate.value for fate in Fate}
    assert tomllib.loads(document["text"])["program"]["command"]


@pytest.mark.parametrize(("content", "rule"), [(b"\x7fELF\x00\x01", "no text"), (b"\n# nothing\n", "no command")])
def test_a_file_that_starts_nothing_is_refused(content: bytes, rule: str, tmp_path: Path,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_bytes(content)
    result = CliRunner().invoke(command, ["file"])
    assert isinstance(result.exception, HpcMpError) and rule in str(result.exception) and not Path("job.toml").exists()
