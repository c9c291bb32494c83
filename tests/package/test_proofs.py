"""``make prove`` remembers what has passed on which files; tests that use the lab are known by their fixtures, so that they alone
go to the workers that have one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import dependencies
import proofs
import pytest
from dependencies import ROOT, files_of, imported, without_prose
from lab_users import lab_users, uses_the_lab
from long_tests import long_cases
from tables import table

TWO = "tests/doctor/test_bench_table.py"  # proofs that take a moment


def reached(test: str) -> set[str]:
    return {str(file.relative_to(ROOT)) for file in files_of(ROOT / test)}


@pytest.mark.parametrize(("test", "depends", "independent"), table(__file__, "proofs.toml", "depends"))
def test_what_a_proof_depends_on(test: str, depends: list[str], independent: list[str]) -> None:
    files = reached(test)
    assert {*depends} <= files, {*depends} - files
    assert not {*independent} & files


def test_a_changed_file_is_another_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tests").mkdir()
    test, module = tmp_path / "tests/test_it.py", tmp_path / "tests/beside.py"
    test.write_text("import beside\n")
    module.write_text("number = 1\n")
    monkeypatch.setattr(dependencies, "ROOT", tmp_path)

    def state() -> str:
        for cached in (dependencies.digest_of, dependencies.state_of, dependencies.data_of):
            cached.cache_clear()
        return dependencies.state_of(test)

    first = state()
    assert state() == first
    module.write_text("number = 2\n")
    assert state() != first
    for cached in (dependencies.digest_of, dependencies.state_of, dependencies.data_of):
        cached.cache_clear()


@pytest.mark.parametrize(("text", "same"), table(__file__, "proofs.toml", "prose"))
def test_prose_is_no_change(text: str, same: bool) -> None:
    assert (without_prose(text) == without_prose("def f(x):\n    return [1, x]\n")) == same


def test_each_long_case_is_there() -> None:
    """Cases of a function that was renamed would come back into `make test` without a word."""
    cases = long_cases()
    assert len(cases) > 100 and min(cases.values()) > 0
    assert [name for name in cases if not defined(name)] == []
    assert not defined("tests/package/test_proofs.py::test_no_such[1]") and not defined("tests/no_such.py::test_no_such")


def defined(name: str) -> bool:
    file, _, case = name.partition("::")
    return (ROOT / file).is_file() and f"def {case.partition('[')[0]}(" in (ROOT / file).read_text(encoding="utf-8")


def test_a_long_case_is_left_to_make_prove() -> None:
    name = next(iter(long_cases()))

    def chosen(marks: str) -> bool:
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", marks, name.partition("::")[0]]
        return name in subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.splitlines()

    assert chosen("prove") and not chosen("not prove and not gpu")


def test_imports_are_found_wherever_they_stand() -> None:
    assert imported("import a.b\ndef f():\n    from c import d, e as g\n") == {"a.b", "c", "c.d", "c.e"}


def prove(memory: Path, *words: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "tests/support/proofs.py", *words, TWO, "-n0", "-p", "no:cacheprovider"]
    environment |= {"HPC_MP_PROVED": str(memory), "HPC_MP_PROVED_RECORD": str(memory.parent / "record")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_what_has_passed_is_not_run_again(tmp_path: Path) -> None:
    memory = tmp_path / "proved.jsonl"
    assert f"2 proofs have not passed on this tree:\n        2  {TWO}" in prove(memory, "--minutes", "0")
    first = prove(memory)
    assert "0 of 2 proofs have passed" in first and "2 passed" in first and first.endswith("all proved on this tree\n")
    assert prove(memory) == "2 of 2 proofs have passed on this tree\nall proved on this tree\n"

    one, two = memory.read_text().splitlines()
    assert {json.loads(line)["proof"].partition("::")[0] for line in (one, two)} == {TWO}
    unrun = json.dumps(json.loads(one) | {"skipped": "Skipped: needs a moon"})
    memory.write_text(f"{unrun}\n{two[:40]}")  # killed while it was written
    assert prove(memory, "--minutes", "0").endswith(
        f"1 proofs have not passed on this tree:\n        1  {TWO}\n"
        f"1 proofs cannot run on this machine:\n        1  {TWO}: needs a moon\n")
    memory.write_text(f"{unrun}\n{two}\n")
    assert "1 passed" in prove(memory), "it is tried again"


@pytest.mark.parametrize(("file", "waits"), [
    ("tests/end_to_end/test_deaths_slurm.py", True), ("tests/end_to_end/test_campaign_slurm.py", True),
    ("tests/doctor/test_survey_prove.py", True), ("tests/doctor/test_localise.py", False),
    ("tests/end_to_end/test_every_example.py", False), (TWO, False)])
def test_proofs_on_a_slurm_of_the_lab_wait(file: str, waits: bool) -> None:
    assert proofs.waits(file) == waits


def test_the_record_tells_a_new_machine_what_others_have_proved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes = tmp_path / "proved.jsonl"
    monkeypatch.setenv("HPC_MP_PROVED", str(notes))
    monkeypatch.setenv("HPC_MP_PROVED_RECORD", str(tmp_path / "record"))
    proved, unrun, due = f"{TWO}::test_a", f"{TWO}::test_b[x y]", "tests/layout/test_placement.py::test_c"
    proofs.remember(proved, seconds=1.0)
    proofs.remember(unrun, skipped="Skipped: needs a moon")
    proofs.write_record([proved, unrun, due])
    notes.unlink()
    assert proofs.reasons([proved, unrun, due]) == {proved: "", unrun: "Skipped: needs a moon"}
    assert proofs.due([proved, unrun, due]) == [unrun, due], "what could not run there may run here"
    monkeypatch.setattr(proofs, "state_of", lambda file: "changed")
    assert proofs.reasons([proved, unrun, due]) == {}


def test_users_are_those_that_ask_for_the_fixture(tmp_path: Path) -> None:
    file, own = tmp_path / "test_one.py", tmp_path / "test_own.py"
    for sample, copy in (("asks_for_the_lab.txt", file), ("has_a_lab_of_its_own.txt", own)):
        copy.write_text(Path(__file__).with_name(sample).read_text(encoding="utf-8"))
    assert lab_users(file) == {"test_direct", "test_through_two", "test_marked"}
    assert lab_users(own) == set()
    assert uses_the_lab(tmp_path, "test_one.py::test_through_two[a::b-[c]]")
    assert not uses_the_lab(tmp_path, "test_one.py::test_other[lab]")
