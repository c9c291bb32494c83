"""The command's face: help in groups, verbs that were renamed, completion, the sub-commands of the doctor."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from machines.tree import broken

from hpc_mp.cli.doctor import command as doctor
from hpc_mp.cli.doctor import spelled_out
from hpc_mp.cli.main import GROUPS, VERBS, cli
from hpc_mp.doctor.checks.registry import PASSIVE

HPC_MP = [sys.executable, "-m", "hpc_mp"]


def run(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*HPC_MP, *words], capture_output=True, text=True, timeout=60, env=os.environ | environ)


def test_help_shows_the_groups_with_every_verb_once() -> None:
    text = CliRunner().invoke(cli, ["--help"]).output
    assert [text.index(f"{group}:") for group in GROUPS] == sorted(text.index(f"{group}:") for group in GROUPS)
    assert re.findall(r"^  ([a-z]+) {2,}\S", text, re.MULTILINE) == list(VERBS)
    assert "cyclecloud" not in text


@pytest.mark.parametrize(("old", "new"), [
    (("cluster", "up"), "lab up"), (("cluster", "status"), "lab status"), (("cluster", "at"), "lab at"),
    (("cluster", "render"), "cloud render"), (("cyclecloud", "render"), "cloud"), (("cyclecloud", "lint"), "cloud"),
])
def test_an_old_spelling_works_and_says_the_new_one_on_standard_error(old: tuple[str, ...], new: str) -> None:
    done = CliRunner().invoke(cli, [*old, "--help"])
    assert done.exit_code == 0 and f"is called hpc-mp {new} now" in done.stderr and "Options" in done.stdout
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


@pytest.mark.parametrize(("words", "meant"), [
    ("", "node"), ("--json", "node --json"), ("--node --json", "node --json"), ("--check shm-size", "node --check shm-size"),
    ("--nodes 4 --json", "cluster --nodes 4 --json"), ("--nodelist=n[1-4]", "cluster --nodelist=n[1-4]"),
    ("--install /x --drain", "install /x --drain"), ("--install=/x", "install /x"), ("--list", "list"),
    ("--list --json", "list --json"),
])
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
    machine = broken("ndv5", edits)
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
