"""The job script: golden files, every line explained, hostile values through real bash, options refused."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hpc_mp.assets import asset
from hpc_mp.errors import HpcMpError
from hpc_mp.job import JobSpec, resolve
from hpc_mp.launch.quoting import directive, literal
from hpc_mp.launch.render import TEMPLATE, gpu_request, render
from hpc_mp.launch.sbatch_options import TABLE

GOLDEN = Path(__file__).parent / "golden" / "sbatch"
RUN = Path("/scratch/runs/job/0001")
PYTHON = "/opt/conda/bin/python"

ALL = {
    "partition": "gpu", "account": "proj", "qos": "high", "constraint": "a100&ib", "reservation": "Monday 9",
    "gpu_type": "h100", "setup": ["module purge", "module load cuda  # 12", "f() {\n  true\n}"],
    "extra": {"cpus-per-task": 12, "exclusive": True, "mem": "0", "comment": "it's #1", "no-requeue": True},
}
CASES: dict[str, tuple[dict[str, Any], Path]] = {
    "cpu": ({"job": {"device": "cpu", "name": "small"}}, RUN),
    "gpu": ({"job": {"nodes": 4, "ranks_per_node": 8, "time_limit": "1-00:00:00"}}, RUN),
    "gres": ({"job": {"ranks_per_node": 4}, "slurm": {"gpu_request": "gres", "gpu_type": "a100"}}, RUN),
    "all": ({"job": {"nodes": 2, "ranks_per_node": 4}, "slurm": ALL,
             "environment": {"set": {"NCCL_DEBUG": "WARN", "GREETING": "it's\n$HOME"}}},
            Path("/data/my runs/50%/0001")),
}

# What a value must survive, as a path component, an environment variable or a comment.
NASTY = ("a b", "$(touch x)", "`touch x`", "; touch x;", "&& touch x", "it's", 'a"b', "#1", "ünï→", "*", "$HOME", "%j",
         "-x", "!")


def job(**sections: Any) -> JobSpec:
    tree = {"model": {"config": {"model_type": "gpt2"}}, "data": {"files": ["a.txt"], "sequence_length": 8},
            "train": {"steps": 1, "global_batch": 32}}
    return resolve(tree | sections, Path("/"))


def text(spec: JobSpec, run: Path = RUN, **options: Any) -> str:
    return render(spec, run, python=PYTHON, **options).text


# --- the text ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str) -> None:
    sections, run = CASES[name]
    assert text(job(**sections), run) == (GOLDEN / f"{name}.sbatch").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", CASES)
def test_every_line_is_explained(name: str) -> None:
    sections, run = CASES[name]
    script = render(job(**sections), run, python=PYTHON)
    assert all(why for _, why in script.explanations)
    explained = "\n".join(line for line, _ in script.explanations)
    assert explained.split() == script.text.split()


def test_a_template_line_without_a_reason_stays_and_says_so() -> None:
    template = "#!/bin/sh\n{% if false %}\nno\n{% endif %}\necho {{ run }} {# why #}\n"
    script = render(job(), RUN, python=PYTHON, template=template)
    assert script.text == f"#!/bin/sh\necho {RUN}\n"
    assert script.explanations == (("#!/bin/sh", ""), (f"echo {RUN}", "why"))


@pytest.mark.parametrize("template", ["{{ nothing }}\n", "{% if %}\n"])
def test_a_broken_template_is_refused(template: str) -> None:
    with pytest.raises(HpcMpError, match="cannot be filled in"):
        text(job(), template=template)


@pytest.mark.parametrize(("slurm", "device", "expected"), [
    ({}, "auto", "gpus-per-node=4"),
    ({"gpu_type": "h100"}, "cuda", "gpus-per-node=h100:4"),
    ({"gpu_request": "gres"}, "auto", "gres=gpu:4"),
    ({"gpu_request": "gres", "gpu_type": "h100"}, "auto", "gres=gpu:h100:4"),
    ({"gpu_request": "none"}, "cuda", None),
    ({"gpu_type": "h100"}, "cpu", None),
])
def test_gpu_request(slurm: dict[str, Any], device: str, expected: str | None) -> None:
    assert gpu_request(job(job={"ranks_per_node": 4, "device": device}, slurm=slurm)) == expected


# --- through real bash ------------------------------------------------------------------------------------------------

# A Python file that a shell starts: a line "#!" cannot hold an interpreter with a space in its path.
BY_PYTHON = f"""#!/bin/sh
'''exec' {shlex.quote(sys.executable)} "$0" "$@"
' '''
"""
FAKE_SRUN = BY_PYTHON + """
import json, os, subprocess, sys
command = sys.argv[sys.argv.index("bash"):]
json.dump({"argv": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd()}, open(os.environ["RECORD"], "w"))
sys.exit(subprocess.run(command).returncode)
"""
FAKE_SCONTROL = """#!/bin/sh
echo "$@" > "$RECORD.scontrol"
seq -f node%g 1 99999
"""
FAKE_PYTHON = BY_PYTHON + """
import json, os, signal, sys
ignored = signal.getsignal(signal.SIGUSR2) == signal.SIG_IGN
json.dump({"argv": sys.argv[1:], "usr2_ignored": ignored}, open(os.environ["RECORD"] + ".rank", "w"))
sys.exit(75)
"""


def executable(path: Path, content: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    path.chmod(0o755)
    return path


def execute(tmp_path: Path, script: str, run: Path, **environ: str) -> dict[str, Any]:
    """Run a script as the batch host does, with an srun that starts one rank; returns what srun and the rank saw."""
    executable(tmp_path / "bin/srun", FAKE_SRUN)
    executable(tmp_path / "bin/scontrol", FAKE_SCONTROL)
    run.mkdir(parents=True)
    record = tmp_path / "record"
    path = tmp_path / "job.sbatch"
    path.write_text(script, encoding="utf-8")
    done = subprocess.run(["bash", str(path)], cwd=tmp_path, timeout=60, capture_output=True, text=True, env={
        "PATH": f"{tmp_path}/bin:/usr/bin:/bin", "HOME": "/nowhere", "LANG": "C.UTF-8", "RECORD": str(record),
        "SLURM_JOB_ID": "4242", "SLURM_JOB_NODELIST": "node[1-99999]"} | environ)
    return {"code": done.returncode, "stderr": done.stderr, "scontrol": Path(f"{record}.scontrol").read_text().strip(),
            "rank": json.loads(Path(f"{record}.rank").read_text()), **json.loads(record.read_text())}


def test_hostile_values_reach_the_ranks_unharmed(tmp_path: Path) -> None:
    values = {f"V{n}": value for n, value in enumerate((*NASTY, "two\nlines", "", "\\", "\t"))}
    run = tmp_path / "runs" / "".join(NASTY).replace("/", "") / "0001"
    python = executable(tmp_path / "py 'th' $(touch x); ü" / "python", FAKE_PYTHON)
    spec = job(environment={"set": values}, slurm={"setup": ["export FROM_SETUP=$((40 + 2))  # yours", "V0=mine"]})
    seen = execute(tmp_path, render(spec, run, python=str(python)).text, run)

    assert {name: seen["env"].get(name) for name in values} == values
    assert seen["env"]["FROM_SETUP"] == "42"
    assert seen["cwd"] == str(run)
    assert seen["rank"]["argv"] == ["-m", "hpc_mp", "train", f"{run}/job.toml"]
    assert seen["argv"][-5:] == [str(python), *seen["rank"]["argv"]]
    assert not list(tmp_path.rglob("x"))
    assert seen["stderr"] == ""


def test_unquoted_values_would_not(tmp_path: Path) -> None:
    """The control: the same value through a template that forgets to quote is executed."""
    source = asset(TEMPLATE).read_text(encoding="utf-8").replace("={{ value }}", "={{ value | verbatim }}")
    python = executable(tmp_path / "python", FAKE_PYTHON)
    spec = job(environment={"set": {"V": "$(touch x)"}})
    seen = execute(tmp_path, render(spec, tmp_path / "run", python=str(python), template=source).text, tmp_path / "run")
    assert seen["env"]["V"] == ""
    assert (tmp_path / "run/x").exists()


def test_what_a_rank_is_told(tmp_path: Path) -> None:
    python = executable(tmp_path / "python", FAKE_PYTHON)
    spec = job(job={"nodes": 2, "ranks_per_node": 4}, slurm={"extra": {"cpus-per-task": 3}})
    script = render(spec, tmp_path / "run", python=str(python)).text
    seen = execute(tmp_path, script, tmp_path / "run", SLURM_CPUS_PER_TASK="3")
    assert seen["code"] == 75, "the exit code of the ranks is the job's"
    assert seen["rank"]["usr2_ignored"], "an early USR2 must not kill Python before its handler is there"
    assert seen["scontrol"] == "show hostnames node[1-99999]"
    told = {name: seen["env"][name] for name in ("MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "HF_HUB_OFFLINE")}
    assert told == {"MASTER_ADDR": "node1", "MASTER_PORT": "14242", "OMP_NUM_THREADS": "3", "HF_HUB_OFFLINE": "1"}
    options = dict(word.lstrip("-").partition("=")[::2] for word in seen["argv"][:seen["argv"].index("bash")])
    assert options == {
        "export": "ALL", "nodes": "2", "relative": "0", "ntasks": "8", "ntasks-per-node": "4", "cpus-per-task": "3",
        "distribution": "block", "kill-on-bad-exit": "1", "wait": "60", "output": "log/rank-%5t.log",
        "open-mode": "append"}


def test_a_requeued_job_meets_on_another_port(tmp_path: Path) -> None:
    ports = []
    for restarts in ("0", "1", "2"):
        here = tmp_path / restarts
        python = executable(here / "python", FAKE_PYTHON)
        seen = execute(here, render(job(), here / "run", python=str(python)).text, here / "run",
                       SLURM_RESTART_COUNT=restarts, SLURM_JOB_ID="123456789")
        ports.append(int(seen["env"]["MASTER_PORT"]))
    assert len(set(ports)) == 3
    assert all(10000 <= port < 30000 for port in ports)


def test_no_host_name_ends_the_script(tmp_path: Path) -> None:
    executable(tmp_path / "bin/scontrol", "#!/bin/sh\nexit 1\n")
    path = tmp_path / "job.sbatch"
    path.write_text(render(job(), tmp_path, python=PYTHON).text)
    environ = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n1"}
    done = subprocess.run(["bash", str(path)], capture_output=True, text=True, timeout=60, env=environ)
    assert done.returncode != 0
    assert "scontrol names no host" in done.stderr


def test_a_signal_to_the_shell_reaches_srun(tmp_path: Path) -> None:
    executable(tmp_path / "bin/scontrol", "#!/bin/sh\necho n1\n")
    executable(tmp_path / "bin/srun",
               "#!/bin/bash\ntrap 'echo got USR2; exit 3' USR2\necho ready\nwhile :; do sleep 0.05; done\n")
    path = tmp_path / "job.sbatch"
    path.write_text(render(job(), tmp_path, python=PYTHON).text)
    with subprocess.Popen(["bash", str(path)], stdout=subprocess.PIPE, text=True, env={
            "PATH": f"{tmp_path}/bin:/usr/bin:/bin", "SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n1"}) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGUSR2)
        assert process.stdout.read() == "got USR2\n"
    assert process.returncode == 3


# --- as sbatch reads it -----------------------------------------------------------------------------------------------


def read_by_sbatch(line: str) -> list[str]:
    """``get_argument`` of src/sbatch/opt.c, in Python: the words of a directive."""
    words: list[str] = []
    at = 0
    while True:
        while at < len(line) and line[at].isspace():
            at += 1
        word, quote, escaped = "", "", False
        if at == len(line) or line[at] == "#":
            return words
        while at < len(line) and (quote or not line[at].isspace()):
            character = line[at]
            if escaped:
                escaped = False
            elif character == "\\":
                escaped = True
                at += 1
                continue
            elif quote and character == quote:
                quote = ""
                at += 1
                continue
            elif not quote and character in "\"'":
                quote = character
                at += 1
                continue
            elif not quote and character == "#":
                return [*words, word]
            word += character
            at += 1
        assert not quote, "Unmatched quote"
        words.append(word)


LINE = st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1)


@given(LINE)
@example("a\\b")
@example("it's #1 \\ 'x")
def test_directives_survive_the_parser_of_sbatch(value: str) -> None:
    assert read_by_sbatch(f"--comment={directive(value)}") == [f"--comment={value}"]


def test_the_quotes_of_the_shell_would_not() -> None:
    assert read_by_sbatch(f"--comment={shlex.quote('a' + chr(92) + 'b')}") == ["--comment=ab"]
    assert read_by_sbatch("--comment=a#b") == ["--comment=a"]


@pytest.mark.parametrize("value", NASTY)
def test_the_directives_of_a_hostile_job(value: str) -> None:
    script = text(job(slurm={"account": value, "extra": {"comment": value}}), Path("/runs") / value / "0001")
    words = [word for line in script.splitlines() if line.startswith("#SBATCH") for word in read_by_sbatch(line[7:])]
    assert f"--account={value}" in words
    assert f"--comment={value}" in words
    assert f"--output=/runs/{value.replace('%', '%%')}/0001/log/slurm-%j.log" in words
    assert literal(value) == value.replace("%", "%%")


@pytest.mark.parametrize(("sections", "run", "value"), [
    ({}, "/runs/a\nb", "job.directory"),
    ({}, "/runs/a\\b", "job.directory"),
    ({}, "/runs/\udcff", "job.directory"),
    ({"slurm": {"extra": {"comment": "a\nb"}}}, "/runs", "slurm.extra.comment"),
    ({"slurm": {"setup": ["a\0b"]}}, "/runs", "slurm.setup"),
    ({"environment": {"set": {"A": "a\0b"}}}, "/runs", "environment.set.A"),
])
def test_what_no_script_can_carry_is_refused(sections: dict[str, Any], run: str, value: str) -> None:
    with pytest.raises(HpcMpError, match=re.escape(value)):
        text(job(**sections), Path(run))


# --- options in slurm.extra -------------------------------------------------------------------------------------------


def refusal(**extra: Any) -> HpcMpError:
    with pytest.raises(HpcMpError) as caught:
        text(job(slurm={"extra": {name.replace("_", "-"): value for name, value in extra.items()}}))
    return caught.value


@pytest.mark.parametrize("name", tomllib.loads(asset(TABLE).read_text())["refused"])
def test_what_the_script_settles_is_refused(name: str) -> None:
    error = refusal(**{name: "1"})
    assert error.value == f"slurm.extra.{name}"
    assert error.rule and error.remedy


@pytest.mark.parametrize(("given_name", "meant"), [
    ("exclusiv", "exclusive"), ("cpu-per-task", "cpus-per-task"), ("partitions", "partition")])
def test_unknown_options_are_answered_with_the_nearest(given_name: str, meant: str) -> None:
    assert f"did you mean '{meant}'" in refusal(**{given_name: "1"}).remedy


@pytest.mark.parametrize(("name", "value"), [("gpus-per-node", 2), ("requeue", True)])
def test_an_option_twice_is_refused(name: str, value: object) -> None:
    assert refusal(**{name: value}).rule == "is set by the script already"


def test_an_option_that_the_script_leaves_out_may_be_added() -> None:
    slurm = {"gpu_request": "none", "extra": {"gres": "gpu:2,nvme:1"}}
    assert "#SBATCH --gres=gpu:2,nvme:1\n" in text(job(slurm=slurm))
    assert "#SBATCH --requeue" not in text(job(slurm={"extra": {"no-requeue": True}}))


def test_false_is_refused() -> None:
    with pytest.raises(HpcMpError, match="says nothing to sbatch"):
        text(job(slurm={"extra": {"contiguous": False}}))


def test_whole_nodes_unless_told_otherwise() -> None:
    assert "#SBATCH --exclusive\n#SBATCH --mem=0\n" in text(job())
    shared = text(job(slurm={"extra": {"exclusive": False, "mem": "64G"}}))
    assert "exclusive" not in shared and "#SBATCH --mem=64G\n" in shared and "mem=0" not in shared
    assert "--mem=0" not in text(job(slurm={"extra": {"mem-per-cpu": "4G"}}))


def test_options_are_checked_against_the_release() -> None:
    spec = job(slurm={"extra": {"segment": 4}})
    with pytest.raises(HpcMpError, match=r"exists from Slurm 24\.05 on; this cluster runs 23\.02"):
        text(spec, slurm_version=(23, 2))
    assert "#SBATCH --segment=4\n" in text(spec, slurm_version=(24, 5))
    assert "#SBATCH --segment=4\n" in text(spec)


def test_every_option_of_the_template_is_guarded() -> None:
    """Whatever the template writes cannot be written again through slurm.extra."""
    sections, run = CASES["all"]
    written = set(re.findall(r"^#SBATCH --([a-z-]+)", text(job(**sections), run), re.M)) - set(ALL["extra"])
    assert {"nodes", "output", "signal", "account", "gpus-per-node"} <= written
    for name in written:
        with pytest.raises(HpcMpError):
            text(job(slurm=ALL | {"extra": {name: "1"}}))
