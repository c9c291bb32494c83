"""``hpc-mp adopt``: scripts of our own. Directives become keys, the body stays as it is, and each line is accounted for."""

import json
import re
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import table

from hpc_mp.adopt import AdoptedJob, Fate, adopt
from hpc_mp.adopt.account import job_text
from hpc_mp.base.errors import HpcMpError
from hpc_mp.cli.adopt import command
from hpc_mp.job.load import load_any
from hpc_mp.launch.render import render
from hpc_mp.lint.sbatch import lint

GOLDEN = sorted((Path(__file__).parents[1] / "golden" / "adopt").glob("*.sbatch"))
NAMES = [path.name for path in GOLDEN]
HEAD = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=4\n#SBATCH --time=5\n"


def adopted(text: str, directory: Path, *arguments: str) -> AdoptedJob:
    (directory / "script.sbatch").write_text(text)
    return adopt(text, directory=directory, job_directory=directory, file=directory / "script.sbatch", arguments=arguments)


def golden(name: str, directory: Path, *arguments: str) -> AdoptedJob:
    return adopted(next(path for path in GOLDEN if path.name == name).read_text(), directory, *arguments)


def header(job: AdoptedJob, directory: Path) -> dict[str, str]:
    """The directives of the job script that Slurm gets."""
    text = render(job.spec, directory / "runs" / "job" / "0001", python=sys.executable).text
    return dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", text, re.MULTILINE))


def unaccounted(job: AdoptedJob, text: str) -> list[int]:
    """Lines that are not blank and stand in no entry, or in several."""
    covered = Counter(number for fate in job.account for number in range(fate.first, fate.last + 1))
    return [number for number, line in enumerate(text.split("\n"), start=1) if line.strip() and covered[number] != 1]


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


def test_directives_become_keys_and_the_body_stays(tmp_path: Path) -> None:
    job = golden("plain.sbatch", tmp_path)
    slurm, sizes = job.spec.slurm, job.spec.job
    assert (sizes.name, sizes.nodes, sizes.ranks_per_node, sizes.time_limit) == ("llama", 2, 4, "04:00:00")
    assert (slurm.partition, slurm.account, slurm.gpu_request) == ("gpu", "proj", "none")
    assert slurm.extra == {"mail-type": "END", "cpus-per-task": "8", "gres": "gpu:a100:4", "ntasks-per-node": "4"}
    assert (slurm.modules, slurm.venv, slurm.setup) == ((), None, ())
    assert (job.spec.program.start, job.spec.program.command) == ("script", (str(tmp_path / "script.sbatch"),))
    assert {line.fate for line in job.account if line.first > 11} == {Fate.KEPT}
    (launch,) = (line for line in job.account if line.text.startswith("srun"))
    assert launch.why == "each rank that srun starts is watched"


@pytest.mark.parametrize(("options", "changes"), table(__file__, "adopt.toml", "asked"))
def test_what_slurm_is_asked_for_is_what_the_script_asks_for(options: str, changes: dict[str, str], tmp_path: Path) -> None:
    job = adopted(f"#!/bin/bash\n#SBATCH {options} --time=5\necho a\nsrun ./a\n", tmp_path)
    ours, short = header(job, tmp_path), {"-N": "nodes", "-n": "ntasks", "-c": "cpus-per-task"}
    words = re.sub(r"(-[Nnc]) (\d+)", lambda option: f"--{short[option[1]]}={option[2]}", options)
    theirs = dict(re.findall(r"--([\w-]+)=?(\S*)", words)) | changes
    assert {name: ours.get(name) for name in theirs} == theirs
    free = {"job-name", "time", "requeue", "output", "open-mode"}
    assert ours.keys() - free == theirs.keys()


@pytest.mark.parametrize(("lines", "nodes", "per_node"), table(__file__, "adopt.toml", "tasks_per_node"))
def test_tasks_per_node_are_a_maximum_beside_all_tasks(lines: str, nodes: int, per_node: int, tmp_path: Path) -> None:
    job = adopted(f"#!/bin/bash\n#SBATCH {lines}\necho a\nsrun ./a\n", tmp_path).spec.job
    assert (job.nodes, job.ranks_per_node) == (nodes, per_node)


def test_a_size_that_is_not_asked_for_would_be_seen(tmp_path: Path) -> None:
    assert "ntasks-per-node" not in header(adopted("#!/bin/bash\n#SBATCH -N 2 -n 5\necho a\nsrun ./a\n", tmp_path), tmp_path)
    assert "ntasks-per-node" in header(adopted(f"{HEAD}srun ./a\n", tmp_path), tmp_path)


@pytest.mark.parametrize(("line", "command"), table(__file__, "adopt.toml", "literal_launches"))
def test_one_literal_launch_becomes_ranks_of_ours(line: str, command: list[str], tmp_path: Path) -> None:
    spec = adopted(f"{HEAD}# a comment\n\n{line}\n", tmp_path).spec
    assert (spec.program.start, [*spec.program.command], spec.job.nodes, spec.job.ranks_per_node) == ("rank", command, 2, 4)
    assert spec.slurm.extra == {"exclusive": False, "mem": False, "cpus-per-task": False}


@pytest.mark.parametrize("line", ["srun ./a", "srun ./a $X"])
def test_a_name_that_a_job_file_cannot_have_reaches_the_ranks(line: str, tmp_path: Path) -> None:
    spec = adopted(f'{HEAD}#SBATCH --job-name="my job"\n{line}\n', tmp_path).spec
    assert spec.program.environment["SLURM_JOB_NAME"] == "my job" != spec.job.name


@pytest.mark.parametrize("line", table(__file__, "adopt.toml", "of_bash"))
def test_all_else_is_run_by_bash(line: str, tmp_path: Path) -> None:
    job = adopted(f"{HEAD}{line}\n", tmp_path)
    assert job.spec.program.start == "script" and job.lost == ()


@pytest.mark.parametrize(("shell", "start"), table(__file__, "adopt.toml", "first_lines"))
def test_a_login_shell_reads_the_users_profile(shell: str, start: str, tmp_path: Path) -> None:
    text = HEAD.replace(HEAD.splitlines()[0], shell)
    assert adopted(f"{text}srun python t.py\n", tmp_path).spec.program.start == start


@pytest.mark.parametrize(("line", "mode"), [
    ("", None), ("#SBATCH --open-mode=append\n", "a"), ("#SBATCH --open-mode=truncate\n", "t")])
def test_sruns_of_the_script_append_as_it_asks(line: str, mode: str | None, tmp_path: Path) -> None:
    assert adopted(f"{HEAD}{line}srun ./a $X\n", tmp_path).spec.program.environment.get("SLURM_OPEN_MODE") == mode


def test_arguments_of_the_script_reach_it(tmp_path: Path) -> None:
    job = adopted(f"{HEAD}srun ./a\n", tmp_path, "one", "two words", "$X")
    assert job.spec.program.command == (str(tmp_path / "script.sbatch"), "one", "two words", "$X")
    assert any("an argument of the script" in note for note in adopted(f"{HEAD}srun ./a $1\n", tmp_path).notes)


def test_variables_of_the_own_sbatch(tmp_path: Path) -> None:
    spec = adopted("#!/bin/bash\n#SBATCH -J 'a b' -N 1 --array=3-9:3%2\necho $SLURM_ARRAY_TASK_ID\nsrun ./a\n", tmp_path).spec
    assert spec.program.environment == {
        "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_NAME": "a b", "SLURM_ARRAY_TASK_COUNT": "3", "SLURM_ARRAY_TASK_MIN": "3",
        "SLURM_ARRAY_TASK_MAX": "9", "SLURM_ARRAY_TASK_STEP": "3"}
    assert spec.sweep.grid == {"program.environment.SLURM_ARRAY_TASK_ID": ["3", "6", "9"]} and spec.sweep.simultaneous == 2


@pytest.mark.parametrize(("array", "step"), [("0-8:4", "4"), ("1,4,9", "1"), ("2,4,6", "1"), ("0-8:4,20", "4"), ("5", "1")])
def test_the_step_of_an_array_is_what_slurm_says(array: str, step: str, tmp_path: Path) -> None:
    """As recorded with Slurm 22.05."""
    spec = adopted(f"#!/bin/bash\n#SBATCH -N 1 --array={array}\necho a\nsrun ./a\n", tmp_path).spec
    assert spec.program.environment["SLURM_ARRAY_TASK_STEP"] == step


@pytest.mark.parametrize(("line", "noted"), [
    ('cd "$(dirname "$0")"', "$0"), ("HERE=${BASH_SOURCE%/*}", "${BASH_SOURCE"), ("# cd $(dirname $0)", ""), ("echo $01 $X", "")])
def test_a_script_that_reads_its_own_path_is_noted(line: str, noted: str, tmp_path: Path) -> None:
    notes = [note for note in adopted(f"{HEAD}{line}\nsrun ./a\n", tmp_path).notes if "copy in slurmd's directory" in note]
    assert len(notes) == bool(noted) and all(noted in note for note in notes)


def test_a_stray_word_for_which_sbatch_refuses_the_script_is_not_carried_over(tmp_path: Path) -> None:
    lost = adopted("#!/bin/bash\n#SBATCH -J { mine }\necho a\nsrun ./a\n", tmp_path).lost
    assert any("mine" in fate.text and "sbatch refuses" in fate.why for fate in lost), lost


def test_an_empty_account_stays_an_empty_variable(tmp_path: Path) -> None:
    spec = adopted("#!/bin/bash\n#SBATCH --account= -N 1\necho a\nsrun ./a\n", tmp_path).spec
    assert (spec.program.environment["SLURM_JOB_ACCOUNT"], spec.slurm.account) == ("", None)


@pytest.mark.parametrize(("line", "why"), table(__file__, "adopt.toml", "watched_ranks"))
def test_the_account_says_whose_ranks_are_watched(line: str, why: str, tmp_path: Path) -> None:
    assert any(why in fate.why for fate in adopted(f"{HEAD}echo\n{line}\n", tmp_path).account)


@pytest.mark.parametrize(("text", "lines", "why"), table(__file__, "adopt.toml", "not_carried_over"))
def test_what_cannot_be_carried_over_is_named_with_its_line(text: str, lines: list[int], why: str, tmp_path: Path) -> None:
    lost = adopted(f"#!/bin/bash\n{text}", tmp_path).lost
    assert [fate.first for fate in lost] == lines and why in lost[0].why


@pytest.mark.parametrize(("text", "rule"), [
    ("srun ./a\n", "does not begin with #!"), ("#!/bin/bash\r\nsrun ./a\r\n", "DOS line ends")])
def test_what_sbatch_refuses_is_refused(text: str, rule: str, tmp_path: Path) -> None:
    with pytest.raises(HpcMpError, match=rule):
        adopted(text, tmp_path)


def test_a_script_of_another_language_is_run_by_its_interpreter(tmp_path: Path) -> None:
    job = golden("program.sbatch", tmp_path)
    assert job.spec.program.start == "script" and job.lost == ()


# --- whatever the text is -------------------------------------------------------------------------------------------

LINES = table(__file__, "adopt.toml", "lines")


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(LINES), max_size=12))
def test_each_line_of_any_script_is_accounted_for_once(lines: list[str]) -> None:
    text = "\n".join(("#!/bin/bash", *lines, ""))
    try:
        job = adopt(text, directory=Path("/tmp"), job_directory=Path("/tmp"), file=Path("/tmp/script.sbatch"))
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
    assert first.exit_code == 0 and "not carried over" in first.output and "     22  kept  srun" in first.output
    assert tomllib.loads(Path("job.toml").read_text())["job"]["nodes"] == 2
    again = CliRunner().invoke(command, [script])
    assert isinstance(again.exception, HpcMpError) and again.exception.rule == "exists"
    assert CliRunner().invoke(command, [script, "--force"]).exit_code == 0


def test_the_difference_writes_nothing_and_json_has_the_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script = str(next(path for path in GOLDEN if path.name == "torchrun.sbatch"))
    assert "-srun torchrun \\" in CliRunner().invoke(command, [script, "--diff"]).output and not list(tmp_path.iterdir())
    document = json.loads(CliRunner().invoke(command, [script, "--json", "-o", "-"]).output)
    assert {line["fate"] for line in document["account"]} <= {fate.value for fate in Fate}
    assert tomllib.loads(document["text"])["program"]["command"]


@pytest.mark.parametrize(("content", "rule"), [(b"\x7fELF\x00\x01", "not a text file"), (b"\n# nothing\n", "no command")])
def test_a_file_that_starts_nothing_is_refused(content: bytes, rule: str, tmp_path: Path,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_bytes(content)
    result = CliRunner().invoke(command, ["file"])
    assert isinstance(result.exception, HpcMpError) and rule in str(result.exception) and not Path("job.toml").exists()
