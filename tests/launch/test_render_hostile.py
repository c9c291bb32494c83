"""Text in a job file is data: hostile values through real bash, and as sbatch reads its directives."""

import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from rendering import CPU, FAKE_HOST, FAKE_RANK, PYTHON, RUN, directives, executable, execute, job, read_by_sbatch, text
from tables import table

from hpc_mp.base.assets import asset
from hpc_mp.base.errors import HpcMpError
from hpc_mp.job import JobSpec
from hpc_mp.launch.facts import ClusterFacts
from hpc_mp.launch.render import ScriptTemplate, render
from hpc_mp.launch.render.values import directive, literal

# What a value must survive. `touch x` leaves a file behind wherever it is run.
NASTY = ("a b", "$(touch x)", "`touch x`", "; touch x;", "&& touch x", "it's", 'a"b', "#1", "ünï→", "*", "$HOME", "%j",
         "-x", "--x=y", "!", "~", "{a,b}", "a\\b", "\\", "${x", ">x", "<(touch x)", "a=b", "[a]")
LINES = st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=12)
PYXIS = ClusterFacts(srun_options=frozenset({"container-image", "container-env"}))


def run_it(folder: Path, spec: JobSpec, run: Path | None = None, python: str = "", **more: Any) -> dict[str, Any]:
    """What the host, srun and the rank get from the script of a job in ``folder``; fails if anything was executed."""
    host = python or str(executable(folder / "python", FAKE_HOST))
    at = run or folder / "run"
    environ = more.pop("environ", {})
    seen = execute(folder, render(spec, [at], python=host, **more).text, at, **environ)
    assert not [path for path in folder.rglob("*") if path.name in ("x", "'x'")], "a value was executed"
    return seen


def rank_at(path: Path) -> str:
    return str(executable(path, FAKE_RANK))


# --- the job as a whole -----------------------------------------------------------------------------------------------


def test_hostile_values_reach_the_ranks_unharmed(tmp_path: Path) -> None:
    values = {f"V{n}": value for n, value in enumerate((*NASTY, "two\nlines", "two\r\nlines", "\r", "", "\t"))}
    run = tmp_path / "runs" / "".join(NASTY).replace("/", "").replace("\\", "") / "0001"
    host = executable(tmp_path / "py 'th' $(touch x); ü" / "python", FAKE_HOST)
    rank = rank_at(tmp_path / "`touch x`" / "python3")
    spec = job(environment={"set": values, "local": "/tmp/$(touch x) \"'"},
               slurm={"python": rank, "setup": ["export FROM_SETUP=$((40 + 2))  # yours", "V0=mine"]})
    seen = run_it(tmp_path, spec, run, str(host))
    assert {name: seen["env"].get(name) for name in values} == values
    assert seen["env"]["FROM_SETUP"] == "42" and seen["cwd"] == str(run) == seen["env"]["HPC_MP_RUN"]
    assert seen["env"]["HPC_MP_LOCAL"].startswith("/tmp/$(touch x) \"'/hpc-mp-")
    assert seen["host"] == [str(host), "-P", "-m", "hpc_mp.supervisor", str(run)]
    assert seen["rank"] == [rank, "-P", "-m", "hpc_mp", "train", f"{run}/job.toml"]
    assert seen["stderr"] == ""


def test_unquoted_values_would_not(tmp_path: Path) -> None:
    """The control: the same value through a template that forgets to quote is executed."""
    source = asset("slurm/job.sbatch.j2").read_text(encoding="utf-8").replace("={{ value }}", "={{ value | verbatim }}")
    spec = job(environment={"set": {"V": "$(touch x)"}}, slurm={"python": rank_at(tmp_path / "rank")})
    with pytest.raises(AssertionError, match="was executed"):
        run_it(tmp_path, spec, template=ScriptTemplate(Path("mine"), source))


@settings(max_examples=settings.default.max_examples // 2, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(["A", "B", "NCCL_X"]), st.one_of(st.sampled_from(NASTY), st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12))), LINES)
def test_any_text_is_data(values: dict[str, str], name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        rank = rank_at(here / "rank")
        seen = run_it(here, job(environment={"set": values}, slurm={"python": rank, "account": name, "extra": {"comment": name}}))
        assert {key: seen["env"][key] for key in values} == values
        assert seen["code"] == 75 and seen["rank"][0] == rank


# --- each field that the shell sees -----------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["modules", "conda"])
def test_no_name_is_read_as_an_option(key: str) -> None:
    for value in (value for value in NASTY if value.startswith("-")):
        with pytest.raises(HpcMpError):
            text(job(slurm={key: [value] if key == "modules" else value}))


@pytest.mark.parametrize("value", NASTY)
def test_modules_a_venv_and_options_that_srun_gets_again(tmp_path: Path, value: str) -> None:
    venv = tmp_path / value.replace("/", "_")
    executable(venv / "bin/activate", "export FROM_VENV=1\n")
    rank_at(venv / "bin/python")
    modules = [] if value.startswith("-") else [value]
    seen = run_it(tmp_path, job(slurm={"modules": modules, "venv": str(venv), "extra": {"network": value, "overcommit": True}}))
    module = f"{tmp_path}/bin/module"
    assert seen["said"] == ([module, "purge", module, "load", value] if modules else [])
    assert seen["env"]["FROM_VENV"] == "1" and seen["rank"][0] == f"{venv}/bin/python"
    assert f"--network={value}" in seen["srun"] and "--overcommit" in seen["srun"]


@pytest.mark.parametrize("value", [value for value in NASTY if not value.startswith("-")])
def test_conda(tmp_path: Path, value: str) -> None:
    """conda is found by CONDA_EXE or on PATH, and its ``activate`` gets the name as one word."""
    hook = "conda() { printf '%s\\n' \"$@\" > \"$RECORD.conda\"; export CONDA_PREFIX=\"${RECORD%/*}/env\"; }"
    executable(tmp_path / "bin/conda", f"#!/bin/sh\ncat <<'E'\n{hook}\nE\n")
    rank_at(tmp_path / "env/bin/python")
    seen = run_it(tmp_path, job(slurm={"conda": value}))
    assert Path(f"{tmp_path}/record.conda").read_text() == f"activate\n{value}\n"
    assert seen["rank"][0] == f"{tmp_path}/env/bin/python"


@pytest.mark.parametrize("value", NASTY)
def test_containers(tmp_path: Path, value: str) -> None:
    mount = f"/host/{value}:/inside"
    slurm = {"container": value, "container_mounts": [mount], "python": "/opt/bin/python"}
    try:
        pyxis = run_it(tmp_path, job(slurm=slurm), facts=PYXIS)
        apptainer = run_it(tmp_path, job(slurm=slurm))
    except HpcMpError as error:
        assert ("," in value and "SOURCE" in str(error)) or value.startswith("-")
        return
    assert f"--container-image={value}" in pyxis["srun"]
    mounts = next(word for word in pyxis["srun"] if word.startswith("--container-mounts=")).partition("=")[2].split(",")
    local = pyxis["env"]["HPC_MP_LOCAL"]
    assert mounts == ["/scratch/corpus:/scratch/corpus", "/scratch/runs:/scratch/runs", mount, f"{local}:{local}"]
    words = apptainer["said"]
    assert words[words.index(value) + 1:][:2] == ["/opt/bin/python", "-P"]
    assert words[words.index(value) - 4:words.index(value)] == ["--bind", mount, "--bind", apptainer["env"]["HPC_MP_LOCAL"]]


# --- what the ranks are told ------------------------------------------------------------------------------------------


def test_what_srun_and_a_rank_are_told(tmp_path: Path) -> None:
    spec = job(job=CPU | {"nodes": 2, "ranks_per_node": 4}, slurm={"python": rank_at(tmp_path / "rank"), "mpi": "pmi2",
                                                                   "extra": {"cpus-per-task": 3}})
    seen = run_it(tmp_path, spec)
    assert seen["code"] == 75, "what the host program ends with is the job's exit code"
    ignored = 1 << signal.SIGUSR2 - 1 | 1 << signal.SIGTERM - 1
    assert seen["ignored"] & ignored == ignored, "an early signal must not kill Python before its handler is there"
    assert seen["tmp"] == seen["env"]["HPC_MP_LOCAL"] + "/tmp"
    options = dict(word.lstrip("-").partition("=")[::2] for word in seen["srun"][1:seen["srun"].index("bash")])
    assert options == {
        "export": "ALL", "nodes": "2", "relative": "0", "ntasks": "8", "ntasks-per-node": "4", "cpus-per-task": "3",
        "mpi": "pmi2", "distribution": "block:block", "kill-on-bad-exit": "1", "wait": "60",
        "output": "log/node-%N.log", "label": "", "open-mode": "append"}
    assert seen["env"]["HPC_MP_MPI"] == "1"


NAMES = table(__file__, "render_hostile.toml", "names")
POLLUTION = dict.fromkeys(NAMES.split(), "polluted")


def test_a_polluted_shell_gives_the_same_run(tmp_path: Path) -> None:
    """The control: without the file that cleans it the shell would show."""
    spec = job(job=CPU, slurm={"python": rank_at(tmp_path / "rank")})
    clean, polluted = (run_it(tmp_path, spec, environ=environ) for environ in (
        {}, POLLUTION | {"LD_PRELOAD": "", "BASH_ENV": "/nowhere", "PYTHONHOME": "/nowhere"}))
    for ran in (clean, polluted):
        del ran["env"]["PATH"]
        ran["env"].pop("SLURM_JOB_NODELIST_HET_GROUP_0", None)
    assert clean["code"] == polluted["code"] == 75 and (clean["env"], clean["srun"]) == (polluted["env"], polluted["srun"])
    lines = asset("slurm/job.sbatch.j2").read_text(encoding="utf-8").splitlines(keepends=True)
    source = "".join(line for line in lines if "clean" not in line)
    assert len(source.splitlines()) == len(lines) - 1
    seen = run_it(tmp_path, spec, template=ScriptTemplate(Path("mine"), source), environ={"NCCL_P2P_DISABLE": "1", "RANK": "3"})
    assert (seen["env"]["NCCL_P2P_DISABLE"], seen["env"]["RANK"]) == ("1", "3")


def test_a_bare_environment_is_enough(tmp_path: Path) -> None:
    """What sbatch --export=NONE may leave."""
    host, rank = executable(tmp_path / "python", FAKE_HOST), rank_at(tmp_path / "rank")
    shutil.copytree(asset("slurm"), tmp_path / "run")
    executable(tmp_path / "bin/srun", "#!/bin/sh\n:\n")
    script = render(job(slurm={"python": rank, "setup": [f"PATH={tmp_path}/bin:$PATH"]}), tmp_path / "run", python=str(host)).text
    done = subprocess.run(["/bin/bash"], input=script, text=True, capture_output=True, timeout=60,
                          env={"SLURM_JOB_ID": "1", "SLURM_EXPORT_ENV": "NONE", "RECORD": f"{tmp_path}/record"})
    assert done.returncode == 0, done.stderr
    seen = dict(word.split("=", 1) for word in (tmp_path / "record.env").read_text().split("\0")[:-1])
    assert seen["HOME"] == str(Path.home()) and seen["USER"] and "SLURM_EXPORT_ENV" not in seen


def test_setup_and_environment_set_have_the_last_word(tmp_path: Path) -> None:
    spec = job(slurm={"setup": ["export NCCL_X=setup TMPDIR=/local OMP_NUM_THREADS=3 HF_HOME=/mine"],
                      "python": rank_at(tmp_path / "rank")}, environment={"set": {"HF_HOME": "/last"}})
    seen = run_it(tmp_path, spec)["env"]
    assert (seen["NCCL_X"], seen["OMP_NUM_THREADS"], seen["HF_HOME"]) == ("setup", "3", "/last")
    assert seen["HPC_MP_LOCAL"].startswith("/local/hpc-mp-") and seen["HPC_MP_LOCAL"].endswith("/4242.0")


def test_each_element_of_an_array_has_its_run(tmp_path: Path) -> None:
    host, rank = executable(tmp_path / "python", FAKE_HOST), rank_at(tmp_path / "rank")
    runs = [tmp_path / "a b" / f"{number}$(touch x)" for number in range(3)]
    spec = job(job=CPU, slurm={"python": rank}, sweep={"runs": [{}, {"train.seed": 1}, {"train.seed": 2}]})
    script = render(spec, runs, python=str(host)).text
    for number, run in enumerate(runs):
        assert execute(tmp_path, script, run, SLURM_ARRAY_TASK_ID=str(number))["cwd"] == str(run)
    assert execute(tmp_path, script, runs[0], SLURM_ARRAY_TASK_ID="3")["code"] == 1, "an element too many runs nothing"


@pytest.mark.parametrize("name", ["USR1", "USR2", "TERM", "HUP", "INT"])
def test_a_signal_to_the_shell_reaches_the_host_program(tmp_path: Path, name: str) -> None:
    waits = (f"import os, signal, time\nsignal.signal(signal.SIG{name}, lambda *_: (os.write(1, b'got it\\n'), os._exit(3)))\n"
             "print('ready', flush=True)\ntime.sleep(60)\n")
    command = shlex.join([sys.executable, "-IS", "-c", waits])
    after = '[ "$4" != --after ] || exit "$5"'  # what it is started with when the first has ended
    host = executable(tmp_path / "host", f"#!/bin/bash\n{after}\nexec {command}\n")
    path = tmp_path / "job.sbatch"
    shutil.copy(asset("slurm/clean-environment.sh"), tmp_path)
    path.write_text(render(job(), tmp_path, python=str(host)).text)
    with subprocess.Popen(["bash", str(path)], stdout=subprocess.PIPE, text=True,
                          env={"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "1"}) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.Signals[f"SIG{name}"])
        assert process.stdout.read() == "got it\n"
    assert process.returncode == 3


# --- as sbatch reads it -----------------------------------------------------------------------------------------------


@given(LINES)
@example("a\\b")
@example("it's #1 \\ 'x")
def test_directives_survive_the_parser_of_sbatch(value: str) -> None:
    assert read_by_sbatch(f"--comment={directive(value)}") == [f"--comment={value}"]


def test_the_quotes_of_the_shell_would_not_survive() -> None:
    assert read_by_sbatch(f"--comment={shlex.quote('a' + chr(92) + 'b')}") == ["--comment=ab"]
    assert read_by_sbatch("--comment=a#b") == ["--comment=a"]


@pytest.mark.parametrize("value", NASTY)
def test_the_directives_of_a_hostile_job(value: str) -> None:
    slurm = {key: value for key in ("account", "partition", "qos", "constraint", "reservation")}
    part = {"nodes": 1, "partition": value, "constraint": value, "extra": {"nodelist": value}}
    words = directives(text(job(slurm=slurm | {"extra": {"comment": value, "licenses": value}, "components": [part]})))
    for option in (*slurm, "comment", "licenses", "nodelist"):
        assert f"--{option}={value}" in words
    assert len(words) == len(directives(text(job(slurm={key: "a" for key in slurm} | {
        "extra": {"comment": "a", "licenses": "a"}, "components": [part | {"extra": {"nodelist": "a"}}]}))))
    if "\\" not in value:
        words = directives(text(job(), Path("/runs") / value / "0001"))
        assert f"--output=/runs/{value.replace('%', '%%')}/0001/slurm-%j.log" in words
    assert literal(value) == value.replace("%", "%%")


@pytest.mark.parametrize(("sections", "run", "value"), [
    *table(__file__, "render_hostile.toml", "carried"), ({}, "/runs/\udcff", "job.directory")])
def test_what_no_script_can_carry_is_refused(sections: dict[str, Any], run: str, value: str) -> None:
    with pytest.raises(HpcMpError, match=re.escape(value)):
        text(job(**sections), Path(run))


def test_no_field_holds_two_lines() -> None:
    for key in ("account", "partition", "qos", "constraint", "reservation", "container", "conda", "venv", "python", "switches"):
        with pytest.raises(HpcMpError):
            text(job(slurm={key: "/a\n#SBATCH --uid=0"}))
    with pytest.raises(HpcMpError, match="the interpreter"):
        render(job(), RUN, python="python3")
    assert PYTHON in render(job(), RUN, python=PYTHON).text
