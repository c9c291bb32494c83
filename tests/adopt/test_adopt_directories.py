"""``hpc-mp adopt``: lines of the setup find what they read, and none runs in another directory than under the script."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from test_adopt_forms import checked

from hpc_mp.adopt.account import Fate
from hpc_mp.base.errors import HpcMpError

HEAD = "#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH --ntasks-per-node=4\n#SBATCH --time=5\n"
FRESH = "rm -rf results\nmkdir results\n"


def set_up(body: str, directory: Path) -> tuple[int, str, str]:
    """What the lines before the program end with, their errors, and where the program runs; home and others hold results."""
    home, there = directory / "home", directory / "there"
    for each in (home, directory, there / "sub"):
        (each / "results").mkdir(parents=True, exist_ok=True)
        (each / "results" / "old").touch()
    spec = checked(HEAD + body.replace("THERE", str(there)), directory).spec
    lines = "\n".join((*spec.slurm.setup, f"echo ${{ADOPTED_DIRECTORY-{spec.program.directory}}}"))
    done = subprocess.run(["bash", "-c", lines], env={"PATH": os.environ["PATH"], "HOME": str(home), "HPC_MP_RUN": "/"},
                          cwd=directory, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    return done.returncode, done.stderr, done.stdout.strip()


def kept(directory: Path) -> set[str]:
    """The directories whose results are those of before."""
    return {name for name in ("home", ".", "there/sub") if (directory / name / "results" / "old").exists()}


LEADS = ["W=THERE/sub\ncd $W", "W=THERE/sub\ncd $W || exit 1", "W=(a THERE/sub)\ncd ${W[1]}", "W[1]=THERE/sub\ncd ${W[1]}",
         "W=THERE/sub\nN=W\ncd ${!N}", "W=THERE\npushd $W/sub > /dev/null", "W=THERE/sub\nset -- $W\ncd $1", "HOME=THERE/sub\ncd",
         "printf -v W %s/sub THERE\ncd $W", "W=THERE\nN=3\ncd $W/$([ $((N + 1)) = 4 ] && echo sub)",
         "OLDPWD=THERE/sub\ncd - > /dev/null",
         "W=THERE/sub\nto() { cd $W; }\nto", "W=THERE/sub\neval \"$(echo cd \\$W)\"", "W=THERE\ncd $W\ncd sub",
         "cat > e.sh <<'X'\ncd $W\nX\nW=THERE/sub\n. ./e.sh", "IFS=:\nL=THERE/sub:x\nset -- $L\ncd $1",
         "CDPATH=THERE\ncd sub > /dev/null",
         "cd THERE/sub > /dev/null || echo none", "W=$(echo THERE/sub)\nif [ $? -eq 0 ]; then cd $W; fi",
         "W=$(mkdir -p THERE/sub && echo THERE/sub)\ncd $W"]


@pytest.mark.parametrize("end", ["srun ./solve", "mkdir -p x && srun ./solve", "if true; then\n  srun ./solve\nfi"])
@pytest.mark.parametrize("lead", LEADS)
def test_lines_of_the_setup_run_where_they_run_under_the_script(lead: str, end: str, tmp_path: Path) -> None:
    *quiet, runs = set_up(f"{lead}\n{FRESH}{end}\n", tmp_path)
    assert quiet == [0, ""] and (runs == f"{tmp_path}/there/sub" or "e.sh" in lead)  # nobody looks into other files
    assert kept(tmp_path) == {"home", "."}


ASTRAY = ["cd $NOWHERE", 'cd "$NOWHERE"', "cd -P $NOWHERE", "cd -- $NOWHERE", "cd /no/such/place", "cd /no/such/place || echo no",
          "cd $NOWHERE || true", "cd $NOWHERE || exit 3", "pushd $NOWHERE", "pushd /no/such/place > /dev/null", "popd",
          "mkdir -p x && cd $NOWHERE", "if true; then cd /no/such/place; fi", "for d in 1; do cd $NOWHERE/$d; done",
          "to() { cd $1; }\nto $NOWHERE", "to() { cd $1; }\nexport -f to\nto", "D=$(cd $NOWHERE && pwd)\ncd $D",
          "cd /no/such/place 2> /dev/null",
          "false || cd /no/such/place", "cd /no/such/place && true"]


@pytest.mark.parametrize("lead", ASTRAY)
def test_a_setup_that_cannot_go_where_it_should_stops_there(lead: str, tmp_path: Path) -> None:
    code, errors, _ = set_up(f"{lead}\n{FRESH}srun ./solve\n", tmp_path)
    assert code and (errors or "2>" in lead) and kept(tmp_path) == {"home", ".", "there/sub"}


@pytest.mark.parametrize("lead", ["if cd /no/such/place 2> /dev/null; then make; fi", "! cd /no/such/place 2> /dev/null",
                                  "[ -d no ] && cd no",
                                  "cd /no/such/place 2> /dev/null || cd sub", "(cd /no/such/place 2> /dev/null)",
                                  "if cd /no/such/place 2> /dev/null && true; then make; fi"])
def test_a_directory_that_a_script_only_tries_stops_nothing(lead: str, tmp_path: Path) -> None:
    assert set_up(f"cd THERE\n{lead}\ncd THERE/sub\n{FRESH}srun ./solve\n", tmp_path)[:2] == (0, "")
    assert kept(tmp_path) == {"home", "."}


@pytest.mark.parametrize(("lead", "rule"), [
    ("cd <run place>", "in another directory"), ("pushd <place>", "in another directory"),
    ("cd there && sbatch next.sh", "in another directory"), ("results=/scratch/<user>", "without results")])
@pytest.mark.parametrize("end", [f"{FRESH}srun ./solve", "rm -rf results && srun ./solve",
                                 "if true; then\n  rm -r results\n  srun ./solve\nfi"])
def test_lines_that_would_miss_one_that_is_not_carried_over_are_refused(lead: str, rule: str, end: str, tmp_path: Path) -> None:
    with pytest.raises(HpcMpError, match=rule) as refused:
        checked(f"{HEAD}{lead}\n{end}\n", tmp_path)
    assert lead.partition("\n")[0] in refused.value.value
    checked(f"{HEAD}{lead}\nsrun ./solve\n", tmp_path)


def test_a_program_runs_where_its_own_line_leads(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for line in ("cd sub && srun ./solve", "if true; then\n  cd sub\n  srun ./solve\nfi",
                 "f() {\n  cd sub\n  srun ./solve\n}\nf"):
        job = checked(f"{HEAD}{line}\n", tmp_path)
        assert 'export ADOPTED_DIRECTORY="$PWD"' in "\n".join(job.spec.slurm.setup)
        assert 'cd "$ADOPTED_DIRECTORY"' in job.spec.program.command[2]


@pytest.mark.parametrize("body", [
    "srun --chdir=THERE/sub pwd -P", "srun -D THERE/sub --label --export=ALL pwd -P", "cd THERE\nsrun --chdir sub pwd -P",
    'W="THERE/su"\nsrun --chdir="${W}b" pwd -P', "W=$(echo THERE)\nsrun -D $W/sub bash -c 'pwd -P'",
    "if true; then\n  W=THERE\n  srun --chdir=$W/sub pwd -P\nfi"])
def test_a_program_runs_where_srun_is_told_to(body: str, tmp_path: Path) -> None:
    (tmp_path / "there" / "sub").mkdir(parents=True)
    job = checked(HEAD + body.replace("THERE", f"{tmp_path}/there"), tmp_path)
    script = f"{chr(10).join(job.spec.slurm.setup)}\ncd {job.spec.program.directory}\n\"$@\""
    done = subprocess.run(["bash", "-c", script, "_", *job.spec.program.command], env={**os.environ, "HPC_MP_RUN": "/"},
                          capture_output=True, text=True, check=False)
    assert done.stdout.strip() == f"{tmp_path}/there/sub"


@pytest.mark.parametrize(("head", "words"), [
    (HEAD, "srun's --chdir: the program enters it"), (HEAD + "#SBATCH --container-image=a.sqsh\n", "srun's --chdir: left out")])
def test_the_account_says_whether_the_program_enters_the_directory_of_srun(head: str, words: str, tmp_path: Path) -> None:
    (why,) = [each.why for each in checked(f"{head}srun --chdir=/tmp ./solve\n", tmp_path).account if "chdir" in each.why]
    assert words in why, why


@pytest.mark.parametrize("option", ["--multi-prog", "--task-prolog=./p.sh"])
def test_what_srun_makes_of_each_task_is_named_as_lost(option: str, tmp_path: Path) -> None:
    lost = [each.why for each in checked(f"{HEAD}srun {option} ./conf\n", tmp_path).account if each.fate is Fate.LOST]
    assert len(lost) == 1 and f"srun's {option.partition('=')[0]}: " in lost[0] and "left out" not in lost[0]


@pytest.mark.parametrize("body", [
    "(cd THERE/sub; FRESH srun ./solve)", "(cd THERE/sub && FRESH srun ./solve)",
    "(\n  cd THERE/sub\n  FRESH srun ./solve\n)\necho done",
    "(cd THERE/sub; FRESH srun ./solve) > out.txt 2>&1", "(cd THERE/sub; FRESH srun ./solve) &\nwait",
    "mkdir -p x && (cd THERE/sub; FRESH srun ./solve)", "(cd THERE; (cd sub; FRESH srun ./solve))",
    "W=THERE\n(cd $W/sub; FRESH srun ./solve | tee log) || exit 1", "(cd THERE/sub; FRESH if true; then srun ./solve; fi)"])
def test_a_program_in_a_subshell_runs_where_that_leads(body: str, tmp_path: Path) -> None:
    *quiet, runs = set_up(body.replace("FRESH ", "rm -rf results; mkdir results; ") + "\n", tmp_path)
    assert quiet == [0, ""] and runs == f"{tmp_path}/there/sub" and kept(tmp_path) == {"home", "."}


@pytest.mark.parametrize("body", ["false && (cd THERE; srun ./solve)", "(cd /no/such/place; srun ./solve)",
                                  "(cd THERE/sub; exit 3; srun ./solve)"])
def test_a_subshell_that_does_not_come_to_its_program_ends_the_setup(body: str, tmp_path: Path) -> None:
    code, _, runs = set_up(f"{body}\n", tmp_path)
    assert code != 0 and runs == ""


@pytest.mark.parametrize(("line", "file", "note"), [
    (". ./e.sh", "cd THERE/sub\n", ""), ("source e.sh", "to() { cd THERE/sub; }\nto\n", ""),
    ("F=e.sh\n. ./$F", "pushd THERE/sub > /dev/null\n", ""), ("source e.sh", ". ./other.sh\n", ""),
    ("source e.sh", "export A=1\n(cd /; ls) > /dev/null\n", "none"), (". ./e.sh", None, "/e.sh, which is not here"),
    ('. "$SITE/env.sh"', None, "runs $SITE/env.sh, which is not here")])
def test_a_file_that_leads_the_shell_elsewhere_is_looked_into_or_named(
    line: str, file: str | None, note: str, tmp_path: Path,
) -> None:
    (tmp_path / "there" / "sub").mkdir(parents=True)
    (tmp_path / "other.sh").write_text(f"cd {tmp_path}/there/sub\n")
    if file is not None:
        (tmp_path / "e.sh").write_text(file.replace("THERE", f"{tmp_path}/there"))
    if note in ("", "none"):
        *quiet, runs = set_up(f"{line}\nsrun ./solve\n", tmp_path)
        assert quiet == [0, ""] and runs == (f"{tmp_path}/there/sub" if not note else str(tmp_path))
    notes = "\n".join(checked(f"{HEAD}{line}\nsrun ./solve\n", tmp_path).notes)
    assert (note in notes and "set program.directory" in notes) if note not in ("", "none") else "not here:" not in notes


@pytest.mark.parametrize("body", [
    'for h in $(scontrol show hostnames); do\n  ssh $h "cd $PWD; python train.py" &\ndone\nwait',
    "i=0\nfor h in $(scontrol show hostnames); do ssh -n $h torchrun --node_rank $i train.py & i=$((i+1)); done\nwait",
    "scontrol show hostnames | while read h; do ssh $h python t.py < /dev/null & done; wait",
    "pdsh -w $SLURM_NODELIST python t.py",
    "clush -bw $SLURM_NODELIST ./solve"])
def test_a_program_that_a_script_starts_by_ssh_is_refused_in_words(body: str, tmp_path: Path) -> None:
    lost = checked(HEAD.replace("nodes=1", "nodes=2") + body + "\n", tmp_path).lost
    name = next(each for each in ("ssh", "pdsh", "clush") if each in body)
    assert lost and all(f"reaches them by {name}, which the job does not: start there with srun what it starts" in each.why
                        for each in lost)


def test_variables_of_a_shell_that_exports_all_are_exported(tmp_path: Path) -> None:
    for on, off in (("set -a", "set +a"), ("set -o allexport", "set +o allexport"), ("set -ea", "set +a")):
        job = checked(f"{HEAD}{on}\nMODE=fast\n{off}\nOTHER=1\nsrun ./solve\n", tmp_path)
        assert job.spec.environment.set == {"MODE": "fast"}
