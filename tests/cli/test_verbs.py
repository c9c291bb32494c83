"""The command's face: help in groups, verbs that were renamed, completion, the sub-commands of the doctor."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from machines.tree import broken
from tables import table

from hpc_mp.base.errors import HpcMpError, RunFailed
from hpc_mp.base.findings import Finding
from hpc_mp.cli import main as main_module
from hpc_mp.cli.doctor import command as doctor
from hpc_mp.cli.doctor import spelled_out
from hpc_mp.cli.launch import _conclude
from hpc_mp.cli.logs import command as logs
from hpc_mp.cli.main import GROUPS, VERBS, cli
from hpc_mp.cli.output import print_findings
from hpc_mp.cli.progress import TerminalListener
from hpc_mp.doctor.checks.registry import PASSIVE
from hpc_mp.launch.listener import Listener
from hpc_mp.rundir import RunDirectory
from hpc_mp.rundir.outcome import Cause, Outcome

HPC_MP = [sys.executable, "-m", "hpc_mp"]


def run(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*HPC_MP, *words], capture_output=True, text=True, timeout=60, env=os.environ | environ)


def test_help_shows_the_groups_with_every_verb_once() -> None:
    text = CliRunner().invoke(cli, ["--help"]).output
    assert [text.index(f"{group}:") for group in GROUPS] == sorted(text.index(f"{group}:") for group in GROUPS)
    assert re.findall(r"^  ([a-z]+) {2,}\S", text, re.MULTILINE) == list(VERBS)
    assert "cyclecloud" not in text


@pytest.mark.parametrize(("old", "new"), table(__file__, "verbs.toml", "old_spellings"))
def test_an_old_spelling_works_and_says_the_new_one_on_standard_error(old: tuple[str, ...], new: str) -> None:
    done = CliRunner().invoke(cli, [*old, "--help"])
    assert done.exit_code == 0 and f"is now hpc-mp {new}" in done.stderr and "Options" in done.stdout
    assert old[1] not in CliRunner().invoke(cli, ["cluster", "--help"]).stdout.split()


@pytest.mark.parametrize("words", [("cluster", "ups"), ("cyclecluod", "lint")])
def test_a_spelling_that_never_was_is_refused(words: tuple[str, ...]) -> None:
    assert CliRunner().invoke(cli, words).exit_code == 2


def test_bash_completes_verbs_and_options() -> None:
    assert "_HPC_MP_COMPLETE=bash_complete" in run(_HPC_MP_COMPLETE="bash_source").stdout
    verbs = run(_HPC_MP_COMPLETE="bash_complete", COMP_WORDS="hpc-mp l", COMP_CWORD="1").stdout
    assert {line.partition(",")[2] for line in verbs.splitlines()} == {"launch", "logs", "lint", "lab"}
    options = run(_HPC_MP_COMPLETE="bash_complete", COMP_WORDS="hpc-mp launch --dr", COMP_CWORD="2").stdout
    assert options.split() == ["plain,--dry-run"]


@pytest.mark.parametrize(("words", "meant"), table(__file__, "verbs.toml", "options_alone"))
def test_options_alone_mean_the_sub_command_that_they_belong_to(words: str, meant: str) -> None:
    assert " ".join(spelled_out(words.split(), {})) == meant


def test_an_allocation_of_several_nodes_is_surveyed_unless_one_node_is_asked_about() -> None:
    inside = {"SLURM_JOB_NUM_NODES": "4"}
    assert spelled_out(["--json"], inside) == ["cluster", "--json"] and spelled_out(["--node"], inside) == ["node"]
    assert spelled_out(["--storage", "/tmp"], inside)[0] == "node"


def test_the_list_of_checks_is_what_runs(tmp_path: Path) -> None:
    rows = json.loads(CliRunner().invoke(doctor, ["--list", "--json"]).output)["checks"]
    assert [row["code"] for row in rows] == [check.code for check in PASSIVE]
    assert all(row["reads"] and row["rule"] and row["severity"] in ("error", "warning", "unknown") for row in rows)
    assert all(row["nagios"] == {"error": 2, "warning": 1, "unknown": 3}[row["severity"]] for row in rows)


@pytest.mark.parametrize(("edits", "state", "code"), [
    ({}, "OK", 0), ({"/proc/sys/vm/zone_reclaim_mode": "1\n"}, "WARNING", 1), ({"/proc/meminfo": None}, "UNKNOWN", 3)])
def test_a_monitor_gets_one_line_and_its_exit_code(edits: dict[str, Any], state: str, code: int) -> None:
    machine = broken("ndv5", edits)  # which is gone with its last name
    words = ["--root", str(machine.root), "--check", "memory-reclaim"]
    done = CliRunner().invoke(doctor, ["node", "--nagios", *words])
    assert done.exit_code == code and len(done.output.splitlines()) == 1 and done.output.startswith(f"HPC-MP {state} ")
    assert json.loads(CliRunner().invoke(doctor, ["node", "--json", *words]).output)["nagios"] == code


def test_every_command_has_help() -> None:
    context = click.Context(cli, info_name="hpc-mp")
    for verb in cli.list_commands(context):  # type: ignore[attr-defined]
        command = cli.get_command(context, verb)  # type: ignore[attr-defined]
        assert command is not None and command.help
        assert all(each.help for each in (command.commands.values() if isinstance(command, click.Group) else ()))


def stopped(steps: int, saved: int | None) -> Outcome:
    return Outcome(Path("run"), "stopped", steps=steps, checkpoint=Path(f"step-{saved:08d}") if saved else None)


def failed(kind: str, run: Path = Path("run")) -> Outcome:
    return Outcome(run, "failed", cause=Cause(kind, "boom"))


@pytest.mark.parametrize(("end", "facts", "words"), table(__file__, "verbs.toml", "ends", globals()))
def test_a_run_that_has_not_completed_says_what_is_kept_and_how_to_go_on(
        end: Callable[..., Outcome], facts: list[Any], words: str) -> None:
    with pytest.raises(RunFailed, match=re.escape(words)):
        _conclude(end(*facts), "again", Listener())


def test_what_the_user_got_wrong_would_fail_alike(capsys: pytest.CaptureFixture[str]) -> None:
    assert _conclude(failed("user"), "again", TerminalListener(aside=False)) == 2
    assert capsys.readouterr().err == "hpc-mp: boom\n"


def test_a_program_is_told_nothing_of_the_engines_keys(tmp_path: Path) -> None:
    RunDirectory(tmp_path).program.write_text("{}")
    with pytest.raises(RunFailed, match="a smaller batch") as said:
        _conclude(failed("memory", tmp_path), "again", Listener())
    assert "parallel." not in str(said.value)


def test_the_end_of_a_program_has_its_last_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDirectory(tmp_path)
    (tmp_path / "log").mkdir()
    assert _conclude(Outcome(tmp_path, "completed"), "again", TerminalListener(aside=False)) == 0
    assert capsys.readouterr().out == f"ended     completed\nlogs      hpc-mp logs {tmp_path}\n"
    run.program.write_text("{}")
    run.rank_log(0).write_text("one\ntwo\nthree\n\x1b]0;title\x07four\n\n")
    assert _conclude(Outcome(tmp_path, "completed"), "again", TerminalListener(aside=False)) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[:3] == ["output    two", "          three", r"          \x1b]0;title\x07four"]
    assert said[3] == "ended     completed"


@pytest.mark.parametrize("letters", ["\x1b[2J", "\x1b]0;x\x07", "\x9b31m", "a\rb", "\x08\x08", "\u202egnp.exe", "\x00\x7f"])
def test_nothing_that_others_wrote_steers_a_terminal(letters: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("log", "checkpoints"):
        (tmp_path / name).mkdir()
    (tmp_path / "log" / "rank-00000.log").write_text(f"{letters}\n")
    for name in ("job.toml", "placement.json"):
        (tmp_path / name).write_text("{}")
    TerminalListener(aside=False).say(f"first row {letters}")
    TerminalListener(aside=False).note(f"warning: {letters}")
    print_findings([Finding("X", "error", "subject", letters, fix=letters)])
    shown = CliRunner().invoke(logs, [str(tmp_path), "--rank", "0"]).output
    said = run("status", letters.replace("\x00", "")).stderr
    printed = capsys.readouterr()
    for text in (shown, said, printed.out, printed.err):
        assert text and not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", text)


@pytest.mark.parametrize(("words", "said"), table(__file__, "verbs.toml", "refused"))
def test_what_is_refused_is_one_document(words: tuple[str, ...], said: str) -> None:
    done = run(*words, "--json")
    document = json.loads(done.stdout)
    assert (done.returncode, document["state"]) == (2, "refused") and said in document["error"]["message"]
    assert said in done.stderr, "people read it as before"
    assert run(*words).stdout == ""


@pytest.mark.parametrize(("end", "code", "document"), [
    (click.Abort(), 1, {"state": "interrupted", "error": {"message": "interrupted"}}),
    (RunFailed("it broke"), 1, {"state": "failed", "error": {"message": "it broke"}}),
    (HpcMpError("run r", "is still going on", "wait"), 2, {"state": "refused", "error": {
        "message": "run r: is still going on. Wait.", "value": "run r", "rule": "is still going on", "remedy": "wait"}})])
@pytest.mark.parametrize("printed", ["", '{"run": "r"}'])
def test_every_end_of_a_verb_is_one_document(
    end: Exception, code: int, document: dict[str, Any], printed: str, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def verb(**_: Any) -> None:
        click.echo(printed, nl=False)
        raise end

    monkeypatch.setattr(main_module, "cli", verb)
    monkeypatch.setattr(sys, "argv", ["hpc-mp", "launch", "job.toml", "--json"])
    with pytest.raises(SystemExit) as ended:
        main_module.main()
    assert ended.value.code == code
    assert json.loads(capfd.readouterr().out) == (json.loads(printed) if printed else document)
    monkeypatch.setattr(sys, "argv", ["hpc-mp", "run", "--", "program", "--json"])
    with pytest.raises(SystemExit):
        main_module.main()
    assert capfd.readouterr().out == printed, "what another program is given asks nothing of us"
