"""``hpc-mp adopt``: what a program reads, and where its output goes, arrive as under the script or are named."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from launching import python_program
from test_adopt_forms import checked

HEAD = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=2\n#SBATCH --time=5\n"
ONCE = "#!/bin/bash\n#SBATCH --ntasks=1\n#SBATCH --time=5\n"
AROUND = ["{}\n", "if true; then\n{}\nfi\n", "f() {{\n{}\n}}\nf\n"]
# Notes its words and what it reads, prints a line, and is there under the names of programs and of srun.
STUB = """
import json, os, sys
words = sys.argv[1:]
if os.path.basename(sys.argv[0]) == "srun":
    os.execvp(words[0], words)
read = "" if os.isatty(0) else sys.stdin.read()
with open(os.environ["SEEN"], "a") as seen:
    print(json.dumps([os.path.basename(sys.argv[0]), *words, read]), file=seen)
print("value", *words)
"""


def seen(script: str, words: list[str], directory: Path) -> list[list[str]]:
    """What the programs of a script note, and the files that it leaves."""
    (programs := directory.parent / "bin").mkdir(exist_ok=True)
    for name in ("solve", "sort-it", "srun"):
        python_program(programs / name, STUB)
    (note := directory.parent / "note").unlink(missing_ok=True)
    environ = {"PATH": f"{programs}:{os.environ['PATH']}", "SEEN": str(note), "HPC_MP_RUN": str(directory.parent)}
    subprocess.run(["bash", "-c", script, "script", *words], cwd=directory, env=environ, check=True, stdin=subprocess.DEVNULL)
    files = sorted((path.name, path.read_text()) for path in directory.iterdir())
    for path in directory.iterdir():
        path.unlink()
    return [*(json.loads(line) for line in note.read_text().splitlines()), *map(list, files)]


def both(text: str, directory: Path) -> tuple[list[list[str]], list[list[str]]]:
    directory.mkdir()
    theirs = seen(text, [], directory)
    job = checked(text, directory)
    assert job.lost == ()
    lines = "\n".join(('PROGRAM=("$@")', "set --", *job.spec.slurm.setup, f"cd {directory}", '"${PROGRAM[@]}"'))
    return theirs, seen(lines, list(job.spec.program.command), directory)


DOCUMENTS = ["<<EOF\nx = 1\n\ny = \"$A\" '$A' \\$A $((1+1))\nEOF", "<<EOF\n`echo z` $(echo $A)\nEOF",
             "<< 'END'\n$A \"b\" \\\nEND", "<<-EOF\n\tone\n\t\ttwo\n\tEOF",
             '<<EOF\nsay \\"hi\\" and "$A"\nEOF', "<<< text", '<<< "a  $A"', "<<< $A", "<<EOF > log\n$A\nEOF"]


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("document", DOCUMENTS)
@pytest.mark.parametrize("launch", ["srun solve -v", "solve -", "solve -nodisplay"])
def test_a_text_that_the_program_is_given_arrives(launch: str, document: str, around: str, tmp_path: Path) -> None:
    head = HEAD if "srun" in launch else ONCE
    theirs, ours = both(f"{head}A='one  two'\n{around.format(launch + document)}", tmp_path / "work")
    assert ours[0] == theirs[0] and theirs[0][-1]


def test_a_text_whose_quotes_cannot_be_told_apart_is_named(tmp_path: Path) -> None:
    for behind in ('<<EOF\n$(echo "a")\nEOF', "< a < b"):
        job = checked(f"{HEAD}srun solve {behind}\n", tmp_path)
        assert "what it reads from stdin" in job.lost[0].why


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("line", ["solve a > table.csv", 'solve "$A" > "$B.dat"', "solve a | sort-it -o x > y.bed",
                                  "time solve a < /dev/null >> x.dat", "solve ${L[@]} | sort-it $A"])
def test_a_result_of_a_program_that_runs_once_goes_where_the_script_puts_it(line: str, around: str, tmp_path: Path) -> None:
    theirs, ours = both(f"{ONCE}A='one  two'\nB=$(echo name)\nL=(p 'q r')\n{around.format(line)}", tmp_path / "work")
    assert ours == theirs and len(theirs) > 1


@pytest.mark.parametrize("line", ["printf '%s\\n' a \"$A\" | solve \"$B\" > r.dat", "cat /etc/hostname | solve"])
def test_what_is_piped_into_a_program_that_runs_once_arrives(line: str, tmp_path: Path) -> None:
    theirs, ours = both(f"{ONCE}A='one  two'\nB=$(echo name)\n{line}\n", tmp_path / "work")
    assert ours == theirs and theirs[0][-1]
    for body in (line.replace("| solve", "| srun solve"), f"if true; then {line}; fi"):
        assert "what is piped into it" in checked(f"{ONCE}{body}\n", tmp_path).lost[0].why


def test_a_result_that_ranks_print_is_named_and_a_log_is_left_out(tmp_path: Path) -> None:
    for line in ("srun solve > table.csv", "mpirun -np 4 solve > $A.dat", "srun solve | sort-it"):
        assert "has to be taken from there" in checked(f"{HEAD}{line}\n", tmp_path).lost[0].why
    for line in ("srun solve > run.log", "python t.py > out.txt 2>&1", "solve &> x", "solve | tee y", "srun solve > /dev/null"):
        job = checked(f"{HEAD.replace('=2', '=1')}{line}\n", tmp_path)
        assert job.lost == () and "is left out" in job.account[-1].why and "tee" not in job.spec.program.command


def test_what_is_left_out_does_not_name_the_file_that_ranks_read(tmp_path: Path) -> None:
    (tmp_path / "in.m").touch()
    assert "left out" not in checked(f"{HEAD}srun ./solve < in.m\n", tmp_path).account[-1].why
    why = checked(f"{HEAD}srun ./solve < in.m > out.log\n", tmp_path).account[-1].why
    assert "“> out.log” is left out" in why


def test_words_behind_a_redirection_are_of_the_program(tmp_path: Path) -> None:
    assert checked(f"{HEAD}srun ./solve > out.log -i in\n", tmp_path).spec.program.command == ("./solve", "-i", "in")
