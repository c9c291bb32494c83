"""The linter: a planted fault and its mended twin for every rule, good scripts of many kinds, any text, the command."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import example, given
from hypothesis import strategies as st
from lint_cases import CASES, GOLDEN, HEAD, placed
from tables import table

from hpc_mp.cli.lint import command
from hpc_mp.lint.sbatch import Finding, lint, shell
from hpc_mp.lint.sbatch.rules import RULES
from hpc_mp.lint.sbatch.shell import read_shell

GOOD = sorted((GOLDEN / "lint" / "good").glob("*.sbatch"))
OURS = sorted((GOLDEN / "sbatch").rglob("*.sbatch"))


def found(text: str, where: Path, version: str | None = None) -> tuple[Finding, ...]:
    release = tuple(map(int, version.split("."))) if version else None
    return lint(text, directory=where, version=release)  # type: ignore[arg-type]


# --- planted faults ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=[f"{case['code']}-{at}" for at, case in enumerate(CASES)])
def test_a_planted_fault_is_found_on_its_line_and_not_in_its_mended_twin(case: dict[str, Any], tmp_path: Path) -> None:
    bad, above = placed(case["bad"])
    findings = found(bad, tmp_path, case.get("version"))
    assert [finding.line - above for finding in findings if finding.code == case["code"]] == [case["line"]], findings
    others = {finding.code for finding in findings if finding.severity != "info"}
    assert others <= {case["code"], *case.get("also", ())}, "a planted fault sets off its own rule only"

    mended, _ = placed(case["good"])
    findings = found(mended, tmp_path, case.get("version"))
    assert case["code"] not in {finding.code for finding in findings}
    assert [finding for finding in findings if finding.severity == "error"] == []


def test_every_rule_has_a_planted_fault_and_a_code_of_its_own() -> None:
    codes = [rule.code for rule in RULES]
    assert sorted(codes) == sorted(set(codes))
    assert {case["code"] for case in CASES} == set(codes)
    assert len(codes) >= 100


def test_every_finding_says_what_and_what_to_do(tmp_path: Path) -> None:
    for case in CASES:
        for finding in found(placed(case["bad"])[0], tmp_path, case.get("version")):
            assert "{" not in finding.message.replace("${", "") and finding.message[-1] in ".?"
            assert finding.fix and finding.fix == finding.fix.strip()


# --- no false alarm ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", OURS, ids=lambda file: file.stem)
def test_our_own_scripts_are_clean(file: Path, tmp_path: Path) -> None:
    assert len(OURS) >= 20
    for version in (None, *re.findall(r"\d\d\.\d\d", file.stem)):
        assert found(file.read_text(encoding="utf-8"), tmp_path, version) == ()


@pytest.mark.parametrize("version", [None, "22.05", "24.05", "26.05"])
def test_good_scripts_of_many_kinds_have_no_error(version: str | None, tmp_path: Path) -> None:
    assert len(GOOD) >= 20
    errors = {file.name: [finding for finding in found(file.read_text(encoding="utf-8"), tmp_path, version)
                          if finding.severity == "error"] for file in GOOD}
    assert {name: found for name, found in errors.items() if found} == {}


def test_good_scripts_are_read_to_the_end(tmp_path: Path) -> None:
    for file in GOOD:
        assert "HM116" not in {finding.code for finding in found(file.read_text(encoding="utf-8"), tmp_path)}, file.name


# --- any input --------------------------------------------------------------------------------------------------------

PIECES = ("#SBATCH", "#!/bin/bash", "srun", "torchrun", "bash -c", "'", '"', "`", "$(", ")", "((", "{", "}", "<<EOF",
          "\n", "\r", "\0", "\\", " ", "=", "--nodes", "-N", "--export=", "export", "MASTER_ADDR", "$SRUN_ARGS",
          "SRUN_ARGS=", "A=$A", "&", "|", "if", "fi", "then", ";", "hetjob", "--mem=", "4", "ü", "\ud800", "trap",
          "--signal=B:USR2@", "#", "env", "timeout", "-")


@given(st.one_of(st.text(), st.lists(st.sampled_from(PIECES), max_size=40).map("".join),
                 st.lists(st.sampled_from(PIECES), max_size=40).map(" ".join)))
@example("")
@example("#!/bin/bash\n#SBATCH --output=" + "a/" * 3000 + "x\n")
@example("A=$A$A$A\nB=$A$B$B\nsrun $B bash -c \"$A $B\"\n" * 40)
@example("srun " * 3000)
@example("(" * 5000)
@example("\0" * 50_000)
@example("srun " * 500 + "bash -c '" * 50)
def test_any_text_is_linted_without_a_traceback(text: str) -> None:
    for finding in lint(text, directory=Path("/nonexistent")):
        assert 1 <= finding.line <= text.count("\n") + 1


@given(st.data())
def test_a_damaged_script_is_linted_without_a_traceback(data: st.DataObject) -> None:
    text = data.draw(st.sampled_from(GOOD)).read_text(encoding="utf-8")
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, len(text)))
    damaged = text[:start] + data.draw(st.sampled_from(PIECES)) + text[end:]
    for finding in lint(damaged, directory=Path("/nonexistent")):
        assert 1 <= finding.line <= damaged.count("\n") + 1


def test_nothing_of_the_script_is_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    found(f"#!/bin/bash\nX=$(touch {mark})\ntouch {mark}\nsrun bash -c 'touch {mark}; `touch {mark}`'\n", tmp_path)
    assert not mark.exists()


# --- details ----------------------------------------------------------------------------------------------------------


def test_a_secret_is_never_printed(tmp_path: Path) -> None:
    secret = "hf_" + "aB3" * 10
    text = f"export HF_TOKEN={secret}\ncurl -H 'Authorization: {secret}' x\nrun --token {secret}\n"
    text += f"srun --export=HF_TOKEN={secret},b true\n"
    findings = found(HEAD + text, tmp_path)
    assert [finding.line for finding in findings if finding.code == "HM504"] == [6, 7, 8, 9]
    assert secret not in repr(findings)


def test_the_output_folder_is_looked_for_where_sbatch_is_called(tmp_path: Path) -> None:
    text = HEAD + "#SBATCH --output=logs/%j.out\n"
    assert "HM211" in {finding.code for finding in found(text, tmp_path)}
    (tmp_path / "logs").mkdir()
    assert "HM211" not in {finding.code for finding in found(text, tmp_path)}


@pytest.mark.parametrize(("version", "applies"),
                         [("20.11", False), ("22.05", True), ("23.02", True), ("23.11", False), (None, True)])
def test_what_depends_on_the_release_follows_it(version: str | None, applies: bool, tmp_path: Path) -> None:
    text = HEAD + "#SBATCH --cpus-per-task=8\nsrun -K python a.py\n"
    assert ("HM302" in {finding.code for finding in found(text, tmp_path, version)}) is applies


@pytest.mark.parametrize("inside", ["shifter --image=site/a:1", "apptainer exec --nv --image=a.sif --", "podman run --rm a --"])
def test_mpirun_in_a_container_starts_ranks_of_its_own(inside: str, tmp_path: Path) -> None:
    assert "HM306" in {finding.code for finding in found(HEAD + f"srun -K {inside} mpirun -np 8 ./solver\n", tmp_path)}


FALSE_FRIENDS = table(__file__, "lint.toml", "false_friends")


@pytest.mark.parametrize("inner", table(__file__, "lint.toml", "scontrol"))
def test_scontrol_that_a_container_runs_is_found(inner: str, tmp_path: Path) -> None:
    text = f"ENTER='cd /x;'\nsrun -K --container-image=a.sqsh bash -c {inner}\n"
    assert [each.code for each in found(HEAD + text, tmp_path)] == ["HM415"]


@pytest.mark.parametrize("text", FALSE_FRIENDS)
def test_what_only_looks_like_a_fault_is_none(text: str, tmp_path: Path) -> None:
    assert found(HEAD + text, tmp_path) == ()


def test_a_step_is_seen_behind_a_program_that_starts_it(tmp_path: Path) -> None:
    text = "#SBATCH --signal=B:USR2@120\nexec python3 -m watchdog run -- \\\n  srun --gpu-bind=single:1 python a.py\n"
    assert [(each.code, each.line) for each in found(HEAD + text, tmp_path)] == [("HM209", 8), ("HM301", 8)]


def test_the_scanner_is_given_ascii_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A code point behind a brace makes it read outside of a table: every other run of the interpreter ended there."""
    given: list[bytes] = []
    parser = shell._parser()
    monkeypatch.setattr(shell, "_parser", lambda: SimpleNamespace(parse=lambda text: given.append(text) or parser.parse(text)))
    read_shell("srun a{\U0001f680,b} \ud800\n")
    read_shell("#!/bin/bash\nsrun bash -c 'python {\U0010ffff..3}'\n")
    assert given and all(text.isascii() for text in given)


def test_words_and_lines_are_those_of_the_text() -> None:
    text = read_shell("# ü\nX='ä b'\n\nécho \"dé $X\" 🚀 # ö\n")
    assert [(word.text, word.line) for word in text.commands[0].words] == [("écho", 4), ("dé $X", 4), ("🚀", 4)]
    assert text.commands[0].words[1].expands == (("X", 4),)
    assert (text.assignments[0].value, text.assignments[0].line) == ("ä b", 2)
    assert text.comments == ((1, "# ü"), (4, "# ö"))


# --- the command ------------------------------------------------------------------------------------------------------


def test_json_is_one_document_and_errors_exit_1(tmp_path: Path) -> None:
    file = tmp_path / "a.sbatch"
    file.write_text(HEAD + "#SBATCH --nodse=2\nsrun -K python a.py\n")
    done = CliRunner().invoke(command, [str(file), "--json"])
    [finding] = json.loads(done.stdout)["findings"]
    assert done.exit_code == 1
    assert finding.keys() == {"code", "severity", "subject", "message", "fix", "file", "line"}
    assert (finding["code"], finding["line"], finding["severity"]) == ("HM107", 6, "error")
    assert "--nodes" in finding["fix"]


def test_warnings_exit_0(tmp_path: Path) -> None:
    file = tmp_path / "a.sbatch"
    file.write_text(HEAD + "srun python a.py\n")
    done = CliRunner().invoke(command, [str(file)])
    assert done.exit_code == 0 and "HM301" in done.stdout and f"{file}:6:" in done.stdout and "1 warning" in done.stdout


@pytest.mark.parametrize("arguments", [["none.sbatch"], ["."], ["a.sbatch", "--slurm-version", "new"]], ids=" ".join)
def test_wrong_input_exits_2_in_one_paragraph(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "a.sbatch").write_text(HEAD)
    done = subprocess.run([sys.executable, "-m", "hpc_mp", "lint", *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr and done.stderr.count("\n") == 1 and not done.stdout


@pytest.mark.parametrize("line", ["A=$B/$C/$D", "A=$B/$C.txt", "A=$B,$C,$D", "export A=$B-$C-x"])
def test_a_value_of_several_variables_is_no_command(line: str) -> None:
    assert [(each.name, each.value) for each in read_shell(f"{line}\n").assignments] == [("A", line.partition("=")[2])]
    assert read_shell(f"{line}\n").commands == ()
