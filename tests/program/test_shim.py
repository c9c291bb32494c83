"""A script whose launchers are shims: its programs get what they get without them, and failures of tasks are recorded."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launching import python_program

from hpc_mp.base.launchers import LAUNCHERS, program_of_mpirun
from hpc_mp.cluster.slurm.srun_words import programs_of_srun
from hpc_mp.program.shim import with_shims, write_shims
from hpc_mp.rundir import AttemptRecord, RunDirectory, create_run, write_attempt, write_json
from hpc_mp.rundir.failures import read_ends

# A launcher that, like srun, runs the program on two tasks; it knows one option, -n, and components apart by a colon.
SRUN = """
import os, shutil, subprocess, sys
words, tasks = sys.argv[1:], []
while words:
    end = words.index(":") if ":" in words else len(words)
    part, words = words[:end], words[end + 1:]
    count = 1
    while part[0].startswith("-"):
        option = part.pop(0)
        count = int(part.pop(0)) if option in ("-n", "-np") else count
    tasks += [part] * count
if any(shutil.which(task[0]) is None for task in tasks):
    sys.exit(2)
ranks = [subprocess.Popen(task, env={**os.environ, "SLURM_PROCID": str(number), "SLURM_LOCALID": str(number), "SLURM_STEP_ID": "0",
         "SLURM_NTASKS": str(len(tasks)), "SLURM_TASK_PID": "1"}) for number, task in enumerate(tasks)]
codes = [rank.wait() for rank in ranks]
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""
# Notes its words, directory, variables and input, by task.
SEES = """
import json, os, sys
read = "" if os.isatty(0) else sys.stdin.read()
name = f"{os.environ['SEEN']}/{os.environ.get('SLURM_PROCID', 0)}.{len(os.listdir(os.environ['SEEN']))}"
with open(name, "x") as file:
    json.dump([sys.argv[1:], os.getcwd(), dict(os.environ), read], file)
print("out", *sys.argv[1:])
print("err", *sys.argv[1:], file=sys.stderr)
if len(sys.argv) > 2 and sys.argv[1] == "end":
    how = int(sys.argv[2])
    print("ValueError: no such layer", file=sys.stderr)
    os.kill(os.getpid(), -how) if how < 0 else sys.exit(how)
"""
OURS = {"PATH", "BASH_ENV", "SLURM_TASK_PID", "SEEN", "_", "SHLVL", "OLDPWD"}


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "site").mkdir()
    for name in ("srun", "mpirun", "torchrun"):
        python_program(tmp_path / "site" / name, SRUN)
    python_program(tmp_path / "site" / "sees", SEES)
    (tmp_path / "work dir").mkdir()
    return tmp_path


def new_run(here: Path) -> RunDirectory:
    run = create_run(here / "runs of mine", "t")
    write_attempt(run.attempt_record, AttemptRecord("token", 1, ("n1",), "n1", 1, ""))
    write_json(run.program, {"command": ["script"], "directory": ".", "environment": {}, "stop_codes": [75]})
    write_shims(run)
    return run


def executed(here: Path, text: str, run: RunDirectory | None) -> tuple[int, str, list[Any]]:
    """Run a script, with shims or without. Return its code, its output, and what its programs got."""
    script, seen = here / "script.sh", here / ("plain" if run is None else "watched")
    script.write_text(text if text.startswith("#!") else f"#!/bin/bash\n{text}")
    script.chmod(0o755)
    seen.mkdir(exist_ok=True)
    environ = {"PATH": f"{here / 'site'}:/usr/bin:/bin", "HOME": str(here), "OWN": "a  b\nc", "SEEN": str(seen)}
    if run is not None:
        environ = with_shims(run, {**environ, "HPC_MP_RUN": str(run.path), "HPC_MP_TOKEN": "token"})
    done = subprocess.run([str(script), "one", "two words"], cwd=here / "work dir", env=environ, stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, timeout=60)
    got = [json.loads(path.read_text()) for path in sorted(seen.iterdir())]
    for _, _, variables, _ in got:
        for name in [*variables]:
            if name in OURS or name.startswith("HPC_MP_"):
                del variables[name]
    return done.returncode, "".join(sorted((done.stdout + done.stderr).splitlines(keepends=True))), sorted(got, key=repr)


SCRIPTS = {
    "plain": "srun sees a 'b c' \"$@\" ''",
    "tasks": "srun -n 3 sees x",
    "input": "srun sees in <<< 'some text'",
    "pipe": "echo lines | srun sees | cat",
    "document": "srun sees <<EOF\n$1 line\nEOF",
    "directory": "mkdir -p sub; cd sub; X=1 srun sees",
    "variables": "export LR='1 2'; A=3 srun sees $LR \"$LR\" {a,b} *.sh",
    "loop": "for i in 1 2; do srun sees $i; done",
    "parallel": "srun sees a & srun sees b & wait",
    "function": "f() { srun -n 2 sees \"$@\"; }; f x 'y z'; f w",
    "branches": "if srun sees end 3; then srun sees yes; else srun sees no; fi",
    "or": "srun sees end 4 || srun sees fallback",
    "and": "srun sees a && srun sees b",
    "substitution": 'X=$(srun sees q); echo "got $X"',
    "components": "srun -n 1 sees server : -n 2 sees client",
    "eval": "C='srun sees \"a b\"'; eval \"$C\"",
    "timeout": "timeout 30 srun sees t",
    "exec": "exec srun sees last",
    "nested": "srun bash -c 'torchrun sees in$SLURM_PROCID'",
    "mpirun": "mpirun -np 2 sees m",
    "code": "srun sees end 7",
    "kill": "srun sees end -9",
    "set -e": "set -euo pipefail\nsrun sees end 5\nsrun sees never",
    "trap": "trap 'echo bye' EXIT; srun sees t; exit 9",
    "xtrace": "set -x; srun sees x",
    "path": 'PATH="$PWD/mine:$PATH"; srun sees p',
    "module": "load() { export PATH=$PWD:$PATH; }; load; srun sees p",
    "job control": "srun sees b & P=$!; wait $P; echo $?",
    "missing": "unknown-program; srun no-such-program",
    "sh": "#!/bin/sh\nsrun sees \"$@\"",
    "login": "#!/bin/bash -l\nexport PATH=$HOME/site:$PATH\nsrun sees \"$@\"",
    "python": f"#!{sys.executable}\nimport subprocess, sys\nsubprocess.run(['srun', 'sees', *sys.argv[1:]])",
}


@pytest.mark.parametrize("text", SCRIPTS.values(), ids=SCRIPTS)
def test_programs_get_what_they_get_without_shims(text: str, here: Path) -> None:
    if " " in sys.executable and text.startswith("#!/") and "python" in text.split("\n")[0]:
        pytest.skip("#! takes no blank")
    run = new_run(here)
    plain, watched = executed(here, text, None), executed(here, text, run)
    assert watched[0] == plain[0]
    if text != SCRIPTS["missing"]:
        assert watched[2] == plain[2]
        assert watched[1] == plain[1]
        assert plain[2] and run.launch.found()


def test_a_difference_would_be_seen(here: Path) -> None:
    text = "srun sees ${BASH_ENV:+other}"
    assert executed(here, text, new_run(here))[2] != executed(here, text, None)[2]


def test_a_module_before_the_shims_does_not_hide_them(here: Path) -> None:
    (here / "module").mkdir()
    (here / "module" / "mpirun").symlink_to(here / "site" / "mpirun")
    run = new_run(here)
    executed(here, f"load() {{ PATH={shlex.quote(str(here))}/module:$PATH; }}\nload\nmpirun -np 2 sees a\n", run)
    assert [json.loads(path.read_text())["command"] for path in run.launch.found()] == [["mpirun", "-np", "2", "sees", "a"]]


def test_the_first_task_that_fails_is_recorded_with_what_it_wrote(here: Path) -> None:
    run = new_run(here)
    code, _, _ = executed(here, "srun sees a\nsrun -n 2 sees end 3\n", run)
    ends = read_ends(run)
    assert code == 3 and [(number, code, failure.rank) for number, code, failure in ends] == [(2, 3, 0), (2, 3, 1)] \
        or [(number, code, failure.rank) for number, code, failure in ends] == [(2, 3, 1), (2, 3, 0)]
    assert all("no such layer" in failure.message for _, _, failure in ends)


@pytest.mark.parametrize(("text", "codes"), [("srun sees end 75", []), ("srun sees a", []), ("srun sees end -11", [-11])])
def test_an_end_that_is_no_failure_is_not_recorded(text: str, codes: list[int], here: Path) -> None:
    run = new_run(here)
    executed(here, text, run)
    assert [code for _, code, _ in read_ends(run)] == codes


def test_a_task_of_an_earlier_attempt_ends(here: Path) -> None:
    run = new_run(here)
    write_attempt(run.attempt_record, AttemptRecord("another", 2, ("n1",), "n1", 1, ""))
    code, output, got = executed(here, "srun sees a", run)
    assert code == 1 and not got and "not the run's current one" in output


@pytest.mark.parametrize(("words", "places"), [
    ("./a x", (0,)), ("-N2 -n 4 ./a -n 3", (3,)), ("--ntasks=4 --mpi pmix -l ./a", (4,)), ("-n1 ./a : -n3 ./b -n 1", (1, 4)),
    ("--multi-prog conf", None), ("--pty bash", None), ("--container-image=i.sqsh ./a", None), ("--bcast=/tmp/a ./a", None),
    ("--version", None), ("-n 4", None), ("--export=ALL,A=1 --chdir /x -i in ./a", (5,)), ("-- ./a", (1,))])
def test_where_programs_begin_in_srun(words: str, places: tuple[int, ...] | None) -> None:
    assert programs_of_srun(words.split()) == places


@pytest.mark.parametrize(("words", "places"), [
    ("./a", (0,)), ("-np 4 ./a -np 3", (2,)), ("--mca btl tcp,self -x A=1 --bind-to none ./a", (7,)), ("-n 1 ./a : -n 2 ./b", (2, 6)),
    ("--map-by=node ./a", (1,)), ("--unheard-of ./a", None), ("-genv I_MPI_DEBUG 5 -ppn 2 ./a", (5,)), ("--app file", None),
    ("-np 4", None)])
def test_where_programs_begin_in_mpirun(words: str, places: tuple[int, ...] | None) -> None:
    assert program_of_mpirun(words.split()) == places


def test_there_is_a_shim_for_each_launcher(here: Path) -> None:
    run = new_run(here)
    assert {path.name for path in run.shims.iterdir()} == LAUNCHERS.keys()
    assert all(os.access(path, os.X_OK) for path in run.shims.iterdir())
