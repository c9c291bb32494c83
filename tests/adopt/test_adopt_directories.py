"""``hpc-mp adopt``: lines of the setup find what they read, and none runs in another directory than under the script."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from test_adopt_forms import checked

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


def test_variables_of_a_shell_that_exports_all_are_exported(tmp_path: Path) -> None:
    for on, off in (("set -a", "set +a"), ("set -o allexport", "set +o allexport"), ("set -ea", "set +a")):
        job = checked(f"{HEAD}{on}\nMODE=fast\n{off}\nOTHER=1\nsrun ./solve\n", tmp_path)
        assert job.spec.environment.set == {"MODE": "fast"}
