"""A script whose launchers are shims: its programs get what they get without them, and failures of tasks are recorded."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
from launching import python_program
from tables import table

from hpc_mp.base.launchers import LAUNCHERS, program_of_mpirun
from hpc_mp.cluster.slurm.option_syntax import programs_of_srun
from hpc_mp.program.shim import MARK, SUBMITTERS, with_shims, write_shims
from hpc_mp.program.witness import Witness
from hpc_mp.rundir import AttemptRecord, RunDirectory, create_run, write_attempt, write_json
from hpc_mp.rundir.failures import read_ends
from hpc_mp.supervisor.script import batch_environ

BIN = Path(__file__).with_name("bin")  # programs in Python
OURS = {"PATH", "BASH_ENV", "SLURM_TASK_PID", "SEEN", "_", "SHLVL", "OLDPWD"}


def launcher(path: Path, text: str) -> None:
    """A program in Python, without a shell before it where the kernel can do so: dash drops variables with odd names."""
    if " " in sys.executable:
        python_program(path, text)
    else:
        path.write_text(f"#!{sys.executable}\n{text}")
        path.chmod(0o755)


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "site").mkdir()
    for name in ("srun", "mpirun", "torchrun", "sbatch", "sees"):
        launcher(tmp_path / "site" / name, (BIN / ("sees" if name == "sees" else "srun")).read_text())
    (tmp_path / "work dir").mkdir()
    return tmp_path


def new_run(here: Path) -> RunDirectory:
    run = create_run(here / "runs of mine", "t")
    write_attempt(run.attempt_record, AttemptRecord("7.0.1", 1, ("n1",), "n1", 1, ""))
    write_json(run.program, {"command": ["script"], "directory": ".", "environment": {}, "stop_codes": [75]})
    write_shims(run, {})
    return run


def executed(here: Path, text: str, run: RunDirectory | None) -> tuple[int, str, list[Any]]:
    """Run a script, with shims or without. Return its code, its output, and what its programs got."""
    script, seen = here / "script.sh", here / ("plain" if run is None else "watched")
    script.write_text(text if text.startswith("#!") else f"#!/bin/bash\n{text}")
    script.chmod(0o755)
    seen.mkdir(exist_ok=True)
    environ = {"PATH": f"{here / 'site'}:/usr/bin:/bin", "HOME": str(here), "OWN": "a  b\nc", "SEEN": str(seen)}
    if run is not None:
        environ = with_shims(run, {**environ, "HPC_MP_RUN": str(run.path), "HPC_MP_TOKEN": "7.0.1", "HPC_MP_ATTEMPT": "1"})
    done = subprocess.run([str(script), "one", "two words"], cwd=here / "work dir", env=environ, stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, timeout=60)
    got = [json.loads(path.read_text()) for path in sorted(seen.iterdir())]
    for _, _, variables, _ in got:
        for name in [*variables]:
            if name in OURS or name.startswith("HPC_MP_"):
                del variables[name]
    return done.returncode, "".join(sorted((done.stdout + done.stderr).splitlines(keepends=True))), sorted(got, key=repr)


SCRIPTS = {name: text.replace("PYTHON", sys.executable) for name, text in tomllib.loads(
    Path(__file__).with_name("scripts.toml").read_text(encoding="utf-8")).items()}


@pytest.mark.parametrize("text", SCRIPTS.values(), ids=SCRIPTS)
def test_programs_get_what_they_get_without_shims(text: str, here: Path) -> None:
    if " " in sys.executable and ("python" in text.split("\n")[0] or "export -f" in text or "a.b" in text):
        pytest.skip("#! takes no blank, and the shell instead drops variables")
    run = new_run(here)
    plain, watched = executed(here, text, None), executed(here, text, run)
    assert watched[0] == plain[0]
    if text != SCRIPTS["missing"]:
        assert watched[2] == plain[2]
        assert watched[1] == plain[1]
        assert plain[2] and (run.launch.found() or "env -i" in text or "which" in text)


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
    assert code == 3 and sorted((number, code, failure.rank) for number, code, failure in ends) == [(2, 3, 0), (2, 3, 1)]
    assert all("no such layer" in failure.message for _, _, failure in ends)


@pytest.mark.parametrize(("text", "codes"), [("srun sees end 75", []), ("srun sees a", []), ("srun sees end -11", [-11])])
def test_an_end_that_is_no_failure_is_not_recorded(text: str, codes: list[int], here: Path) -> None:
    run = new_run(here)
    executed(here, text, run)
    assert [code for _, code, _ in read_ends(run)] == codes


def test_a_task_of_an_earlier_attempt_ends(here: Path) -> None:
    run = new_run(here)
    write_attempt(run.attempt_record, AttemptRecord("7.1.2", 2, ("n1",), "n1", 1, ""))
    code, output, got = executed(here, "srun sees a", run)
    assert code == 1 and not got and "no longer the run's current one" in output


@pytest.mark.parametrize(("words", "places"), table(__file__, "shim.toml", "srun"))
def test_where_programs_begin_in_srun(words: str, places: list[int] | None) -> None:
    assert programs_of_srun(words.split()) == (places and tuple(places))


@pytest.mark.parametrize(("words", "places"), table(__file__, "shim.toml", "mpirun"))
def test_where_programs_begin_in_mpirun(words: str, places: list[int] | None) -> None:
    assert program_of_mpirun(words.split()) == (places and tuple(places))


def test_there_is_a_shim_for_each_launcher(here: Path) -> None:
    run = new_run(here)
    assert {path.name for path in run.shims.iterdir()} == {*LAUNCHERS, *SUBMITTERS, MARK}
    assert all(os.access(path, os.X_OK) for path in run.shims.iterdir() if path.name != MARK)


def test_a_job_that_the_script_hands_in_is_none_of_the_run(here: Path) -> None:
    run = new_run(here)
    script = f"sbatch bash -c 'sees $PATH; env | grep -c HPC_MP_ >{here}/ours; echo \"${{BASH_ENV-none}}\" >{here}/bash_env'"
    _, _, got = executed(here, script.replace("sees $PATH", 'sees \"$PATH\"'), run)
    assert str(run.shims) not in got[0][0][0] and not run.launch.found()
    assert ((here / "ours").read_text(), (here / "bash_env").read_text()) == ("0\n", "none\n")


def test_another_job_is_not_watched(here: Path) -> None:
    run = new_run(here)
    _, _, got = executed(here, "SLURM_JOB_ID=8 srun sees x", run)
    assert len(got) == 1 and not run.launch.found()
    executed(here, "SLURM_JOB_ID=7 srun sees x", run)
    assert len(run.launch.found()) == 1


def test_the_shims_of_a_run_in_a_run_do_not_find_each_other(here: Path) -> None:
    outer, inner = new_run(here), new_run(here)
    environ = {"PATH": f"{here / 'site'}:/usr/bin:/bin", "SEEN": str(here), "HOME": str(here)}
    for run in (outer, inner):
        write_shims(run, environ)
        environ = with_shims(run, environ)
    done = subprocess.run(["bash", "-c", "srun true; echo $?"], env=environ, timeout=30, capture_output=True, text=True)
    assert done.stdout == "0\n"


def test_its_own_numbers_name_a_task_of_mpirun(here: Path) -> None:
    run = new_run(here)
    executed(here, "mpirun -np 1 env OMPI_COMM_WORLD_RANK=6 sees a\n", run)
    executed(here, "export OMPI_COMM_WORLD_RANK=6; mpirun -np 1 sees end 3\n", run)
    assert [failure.rank for _, _, failure in read_ends(run)] == [6]


@pytest.mark.parametrize("forwards", [True, False])
def test_a_signal_to_the_witness_alone_reaches_its_process(here: Path, forwards: bool) -> None:
    """As with proctrack/cgroup, where Slurm signals the children of slurmstepd and not theirs."""
    run = new_run(here)
    words = Witness(str(run.path), "7.0.1", 1, 0, "srun", forwards).of(1, "srun")
    process = subprocess.Popen([*words, "bash", "-c", f"trap 'echo asked; exit 75' USR1; touch {here}/up; for i in {{1..40}}; do "
                                "sleep 0.1; done"], stdout=subprocess.PIPE, text=True)
    while not (here / "up").exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGUSR1)
    output, _ = process.communicate(timeout=30)
    assert (output, process.returncode) == (("asked\n", 75) if forwards else ("", 0)) and not read_ends(run)


@pytest.mark.parametrize(("family", "name"), [("srun", shutil.which("bash")), ("mpi", "bash")])
def test_srun_gives_a_program_on_path_its_whole_path_as_name(here: Path, family: str, name: str) -> None:
    assert witnessed(here, family, "bash", "-c", 'echo "$0"').stdout == f"{name}\n"


@pytest.mark.parametrize(("name", "code", "error"), [
    ("stage", 13, "stage: Permission denied"), ("bash", 2, "bash: No such file"), ("./main", 2, "{here}/./main: No such file")])
def test_what_cannot_run_is_refused_as_by_slurmstepd(here: Path, monkeypatch: Any, name: str, code: int, error: str) -> None:
    """Without PATH, as under --export=NONE, no name is looked up."""
    (here / "stage").write_text("echo\n")
    monkeypatch.delenv("PATH")
    done = witnessed(here, "srun", name)
    assert done.returncode == code and done.stderr.startswith("slurmstepd-") and error.format(here=here) in done.stderr


def witnessed(here: Path, family: str, *command: str) -> subprocess.CompletedProcess[str]:
    words = Witness(str(new_run(here).path), "7.0.1", 1, 0, family, False).of(1, family)
    return subprocess.run([*words, *command], cwd=here, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(("level", "handed_on"), [("0", {}), ("1", {"SHLVL": "1"}), ("3", {"SHLVL": "3"})])
def test_the_level_of_shells_is_that_of_sbatch(here: Path, level: str, handed_on: dict[str, str]) -> None:
    """A bash that begins without SHLVL gives its children 0 as it ends."""
    run = RunDirectory(here)
    run.batch_environ.write_bytes(f"SHLVL={level}\0SLURM_OPEN_MODE=a\0A=1\0".encode())
    assert batch_environ(run) == {"A": "1", **handed_on} and not run.batch_environ.exists()
